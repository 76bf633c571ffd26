"""Two looks at a study with one level for both: all arms run a few seeds, the arms that look alive run the rest.

The level α is shared out over the looks before the study begins, w_1 + w_2 = 1, after O'Brien and Fleming in the form
of Lan and DeMets 1983: with t the share of the seeds at the first look,

    w_1 = (2 − 2·Φ(z_{1 − α/2} / sqrt(t))) / α        (α = 0.05; 3 of 8 seeds: w_1 = 0.027)

Look k has a p value p_k that is valid on its own (Student's, over seeds and problems, paired by both). Then

    p = min over the looks that were made of p_k / w_k

is a p value whichever look was the last: P(p ≤ u) ≤ Σ_k P(p_k ≤ w_k·u) ≤ Σ_k w_k·u = u. This is a union bound and
asks nothing of how the looks depend on each other. The joint normal distribution would give the last of 3 and 8 seeds
the level 0.0494 in place of 0.0486, a critical value of 1.965 and not 1.972. Holm's correction of these p values over
all arms and measures of the study, those that stopped early included, keeps the chance of any false finding below α.

Which arms go on is free: the bound holds for every rule, as an arm that stops only loses its second chance to be found
(non-binding futility). The interval after look k has the confidence 1 − α·w_k, so that the intervals of both looks hold
together with a chance of 95 % (repeated confidence intervals, Jennison and Turnbull 1989).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from explorl.stats.crossed import power, student_quantile

LEVEL = 0.05
STUDIES = 4000
"""Simulated studies behind a chance: a standard error below 0.8 points."""


@dataclass(frozen=True)
class Design:
    """A study with two looks."""

    first: int
    """Seeds of every arm at the first look."""
    seeds: int
    """Seeds at the last look of the arms that go on."""
    keep: int
    """How many arms go on at most."""
    arms: int
    """Arms that are compared with the baseline."""
    measures: int
    """Measures on which they are compared."""

    def __post_init__(self) -> None:
        if not 2 <= self.first < self.seeds:
            raise ValueError(
                f"the first look is at {self.first} of {self.seeds} seeds; it needs 2 or more and fewer than all, such "
                "as 3 of 8"
            )

    @property
    def seeds_by_look(self) -> tuple[int, int]:
        """Seeds at each look."""
        return self.first, self.seeds

    @property
    def shares(self) -> tuple[float, float]:
        """What each look has of the level: w_1 and w_2."""
        normal = NormalDist()
        line = normal.inv_cdf(1 - LEVEL / 2) / math.sqrt(self.first / self.seeds)
        early = 2 * normal.cdf(-line) / LEVEL
        return early, 1 - early

    @property
    def levels(self) -> tuple[float, float]:
        """The level of each look for one arm on one measure."""
        return LEVEL * self.shares[0], LEVEL * self.shares[1]

    @property
    def tests(self) -> int:
        """Comparisons that the correction is over."""
        return self.arms * self.measures


def sequential_p(by_look: Sequence[float], shares: Sequence[float]) -> float:
    """min_k p_k / w_k over the looks that were made, at most 1."""
    return min([1.0, *(p / share for p, share in zip(by_look, shares, strict=False))])


def expected_findings(seen: Mapping[str, tuple[float, float]], design: Design) -> float:
    """How many of an arm's measures the last look would find, if the differences so far were true.

    `seen` has for each measure the mean difference and the standard deviation between seeds, pooled over the arms, as
    three seeds alone tell too little of it. Each counts with the power of the last look's t test at the level of the
    correction's first step.
    """
    level = design.levels[1] / design.tests
    return sum(
        float(effect != 0) if deviation == 0 else power(effect, deviation, design.seeds, level)
        for effect, deviation in seen.values()
    )


def select_arms(promises: Mapping[str, float], keep: int) -> list[str]:
    """The arms with the highest expected_findings, those that come first where it is equal."""
    ranked = sorted(promises, key=lambda name: -promises[name])
    return [name for name in promises if name in ranked[:keep]]


# ---------------------------------------------------------------------------- power
def detection_chance(effect: float, deviation: float, design: Design, *, studies: int = STUDIES) -> float:
    """Chance that one arm with this effect on one measure is found by the whole design, the other arms having none.

    Simulated with normal seeds: all arms share the baseline's, the `keep` largest differences go on, and a finding is
    one of the correction's first step, at either look. `deviation` is that of a difference between seeds.
    """
    noise, spread = _simulated(design, studies)
    scaled = noise.copy()
    scaled[:, :, 0] += effect / deviation
    found = np.zeros(studies, dtype=bool)
    kept = np.ones(studies, dtype=bool)
    for look, (seeds, level) in enumerate(zip(design.seeds_by_look, design.levels, strict=True)):
        critical = student_quantile(1 - level / design.tests / 2, seeds - 1)
        mean = scaled[look]
        found |= kept & (np.abs(mean[:, 0]) * math.sqrt(seeds) > critical * spread[look])
        if look == 0:
            above = (np.abs(mean[:, 1:]) > np.abs(mean[:, :1])).sum(axis=1)
            kept = above < design.keep
    return float(found.mean())


def detectable_effect(deviation: float, design: Design, wanted: float = 0.8) -> float:
    """The smallest effect that the design finds with a chance of 80 %."""
    return deviation * _detectable(design, wanted)


@lru_cache(maxsize=64)
def _detectable(design: Design, wanted: float) -> float:
    low, high = 0.0, 1.0
    while detection_chance(high, 1.0, design) < wanted:
        high *= 2
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if detection_chance(middle, 1.0, design) < wanted else (low, middle)
    return high


@lru_cache(maxsize=4)
def _simulated(design: Design, studies: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of the differences, looks × studies × arms, and the first arm's deviations, looks × studies."""
    rng = np.random.default_rng(0)
    runs = rng.standard_normal((studies, design.arms + 1, design.seeds)) / math.sqrt(2)
    differences = runs[:, 1:] - runs[:, :1]
    means = np.stack([differences[:, :, :seeds].mean(axis=2) for seeds in design.seeds_by_look])
    spreads = np.stack([differences[:, 0, :seeds].std(axis=1, ddof=1) for seeds in design.seeds_by_look])
    return means, spreads
