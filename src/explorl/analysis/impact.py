"""What a token changes: accuracy of continuations from it against those from the best other token.

    õ_t = argmax_{v ≠ o_t} π(v | q, o_<t)
    I_t = mean_j Acc_j(q, o_<t, o_t) − mean_j Acc_j(q, o_<t, õ_t),   k continuations j each

Deng et al. 2025, Eq. 5 and 6. This module holds what follows from the counts; `impact_sampling` draws them.

Each I_t has Newcombe's interval for a difference of two proportions, and a p value by Fisher's exact test. Tokens are
many, so the p values are corrected by Benjamini and Hochberg's rule: what is wanted is a list of tokens that matter,
of which at most 5 % are there by chance, and each token is tested on draws of its own, so that the tests are
independent as the rule asks. Where no token matters, the chance that any is listed is at most 5 %, as with Holm's rule,
and where some do, more of them are found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from explorl.stats import Interval
from explorl.stats.clusters import cluster_means
from explorl.stats.regression import Effect

LEVEL = 0.05


@dataclass(frozen=True)
class Continuation:
    """How an answer went on, and whether the whole of it is correct."""

    text: str
    correct: bool
    finish: str
    """``stop``, ``length`` where it was cut off, ``none`` where there was nothing to sample."""


@dataclass(frozen=True)
class Side:
    """The continuations from one token."""

    token_id: int
    token: str
    probability: float
    """Of the token at its place, at the temperature of sampling."""
    continuations: tuple[Continuation, ...]

    @property
    def correct(self) -> int:
        return sum(one.correct for one in self.continuations)

    @property
    def count(self) -> int:
        return len(self.continuations)


@dataclass(frozen=True)
class TokenImpact:
    """One token that was replaced."""

    answer: int
    """Its place among the run's answers."""
    position: int
    length: int
    """Tokens of the answer."""
    step: int
    sign: int
    """Of the answer: 1 positive, −1 negative, 0 neither or not known."""
    entropy: float
    perplexity: float
    """Of the answer."""
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
        """Correct ones and all of the continuations, of the token and of its alternative."""
        return self.sampled.correct, self.sampled.count, self.other.correct, self.other.count

    @property
    def significant(self) -> bool:
        """Whether it changes the accuracy, after correction."""
        return self.corrected < LEVEL


@dataclass(frozen=True)
class GroupImpact:
    """The tokens that one rule chose, with intervals over prompts, or over answers where prompts are few."""

    name: str
    tokens: int
    answers: int
    found: int
    """Tokens whose impact is not 0, after correction."""
    mean: Interval | None
    """Accuracy lost by replacing a token."""
    square: Interval | None
    """Mean I_t², without what the sampling of continuations adds to it."""


@dataclass(frozen=True)
class ImpactDifference:
    """One group of tokens minus another."""

    name: str
    mean: Effect | None
    square: Effect | None


# ---------------------------------------------------------------------------- one token
def newcombe(a: int, n: int, b: int, m: int, confidence: float = 0.95) -> Interval:
    """a/n − b/m with its interval from two Wilson intervals (Newcombe 1998, method 10).

        low = d − sqrt((p₁ − l₁)² + (u₂ − p₂)²),   high = d + sqrt((u₁ − p₁)² + (p₂ − l₂)²)

    It stays within [−1, 1], and is no point where all of few draws agree.
    """
    (p1, l1, u1), (p2, l2, u2) = _wilson(a, n, confidence), _wilson(b, m, confidence)
    d = p1 - p2
    return Interval(d, d - math.hypot(p1 - l1, u2 - p2), d + math.hypot(u1 - p1, p2 - l2), confidence)


def _wilson(successes: int, draws: int, confidence: float) -> tuple[float, float, float]:
    if not 0 <= successes <= draws or draws < 1:
        raise ValueError(f"{successes} of {draws} is no proportion; give counts such as 3 of 8")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, share = successes / draws, z * z / draws
    centre = (p + share / 2) / (1 + share)
    reach = z / (1 + share) * math.sqrt(p * (1 - p) / draws + share / (4 * draws))
    return p, max(0.0, centre - reach), min(1.0, centre + reach)


def fisher(a: int, n: int, b: int, m: int) -> float:
    """Two-sided p value of a/n and b/m having one chance (Fisher 1935): tables no likelier than this one."""
    total = a + b
    ways = [math.comb(n, x) * math.comb(m, total - x) for x in range(max(0, total - m), min(n, total) + 1)]
    here = math.comb(n, a) * math.comb(m, b)
    return sum(way for way in ways if way <= here) / sum(ways)


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """p values corrected so that of those below a level, at most that share is expected to be there by chance.

        p̃_(i) = min_{j ≥ i} min(1, m · p_(j) / j),   p_(1) ≤ … ≤ p_(m)

    Benjamini and Hochberg 1995, for independent tests.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, lowest = [1.0] * len(p_values), 1.0
    for rank in range(len(order), 0, -1):
        lowest = min(lowest, len(order) * p_values[order[rank - 1]] / rank)
        corrected[order[rank - 1]] = lowest
    return corrected


def enough_samples(tokens: int) -> int:
    """Continuations a side from which a token that alone decides everything is found among so many tokens."""
    samples = 2
    while tokens * fisher(samples, samples, 0, samples) >= LEVEL:
        samples += 1
    return samples


def squared_impact(a: int, n: int, b: int, m: int) -> float | None:
    """Unbiased estimate of I²: (p₁ − p₂)² − p₁(1 − p₁)/(n − 1) − p₂(1 − p₂)/(m − 1); None with one draw."""
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
    """Mean and squared impact of each group of tokens, and the differences of pairs of groups, over answers.

    ``together`` has a number for each of the run's answers: those of one number are drawn together
    (`explorl.stats.clusters`).
    """
    names = [name for name in names if any(name in token.groups for token in tokens)]
    pairs = [pair for pair in pairs if set(pair) <= set(names)]
    answers = np.array([token.answer for token in tokens], dtype=np.int64)
    _, cluster = np.unique(answers if clusters is None else clusters[answers], return_inverse=True)
    shape = (int(cluster.max()) + 1 if len(cluster) else 0, len(names))
    values: dict[str, list[float | None]] = {
        "mean": [token.impact.mean for token in tokens],
        "square": [squared_impact(*token.counts) for token in tokens],
    }
    contrasts = [[(name == one) - (name == two) for name in names] for one, two in pairs]
    found = {}
    for key, column in values.items():
        sums, counts = np.zeros(shape), np.zeros(shape)
        for token, at, value in zip(tokens, cluster, column, strict=True):
            for place, name in enumerate(names):
                if name in token.groups and value is not None:
                    sums[at, place] += value
                    counts[at, place] += 1
        found[key] = cluster_means(sums, counts, contrasts, seed=seed)
    groups = [
        GroupImpact(
            name,
            sum(name in token.groups for token in tokens),
            len({token.answer for token in tokens if name in token.groups}),
            sum(name in token.groups and token.significant for token in tokens),
            found["mean"][0][place],
            found["square"][0][place],
        )
        for place, name in enumerate(names)
    ]
    compared = [
        ImpactDifference(f"{one} − {two}", found["mean"][1][place], found["square"][1][place])
        for place, (one, two) in enumerate(pairs)
    ]
    return groups, compared


# ---------------------------------------------------------------------------- which tokens
RULES = ("entropy", "random", "first", "last", "positive", "negative", "low-ppl", "high-ppl")
"""Tokens of highest entropy: of all, at random, in the first and the last 20 % of answers, in positive and negative
answers, and in answers of low and high perplexity (bottom and top 20 %)."""
PAIRS = (("first", "last"), ("low-ppl", "high-ppl"), ("positive", "negative"))
EDGE = 0.2


def choose_tokens(
    entropy: NDArray[np.float64],
    answer: NDArray[np.int64],
    relative: NDArray[np.float64],
    sign: NDArray[np.int64],
    perplexity_group: NDArray[np.int64],
    rules: Sequence[str],
    each: int,
    *,
    seed: int = 0,
) -> Mapping[int, tuple[str, ...]]:
    """Which tokens each rule chooses, up to `each`: places of tokens with the rules that chose them, in their order.

    All arrays have one value per token. Completions take turns: first the token of highest entropy of each, those of
    higher entropy before others, then the second of each, so that a group does not consist of one answer.
    """
    wanted: dict[str, NDArray[np.bool_]] = {
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
    chance = np.random.default_rng(seed).random(len(entropy))
    chosen: dict[int, tuple[str, ...]] = {}
    for rule in rules:
        if rule not in wanted:
            raise ValueError(f"there is no rule {rule!r} to choose tokens; use {', '.join(RULES)}")
        places = np.flatnonzero(wanted[rule] & np.isfinite(score))
        for place in _by_turns(chance if rule == "random" else score, answer, places)[:each]:
            chosen[place] = (*chosen.get(place, ()), rule)
    return dict(sorted(chosen.items()))


def _by_turns(score: NDArray[np.float64], answer: NDArray[np.int64], places: NDArray[np.int64]) -> list[int]:
    ordered = places[np.argsort(-score[places], kind="stable")]
    turns: dict[int, int] = {}
    ranked = []
    for rank, place in enumerate(ordered.tolist()):
        turn = turns.get(int(answer[place]), 0)
        turns[int(answer[place])] = turn + 1
        ranked.append((turn, rank, place))
    return [place for _, _, place in sorted(ranked)]
