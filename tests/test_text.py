"""Text from strangers: whatever it is, it can be written, shown and drawn afterwards."""

from __future__ import annotations

import time
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from explorl.core.text import clean, normalized

ANY = st.text(st.characters(), max_size=50) | st.lists(st.integers(0, 0x10FFFF).map(chr), max_size=50).map("".join)
"""Surrogates too."""


@given(ANY, st.none() | st.integers(1, 60))
@example("\ud83d\ude00", None)
@example("a\r\n\x1b[31m\x9b\x7f\0", None)
@example("\u202eabc\u2066", 2)
@example("", 1)
def test_any_text_becomes_fit(text: str, most: int | None) -> None:
    cleaned = clean(text, most)
    cleaned.encode()
    assert not [c for c in cleaned if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert not [c for c in cleaned if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "PDF")]
    assert not [c for c in cleaned if unicodedata.bidirectional(c) in ("LRI", "RLI", "FSI", "PDI")]
    assert clean(cleaned, most) == cleaned
    assert len(cleaned) == min(len(text), most or len(text))


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs", "M")) | st.sampled_from("\n\t")))
def test_ordinary_text_stays(text: str) -> None:
    assert clean(text) == text


def test_what_is_shown() -> None:
    assert clean("a\tb\n\x1b[1m\0\x7f\x85\ud800\u202eπ") == "a\tb\n␛[1m␀␡���π"
    assert clean("abcdef", 4) == "abc…"
    assert clean("abcd", 4) == "abcd"
    with pytest.raises(ValueError, match="most is 0; use a number of characters like 200"):
        clean("a", 0)


@pytest.mark.parametrize("piece", ["a", "\0", "\ud800", "é\x1b"])
def test_megabytes_take_no_time(piece: str) -> None:
    start = time.process_time()
    clean(piece * ((1 << 20) // len(piece)))
    assert time.process_time() - start < 2


@given(st.text(max_size=30))
@example("e\u0315\u0301 ﬁ \u1100\u1161\u11a8 x²")
def test_normal_forms_are_those_of_unicode(text: str) -> None:
    for form in ("NFC", "NFKC"):
        assert normalized(text, form) == unicodedata.normalize(form, text)


def test_more_marks_than_anybody_writes_stay_as_they_are() -> None:
    assert normalized("e\u0315\u0301" + "\u0315\u0301" * 14, "NFC") == "é" + "\u0301" * 14 + "\u0315" * 15
    long = "é e\u0301" + "\u0315\u0301" * 15 + " e\u0301"
    assert normalized(long, "NFC") == long


@pytest.mark.parametrize("piece", ["\u0315\u0300", "\u0f73", "\u0315\uff9e", "é\u0300", "한"])
def test_normal_forms_take_no_time(piece: str) -> None:
    start = time.process_time()
    normalized(piece * ((1 << 20) // len(piece)), "NFKC")
    assert time.process_time() - start < 2
