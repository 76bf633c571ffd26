"""Find where a ranked distribution is cut, for top-k, top-p, bottom-p and the branching factor.

The rank of a token is the same on every device and for every type of logits:

    rank(i) = #{j : x_j > x_i} + #{j < i : x_j = x_i}

so of tokens with the same score the one with the lower id comes first. Scores are compared as they are, before the
temperature and any softmax, whose rounding could make different scores equal. The *head* of a row is its first tokens
by rank: `count_head` has a given size, `mass_head` a given probability mass, and `head_mask` marks its tokens. On the
CPU, short rows are sorted; long ones are divided into buckets by the leading bits of their values, and only the bucket
with the cut is sorted. On other devices, a bisection on the bits of the score gives the same without sorting the
vocabulary and without host synchronisation; `kernel` follows the same rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

BLOCK = 256
"""Number of values summed at a time in a large vocabulary."""
SLACK = 1e-6
"""Relative slack of a cut: two equal float32 logits do not give exactly 0.5 each."""
COUNT_SLACK = 1e-12
"""The slack for counting tokens: 19 of 20 equally likely tokens have a mass of 0.95."""
LONG = 4 * BLOCK
"""Rows with more tokens are divided into buckets."""
FIRST_BITS = 16
"""Leading bits of a float32 that select its bucket: its sign, its exponent and 7 more."""
FEW_TOP = 1024
"""Up to this many of the largest values are found faster by topk than by sorting the row."""
FEW_SORTED = 6
"""If fewer than one in this many tokens is relevant, they are selected before sorting."""
SURE = 0.99
"""Safety factor for the rounding of a float32 softmax."""
TINY = 2.0**-126
"""Weights below this, relative to that of the likeliest token, count as 0: not every device can tell them apart."""


class Head(NamedTuple):
    """The first tokens of each row by falling score."""

    threshold: Float[Tensor, " rows"]
    """Score of the head's last token; +inf if the head is empty."""
    above: Int[Tensor, " rows"]
    """Number of tokens with a score above the threshold."""
    ties: Int[Tensor, " rows"]
    """Number of tokens exactly at the threshold that belong to the head."""
    mass: Float64[Tensor, " rows"]
    """Probability of the head; exactly 0 if it is empty."""

    @property
    def size(self) -> Int[Tensor, " rows"]:
        return self.above + self.ties


def mass_head(
    scores: Float[Tensor, "rows vocab"],
    mass: Float[Tensor, " rows"] | float,
    *,
    over: bool = False,
    slack: float = SLACK,
    rate: Float[Tensor, " rows"] | None = None,
) -> Head:
    """Return the smallest head with a probability, by softmax(rate · scores), of at least ``mass``.

    With ``over=True``, return the largest head with a probability of at most ``mass``, but never the whole row: the
    last token with non-zero probability stays outside. ``rate`` defaults to 1.
    """
    scores = comparable(scores).detach()
    if not isinstance(mass, Tensor):
        mass = torch.full(scores.shape[:1], mass, device=scores.device, dtype=torch.float64)
    target = mass.double()
    target = target * (1 + slack if over else 1 - slack)
    if scores.device.type != "cpu":
        return search_head(scores, target, over=over, rate=rate)
    bucketed = len(scores) > 0 and scores.shape[-1] > LONG and scores.dtype == torch.float32
    with np.errstate(over="ignore", invalid="ignore"):  # for rows that are not finite
        return (_bucketed_head if bucketed else _sorted_head)(scores, target, over=over, rate=rate)


def count_head(scores: Float[Tensor, "rows vocab"], k: Int[Tensor, " rows"]) -> Head:
    """Return the head of k tokens, or the whole row if k is 0 or at least the vocabulary; its mass is not computed."""
    scores, vocab = comparable(scores), scores.shape[-1]
    size = torch.where((k <= 0) | (k >= vocab), vocab, k).long()
    threshold = kth_largest(scores, k)
    above = (scores > threshold[:, None]).sum(-1)
    return Head(threshold, above, size - above, torch.full_like(threshold, torch.nan, dtype=torch.float64))


def head_mask(scores: Float[Tensor, "rows vocab"], head: Head) -> Bool[Tensor, "rows vocab"]:
    """Return a mask of the tokens in the head."""
    scores, threshold = comparable(scores), head.threshold[:, None]
    ties = scores == threshold
    if scores.device.type == "cpu" and not bool((ties.sum(-1) > head.ties).any()):
        return scores >= threshold
    return (scores > threshold) | (ties & (ties.cumsum(-1) <= head.ties[:, None]))


def kth_largest(scores: Float[Tensor, "rows vocab"], k: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """Return the k-th largest score of each row; −inf if k is 0 or at least the vocabulary."""
    scores, vocab = comparable(scores), scores.shape[-1]
    off = (k <= 0) | (k >= vocab)
    if len(scores) == 0:
        return scores.new_empty(0)
    if scores.device.type == "cpu":
        most = int(torch.where(off, 1, k).max())
        if most <= FEW_TOP:
            ranked = scores.topk(most).values
        else:
            ranked = torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
        value = ranked.gather(-1, (k.clamp(1, ranked.shape[-1]) - 1).long()[:, None])[:, 0]
    else:
        value = _bisect(scores, torch.ones_like(scores, dtype=torch.float32), k.double(), strict=False)
    return torch.where(off, -torch.inf, value)


def comparable(scores: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return float64 scores as they are, and others in float32, which has every value of the shorter types."""
    return scores if scores.dtype == torch.float64 else scores.float()


def branching_count(
    scores: Float[Tensor, "rows vocab"], probs: Float[Tensor, "rows vocab"], mass: float = 0.95
) -> Int[Tensor, " rows"]:
    """Return the size of the smallest set of top tokens with at least ``mass``; ``probs`` is softmax(``scores``)."""
    if probs.device.type != "cpu":
        return mass_head(scores, mass, slack=COUNT_SLACK).size
    # In increasing order, tokens outside the set come first.
    vocab, outside = probs.shape[-1], 1 - mass * (1 - COUNT_SLACK)
    if vocab <= LONG:
        cumulative = torch.from_numpy(np.sort(probs.numpy(), axis=-1)).double().cumsum(-1)
        return vocab - (cumulative <= outside * cumulative[:, -1:]).sum(-1)
    return torch.tensor([vocab - _count_smallest(row, outside) for row in probs.numpy()], dtype=torch.int64)


def _count_smallest(probs: np.ndarray, share: float) -> int:
    """Return how many of the smallest probabilities have at most this share of the total.

    All those below share / n are among them, since even n of these sum to less. If few are left, as in the
    distributions of a trained policy, only these are sorted.
    """
    large = probs >= np.float32(SURE * share / len(probs))
    large_count = int(np.count_nonzero(large))
    if FEW_SORTED * large_count >= len(probs):
        return _count_smallest_bucketed(probs, share)
    rest = probs[large]
    rest.sort()
    total, ends = float(probs.sum(dtype=np.float64)), np.cumsum(rest, dtype=np.float64)
    missing = total - float(rest.sum(dtype=np.float64))
    return len(probs) - large_count + int(np.searchsorted(ends, share * total - missing, side="right"))


def _count_smallest_bucketed(probs: np.ndarray, share: float) -> int:
    bucket = _buckets(probs)
    bucket -= bucket.min()
    ends = np.cumsum(np.bincount(bucket, weights=probs))
    limit = share * ends[-1]
    at = int(np.searchsorted(ends, limit, side="right"))
    inside = np.cumsum(np.sort(probs[bucket == at]), dtype=np.float64)
    rest = limit - (ends[at - 1] if at else 0.0)
    return int(np.count_nonzero(bucket < at) + np.searchsorted(inside, rest, side="right"))


def _buckets(values: np.ndarray) -> np.ndarray:
    """Return the bucket of each float32 by its absolute value: the bits of positive floats sort like the floats."""
    bits: np.ndarray = (values.view(np.int32) & 0x7FFFFFFF) >> (32 - FIRST_BITS)
    return bits


def _bucketed_head(scores: Tensor, target: Tensor, *, over: bool, rate: Tensor | None = None) -> Head:
    """Compute `_sorted_head` with buckets: in a fifth of the time for a vocabulary of 49,152."""
    rates = [None] * len(scores) if rate is None else rate.numpy().astype(np.float32)
    heads = []
    for index, (row, share, row_rate) in enumerate(zip(scores.numpy(), target.tolist(), rates, strict=True)):
        head = _bucketed_row(row, share, over, row_rate)
        if head is None:
            row_slice = slice(index, index + 1)
            each = _sorted_head(
                scores[row_slice], target[row_slice], over=over, rate=None if rate is None else rate[row_slice]
            )
            head = tuple(part.item() for part in each)
        heads.append(head)
    threshold, above, ties, mass = zip(*heads, strict=True)
    return Head(
        torch.tensor(threshold, dtype=scores.dtype),
        torch.tensor(above),
        torch.tensor(ties),
        torch.tensor(mass, dtype=torch.float64),
    )


def _bucketed_row(row: np.ndarray, share: float, over: bool, rate: np.float32 | None) -> tuple[float, ...] | None:
    """Return the `Head` of one row; None if it has to be sorted: it is not finite, or its last token stays outside."""
    distance = row - row.max()
    weights = np.exp(distance if rate is None else distance * rate)
    bucket = _buckets(distance)  # the highest scores are in the first buckets
    ends = np.cumsum(np.bincount(bucket, weights=weights))
    limit = share * ends[-1]
    at = int(np.searchsorted(ends, limit, side="right" if over else "left"))
    if not np.isfinite(ends[-1]) or at >= len(ends):
        return None
    inside = np.flatnonzero(bucket == at)
    inside = inside[np.argsort(-row[inside], kind="stable")]
    before, first = float(ends[at - 1]) if at else 0.0, int(np.count_nonzero(bucket < at))
    sums = before + np.cumsum(weights[inside], dtype=np.float64)
    if over:
        count = int(np.count_nonzero(sums <= limit))
        if first + count >= np.count_nonzero(weights >= TINY):
            return None
    else:
        count = min(int(np.count_nonzero(sums < limit)) + 1, len(inside))
    if first + count == 0:
        return np.inf, 0, 0, 0.0
    threshold = row[inside[count - 1]] if count else row[bucket < at].min()
    above = int(np.count_nonzero(row > threshold))
    return float(threshold), above, first + count - above, float((sums[count - 1] if count else before) / ends[-1])


def _sorted_head(scores: Tensor, target: Tensor, *, over: bool, rate: Tensor | None = None) -> Head:
    ranked = np.sort(scores.numpy(), axis=-1)[:, ::-1]
    distance = ranked - ranked[:, :1]
    weights = np.exp(distance if rate is None else distance * rate.numpy().astype(ranked.dtype)[:, None])
    cumulative = np.cumsum(weights, axis=-1, dtype=np.float64)
    limit = target.numpy()[:, None] * cumulative[:, -1:]
    if over:
        count = (cumulative <= limit).sum(-1)
        count = np.minimum(count, (weights >= TINY).sum(-1) - 1)
    else:
        count = np.minimum((cumulative < limit).sum(-1) + 1, ranked.shape[-1])
    threshold = np.where(count > 0, np.take_along_axis(ranked, np.maximum(count, 1)[:, None] - 1, -1)[:, 0], np.inf)
    above = (ranked > threshold[:, None]).sum(-1)
    head_mass = np.where(count > 0, np.take_along_axis(cumulative, np.maximum(count, 1)[:, None] - 1, -1)[:, 0], 0.0)
    return Head(
        torch.from_numpy(threshold.astype(ranked.dtype)),
        torch.from_numpy(above),
        torch.from_numpy(count - above),
        torch.from_numpy(head_mass / cumulative[:, -1]),
    )


def search_head(
    scores: Float[Tensor, "rows vocab"],
    target: Float[Tensor, " rows"],
    *,
    over: bool = False,
    rate: Float[Tensor, " rows"] | None = None,
) -> Head:
    """Compute `mass_head` by bisection: one pass over the row per bit of a score, no sort and no synchronisation."""
    scores = comparable(scores)
    distance = scores - scores.amax(-1, keepdim=True)
    weights = torch.exp(distance if rate is None else distance * rate.to(scores.dtype)[:, None])
    total = weights.sum(-1, dtype=torch.float64)
    limit = target * total
    threshold = _bisect(scores, weights, limit, strict=over)
    if over:  # if the whole row weighs no more than the limit, all but the last token are in the head
        last = torch.where(weights >= TINY, scores, torch.inf).amin(-1)
        threshold = torch.where(limit >= total, last, threshold)
    higher, equal = scores > threshold[:, None], scores == threshold[:, None]
    above, at = higher.sum(-1), equal.sum(-1)
    mass_above = torch.where(higher, weights, 0.0).sum(-1, dtype=torch.float64)
    short = limit - mass_above
    each = torch.where(equal, weights, 0.0).sum(-1, dtype=torch.float64) / at
    if over:
        ties = torch.minimum((short / each).floor(), at.double()).long().clamp(min=0)
        ties = torch.minimum(ties, (weights >= TINY).sum(-1) - 1 - above)
    else:
        ties = torch.minimum((short / each).ceil(), at.double()).long().clamp(min=1)
    return Head(threshold, above, ties, (mass_above + ties * each) / total)


def _bisect(scores: Tensor, weights: Tensor, limit: Tensor, *, strict: bool) -> Tensor:
    """Return the largest score t of each row with Σ weights[scores ≥ t] ≥ limit (> limit if ``strict``)."""
    keys = _sortable(scores)
    low = keys.amin(-1).long()
    high = keys.amax(-1).long()
    for _ in range(8 * scores.element_size()):
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without the overflow of a sum
        mass = torch.where(keys >= middle[:, None], weights, 0.0).sum(-1, dtype=torch.float64)
        enough = mass > limit if strict else mass >= limit
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle - 1)
    return _sortable(low.to(keys.dtype).view(scores.dtype)).view(scores.dtype)


def _sortable(values: Tensor) -> Int[Tensor, ...]:
    """Map float32 to int32, or float64 to int64, in the same order; on the bits the map is its own inverse."""
    whole, bits = (torch.int64, 64) if values.dtype == torch.float64 else (torch.int32, 32)
    pattern = values.contiguous().view(whole)
    return pattern ^ ((pattern >> (bits - 1)) & ((1 << (bits - 1)) - 1))
