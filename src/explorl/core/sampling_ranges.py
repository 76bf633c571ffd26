"""The values that sampling parameters may have: one table for configurations, the engine and vLLM's processor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The values that a number may have."""

    good: str
    """Describes the range, with a good value."""
    low: float
    high: float = math.inf
    above_low: bool = False
    """True if ``low`` itself is excluded."""
    whole: bool = False
    also: float | None = None
    """A value outside the range that has a meaning of its own."""

    def includes(self, value: Any) -> bool:
        """Return whether a value is a number in this range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        if self.whole and not float(value).is_integer():
            return False
        inside = self.low < value if self.above_low else self.low <= value
        return value == self.also or (inside and value <= self.high)

    @property
    def bounds(self) -> dict[str, Any]:
        """The range, without ``also``, as arguments of pydantic's `Field`."""
        upper = {} if self.high == math.inf else {"le": self.high}
        return {"gt" if self.above_low else "ge": self.low, **upper}


RANGES: Mapping[str, Range] = {
    "temperature": Range("a number from 1e-6 to 100 such as 1.0, or 0 for greedy", 1e-6, 100, also=0),
    "top_k": Range("a whole number ≥ 0 such as 50, or 0 to disable it", 0, whole=True),
    "top_p": Range("a number in (0, 1] such as 0.9", 0, 1, above_low=True),
    "min_p": Range("a number in [0, 1] such as 0.05", 0, 1),
    "repetition_penalty": Range("a number > 0 such as 1.1", 0, above_low=True),
    "bottom_p": Range("a number in (0, 1] such as 0.9", 0, 1, above_low=True),
    "bottom_p_frequency": Range("a number in [0, 1] such as 0.5", 0, 1),
    "max_tokens": Range("a whole number ≥ 1 such as 256", 1, whole=True),
}
MIN_TEMPERATURE, MAX_TEMPERATURE = RANGES["temperature"].low, RANGES["temperature"].high
