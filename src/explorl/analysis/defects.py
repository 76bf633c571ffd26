"""Defects of responses over the steps of a training run: Deng et al. 2025, §3.2.2 and Figure 3d."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import DASHED, DOTTED, RUNNING_MEAN_NOTE, Chart, Palette, course
from explorl.analysis.lens import Context, Findings, Unavailable, series_table
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.analysis.reward_stages import MIN_STEPS
from explorl.metrics.quality import response_quality
from explorl.stats import Cell, Table
from explorl.stats.interval import Effect, format_points
from explorl.stats.regression import binned, regression, trend

Floats = NDArray[np.float64]

DEFECTS = ("format violations", "repetitive", "language mixing")
FORMAT = "reward/format"


def defects(table: LensTable, context: Context) -> Findings | Unavailable:
    """Return shares of malformed, repetitive and language-mixing responses: as logged, otherwise counted."""
    steps, shares = _curves(table)
    if len(steps) < MIN_STEPS:
        return Unavailable(f"the run has responses of {len(steps)} steps; the analysis needs {MIN_STEPS} or more")
    changes = {name: _change(steps, values, context.seed) for name, values in shares.items()}
    text = "; ".join(_describe(name, change) for name, change in changes.items())
    sentence = f"{text[0].upper()}{text[1:]}."
    rows: list[list[Cell]] = [
        [name, float(shares[name].mean()), change, None if change is None else change.p]
        for name, change in changes.items()
    ]
    dashes = ("-", DASHED, DOTTED)
    marks = [course(steps, 100 * shares[name], index, name, dash=dashes[index]) for index, name in enumerate(DEFECTS)]
    return Findings(
        sentence,
        {
            "defects": Table(
                ["defect", "mean share", "last third − first third", "p of 0"], rows, title="defects of responses"
            ),
            "defects-curve": series_table(
                "defects of responses by step",
                {"step": steps, **{f"{name} (share)": values for name, values in shares.items()}},
            ),
        },
        [
            Chart(
                "defects", "Defects of completions", sentence + RUNNING_MEAN_NOTE, [*marks, _from_zero],
                "training step", "completions (%)", legend="best",
            )
        ],
        {
            "steps": steps,
            "kinds": [{"name": name, "shares": shares[name], "change": change} for name, change in changes.items()],
        },
    )  # fmt: skip


def _describe(name: str, change: Effect | None) -> str:
    """Describe how a defect changes over training."""
    if change is None:
        return f"no response with {name}" if name != "repetitive" else "no repetitive response"
    verb = {1: "rise", -1: "fall", 0: "do not change significantly"}[change.sign]
    noun = "repetitive responses" if name == "repetitive" else name
    return f"{noun} {verb} ({format_points(change)} from the first to the last third)"


def _from_zero(axes: Any, palette: Palette) -> None:
    top = max(axes.get_ylim()[1], 1.0)
    axes.set_ylim(-0.03 * top, top)


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
