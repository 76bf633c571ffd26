"""Which category a token has, what a user's own lists may be, and counts that find what was planted."""

from __future__ import annotations

import numpy as np
import pytest

from explorl.analysis.categories import (
    CATEGORIES,
    CategoryError,
    categories_of,
    parse_lists,
    word_lists,
)
from explorl.analysis.category_counts import category_counts, count_categories
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import build_table

FORMAL, LOGICAL, META, REST = CATEGORIES

# Deng et al. 2025, Table 1
PAPER = {
    FORMAL: ["1", "3.14", "+", "*", "=", "x", "y", "π", "√", "∑"],
    LOGICAL: ["therefore", "because", "however", "but", "first", "next", "finally", "and", "also"],
    META: ["Let's check", "Correction", "Wait", "In summary", "First, I will"],
    REST: ["the", "is", "of", "problem", "solution", "correct", "final"],
}


@pytest.mark.parametrize(("category", "token"), [(c, t) for c, tokens in PAPER.items() for t in tokens])
def test_the_papers_examples(category, token):
    assert categories_of([token]) == categories_of([f" {token}"]) == [category]
    assert categories_of([token.upper()]) == [FORMAL if token in "xy" else category]


@pytest.mark.parametrize(
    ("token", "category"),
    [
        ("", REST), (" ", REST), ("\n\n", REST), (".", REST), ("a", REST), ("I", REST), ("A", REST), ("Zebra", REST),
        ("\\frac", FORMAL), ("}{", FORMAL), ("2x", FORMAL), ("-", FORMAL), ("well-known", REST), ("<think>", REST),
        ("thenceforth", REST), ("\ud800", REST), ("数", REST), ("ſo", LOGICAL), ("don't", REST),
        ("WAİT", REST), ("\0", REST), ("١٢", FORMAL),
    ],
)  # fmt: skip
def test_odd_tokens(token, category):
    assert categories_of([token]) == [category]


def test_a_word_in_pieces_is_read_whole():
    assert categories_of(["there", "fore", " the"]) == [LOGICAL, LOGICAL, REST]
    assert categories_of(list("so 1")) == [LOGICAL, LOGICAL, REST, FORMAL]
    assert categories_of(["al", "so"]) == [LOGICAL, LOGICAL]  # `also`, not `so`
    assert categories_of(["First", ",", " I", " will", " add"]) == [META] * 4 + [REST]
    assert categories_of(["First", ",", " add"]) == [LOGICAL, REST, REST]
    assert categories_of(list("<a>2<3")) == [REST] * 3 + [FORMAL] * 3
    assert categories_of([]) == []
    assert categories_of(["", "so", ""]) == [REST, LOGICAL, REST]
    assert categories_of(["wait 3", ") so"]) == [META, FORMAL]  # by the first part that is named


OWN = """
metacognitive:
  doubt: {words: [peut-être, "c'est  faux"], patterns: ['\\?+']}
"""


def test_own_lists_take_the_place_of_ours(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN, encoding="utf-8")
    lists = word_lists(path)
    assert categories_of(["Peut-être"], lists) == [META]
    assert categories_of(["c’est", " faux", "??", " therefore", " 12"], lists) == [META, META, META, REST, REST]
    assert categories_of(["therefore"]) == [LOGICAL]  # ours stay as they are


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a mapping"),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "not YAML"),
        ("meta: {a: {words: [x]}}", "'meta'.*use formal reasoning"),
        ("metacognitive: [wait]", r"'metacognitive' is \['wait'\]; use groups"),
        ("metacognitive: {a: [wait]}", "'metacognitive: a' is"),
        ("metacognitive: {a: {word: [wait]}}", "'word'; use words or patterns"),
        ("metacognitive: {a: {words: wait}}", "words is 'wait'; use a list"),
        ("metacognitive: {a: {words: [no]}}", "words contains False, .*quote it"),
        ("metacognitive: {a: {words: ['']}}", "words contains ''"),
        ("metacognitive: {a: {patterns: ['(']}}", r"invalid regular expression '\('"),
        ("metacognitive: {a: {patterns: ['x*']}}", "matches empty text"),
        ("metacognitive: {a: {patterns: ['(x)']}}", r"a group; write \(\?:…\)"),
        ("metacognitive: {a: {patterns: ['x(?i)']}}", "invalid regular expression"),
        ("metacognitive: {a: {words: [x]}, b: {words: [X]}}", "lists 'X', which is also in 'metacognitive: a'"),
        ("metacognitive: {}", "no words or patterns"),
    ],
)
def test_lists_that_cannot_be_used_are_said(text, says):
    with pytest.raises(CategoryError, match=says) as caught:
        parse_lists(text, "mine.yaml")
    assert "mine.yaml" in str(caught.value)


def test_files_that_cannot_be_read_are_said(tmp_path):
    with pytest.raises(CategoryError, match=r"gone\.yaml"):
        word_lists(tmp_path / "gone.yaml")
    with pytest.raises(CategoryError, match="cannot read"):
        word_lists(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("metacognitive: {a: {words: [été]}}".encode("latin-1"))
    with pytest.raises(CategoryError, match="UTF-8"):
        word_lists(tmp_path / "latin.yaml")


# ---------------------------------------------------------------------------- counts
def planted(rng, answers, meta, length=20):
    """Completions of words, each followed by "wait" with a chance of its own."""
    found = []
    for _ in range(answers):
        chance = meta * rng.uniform(0.5, 1.5)
        words = [" wait" if rng.random() < chance else str(rng.integers(9)) for _ in range(length)]
        found.append([part for word in words for part in (word, " the")])
    return found


def test_counts_equal_a_count_by_hand():
    answers = [["so", " 1", "+", "2"], ["wait", " 3"], [" the", " end", "."]]
    found = count_categories(answers)
    assert found["length"].all.mean == pytest.approx(3)
    assert [one.all.mean for one in found["categories"]] == pytest.approx([4 / 3, 1 / 3, 1 / 3, 1])
    shares = {one.name: one.all.mean for one in found["patterns"]}
    assert shares["formal reasoning: numbers"] == pytest.approx(2 / 3)
    assert shares["metacognitive: revising"] == pytest.approx(1 / 3)
    assert shares["metacognitive: planning"] == 0
    assert found["length"].change is None
    assert found.sentence.startswith("A completion has 3.0 [")
    assert "1.3 formal reasoning, 0.3 logical structuring" in found.sentence


def test_planted_changes_are_recovered_and_nothing_else():
    rng = np.random.default_rng(0)
    answers = planted(rng, 80, 0.05) + planted(rng, 80, 0.3)
    found = count_categories(answers, [1] * 80 + [10] * 80)
    change = {one.name: one.change for one in found["categories"]}
    assert change[META].low < 20 * 0.25 < change[META].high
    assert change[META].low > 0
    assert change[FORMAL].high < 0
    assert change[REST].mean == 0
    assert "metacognitive +" in found.sentence
    assert {"token_categories", "response_patterns"} == set(found.tables)


def test_no_change_is_reported_where_none_is_planted():
    reports, lists = 0, parse_lists("metacognitive: {revising: {words: [wait]}}", "a short file")
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found = count_categories(planted(rng, 40, 0.2), [1] * 20 + [2] * 20, lists, seed=seed)
        reports += any(one.change.sign for one in (found["length"], *found["categories"]))
    assert reports <= 5


def test_counts_of_a_run():
    columns = {"prompt": ["p"] * 2, "completion": ["c"] * 2, "tokens": [["so", " 1"], ["</script>"]]}
    found = category_counts(build_table("run", {1: columns, 2: columns}), Context())
    assert found["answers"] == 4
    with pytest.raises(ValueError, match="'tokens'"):
        category_counts(build_table("run", {1: {"prompt": ["p"], "completion": ["c"], "entropy": [[1.0]]}}), Context())
    with pytest.raises(CategoryError, match=r"gone\.yaml"):
        category_counts(build_table("run", {1: columns}), Context(options={"categories.lists": "gone.yaml"}))
    one = {key: value[:1] for key, value in columns.items()}
    assert isinstance(category_counts(build_table("run", {1: one}), Context()), Unavailable)
