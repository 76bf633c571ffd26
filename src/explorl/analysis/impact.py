"""Impact of a token: accuracy of continuations from it minus that of continuations from the best other token.

    õ_t = argmax_{v ≠ o_t} π(v | q, o_<t)
    I_t = mean_j Acc_j(q, o_<t, o_t) − mean_j Acc_j(q, o_<t, õ_t),   k continuations j each

Deng et al. 2025, Eq. 5 and 6. This module computes statistics of the counts; `impact_sampling` samples them.

Each I_t has Newcombe's interval for a difference of two proportions, and a p value by Fisher's exact test. As there are
many tokens, the p values are corrected by the rule of Benjamini and Hochberg. The result is a list of tokens of
which at most 5 % are expected to be false findings. The rule assumes independent tests, and each token has its own
continuations. If no token has an impact, the probability that any is listed is at most 5 %, as with Holm's rule, and if
some have, more of them are found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from explorl.stats import Interval
from explorl.stats.distributions import fisher
from explorl.stats.interval import Effect
from explorl.stats.resample import cluster_means

LEVEL = 0.05


@dataclass(frozen=True)
class Continuation:
    """A continuation of a completion, and whether the whole completion is correct."""

    text: str
    correct: bool
    finish: str
    """``stop``, ``length`` if it was cut off, ``none`` if there was nothing to sample."""


@dataclass(frozen=True)
class Side:
    """The continuations from one token."""

    token_id: int
    token: str
    probability: float
    """Probability of the token at its position, at the sampling temperature."""
    continuations: tuple[Continuation, ...]

    @property
    def correct(self) -> int:
        """Number of correct continuations."""
        return sum(continuation.correct for continuation in self.continuations)

    @property
    def count(self) -> int:
        """Number of continuations."""
        return len(self.continuations)


@dataclass(frozen=True)
class TokenImpact:
    """Impact of one token that was replaced."""

    answer: int
    """Index of the completion in the run."""
    position: int
    length: int
    """Tokens of the completion."""
    step: int
    sign: int
    """Sign of the completion: 1 positive, −1 negative, 0 neither or unknown."""
    entropy: float
    perplexity: float
    """Perplexity of the completion."""
    groups: tuple[str, ...]
    """The rules that chose it."""
    sampled: Side
    other: Side
    impact: Interval
    p: float
    corrected: float
    """p corrected for the number of tokens."""

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Correct and all continuations of the token, then of its alternative."""
        return self.sampled.correct, self.sampled.count, self.other.correct, self.other.count

    @property
    def significant(self) -> bool:
        """True if the token changes the accuracy significantly, after correction."""
        return self.corrected < LEVEL


@dataclass(frozen=True)
class GroupImpact:
    """Tokens that one rule chose, with intervals over prompts, or over completions if there are few prompts."""

    name: str
    tokens: int
    answers: int
    found: int
    """Tokens with a significant impact, after correction."""
    mean: Interval | None
    """Accuracy lost by replacing a token."""
    square: Interval | None
    """Mean I_t², corrected for the variance from sampling continuations."""


@dataclass(frozen=True)
class ImpactDifference:
    """One group of tokens minus another."""

    name: str
    mean: Effect | None
    square: Effect | None


# ---------------------------------------------------------------------------- one token
def newcombe(a: int, n: int, b: int, m: int, confidence: float = 0.95) -> Interval:
    """Return a/n − b/m with its interval from two Wilson intervals (Newcombe 1998, method 10).

        low = d − sqrt((p₁ − l₁)² + (u₂ − p₂)²),   high = d + sqrt((u₁ − p₁)² + (p₂ − l₂)²)

    The interval stays within [−1, 1], and has a positive width even if all samples agree.
    """
    (p1, l1, u1), (p2, l2, u2) = _wilson(a, n, confidence), _wilson(b, m, confidence)
    d = p1 - p2
    return Interval(d, d - math.hypot(p1 - l1, u2 - p2), d + math.hypot(u1 - p1, p2 - l2), confidence)


def _wilson(successes: int, draws: int, confidence: float) -> tuple[float, float, float]:
    if not 0 <= successes <= draws or draws < 1:
        raise ValueError(f"{successes} of {draws} is not a proportion; use counts such as 3 of 8")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, share = successes / draws, z * z / draws
    centre = (p + share / 2) / (1 + share)
    reach = z / (1 + share) * math.sqrt(p * (1 - p) / draws + share / (4 * draws))
    return p, max(0.0, centre - reach), min(1.0, centre + reach)


def enough_samples(tokens: int) -> int:
    """Return the continuations per side needed to find a token that decides correctness, among this many tokens."""
    samples = 2
    while tokens * fisher(samples, samples, 0, samples) >= LEVEL:
        samples += 1
    return samples


def squared_impact(a: int, n: int, b: int, m: int) -> float | None:
    """Return (p₁ − p₂)² − p₁(1 − p₁)/(n − 1) − p₂(1 − p₂)/(m − 1), which is unbiased for I²; None with one sample."""
    if min(n, m) < 2:
        return None
    p, q = a / n, b / m
    return (p - q) ** 2 - p * (1 - p) / (n - 1) - q * (1 - q) / (m - 1)


# ---------------------------------------------------------------------------- many tokens
def group_impacts(
    tokens: Sequence[TokenImpact],
    names: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    *,
    clusters: NDArray[np.int64] | None = None,
    seed: int = 0,
) -> tuple[list[GroupImpact], list[ImpactDifference]]:
    """Return mean and squared impact of each group of tokens, and the differences between pairs of groups.

    ``clusters`` has a number for each completion of the run; those with the same number are resampled together
    (`explorl.stats.resample`).
    """
    names = [name for name in names if any(name in token.groups for token in tokens)]
    pairs = [pair for pair in pairs if set(pair) <= set(names)]
    completions = np.array([token.answer for token in tokens], dtype=np.int64)
    _, cluster = np.unique(completions if clusters is None else clusters[completions], return_inverse=True)
    shape = (int(cluster.max()) + 1 if len(cluster) else 0, len(names))
    values: dict[str, list[float | None]] = {
        "mean": [token.impact.mean for token in tokens],
        "square": [squared_impact(*token.counts) for token in tokens],
    }
    contrasts = [[(name == first) - (name == second) for name in names] for first, second in pairs]
    results = {}
    for key, column in values.items():
        sums, counts = np.zeros(shape), np.zeros(shape)
        for token, row, value in zip(tokens, cluster, column, strict=True):
            for index, name in enumerate(names):
                if name in token.groups and value is not None:
                    sums[row, index] += value
                    counts[row, index] += 1
        results[key] = cluster_means(sums, counts, contrasts, seed=seed)
    groups = [
        GroupImpact(
            name,
            sum(name in token.groups for token in tokens),
            len({token.answer for token in tokens if name in token.groups}),
            sum(name in token.groups and token.significant for token in tokens),
            results["mean"][0][index],
            results["square"][0][index],
        )
        for index, name in enumerate(names)
    ]
    differences = [
        ImpactDifference(f"{first} − {second}", results["mean"][1][index], results["square"][1][index])
        for index, (first, second) in enumerate(pairs)
    ]
    return groups, differences


# ---------------------------------------------------------------------------- choice of tokens
RULES = ("entropy", "random", "first", "last", "positive", "negative", "low-ppl", "high-ppl")
"""Tokens of highest entropy overall; random tokens; and tokens of highest entropy in the first and the last 20 % of
completions, in positive and negative ones, and in those of low and high perplexity (bottom and top 20 %)."""
PAIRS = (("first", "last"), ("low-ppl", "high-ppl"), ("positive", "negative"))
EDGE = 0.2


def choose_tokens(
    entropy: NDArray[np.float64],
    completion: NDArray[np.int64],
    relative: NDArray[np.float64],
    sign: NDArray[np.int64],
    perplexity_group: NDArray[np.int64],
    rules: Sequence[str],
    each: int,
    *,
    seed: int = 0,
) -> Mapping[int, tuple[str, ...]]:
    """Return the indices of up to `each` tokens per rule, in order, with the rules that chose them.

    All arrays have one value per token. Completions take turns: first the token of highest entropy of each completion,
    in order of entropy, then the second of each, so that a group does not consist of one completion.
    """
    masks: dict[str, NDArray[np.bool_]] = {
        "entropy": np.ones(len(entropy), dtype=bool),
        "random": np.ones(len(entropy), dtype=bool),
        "first": relative < EDGE,
        "last": relative >= 1 - EDGE,
        "positive": sign > 0,
        "negative": sign < 0,
        "low-ppl": perplexity_group == -1,
        "high-ppl": perplexity_group == 1,
    }
    score = np.where(np.isfinite(entropy), entropy, -np.inf)
    random_score = np.random.default_rng(seed).random(len(entropy))
    chosen: dict[int, tuple[str, ...]] = {}
    for rule in rules:
        if rule not in masks:
            raise ValueError(f"unknown rule {rule!r}; use {', '.join(RULES)}")
        indices = np.flatnonzero(masks[rule] & np.isfinite(score))
        for index in _take_turns(random_score if rule == "random" else score, completion, indices)[:each]:
            chosen[index] = (*chosen.get(index, ()), rule)
    return dict(sorted(chosen.items()))


def _take_turns(score: NDArray[np.float64], completion: NDArray[np.int64], indices: NDArray[np.int64]) -> list[int]:
    ordered = indices[np.argsort(-score[indices], kind="stable")]
    turns: dict[int, int] = {}
    ranked = []
    for rank, index in enumerate(ordered.tolist()):
        turn = turns.get(int(completion[index]), 0)
        turns[int(completion[index])] = turn + 1
        ranked.append((turn, rank, index))
    return [index for _, _, index in sorted(ranked)]
