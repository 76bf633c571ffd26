r"""The normal form of a mathematical answer, and the LaTeX that math-verify reads of it.

Answers with the same normal form say the same; answers that say the same often have it: ``\dfrac{1}{2}`` and ``1/2``,
``27.0`` and ``27``, ``4.5e33`` and ``4.5 \times 10^{33}``, ``90^\circ`` and ``90``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LENGTH = 1_000
"""No answer of the benchmarks has a third of this; what is longer is no answer."""

_NUMERAL = re.compile(
    r"(?P<sign>[+-]?)(?=\.?[0-9])(?P<whole>[0-9]{1,3}(?:[ ,][0-9]{3})+|[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?:[eE]|(?:\\times|\\cdot|[*x×·]) ?10\^)(?P<power>[+-]?[0-9]{1,6}|\{[+-]?[0-9]{1,6}\}))?"
)
_POWER_OF_TEN = re.compile(r"(?P<sign>[+-]?)10\^(?P<power>[0-9]|\{[+-]?[0-9]{1,6}\})")
_FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}")

# In this order; each pattern takes time linear in the text.
_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\! *", ""),
        (r"\\(?:left|right) *\.|\\(?:left|right|displaystyle)(?![A-Za-z])", " "),
        # Signs around a number, which say nothing; between two digits they are no part of one number.
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

_MENDS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\[()\[\]]|(?<!\\)\$", ""),
        (r"(?<![\w.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]+)(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"([0-9])\.(?![0-9])", r"\1"),
        (r"\bnp\.([a-z]+)", r"\\\1 "),
    )
]


class Numeral(NamedTuple):
    """A number as written in digits, exactly: ``sign digits × 10^exponent``, without zeros at either end."""

    sign: str
    digits: str
    exponent: int

    @property
    def magnitude(self) -> int:
        """The power of ten of its first digit."""
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
    r"""The number that a text is: ``-27.0``, ``1,024``, ``4.5e33`` or ``4.5 \times 10^{33}``; None for all else."""
    text = re.sub(r" (?=[^\w,])|(?<=[^\w,]) ", "", re.sub(r"\\! *", "", text.strip(" \t\r\n")).replace("−", "-"))
    if match := _POWER_OF_TEN.fullmatch(text):
        return Numeral(match["sign"].replace("+", ""), "1", int(match["power"].strip("{}")))
    if not (match := _NUMERAL.fullmatch(text)):
        return None
    whole, part = re.sub("[ ,]", "", match["whole"]), match["part"] or ""
    digits = (whole + part).lstrip("0")
    kept = digits.rstrip("0")
    if not kept:
        return Numeral("", "0", 0)
    exponent = int((match["power"] or "0").strip("{}")) - len(part) + len(digits) - len(kept)
    return Numeral(match["sign"].replace("+", ""), kept, exponent)


def normalize(text: str) -> str:
    """The normal form of an answer."""
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


def repair_latex(text: str) -> str:
    """An answer with what math-verify misreads rewritten: 4.5e33 (to it 4.5·e·33), 1./3, np.arcsin."""
    number = parse_numeral(text)
    if number is not None:
        text = str(number)
    for pattern, by in _MENDS:
        text = pattern.sub(by, text)
    return text.strip()
