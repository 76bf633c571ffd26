"""Text from strangers, made fit to be written to files, shown on a terminal and drawn."""

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
"""On one letter. No language has more (Unicode Standard Annex #15, Stream-Safe Text Format)."""


def is_clean(text: str) -> bool:
    """Whether `clean` leaves the text as it is."""
    return _UNFIT.search(text) is None


def clean(text: str, most: int | None = None) -> str:
    """The text with a visible character for each that cannot be encoded, steers a terminal or turns the writing around.

    Control characters but newline and tab become their pictures (``␛``); lone surrogates, the controls from U+0080 to
    U+009F, overrides of the writing direction and what XML does not know become ``\N{REPLACEMENT CHARACTER}``. A text
    of over ``most`` characters ends with ``…`` as the last of them. Cleaning twice changes nothing more.
    """
    if most is not None:
        if most < 1:
            raise ValueError(f"most={most}: give a count of characters like 200, or None for all")
        if len(text) > most:
            text = f"{text[: most - 1]}…"
    return text if is_clean(text) else text.translate(_SHOWN)


def normalized(text: str, form: Literal["NFC", "NFKC"]) -> str:
    """Unicode's normal form, in time that grows with the text; one with over 30 marks on a letter stays as it is.

    The marks on a letter are put in order by a sort in quadratic time: a megabyte of them takes minutes.
    """
    if text.isascii():
        return text
    marks = [sign for sign in set(text) if unicodedata.combining(unicodedata.normalize("NFKD", sign)[0])]
    if marks and re.search(f"[{re.escape(''.join(marks))}]{{{_MOST_MARKS + 1}}}", text):
        return text
    return unicodedata.normalize(form, text)
