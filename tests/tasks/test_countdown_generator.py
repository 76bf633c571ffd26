"""Generated problems and splits: solvable, within their ranges, disjoint, and the same everywhere."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.tasks.countdown.generator import (
    MINI,
    PAPER,
    SPLITS,
    Puzzle,
    Space,
    deduplicated,
    draw_puzzles,
    list_puzzles,
    make_splits,
)
from explorl.tasks.countdown.solver import reachable, solve
from explorl.tasks.stable_random import below, between, pick, shuffled


def test_draws_are_those_of_every_machine() -> None:
    rng = Random(7)
    assert [below(rng, 100) for _ in range(5)] == [32, 15, 65, 7, 53]
    assert [between(rng, 3, 4) for _ in range(8)] == [3, 3, 4, 3, 3, 3, 3, 3]
    assert pick(rng, "abcdefgh") == "g"
    assert shuffled(rng, range(8)) == [7, 5, 6, 2, 4, 3, 1, 0]


@given(st.integers(), st.lists(st.integers()))
def test_shuffled_keeps_the_items(seed: int, items: list[int]) -> None:
    copy = list(items)
    assert sorted(shuffled(Random(seed), items)) == sorted(items)
    assert items == copy


def test_drawn_problems_are_in_range_and_solvable() -> None:
    puzzles = list(itertools.islice(draw_puzzles(PAPER, Random(3)), 1_000))
    assert {len(puzzle.nums) for puzzle in puzzles} == {3, 4}
    for nums, target in puzzles:
        assert all(1 <= number <= 100 for number in nums)
        assert 1 <= target < 2_000
        assert solve(nums, target, use_all=True) is not None
    assert len({puzzle.key for puzzle in puzzles}) == len(puzzles)
    assert max(puzzle.target for puzzle in puzzles) > 1_000
    assert any(list(puzzle.nums) != sorted(puzzle.nums) for puzzle in puzzles)


def test_ranges_are_parameters() -> None:
    space = Space(operands=(2, 5), numbers=(10, 30), targets=(50, 60))
    puzzles = list(itertools.islice(draw_puzzles(space, Random(0)), 200))
    assert {len(puzzle.nums) for puzzle in puzzles} == {2, 3, 4, 5}
    assert {number for puzzle in puzzles for number in puzzle.nums} == set(range(10, 31))
    assert {puzzle.target for puzzle in puzzles} == set(range(50, 61))


def test_the_mini_space_is_as_large_as_its_docstring_says() -> None:
    puzzles = list_puzzles(MINI)
    assert len(puzzles) == 16_292
    assert len({puzzle.key for puzzle in puzzles}) == 16_292
    assert len({puzzle.nums for puzzle in puzzles}) == 1_540
    assert sum(len(set(itertools.permutations(puzzle.nums))) for puzzle in puzzles) == 87_553


def test_the_mini_space_with_numbers_left_over() -> None:
    multisets = itertools.combinations_with_replacement(range(1, 21), 3)
    assert sum(target <= 100 for nums in multisets for target in reachable(nums)) == 27_057


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**64), st.sampled_from([MINI, PAPER]))
def test_splits_share_no_problem_and_a_seed_gives_the_same(seed: int, space: Space) -> None:
    sizes = {"sft": 300, "train": 200, "holdout": 100}
    splits = make_splits(space, sizes, seed=seed)
    assert {name: len(puzzles) for name, puzzles in splits.items()} == sizes
    assert len({puzzle.key for name in SPLITS for puzzle in splits[name]}) == 600
    assert make_splits(space, sizes, seed=seed) == splits
    assert make_splits(space, sizes, seed=seed + 1) != splits
    assert make_splits(space, {"holdout": 100, "sft": 7}, seed=seed)["holdout"] == splits["holdout"]


def test_excluded_problems_stay_out() -> None:
    first = make_splits(PAPER, {"holdout": 200}, seed=5)["holdout"]
    second = make_splits(PAPER, {"holdout": 200}, seed=5, exclude={puzzle.key for puzzle in first})["holdout"]
    assert not {puzzle.key for puzzle in first} & {puzzle.key for puzzle in second}


def test_a_split_can_take_all_that_is_left() -> None:
    splits = make_splits(MINI, {"sft": None, "train": 4_000, "holdout": 1_000})
    assert {name: len(puzzles) for name, puzzles in splits.items()} == {"sft": 11_292, "train": 4_000, "holdout": 1_000}
    assert any(puzzle.nums != tuple(sorted(puzzle.nums)) for puzzle in splits["sft"])


def test_asking_for_more_than_there_is_says_how_much_there_is() -> None:
    with pytest.raises(ValueError, match=r"'sft' needs 60000 problems but gets 11292: .* sum to at most 16292"):
        make_splits(MINI, {"sft": 60_000, "train": 4_000, "holdout": 1_000})
    small = Space(operands=(4, 4), numbers=(1, 2), targets=(1, 9))
    assert not small.listable
    with pytest.raises(ValueError, match="'train' needs 1000 problems"):
        make_splits(small, {"train": 1_000})
    with pytest.raises(ValueError, match="cannot take all remaining problems"):
        make_splits(PAPER, {"sft": None})


def test_bad_splits_and_spaces() -> None:
    with pytest.raises(ValueError, match="unknown split 'trian'; did you mean 'train'"):
        make_splits(MINI, {"trian": 3})
    with pytest.raises(ValueError, match="'train' is -1; give a count like 1000"):
        make_splits(MINI, {"train": -1})
    for options in ({"operands": (4, 3)}, {"operands": (3, 7)}, {"numbers": (0, 9)}, {"targets": (1, 10**9)}):
        with pytest.raises(ValueError, match=r"give 1 ≤ low ≤ high ≤ .*, like \("):
            Space(**options)


def test_deduplicated_keeps_the_first() -> None:
    puzzles = [Puzzle((3, 7), 10), Puzzle((7, 3), 10), Puzzle((1, 2), 3), Puzzle((3, 7), 4)]
    assert deduplicated(puzzles) == [puzzles[0], *puzzles[2:]]
    assert deduplicated(puzzles, {((1, 2), 3)}) == [puzzles[0], puzzles[3]]
