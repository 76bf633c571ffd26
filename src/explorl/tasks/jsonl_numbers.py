r"""Numbers as people and models write them: ``42``, ``1,000``, ``$5``, ``-7.50``, ``1e3``, ``3/4``, ``\frac{3}{4}``.

Currency, percent signs and units do not count: ``50 %`` is 50, and ``5 apples`` is 5. What makes another number of it
does: ``3 1/2`` is 3.5, ``5 million`` is 5,000,000, and ``5²``, ``√5`` and ``5π`` are none. Nothing here raises,
whatever the text, and nothing takes longer than a few passes over it.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal, InvalidOperation, localcontext

MAX_LENGTH = 1_000
"""No number needs more characters; what is longer states none."""
_DIGITS = 60
"""Digits of a quotient."""
_CLOSE = Decimal("1e-9")
"""Numbers that are not whole may differ by this share: 0.1 + 0.2 is 0.30000000000000004 to a computer."""

_SIGNS = re.compile(r"\\[$%!,]|\\(?:text|textbf|mathrm|mathbf|mbox)(?![A-Za-z])|[$€£¥₹%{}]|[\u00a0\u202f](?=[0-9]{3})")
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*([0-9.,]{1,60})\s*\}\s*\{\s*([0-9.,]{1,60})\s*\}")
_MIXED = re.compile(r"(?<=[0-9])\s?(?=\\[dtc]?frac\s*\{)")
_MINUS = re.compile(r"\b(?:minus|negative) (?=[0-9.])", re.IGNORECASE)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = rf"(?:[ -](?i:{'|'.join(_SCALES)})\b)"
# What stands next to a number makes another one of it: 5², √5, 5½, 5π, 1_000, 0x10.
_NUMBER = re.compile(
    r"(?<![\w.√])(?<![A-Za-z]\^)[-+]?(?:[0-9]{1,9} (?=[0-9]{1,9}/[0-9]))?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4}(?!\w))?"
    r"(?![0-9]|\.[0-9]|[eE][-+]?[0-9]|[_xX][0-9]|\s?(?:[⁰¹²³⁴-⁹½¼¾⅓⅔⅛√π]|\\?pi\b|\\sqrt))"
    rf"(?:[ ]?/[ ]?[0-9]+(?:\.[0-9]+)?)?{_SCALE}{{0,2}}"
)
_PARTS = re.compile(r"(?:([-+]?[0-9]+) (?=[0-9]))?([^/ ]+)(?: ?/ ?(.+))?")
_PLAIN = re.compile(r"[$€£¥₹]?[-+−]?[$€£¥₹]?(?!0[0-9])[0-9][0-9.,]*(?:[eE][-+]?[0-9]{1,4})?\s?%?")


def last_number(text: str) -> str | None:
    """The last number of a text, as it is written."""
    found = deque(_NUMBER.finditer(_cleaned(text)), maxlen=1)
    return found[0][0] if found else None


def number(text: str) -> Decimal | None:
    """The one number that a text states, after its last ``=`` if it has one; None if it states none, or several."""
    if len(text) > MAX_LENGTH:
        return None
    found = _NUMBER.findall(_cleaned(text).rpartition("=")[2])
    return _value(found[0]) if len(found) == 1 else None


def is_number(text: str) -> bool:
    """Whether a text is nothing but a number, not a code with zeros in front."""
    if text.isascii() and text.isdecimal():
        return text == "0" or text[0] != "0"
    return _PLAIN.fullmatch(text.strip()) is not None and number(text) is not None


def same(said: Decimal, right: Decimal, tolerance: float = 0.0) -> bool:
    """Whether two numbers differ by at most ``tolerance``; if it is 0, to nine digits, and whole ones not at all."""
    with localcontext() as context:
        context.prec = _DIGITS
        close = Decimal(0) if right == right.to_integral_value() else abs(right) * _CLOSE
        return abs(said - right) <= max(Decimal(str(tolerance)), close)


def shown(value: Decimal) -> str:
    """A number in one way of writing: 42 for 42.0 and 4.2e1."""
    with localcontext() as context:
        context.prec = 30
        value = +value
    if not value:
        return "0"
    value = value.normalize()
    return f"{value:f}" if -10 <= value.adjusted() <= 30 else str(value)


def _cleaned(text: str) -> str:
    text = _FRACTION.sub(r"\1/\2", _MIXED.sub(" ", text.replace("−", "-").replace("{,}", ",")))
    return _MINUS.sub("-", _SIGNS.sub("", text))


def _value(text: str) -> Decimal | None:
    digits, *scales = re.split(r"[ -](?=[a-z])", text.casefold().replace(",", ""))
    found = _PARTS.fullmatch(digits)
    if not found:
        return None
    whole, above, below = found.groups()
    try:
        with localcontext() as context:
            context.prec = _DIGITS
            value = Decimal(above) / Decimal(below) if below else Decimal(above)
            if whole and not value < 1:
                return None
            value = Decimal(whole) + value.copy_sign(Decimal(whole)) if whole else value
            return value.scaleb(sum(_SCALES[scale] for scale in scales))
    except (InvalidOperation, ZeroDivisionError):
        return None
