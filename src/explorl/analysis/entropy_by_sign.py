"""Entropy of positive and negative completions in the rising stage: Deng et al. 2025, §3.2.2 and Figure 3c."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.analysis.reward_stages import MIN_STEPS, rising_end
from explorl.stats import Cell, Table
from explorl.stats.interval import Effect
from explorl.stats.regression import binned, regression, trend

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SignSplit:
    """Entropy of positive and negative completions by step, and their difference in the rising stage."""

    steps: Floats
    positive: Floats
    negative: Floats
    rising_end: float
    difference: Effect
    """Mean of negative − positive (nats)."""
    positive_slope: Effect
    """Nats per 100 steps."""
    negative_slope: Effect
    slope_difference: Effect
    """Negative − positive; below 0, the entropy of negative completions falls faster."""


def sign_split(table: LensTable, context: Context) -> SignSplit | Unavailable:
    """Compare the entropy of positive and negative completions over the steps."""
    steps, positive, negative = sign_curves(table)
    end = min(rising_end(table, context), float(steps[-1]))
    rising = steps <= end
    if rising.sum() < MIN_STEPS:
        return Unavailable(
            f"{rising.sum()} steps of the rising stage have both positive and negative completions; the analysis needs "
            f"{MIN_STEPS} or more"
        )
    t, up, down = binned(steps[rising], positive[rising], negative[rising])
    fits = [regression(trend(t / 100), values, context.seed) for values in (up, down, down - up)]
    slopes = [fit.effect([0, 1, 0, 0]) for fit in fits]
    return SignSplit(steps, positive, negative, end, fits[2].effect([1, 0, 0, 0]), *slopes)


def sign_curves(table: LensTable) -> tuple[Floats, Floats, Floats]:
    """Return the steps that have completions of both signs, and the mean entropy of each sign.

    It is computed from recorded tokens, in which groups of equal rewards have no sign, or else read from the logs.
    """
    if "entropy" in table.tokens:
        entropy, signs = table.tokens["entropy"], table.completions.sign[table.tokens.completion]
        first, positive = _means_by_step(table, entropy, signs > 0)
        second, negative = _means_by_step(table, entropy, signs < 0)
    else:
        try:
            first, positive = table.curve("lens/entropy_positive")
            second, negative = table.curve("lens/entropy_negative")
        except NotRecorded:
            table.tokens["entropy"]  # raises NotRecorded with advice
            raise
    both = np.intersect1d(first, second)
    if not len(both):
        raise NotRecorded("no step has tokens of both positive and negative completions: all rewards are equal")
    return both, positive[np.isin(first, both)], negative[np.isin(second, both)]


def _means_by_step(table: LensTable, values: Floats, selected: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    known = selected & np.isfinite(values)
    steps, inverse = np.unique(table.tokens.step[known], return_inverse=True)
    return steps.astype(float), np.bincount(inverse, values[known]) / np.maximum(np.bincount(inverse), 1)


# ---------------------------------------------------------------------------- summary and tables
def split_summary(result: SignSplit) -> str:
    """Describe which sign has more entropy, and whose entropy falls faster."""
    level = {
        1: "Negative completions have more entropy than positive ones",
        -1: "Positive completions have more entropy than negative ones",
        0: "Positive and negative completions do not differ significantly in entropy",
    }[result.difference.sign]
    pace = {-1: "that of negative ones falls faster", 1: "that of negative ones falls more slowly",
            0: "neither falls significantly faster"}[result.slope_difference.sign]  # fmt: skip
    return (
        f"{level} (negative − positive {result.difference:+.3f} nats until step {result.rising_end:.0f}); "
        f"{pace} (slopes per 100 steps: negative {result.negative_slope:+.3f}, positive "
        f"{result.positive_slope:+.3f}, difference {result.slope_difference:+.3f})."
    )


def split_tables(result: SignSplit) -> dict[str, Table]:
    """Return tables of the effects and of the curves."""
    rows: list[list[Cell]] = [
        [name, effect, effect.p]
        for name, effect in (
            ("negative − positive (nats)", result.difference),
            ("slope of positive (nats per 100 steps)", result.positive_slope),
            ("slope of negative (nats per 100 steps)", result.negative_slope),
            ("slope of negative − positive", result.slope_difference),
        )
    ]
    points: list[list[Cell]] = [
        [float(s), float(p), float(n)] for s, p, n in zip(result.steps, result.positive, result.negative, strict=True)
    ]
    return {
        "signs": Table(["measure", "value", "p of 0"], rows, title="entropy by sign, rising stage"),
        "signs-curve": Table(["step", "positive (nats)", "negative (nats)"], points, title="entropy by sign"),
    }
