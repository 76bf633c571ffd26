"""Token entropy by relative position in the completion (Deng et al. 2025, §3.2.4, Fig. 6a).

The paper finds a U shape: more entropy at the beginning and at the end than between, and at the end more in wrong
completions than in right ones. Each of these is a contrast here, with an interval over completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.charts import Chart, Mark, band, line
from explorl.analysis.lens import Context, Finding, Findings, Unavailable, finding_table, series_table, values_of
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Interval
from explorl.stats.interval import Effect, format_effect
from explorl.stats.resample import cluster_means, cluster_sums

BINS = 20
EDGE = 0.2
"""Share of a completion that counts as its beginning, and as its end."""


def entropy_by_position(
    entropy: NDArray[np.float64],
    relative: NDArray[np.float64],
    completion: NDArray[np.int64],
    sign: NDArray[np.int64],
    *,
    clusters: NDArray[np.int64] | None = None,
    bins: int = BINS,
    seed: int = 0,
) -> Findings:
    """Return the profile of tokens from one value of each array per token.

    `sign` is that of the token's completion (1, −1, or 0 for neither). `clusters` has a number per completion;
    completions with the same number are resampled together, by default each is independent. A token at position t of a
    completion of L tokens has the relative position t / L and belongs to bin ⌊bins · t / L⌋.
    """
    known = np.isfinite(entropy)
    entropy, relative, completion, sign = entropy[known], relative[known], completion[known], sign[known]
    bin_index = np.minimum((relative * bins).astype(np.int64), bins - 1)
    _, cluster = np.unique(completion if clusters is None else clusters[completion], return_inverse=True)
    part = np.where(relative < EDGE, 0, np.where(relative >= 1 - EDGE, 2, 1))
    layers = [
        bin_index,
        np.where(sign > 0, bin_index, -1),
        np.where(sign < 0, bin_index, -1),
        part,
        np.where((part == 2) & (sign != 0), (sign < 0).astype(np.int64), -1),
    ]
    widths = [bins, bins, bins, 3, 2]
    cluster_count = int(cluster.max()) + 1 if len(cluster) else 0
    sums, counts = (
        np.hstack(
            [cluster_sums(cluster, layer, values, (cluster_count, w)) for layer, w in zip(layers, widths, strict=True)]
        )
        for values in (entropy, np.ones_like(entropy))
    )
    first = 3 * bins
    contrasts = np.zeros((3, first + 5))
    contrasts[0, [first, first + 1]] = 1, -1
    contrasts[1, [first + 2, first + 1]] = 1, -1
    contrasts[2, [first + 4, first + 3]] = 1, -1
    means, (begin, end, end_by_sign) = cluster_means(sums, counts, contrasts.tolist(), seed=seed)
    overall, positive, negative = (tuple(means[start : start + bins]) for start in (0, bins, 2 * bins))
    tokens, answers = len(entropy), len(np.unique(completion))
    return _findings(overall, positive, negative, begin, end, end_by_sign, tokens=tokens, answers=answers)


def _findings(
    overall: Sequence[Interval | None],
    positive: Sequence[Interval | None],
    negative: Sequence[Interval | None],
    begin: Effect | None,
    end: Effect | None,
    end_by_sign: Effect | None,
    *,
    tokens: int,
    answers: int,
) -> Findings:
    """Return the findings of the profiles and contrasts."""
    bins = len(overall)
    contrasts = [
        Finding("begin_minus_middle", f"first {EDGE:.0%} − middle", begin),
        Finding("end_minus_middle", f"last {EDGE:.0%} − middle", end),
        Finding("end_negative_minus_positive", f"last {EDGE:.0%}: negative − positive", end_by_sign),
    ]
    columns = {
        "position": [f"{index / bins:.0%}–{(index + 1) / bins:.0%}" for index in range(bins)],
        "entropy (nats)": overall,
        "positive answers": positive,
        "negative answers": negative,
    }
    caption = (
        f"Mean token entropy in {bins} parts of a completion, with 95 % bands over {answers:,} completions "
        f"({tokens:,} tokens). The first fifth minus the middle: {format_effect(begin)} nats; the last fifth minus the "
        f"middle: {format_effect(end)}."
    )
    marks = [
        *_curve(overall, "ink", "all completions", "-"), *_curve(positive, 0, "positive", "--"),
        *_curve(negative, 1, "negative", ":"), lambda axes, palette: axes.set_xlim(0, 100),
    ]  # fmt: skip
    return Findings(
        _describe(begin, end, end_by_sign),
        {
            "positions": series_table("Entropy by position", columns),
            "position_contrasts": finding_table(
                "Beginning and end against the middle", contrasts, columns=("contrast", "entropy (nats)")
            ),
        },
        [
            Chart(
                "positions", "Entropy by position", caption, marks, "relative position in the completion (%)",
                "entropy (nats)", legend="best",
            )
        ],
        {
            "all": overall, "positive": positive, "negative": negative, **values_of(contrasts),
            "tokens": tokens, "answers": answers,
        },
    )  # fmt: skip


def _curve(values: Sequence[Interval | None], colour: int | str, label: str, dash: str) -> list[Mark]:
    """Return the curve of means by bin with its band; without a band if an interval is infinite."""
    points = [(100 * (index + 0.5) / len(values), value) for index, value in enumerate(values) if value is not None]
    if not points:
        return []
    x = [centre for centre, _ in points]
    curve = line(x, [value.mean for _, value in points], colour, label, dash=dash, width=1.8)
    if not all(math.isfinite(value.low) for _, value in points):
        return [curve]
    ends = [value.low for _, value in points], [value.high for _, value in points]
    return [curve, band(x, *ends, colour, strength=0.18)]


def _describe(begin: Effect | None, end: Effect | None, end_by_sign: Effect | None) -> str:
    """Describe the profile in two sentences."""
    ends = (begin, end)
    shape = "is not significantly U-shaped"
    if all(effect is not None and effect.sign > 0 for effect in ends):
        shape = "is U-shaped"
    if any(effect is not None and effect.sign < 0 for effect in ends):
        shape = "is not U-shaped"
    text = (
        f"Entropy over the completion {shape}: the first {EDGE:.0%} minus the middle {format_effect(begin)} nats, the "
        f"last {EDGE:.0%} minus the middle {format_effect(end)}."
    )
    if end_by_sign is None:
        return text
    verdict = "do not differ significantly from"
    if end_by_sign.sign:
        verdict = "have more entropy than" if end_by_sign.mean > 0 else "have less entropy than"
    return f"{text} At the end negative completions {verdict} positive ones: {format_effect(end_by_sign)} nats."


def positions(table: LensTable, context: Context) -> Findings | Unavailable:
    """Return the profile of a run's recorded tokens."""
    tokens = table.tokens
    entropy = tokens["entropy"]
    sign = completion_signs(table)[tokens.completion]
    profile = entropy_by_position(
        entropy,
        tokens.relative_position,
        tokens.completion,
        sign,
        clusters=table.completions.cluster,
        seed=context.seed,
    )
    if not profile["tokens"]:
        return Unavailable("no token has a finite entropy")
    if profile["answers"] < 2:
        return Unavailable("only one completion has recorded tokens, which gives no interval; record 2 or more")
    return profile


def completion_signs(table: LensTable) -> NDArray[np.int64]:
    """Return 1, −1 or 0 per completion; all 0 if neither advantage nor correctness was recorded."""
    try:
        return table.completions.sign
    except NotRecorded:
        return np.zeros(len(table.completions), dtype=np.int64)
