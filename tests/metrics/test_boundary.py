"""Unsolvable problems, set regions, answer diversity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.metrics import answer_diversity, pass_at_k, set_regions, unsolvable, upset_counts

CORRECT = [[0, 0, 1], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda rows: torch.tensor(rows).bool()])
def test_unsolvable(kind):
    assert unsolvable(kind(CORRECT)) == {1}
    assert unsolvable(kind(CORRECT), k=2) == {0, 1}


def test_unsolvable_ragged_and_empty():
    assert unsolvable([[0, 1], [0], np.array([False, False, False])]) == {1, 2}
    assert unsolvable([]) == set()
    ragged = np.empty(2, dtype=object)
    ragged[:] = [[0, 0], [1]]
    assert unsolvable(ragged) == {0}


def test_unsolvable_is_where_pass_at_k_is_zero():
    correct = np.random.default_rng(0).random((50, 16)) < 0.05
    assert unsolvable(correct) == set(np.flatnonzero(pass_at_k(16, correct.sum(1), 16) == 0))


@pytest.mark.parametrize(
    ("correct", "k", "named"),
    [([[0, 0.1]], None, "0.1"), ([0, 1], None, "one problem"), ([[0]], 2, "problem 0 has 1"), ([[0]], 0, "got 0")],
)
def test_unsolvable_names_the_bad_value(correct, k, named):
    with pytest.raises(ValueError, match=named):
        unsolvable(correct, k)


SETS = st.dictionaries(st.sampled_from("ABCD"), st.sets(st.integers(0, 8)), min_size=2, max_size=4)


@settings(deadline=None)
@given(SETS)
def test_regions_part_the_union(sets):
    regions = set_regions(sets)
    assert len(regions) == 2 ** len(sets) - 1
    for item in range(9):
        holders = frozenset(name for name, items in sets.items() if item in items)
        assert [names for names, items in regions.items() if item in items] == ([holders] if holders else [])


def test_three_models_by_hand():
    regions = set_regions({"base": {1, 2, 3, 4}, "sft": {2, 3}, "rl": {3, 4, 5}})
    expected = {
        "base": {1},
        "sft": set(),
        "rl": {5},
        "base sft": {2},
        "base rl": {4},
        "sft rl": set(),
        "base sft rl": {3},
    }
    assert regions == {frozenset(names.split()): items for names, items in expected.items()}


@pytest.mark.parametrize("count", [1, 5])
def test_regions_are_for_two_to_four(count):
    with pytest.raises(ValueError, match=f"got {count}.*upset_counts"):
        set_regions({str(i): {i} for i in range(count)})


def test_upset_counts_of_five_in_order():
    sets = {"a": {1, 2, 3, 9}, "b": {1, 2, 3}, "c": {4}, "d": {5, 9}, "e": set()}
    counts = upset_counts(sets)
    names = ["".join(sorted(some)) for some in counts]
    assert dict(zip(names, counts.values(), strict=True)) == {"ab": 3, "c": 1, "d": 1, "ad": 1}
    assert names == ["ab", "c", "d", "ad"]


def test_answer_diversity():
    answers = [["1", "2", "2", None, "1/2"], [None, None], ["7"]]
    correct = [[0, 1, 1, 0, 1], [0, 0], [0]]
    distinct, right = answer_diversity(answers, correct)
    assert distinct.tolist() == [3, 0, 1]
    assert right.tolist() == [2, 0, 0]
    assert answer_diversity(np.array([1, 1, 2]), [1, 1, 0]).distinct.tolist() == [2]
    assert answer_diversity(torch.tensor([[1, 1, 2]]), [[1, 1, 0]]).correct.tolist() == [1]
