"""Entropy of positive and negative completions in the rising stage: Deng et al. 2025, §3.2.2 and Figure 3c."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import DASHED, RUNNING_MEAN_NOTE, Chart, course, rule
from explorl.analysis.lens import Context, Finding, Findings, Unavailable, finding_table, series_table, values_of
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.analysis.reward_stages import MIN_STEPS, rising_end
from explorl.stats.regression import binned, regression, trend

Floats = NDArray[np.float64]


def sign_split(table: LensTable, context: Context) -> Findings | Unavailable:
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
    difference, (up_slope, down_slope, slopes) = (
        fits[2].effect([1, 0, 0, 0]),
        (fit.effect([0, 1, 0, 0]) for fit in fits),
    )
    level = {
        1: "Negative completions have more entropy than positive ones",
        -1: "Positive completions have more entropy than negative ones",
        0: "Positive and negative completions do not differ significantly in entropy",
    }[difference.sign]
    pace = {-1: "that of negative ones falls faster", 1: "that of negative ones falls more slowly",
            0: "neither falls significantly faster"}[slopes.sign]  # fmt: skip
    sentence = (
        f"{level} (negative − positive {difference:+.3f} nats until step {end:.0f}); {pace} (slopes per 100 steps: "
        f"negative {down_slope:+.3f}, positive {up_slope:+.3f}, difference {slopes:+.3f})."
    )
    findings = [
        Finding("difference", "negative − positive", difference, "nats"),
        Finding("positive_slope", "slope of positive", up_slope, "nats per 100 steps"),
        Finding("negative_slope", "slope of negative", down_slope, "nats per 100 steps"),
        Finding("slope_difference", "slope of negative − positive", slopes),
    ]
    marks = [course(steps, positive, 0, "positive"), course(steps, negative, 1, "negative", dash=DASHED)]
    if end < steps[-1]:
        marks.append(rule(end, "ink", "end of the rise", width=0.9))
    return Findings(
        sentence,
        {
            "signs": finding_table("entropy by sign, rising stage", findings),
            "signs-curve": series_table(
                "entropy by sign", {"step": steps, "positive (nats)": positive, "negative (nats)": negative}
            ),
        },
        [
            Chart(
                "signs", "Entropy of positive and negative completions", sentence + RUNNING_MEAN_NOTE, marks,
                "training step", "mean entropy (nats)", legend="best",
            )
        ],
        {"steps": steps, "positive": positive, "negative": negative, "rising_end": end, **values_of(findings)},
    )  # fmt: skip


def sign_curves(table: LensTable) -> tuple[Floats, Floats, Floats]:
    """Return the steps that have completions of both signs, and the mean entropy of each sign.

    It is computed from recorded tokens, in which groups of equal rewards have no sign, or else read from the logs.
    """
    if "entropy" in table.tokens:
        entropy, signs = table.tokens["entropy"], table.completions.sign[table.tokens.completion]
        first, positive = table.tokens.means_by_step(entropy, signs > 0)
        second, negative = table.tokens.means_by_step(entropy, signs < 0)
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
