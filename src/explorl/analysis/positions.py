"""Where in an answer the policy is uncertain: token entropy by relative position (Deng et al. 2025, §3.2.4, Fig. 6a).

The paper finds a U: more entropy at the beginning and at the end than between, and at the end more in wrong answers
than in right ones. Each part of it is a contrast here, with an interval over answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Cell, Interval, Table
from explorl.stats.clusters import cluster_means, cluster_sums, effect_cell, format_effect
from explorl.stats.regression import Effect

BINS = 20
EDGE = 0.2
"""Share of an answer that is its beginning, and its end."""


@dataclass(frozen=True)
class PositionProfile:
    """Entropy in nats by relative position; a bin without tokens is None."""

    all: tuple[Interval | None, ...]
    positive: tuple[Interval | None, ...]
    negative: tuple[Interval | None, ...]
    begin_minus_middle: Effect | None
    end_minus_middle: Effect | None
    end_negative_minus_positive: Effect | None
    tokens: int
    answers: int

    @property
    def bins(self) -> int:
        return len(self.all)

    @property
    def u_shaped(self) -> bool:
        """Whether both ends are above the middle beyond doubt."""
        ends = (self.begin_minus_middle, self.end_minus_middle)
        return all(one is not None and one.sign > 0 for one in ends)


def entropy_by_position(
    entropy: NDArray[np.float64],
    relative: NDArray[np.float64],
    answer: NDArray[np.int64],
    sign: NDArray[np.int64],
    *,
    clusters: NDArray[np.int64] | None = None,
    bins: int = BINS,
    seed: int = 0,
) -> PositionProfile:
    """The profile of tokens: one value of each a token, `sign` that of its answer (1, −1, or 0 for neither).

    `together` has, by answer, a number for those that are drawn together; by default each is drawn alone.
    A token at place t of an answer of L tokens has the relative position t / L, and falls into bin ⌊bins · t / L⌋.
    """
    known = np.isfinite(entropy)
    entropy, relative, answer, sign = entropy[known], relative[known], answer[known], sign[known]
    place = np.minimum((relative * bins).astype(np.int64), bins - 1)
    _, cluster = np.unique(answer if clusters is None else clusters[answer], return_inverse=True)
    part = np.where(relative < EDGE, 0, np.where(relative >= 1 - EDGE, 2, 1))
    layers = [
        place,
        np.where(sign > 0, place, -1),
        np.where(sign < 0, place, -1),
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
    means, (begin, end, wrong) = cluster_means(sums, counts, contrasts.tolist(), seed=seed)
    every, positive, negative = (tuple(means[start : start + bins]) for start in (0, bins, 2 * bins))
    return PositionProfile(every, positive, negative, begin, end, wrong, len(entropy), len(np.unique(answer)))


def positions(table: LensTable, context: Context) -> PositionProfile | Unavailable:
    """The profile of a run's recorded tokens."""
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
    if not profile.tokens:
        return Unavailable("no token has a finite entropy")
    if profile.answers < 2:
        return Unavailable("one answer has recorded tokens, which leaves no interval; record 2 or more")
    return profile


def completion_signs(table: LensTable) -> NDArray[np.int64]:
    """1, −1 or 0 of each answer; 0 of all where neither advantage nor correctness was recorded."""
    try:
        return table.completions.sign
    except NotRecorded:
        return np.zeros(len(table.completions), dtype=np.int64)


def summary(profile: PositionProfile) -> str:
    """What the profile shows, in two sentences."""
    shape = "is U-shaped" if profile.u_shaped else "is not U-shaped beyond doubt"
    found = [0 if one is None else one.sign for one in (profile.begin_minus_middle, profile.end_minus_middle)]
    if -1 in found:
        shape = "is not U-shaped"
    text = (
        f"Entropy over the answer {shape}: the first {EDGE:.0%} minus the middle "
        f"{format_effect(profile.begin_minus_middle)} nats, the last {EDGE:.0%} minus the middle {format_effect(profile.end_minus_middle)}."
    )
    late = profile.end_negative_minus_positive
    if late is None:
        return text
    verdict = "do not differ beyond doubt from"
    if late.sign:
        verdict = "have more entropy than" if late.mean > 0 else "have less entropy than"
    return f"{text} At the end negative answers {verdict} positive ones: {format_effect(late)} nats."


def tables(profile: PositionProfile) -> dict[str, Table]:
    """Entropy by bin, and the contrasts."""
    rows: list[list[Cell]] = []
    for index in range(profile.bins):
        low, high = index / profile.bins, (index + 1) / profile.bins
        rows.append([f"{low:.0%}–{high:.0%}", profile.all[index], profile.positive[index], profile.negative[index]])
    columns = ["position", "entropy (nats)", "positive answers", "negative answers"]
    contrasts: list[list[Cell]] = [
        [f"first {EDGE:.0%} − middle", effect_cell(profile.begin_minus_middle)],
        [f"last {EDGE:.0%} − middle", effect_cell(profile.end_minus_middle)],
        [f"last {EDGE:.0%}: negative − positive", effect_cell(profile.end_negative_minus_positive)],
    ]
    return {
        "positions": Table(columns, rows, "Entropy by position"),
        "position_contrasts": Table(["contrast", "entropy (nats)"], contrasts, "Beginning and end against the middle"),
    }
