"""Format a study's numbers: by unit, with an interval, and with a mark if a difference is significant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from explorl.analysis.verdicts import is_significant

NOTHING = "–"
INFERENCE = ("low", "high", "p_corrected")
"""The values of a difference that decide whether it is significant."""


@dataclass(frozen=True)
class DifferenceMark:
    """A significant difference: its direction as a sign and its meaning as a word, so that colour is not needed."""

    sign: str
    word: str


def finite_or_none(value: Any) -> float | None:
    """Return the value as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def scaled(value: Any, unit: str) -> float | None:
    """Return the number as it is shown: shares become percent."""
    number = finite_or_none(value)
    return None if number is None else number * 100 if unit == "%" else number


def format_number(value: Any, unit: str = "", *, signed: bool = False) -> str:
    """Return a number with as many decimals as its unit needs, without the unit."""
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
    """Return a formatted number with a typographic minus sign; zero loses its sign."""
    digits = text.lstrip("+-")
    return digits if not digits.strip("0.,") else text.replace("-", "−")


def format_with_unit(value: Any, unit: str = "") -> str:
    """Return a number with its unit, for a sentence."""
    text = format_number(value, unit)
    return f"{text} {unit}" if unit and text != NOTHING else text


def format_interval(values: Mapping[str, Any] | None, unit: str = "", *, signed: bool = False) -> str:
    """Return ``[low, high]``, or an empty text if there is no interval."""
    if not values or finite_or_none(values.get("low")) is None or finite_or_none(values.get("high")) is None:
        return ""
    low, high = (format_number(values[end], unit, signed=signed) for end in ("low", "high"))
    if low == high and re.fullmatch(r"[+−]?\d+\.\d+", low):  # narrower than the last decimal shown
        return f"[± < {10.0 ** -len(low.partition('.')[2]):g}]"
    return f"[{low}, {high}]"


def difference_mark(difference: Mapping[str, Any] | None, higher_is_better: bool | None) -> DifferenceMark | None:
    """Return the mark of a significant difference, or None.

    A difference is significant if its interval excludes zero and its corrected p is below 0.05; with one seed there is
    no p.
    """
    if not difference or not is_significant({key: finite_or_none(difference.get(key)) for key in INFERENCE}):
        return None
    up = difference["low"] > 0
    if higher_is_better is None:
        return DifferenceMark("▲" if up else "▼", "higher" if up else "lower")
    return DifferenceMark("▲" if up else "▼", "better" if up == higher_is_better else "worse")
