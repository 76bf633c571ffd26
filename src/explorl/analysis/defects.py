"""Defects of responses over the steps of a training run: Deng et al. 2025, §3.2.2 and Figure 3d."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.analysis.reward_stages import MIN_STEPS
from explorl.metrics.quality import response_quality
from explorl.stats import Cell, Table
from explorl.stats.interval import Effect, format_points
from explorl.stats.regression import binned, regression, trend

Floats = NDArray[np.float64]

DEFECTS = ("format violations", "repetitive", "language mixing")
FORMAT = "reward/format"


@dataclass(frozen=True)
class Defect:
    """The share of responses with a defect, by step."""

    name: str
    shares: Floats
    change: Effect | None
    """From the first to the last third of the steps; None if no response has the defect."""


@dataclass(frozen=True)
class Defects:
    """All kinds of defects over the steps."""

    steps: Floats
    kinds: tuple[Defect, ...]


def defects(table: LensTable, context: Context) -> Defects | Unavailable:
    """Return shares of malformed, repetitive and language-mixing responses: as logged, otherwise counted."""
    steps, shares = _curves(table)
    if len(steps) < MIN_STEPS:
        return Unavailable(f"the run has responses of {len(steps)} steps; the analysis needs {MIN_STEPS} or more")
    return Defects(
        steps, tuple(Defect(name, values, _change(steps, values, context.seed)) for name, values in shares.items())
    )


def _change(steps: Floats, values: Floats, seed: int) -> Effect | None:
    """Return the mean of the last third minus that of the first, along a smooth curve through the steps."""
    if values.max() == 0:
        return None
    t, shares = binned(steps, values)
    first, last = np.quantile(t, [1 / 3, 2 / 3])
    design = trend(t)
    fit = regression(design, shares, seed)
    return fit.effect(design[t > last].mean(axis=0) - design[t <= first].mean(axis=0))


def _curves(table: LensTable) -> tuple[Floats, dict[str, Floats]]:
    try:
        curves = {name: table.curve(f"lens/quality_{name.replace(' ', '_')}") for name in DEFECTS}
    except NotRecorded:
        return _count(table)
    steps = next(iter(curves.values()))[0]
    if any(not np.array_equal(curve_steps, steps) for curve_steps, _ in curves.values()):
        return _count(table)
    return steps, {name: values for name, (_, values) in curves.items()}


def _count(table: LensTable) -> tuple[Floats, dict[str, Floats]]:
    completions = table.completions
    if not len(completions):
        raise NotRecorded(f"the run has no rollouts; {table.tokens.advice.rollouts}")
    steps = np.unique(completions.step)
    counts = []
    for step in steps:
        indices = np.flatnonzero(completions.step == step).tolist()
        form = list(completions[FORMAT][indices]) if FORMAT in completions else None
        counts.append(response_quality([completions.completion[index] for index in indices], form))
    return steps.astype(float), {
        name: np.array([getattr(count, name.replace(" ", "_")) / count.responses for count in counts])
        for name in DEFECTS
    }


def defects_summary(result: Defects) -> str:
    """Describe how each defect changes over training."""
    parts = []
    for kind in result.kinds:
        if kind.change is None:
            parts.append(f"no response with {kind.name}" if kind.name != "repetitive" else "no repetitive response")
            continue
        verb = {1: "rise", -1: "fall", 0: "do not change significantly"}[kind.change.sign]
        noun = "repetitive responses" if kind.name == "repetitive" else kind.name
        parts.append(f"{noun} {verb} ({format_points(kind.change)} from the first to the last third)")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def defects_tables(result: Defects) -> dict[str, Table]:
    """Return tables of the changes and of the shares by step."""
    rows: list[list[Cell]] = [
        [kind.name, float(kind.shares.mean()), kind.change if kind.change else None,
         kind.change.p if kind.change else None]
        for kind in result.kinds
    ]  # fmt: skip
    points: list[list[Cell]] = [
        [float(step), *(float(kind.shares[index]) for kind in result.kinds)] for index, step in enumerate(result.steps)
    ]
    return {
        "defects": Table(
            ["defect", "mean share", "last third − first third", "p of 0"], rows, title="defects of responses"
        ),
        "defects-curve": Table(
            ["step", *(f"{kind.name} (share)" for kind in result.kinds)], points, title="defects of responses by step"
        ),
    }
