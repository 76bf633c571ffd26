"""The solver against brute force over all orders, trees and operators, and on real problems."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.tasks.countdown.solver import reachable, solutions, solve
from explorl.tasks.countdown.task import verify
from explorl.tasks.expression import canonical, numbers, parse

DATA = Path(__file__).parents[3] / "shared" / "data"


def brute_force(nums: tuple[int, ...]) -> Iterator[tuple[Fraction, str]]:
    """Every expression of all the numbers: each order, each bracketing, each choice of operators."""
    for order in set(itertools.permutations(nums)):
        yield from bracketings(order)


def bracketings(nums: tuple[int, ...]) -> Iterator[tuple[Fraction, str]]:
    if len(nums) == 1:
        yield Fraction(nums[0]), str(nums[0])
    for cut in range(1, len(nums)):
        for (a, left), (b, right) in itertools.product(bracketings(nums[:cut]), bracketings(nums[cut:])):
            yield a + b, f"({left}+{right})"
            yield a - b, f"({left}-{right})"
            yield a * b, f"({left}*{right})"
            if b:
                yield a / b, f"({left}/{right})"


def subsets(nums: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {part for size in range(1, len(nums) + 1) for part in itertools.combinations(nums, size)}


def accepted(text: str | None, nums: tuple[int, ...], target: int) -> bool:
    return verify(f"<answer>{text}</answer>", nums, target).correct


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple), st.booleans())
def test_complete_against_brute_force(nums: tuple[int, ...], use_all: bool) -> None:
    expected: dict[int, set[str]] = {}
    for part in {nums} if use_all else subsets(nums):
        for value, text in brute_force(part):
            if value.denominator == 1 and value > 0:
                expected.setdefault(int(value), set()).add(canonical(parse(text)))
    assert reachable(nums, use_all=use_all) == set(expected)
    for target, texts in expected.items():
        all_solutions = solutions(nums, target, use_all=use_all)
        assert {canonical(parse(text)) for text in all_solutions} == texts
        assert len(all_solutions) == len(texts)
        assert all(accepted(text, nums, target) for text in all_solutions)
        solution = solve(nums, target, use_all=use_all)
        assert accepted(solution, nums, target)
        assert not use_all or len(numbers(parse(solution or ""))) == len(nums)
    for target in set(range(1, 60)) - set(expected):
        assert solve(nums, target, use_all=use_all) is None
        assert solutions(nums, target, use_all=use_all) == []


@pytest.mark.parametrize("nums", [(1, 5, 5, 5), (3, 3, 8, 8), (2, 9, 13, 14)])
def test_complete_with_four_numbers(nums: tuple[int, ...]) -> None:
    expected = {int(value) for value, _ in brute_force(nums) if value.denominator == 1 and value > 0}
    assert reachable(nums, use_all=True) == expected
    for target in range(1, 200):
        text = solve(nums, target, use_all=True)
        assert (text is not None) is (target in expected)
        assert text is None or accepted(text, nums, target)
    texts = {canonical(parse(text)) for value, text in brute_force(nums) if value == 24}
    assert {canonical(parse(text)) for text in solutions(nums, 24, use_all=True)} == texts


def test_by_hand() -> None:
    assert solve([3, 3, 8, 8], 24) == "3 * 8"
    assert solve([3, 3, 8, 8], 24, use_all=True) == "8 / (3 - (8 / 3))"
    assert solve([7], 7) == "7"
    assert solve([7], 8) is None
    assert solve([3, 7, 12], 12) == "12"
    assert solve([3, 7, 12], 12, use_all=True) is None
    assert solve([5, 5], 25) == "5 * 5"
    assert solve([5, 5, 7], 7, use_all=True) in ("(5 - 5) + 7", "7 + (5 - 5)", "(7 + 5) - 5", "(5 + 7) - 5")
    assert solutions([3, 7, 12], 33) == ["12 + (3 * 7)"] or solutions([3, 7, 12], 33) == ["(3 * 7) + 12"]
    assert len(solutions([1, 2, 3], 6)) > len(solutions([1, 2, 3], 6, use_all=True)) > 2


def test_signs_of_factors_make_different_solutions() -> None:
    forms = {canonical(parse(text)) for text in solutions([3, 5, 2, 7], 10, use_all=True)}
    assert {canonical(parse("(3-5)*(2-7)")), canonical(parse("(5-3)*(7-2)"))} <= forms


@pytest.mark.parametrize(("nums", "target"), [([], 3), ([1] * 7, 3), ([0, 1], 1), ([-2, 3], 1), ([3, 7], 0), ([3], -3)])
def test_bad_input_names_a_good_value(nums: list[int], target: int) -> None:
    for function in (solve, solutions):
        with pytest.raises(ValueError, match="like"):
            function(nums, target)


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
def test_solves_real_problems() -> None:
    for file, every in (("countdown-3to4-test.jsonl", 1), ("countdown-3to4-train.jsonl", 5)):
        for line in (DATA / file).read_text().splitlines()[::every]:
            row = json.loads(line)
            assert accepted(solve(row["nums"], row["target"], use_all=True), row["nums"], row["target"])


def test_many_random_four_number_problems() -> None:
    rng = Random(1)
    solved = 0
    for _ in range(200):
        nums = tuple(rng.randint(1, 100) for _ in range(4))
        target = rng.randint(1, 300)
        text = solve(nums, target)
        solved += text is not None
        assert text is None or accepted(text, nums, target)
    assert solved > 20
