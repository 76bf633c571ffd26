"""Studies with two interim looks at one shared level: all arms run a few seeds, promising arms run the rest.

The level α is divided between the looks before the study begins, w_1 + w_2 = 1, after O'Brien and Fleming in the form
of Lan and DeMets 1983: with t the share of the seeds at the first interim look,

    w_1 = (2 − 2·Φ(z_{1 − α/2} / sqrt(t))) / α        (α = 0.05; 3 of 8 seeds: w_1 = 0.027)

Look k has a p value p_k that is valid by itself (Student's, over seeds and problems, paired by both). Then

    p = minimum of p_k / w_k over the looks so far

is a p value no matter which look is the last: P(p ≤ u) ≤ Σ_k P(p_k ≤ w_k·u) ≤ Σ_k w_k·u = u. This is a union bound
and assumes nothing about the dependence between looks. The joint normal distribution would give the second look of 3
and 8 seeds the level 0.0494 instead of 0.0486, a critical value of 1.965 instead of 1.972. Holm's correction of these p
values over all arms and measures of the study, including arms that stopped early, keeps the probability of any false
finding below α.

Any rule may choose which arms continue: an arm that stops only loses its second opportunity to be found (non-binding
futility). The interval after look k has the confidence 1 − α·w_k, so the intervals of both looks hold together with a
probability of 95 % (repeated confidence intervals, Jennison and Turnbull 1989).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from explorl.stats.crossed import power
from explorl.stats.distributions import student_quantile

LEVEL = 0.05
STUDIES = 4000
"""Simulated studies behind a probability: its standard error is below 0.8 points."""


@dataclass(frozen=True)
class Design:
    """A study with two interim looks."""

    first: int
    """Seeds of every arm at the first interim look."""
    seeds: int
    """Seeds, at the second look, of the arms that continue."""
    keep: int
    """Most arms that continue."""
    arms: int
    """Arms that are compared with the baseline."""
    measures: int
    """Measures on which they are compared."""

    def __post_init__(self) -> None:
        if not 2 <= self.first < self.seeds:
            raise ValueError(
                f"the first interim look is at {self.first} of {self.seeds} seeds; use at least 2 and fewer than all, "
                "such as 3 of 8"
            )

    @property
    def seeds_by_look(self) -> tuple[int, int]:
        """Seeds at each interim look."""
        return self.first, self.seeds

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the level for the two looks: w_1 and w_2."""
        normal = NormalDist()
        threshold = normal.inv_cdf(1 - LEVEL / 2) / math.sqrt(self.first / self.seeds)
        early = 2 * normal.cdf(-threshold) / LEVEL
        return early, 1 - early

    @property
    def levels(self) -> tuple[float, float]:
        """Level of each look for one arm on one measure."""
        return LEVEL * self.shares[0], LEVEL * self.shares[1]

    @property
    def tests(self) -> int:
        """Number of comparisons that are corrected for."""
        return self.arms * self.measures


def sequential_p(by_look: Sequence[float], shares: Sequence[float]) -> float:
    """Return min_k p_k / w_k over the looks so far, at most 1."""
    return min([1.0, *(p / share for p, share in zip(by_look, shares, strict=False))])


def expected_findings(observed: Mapping[str, tuple[float, float]], design: Design) -> float:
    """Return how many of an arm's measures the second look is expected to find if the differences so far are true.

    `observed` has for each measure the mean difference and the standard deviation between seeds, pooled over the arms,
    because three seeds give a poor estimate of it. Each measure counts with the power of the second look's t test at
    the level of the first step of Holm's correction.
    """
    level = design.levels[1] / design.tests
    return sum(
        float(effect != 0) if deviation == 0 else power(effect, deviation, design.seeds, level)
        for effect, deviation in observed.values()
    )


def select_arms(scores: Mapping[str, float], keep: int) -> list[str]:
    """Return the arms with the highest scores; ties go to the arm that comes first."""
    ranked = sorted(scores, key=lambda name: -scores[name])
    return [name for name in scores if name in ranked[:keep]]


# ---------------------------------------------------------------------------- power
def detection_chance(effect: float, deviation: float, design: Design, *, studies: int = STUDIES) -> float:
    """Return the probability that the design finds this effect of one arm on one measure, if no other arm has any.

    Seeds are simulated as normal, all arms share those of the baseline, the `keep` largest differences continue, and a
    finding is one of the first step of Holm's correction, at either look. `deviation` is the standard deviation of a
    difference between seeds.
    """
    noise, spread = _simulated(design, studies)
    scaled = noise.copy()
    scaled[:, :, 0] += effect / deviation
    detected = np.zeros(studies, dtype=bool)
    continues = np.ones(studies, dtype=bool)
    for look, (seeds, level) in enumerate(zip(design.seeds_by_look, design.levels, strict=True)):
        critical = student_quantile(1 - level / design.tests / 2, seeds - 1)
        mean = scaled[look]
        detected |= continues & (np.abs(mean[:, 0]) * math.sqrt(seeds) > critical * spread[look])
        if look == 0:
            above = (np.abs(mean[:, 1:]) > np.abs(mean[:, :1])).sum(axis=1)
            continues = above < design.keep
    return float(detected.mean())


def detectable_effect(deviation: float, design: Design, wanted: float = 0.8) -> float:
    """Return the smallest effect that the design finds with a probability of 80 %."""
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
    """Return means of the differences, looks × studies × arms, and the first arm's deviations, looks × studies."""
    rng = np.random.default_rng(0)
    runs = rng.standard_normal((studies, design.arms + 1, design.seeds)) / math.sqrt(2)
    differences = runs[:, 1:] - runs[:, :1]
    means = np.stack([differences[:, :, :seeds].mean(axis=2) for seeds in design.seeds_by_look])
    spreads = np.stack([differences[:, 0, :seeds].std(axis=1, ddof=1) for seeds in design.seeds_by_look])
    return means, spreads
