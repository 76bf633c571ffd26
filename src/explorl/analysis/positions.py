"""Token entropy by relative position in the completion (Deng et al. 2025, §3.2.4, Fig. 6a).

The paper finds a U shape: more entropy at the beginning and at the end than between, and at the end more in wrong
completions than in right ones. Each of these is a contrast here, with an interval over completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded
from explorl.stats import Cell, Interval, Table
from explorl.stats.interval import Effect, format_effect
from explorl.stats.resample import cluster_means, cluster_sums

BINS = 20
EDGE = 0.2
"""Share of a completion that counts as its beginning, and as its end."""


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
        """Number of bins."""
        return len(self.all)

    @property
    def u_shaped(self) -> bool:
        """True if both ends are significantly above the middle."""
        ends = (self.begin_minus_middle, self.end_minus_middle)
        return all(effect is not None and effect.sign > 0 for effect in ends)


def entropy_by_position(
    entropy: NDArray[np.float64],
    relative: NDArray[np.float64],
    completion: NDArray[np.int64],
    sign: NDArray[np.int64],
    *,
    clusters: NDArray[np.int64] | None = None,
    bins: int = BINS,
    seed: int = 0,
) -> PositionProfile:
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
    return PositionProfile(
        overall, positive, negative, begin, end, end_by_sign, len(entropy), len(np.unique(completion))
    )


def positions(table: LensTable, context: Context) -> PositionProfile | Unavailable:
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
    if not profile.tokens:
        return Unavailable("no token has a finite entropy")
    if profile.answers < 2:
        return Unavailable("only one completion has recorded tokens, which gives no interval; record 2 or more")
    return profile


def completion_signs(table: LensTable) -> NDArray[np.int64]:
    """Return 1, −1 or 0 per completion; all 0 if neither advantage nor correctness was recorded."""
    try:
        return table.completions.sign
    except NotRecorded:
        return np.zeros(len(table.completions), dtype=np.int64)


def summary(profile: PositionProfile) -> str:
    """Describe the profile in two sentences."""
    shape = "is U-shaped" if profile.u_shaped else "is not significantly U-shaped"
    ends = (profile.begin_minus_middle, profile.end_minus_middle)
    if any(effect is not None and effect.sign < 0 for effect in ends):
        shape = "is not U-shaped"
    text = (
        f"Entropy over the completion {shape}: the first {EDGE:.0%} minus the middle "
        f"{format_effect(profile.begin_minus_middle)} nats, the last {EDGE:.0%} minus the middle "
        f"{format_effect(profile.end_minus_middle)}."
    )
    difference = profile.end_negative_minus_positive
    if difference is None:
        return text
    verdict = "do not differ significantly from"
    if difference.sign:
        verdict = "have more entropy than" if difference.mean > 0 else "have less entropy than"
    return f"{text} At the end negative completions {verdict} positive ones: {format_effect(difference)} nats."


def tables(profile: PositionProfile) -> dict[str, Table]:
    """Return tables of entropy by bin and of the contrasts."""
    rows: list[list[Cell]] = []
    for index in range(profile.bins):
        low, high = index / profile.bins, (index + 1) / profile.bins
        rows.append([f"{low:.0%}–{high:.0%}", profile.all[index], profile.positive[index], profile.negative[index]])
    columns = ["position", "entropy (nats)", "positive answers", "negative answers"]
    contrasts: list[list[Cell]] = [
        [f"first {EDGE:.0%} − middle", profile.begin_minus_middle],
        [f"last {EDGE:.0%} − middle", profile.end_minus_middle],
        [f"last {EDGE:.0%}: negative − positive", profile.end_negative_minus_positive],
    ]
    return {
        "positions": Table(columns, rows, "Entropy by position"),
        "position_contrasts": Table(["contrast", "entropy (nats)"], contrasts, "Beginning and end against the middle"),
    }
