"""Repetition, format and language of a response."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.metrics import format_violations, language_mixing, trigram_redundancy


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("a b", 0), ("a b c", 0), ("a b c d", 0), ("a a a a a a", 0.75), ("a b c a b c", 0.25),
     (" a\n b\tc  a b c", 0.25)],
)  # fmt: skip
def test_trigram_redundancy_by_hand(text, value):
    assert trigram_redundancy(text) == value


@settings(deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_trigram_redundancy_counts(words):
    seen, repeats = set(), 0
    for i in range(len(words) - 2):
        gram = "".join(words[i : i + 3])
        repeats += gram in seen
        seen.add(gram)
    assert trigram_redundancy(" ".join(words)) == pytest.approx(repeats / max(1, len(words) - 2))


def test_format_violations():
    assert format_violations(r"so \boxed{\frac{1}{2}}") == 0
    assert format_violations("so 3") == 1
    assert format_violations(r"\boxed{1} or \boxed{2} or \boxed{3}") == 2
    assert format_violations("<think>1</think><answer>2</answer>", mark="<answer>") == 0
    with pytest.raises(ValueError, match="mark"):
        format_violations("x", mark="")


@pytest.mark.parametrize(
    ("text", "count"),
    [("2 × π ≤ 7 — “naïve” café Привет", 0), ("so 因此 x", 2), ("ですか", 3), ("한국", 2), ("\U00020000 \U00030000", 2),
     ("、，！", 0), ("々", 1)],
)  # fmt: skip
def test_language_mixing(text, count):
    assert language_mixing(text) == count
