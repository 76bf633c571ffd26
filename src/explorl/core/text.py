"""Clean text from untrusted sources for files, the terminal and figures."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

_UNFIT = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_REPLACED = (range(0x80, 0xA0), range(0xD800, 0xE000), range(0x202A, 0x202F), range(0x2066, 0x206A), (0xFFFE, 0xFFFF))
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: "\ufffd" for codes in _REPLACED for code in codes},
}

_MOST_MARKS = 30
"""Combining marks on a letter; no language has more (Unicode Standard Annex #15, Stream-Safe Text Format)."""


def is_clean(text: str) -> bool:
    """Return whether `clean` leaves the text unchanged."""
    return _UNFIT.search(text) is None


def clean(text: str, most: int | None = None) -> str:
    """Replace characters that cannot be encoded, control a terminal or change the writing direction by visible ones.

    Control characters except newline and tab become their pictures (``␛``); lone surrogates, the controls from U+0080
    to U+009F, overrides of the writing direction and characters that XML lacks become ``\N{REPLACEMENT CHARACTER}``.
    A text of over ``most`` characters is truncated to them, the last being ``…``. Cleaning twice changes nothing more.
    """
    if most is not None:
        if most < 1:
            raise ValueError(f"most is {most}; use a number of characters like 200, or None for all")
        if len(text) > most:
            text = f"{text[: most - 1]}…"
    return text if is_clean(text) else text.translate(_SHOWN)


def normalized(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """Return Unicode's normal form in linear time; a text with over 30 marks on a letter is returned unchanged.

    Normalization sorts the marks on a letter in quadratic time: a megabyte of them takes minutes.
    """
    if text.isascii():
        return text
    marks = [char for char in set(text) if unicodedata.combining(unicodedata.normalize("NFKD", char)[0])]
    if marks and re.search(f"[{re.escape(''.join(marks))}]{{{_MOST_MARKS + 1}}}", text):
        return text
    return unicodedata.normalize(form, text)
