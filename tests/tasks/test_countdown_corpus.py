"""Rows for fine-tuning: right, the same whoever makes them, and none of what is held out."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools import countdown_corpus
from tools.countdown_corpus import corpus, makeable

from explorl.tasks.countdown.generator import Puzzle
from explorl.tasks.countdown.task import verify


def puzzle_of(row: dict[str, Any]) -> Puzzle:
    match = re.search(r"numbers \[([0-9, ]+)\], create an equation that equals ([0-9]+)\.", row["prompt"])
    assert match
    return Puzzle(tuple(int(number) for number in match[1].split(",")), int(match[2]))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return corpus(120, seed=3)


def test_every_row_is_right(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 120
    for row in rows:
        puzzle = puzzle_of(row)
        verdict = verify(row["completion"], puzzle.nums, puzzle.target, opened=True)
        assert verdict.correct
        assert verdict.well_formed
        assert row["prompt"].endswith("<think>")
        assert len(row["completion"]) <= 900
    operands = [len(puzzle_of(row).nums) for row in rows]
    assert operands.count(4) > 70
    assert operands.count(3) > 10
    assert any(puzzle_of(row).target > 100 for row in rows)


def test_what_is_excluded_is_left_out(rows: list[dict[str, Any]]) -> None:
    hidden = {puzzle_of(row).key for row in rows[::2]}
    assert not hidden & {puzzle_of(row).key for row in corpus(120, seed=3, exclude=hidden)}
    assert corpus(120, seed=3) == rows  # and is forgotten


def test_the_same_by_two_processes(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown_corpus, "ROWS_PER_PIECE", 20)
    sequential = corpus(50, seed=3, exclude={puzzle_of(rows[0]).key})
    two = corpus(50, seed=3, exclude={puzzle_of(rows[0]).key}, processes=2)
    assert sequential == two
    assert len({row["prompt"] for row in sequential}) > 45  # pieces are not the same


def test_other_templates_and_bad_options() -> None:
    (row,) = corpus(1, template="paper")
    assert str(row["completion"]).startswith("<think>")
    assert corpus(0) == []
    with pytest.raises(ValueError, match="unknown style 'word'"):
        corpus(1, style="word")
    with pytest.raises(ValueError, match="unknown template 'papr'; did you mean 'paper'"):
        corpus(1, template="papr")
    with pytest.raises(ValueError, match="longest is 10, but few searches are that short; use 200 or more"):
        corpus(1, longest=10)


def made_of(numbers: tuple[int, ...]) -> set[int]:
    """What all the numbers give through whole positive values, one step at a time."""
    if len(numbers) == 1:
        return set(numbers)
    values: set[int] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        left = tuple(number for index, number in enumerate(numbers) if index not in (i, j))
        a, b = numbers[i], numbers[j]
        for value in (a + b, a - b, a * b, a // b if a % b == 0 else 0):
            if value > 0:
                values |= made_of((*left, value))
    return values


@given(
    st.integers(1, 4).flatmap(lambda count: st.lists(st.tuples(*[st.integers(1, 12)] * count), min_size=1, max_size=3))
)
def test_what_can_be_made(problems: list[tuple[int, ...]]) -> None:
    targets = np.arange(1, 60)
    for numbers in problems:
        columns = [np.full(len(targets), number) for number in numbers]
        assert set(targets[makeable(columns, targets)]) == made_of(numbers) & set(range(1, 60))
    together = makeable(list(np.array(problems).T), np.full(len(problems), 24))
    assert together.tolist() == [24 in made_of(numbers) for numbers in problems]
