"""Numbers with their uncertainty: a mean with its interval, and an effect that is also tested against zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from explorl.stats.distributions import student_cdf, student_quantile

CONFIDENCE = 0.95
LEVEL = 0.01
"""p value below which an effect is significant: without an effect, that happens in 1 of 100 analyses."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval. ``f"{interval:.1%}"`` formats each of the three numbers."""

    mean: float
    low: float
    high: float
    confidence: float = CONFIDENCE

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"

    def __str__(self) -> str:
        return format(self)

    def times(self, factor: float) -> Interval:
        """Return the interval in another unit."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high, self.confidence)


@dataclass(frozen=True, kw_only=True)
class Effect(Interval):
    """An interval with the two-sided p value of there being no effect."""

    p: float

    @property
    def sign(self) -> int:
        """1 if significantly above zero, −1 if significantly below, else 0 (at a level of 1 %)."""
        return int(np.sign(self.mean)) if self.p < LEVEL else 0

    @classmethod
    def of(cls, mean: float, error: float, freedom: float) -> Effect:
        """Return the effect with this standard error and degrees of freedom."""
        freedom = max(freedom, 1.0)
        reach = student_quantile((1 + CONFIDENCE) / 2, freedom) * error
        if not error:
            return cls(mean, mean, mean, p=1.0 if mean == 0 else 0.0)
        return cls(mean, mean - reach, mean + reach, p=2 * (1 - student_cdf(abs(mean) / error, freedom)))


def format_effect(effect: Interval | None, spec: str = "") -> str:
    """Return an effect with its interval as text, by default with three decimals, more if it is small."""
    if effect is None:
        return "not known"
    ends = [abs(end) for end in (effect.mean, effect.low, effect.high) if math.isfinite(end)]
    spec = spec or ("+.3f" if max(ends) >= 0.01 or max(ends) == 0 else "+.1e")
    text = format(effect, spec) if math.isfinite(effect.low) else f"{effect.mean:{spec}} (of one completion)"
    return text.replace("-", "−")


def format_points(effect: Interval) -> str:
    """Return a difference of shares in percentage points: ``+4.1 [+1.2, +7.0] points``."""
    return f"{effect.times(100):+.1f} points"
