"""How a study's numbers are written: by their unit, with their interval, and with a mark where a difference is real."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOTHING = "–"
ALPHA = 0.05


@dataclass(frozen=True)
class DifferenceMark:
    """A difference that is no chance: where it goes as a sign, what that means as a word; colour is not needed."""

    sign: str
    word: str


def finite_or_none(value: Any) -> float | None:
    """The number, or None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def scaled(value: Any, unit: str) -> float | None:
    """The number as it is shown: shares become percent."""
    number = finite_or_none(value)
    return None if number is None else number * 100 if unit == "%" else number


def format_number(value: Any, unit: str = "", *, signed: bool = False) -> str:
    """A number in the decimals that its unit deserves, without the unit."""
    number = scaled(value, unit)
    if number is None:
        return NOTHING
    size = abs(number)
    plus = "+" if signed else ""
    if unit == "%":
        text = f"{number:{plus}.1f}"
    elif unit == "nats":
        text = f"{number:{plus}.3f}"
    elif size >= 1e6:
        text = f"{number / 1e6:{plus}.2f} M"
    elif size >= 1e4:
        text = f"{number / 1e3:{plus}.0f} k"
    elif size >= 100:
        text = f"{number:{plus},.0f}"
    elif unit in ("s", "steps", "tokens"):
        text = f"{number:{plus}.1f}"
    elif signed and size < 1:
        text = f"{number:+.3f}"
    else:
        text = f"{number:{plus}.3g}"
    return with_minus_sign(text)


def with_minus_sign(text: str) -> str:
    """A written number with a real minus sign, and none, nor a plus, before a zero."""
    digits = text.lstrip("+-")
    return digits if not digits.strip("0.,") else text.replace("-", "−")


def format_with_unit(value: Any, unit: str = "") -> str:
    """A number with its unit, for a sentence."""
    text = format_number(value, unit)
    return f"{text} {unit}" if unit and text != NOTHING else text


def format_interval(values: Mapping[str, Any] | None, unit: str = "", *, signed: bool = False) -> str:
    """``[low, high]``, empty where there is none."""
    if not values or finite_or_none(values.get("low")) is None or finite_or_none(values.get("high")) is None:
        return ""
    low, high = (format_number(values[end], unit, signed=signed) for end in ("low", "high"))
    if low == high and re.fullmatch(r"[+−]?\d+\.\d+", low):  # narrower than what is shown
        return f"[± < {10.0 ** -len(low.partition('.')[2]):g}]"
    return f"[{low}, {high}]"


def difference_mark(difference: Mapping[str, Any] | None, higher_is_better: bool | None) -> DifferenceMark | None:
    """The mark of a difference whose interval excludes zero and whose corrected p is below 0.05; one seed has no p."""
    if not difference:
        return None
    low, high = finite_or_none(difference.get("low")), finite_or_none(difference.get("high"))
    p = finite_or_none(difference.get("p_corrected"))
    if low is None or high is None or low <= 0 <= high or p is None or p >= ALPHA:
        return None
    up = low > 0
    if higher_is_better is None:
        return DifferenceMark("▲" if up else "▼", "higher" if up else "lower")
    return DifferenceMark("▲" if up else "▼", "better" if up == higher_is_better else "worse")
