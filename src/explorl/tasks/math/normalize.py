r"""The normal form of a mathematical answer.

Answers with the same normal form are equal, and equal answers often have the same one: ``\dfrac{1}{2}`` and ``1/2``,
``27.0`` and ``27``, ``4.5e33`` and ``4.5 \times 10^{33}``, ``90^\circ`` and ``90``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LENGTH = 1_000
"""A longer text is not an answer; the benchmarks' answers have less than a third of this."""

_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)(?=\.?[0-9])(?P<whole>[0-9]{1,3}(?:[ ,][0-9]{3})+|[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?:[eE]|(?:\\times|\\cdot|[*x×·]) ?10\^)(?P<power>[+-]?[0-9]{1,6}|\{[+-]?[0-9]{1,6}\}))?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?)10\^(?P<power>[0-9]|\{[+-]?[0-9]{1,6}\})")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}")

# The order matters; each pattern takes time linear in the text.
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\! *", ""),
        (r"\\(?:left|right) *\.|\\(?:left|right|displaystyle)(?![A-Za-z])", " "),
        # Signs around a number mean nothing, but between two digits they separate two numbers.
        (r"(?<![0-9])(?:\\[$()\[\]]|\$)|(?:\\[()\[\]]|\$)(?![0-9])", " "),
        (r"(?:\^ ?\\circ(?![A-Za-z])|\^ ?\{ ?\\circ ?\}|\\degree(?![A-Za-z])|°)(?! *[0-9])", ""),
        (r"\\%", "%"),
        (r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
        (r"\{,\}", ","),
        (r"−", "-"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname) ?\{([^{}]*)\}", r"\1"),
        (r" +", " "),
        # "3, 5" is "3,5", but "1, 234" is not 1,234.
        (r" (?=\W)|(?<=[^\w,]) |(?<=,) (?![0-9]{3}(?![0-9]))", ""),
        (r"\\frac ?([0-9]) ?(?=[0-9{])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
        (r"\\sqrt ?([0-9])", r"\\sqrt{\1}"),
        (r"([_^])\{(\w)\}", r"\1\2"),
    )
]


class Numeral(NamedTuple):
    """An exact number in digits: ``sign digits × 10^exponent``, without leading or trailing zeros."""

    sign: str
    digits: str
    exponent: int

    @property
    def magnitude(self) -> int:
        """Power of ten of the first digit."""
        return self.exponent + len(self.digits) - 1

    def __str__(self) -> str:
        digits, magnitude = self.digits, self.magnitude
        if not -5 <= magnitude <= 15:
            point = "." if len(digits) > 1 else ""
            return f"{self.sign}{digits[0]}{point}{digits[1:]}e{magnitude}"
        if magnitude < 0:
            return f"{self.sign}0.{'0' * (-magnitude - 1)}{digits}"
        digits = digits.ljust(magnitude + 1, "0")
        whole, part = digits[: magnitude + 1], digits[magnitude + 1 :]
        return f"{self.sign}{whole}.{part}" if part else f"{self.sign}{whole}"


def parse_numeral(text: str) -> Numeral | None:
    r"""Parse a number like ``-27.0``, ``1,024``, ``4.5e33`` or ``4.5 \times 10^{33}``; return None for other texts."""
    text = re.sub(r" (?=[^\w,])|(?<=[^\w,]) ", "", re.sub(r"\\! *", "", text.strip(" \t\r\n")).replace("−", "-"))
    if match := _POWER_OF_TEN.fullmatch(text):
        return Numeral(match["sign"].replace("+", ""), "1", int(match["power"].strip("{}")))
    if not (match := _NUMERAL.fullmatch(text)):
        return None
    whole, part = re.sub("[ ,]", "", match["whole"]), match["part"] or ""
    digits = (whole + part).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return Numeral("", "0", 0)
    exponent = int((match["power"] or "0").strip("{}")) - len(part) + len(digits) - len(significant)
    return Numeral(match["sign"].replace("+", ""), significant, exponent)


def normalize(text: str) -> str:
    """Return the normal form of an answer."""
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    text = text.strip().removesuffix(".").strip()
    if re.fullmatch(r"\{[^{}]*\}", text):
        text = text[1:-1].strip()
    if re.fullmatch(r"\([A-J]\)", text):
        return text[1]
    number = parse_numeral(text)
    if number is not None:
        return str(number)
    if match := _FRACTION.fullmatch(text):
        outer, inner, above, below = match.groups()
        return f"{'-' if outer != inner else ''}{above}/{below}"
    return text
