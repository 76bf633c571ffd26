"""Solve Countdown by a search that a small model can imitate: each value follows from the values written before it.

The search combines two numbers, and works backwards from the target with the other numbers until both meet:

    35 18:+53-17*630|7 9     the pair, its results, and the other numbers
    61 7:+68-54*427          the target 61 without the 7: goals for the other three numbers
    68 9?+77-59*612          a goal without the 9: is one of these a result of the pair?
    54 9?+63-45*486/6
    427 9?+436-418
    61 9:+70-52*549          then the 9 first, if that yields anything new
    70 7?*490/10
    52 7?*364
    549 7?+556-542
    7 9:+16-2*63             then both together
    61 2?*122
    61 63?+124-2

A value that is a result of the pair is followed by ``!``, then by the steps of the solution and the answer. Otherwise
the search continues with the next pair; none is tried twice. An operation is written as its sign and its result: ``+``
the sum, ``-`` the distance, ``*`` the product, ``/`` the quotient if it is whole. If v is the goal g without the number
n, then g is v − n (``+``), v + n or n − v (``-``), v / n (``*``), v · n or n / v (``/``).

Values that cannot meet are left out: those larger than all results of the pair, and sums of sums or products of
products in a second order. The search does not find solutions that need a fraction, a zero or a value beyond `LARGEST`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeAlias

from explorl.tasks.expression import Tree, render, steps
from explorl.tasks.stable_random import pick, shuffled

SIGNS = "0+1-2*3/4:5?6|7!8=9"
"""The first line of every search: all its signs as separate tokens. A penalty on repeated tokens, as in Mecklenburg's
protocol, then favours none of them; without this line it would favour the first ``!`` and the first ``/``."""
LARGEST = 4_000
"""Larger values are never written: products of two large numbers are hard to compute, and rarely needed."""
MOST_NUMBERS = 4
HINTS = 0.5
"""Probability that a guided search tries a pair that leads to a solution instead of a random remaining one."""

_SUMS, _PRODUCTS, _ALL = "+-", "*/", "+-*/"


class Term(NamedTuple):
    """A value and the expression that yields it."""

    value: int
    tree: Tree


class Goal(NamedTuple):
    """A value that the other numbers must yield, so that it and ``number`` yield the previous goal, ``before``."""

    value: int
    before: Goal | None = None
    op: str = ""
    number: Term = Term(0, 0)


Pair: TypeAlias = tuple[int, int]
"""Indices of two numbers."""


class PairTrial(NamedTuple):
    """The text of the search with one pair, and the solution if it found one."""

    text: str
    solution: Tree | None


def search(nums: Sequence[int], target: int, *, rng: Random, order: str = "systematic") -> str | None:
    """Return a completion that searches until a solution that uses all the numbers, or None if it finds none."""
    if not 1 <= len(nums) <= MOST_NUMBERS:
        raise ValueError(
            f"nums={list(nums)!r}: style {order!r} takes one to {MOST_NUMBERS} numbers; for more use the style 'words'"
        )
    if len(nums) == 1:
        return _completion("", nums[0]) if nums[0] == target else None
    text = f"{SIGNS}\n"
    for pair in ORDERS[order](nums, target, rng):
        trial = try_pair(tuple(nums), target, pair)
        text += trial.text
        if trial.solution is not None:
            return _completion(text + _solution_steps(trial.solution), trial.solution)
    return None


@lru_cache(maxsize=16)
def try_pair(nums: tuple[int, ...], target: int, pair: Pair) -> PairTrial:
    """Search for a solution that combines the two numbers at these indices first."""
    a, b = (Term(nums[index], nums[index]) for index in pair)
    others = [Term(number, number) for index, number in enumerate(nums) if index not in pair]
    results = combine(a, b, LARGEST)
    values = {term.value: term.tree for _, term in reversed(results)}
    if not others:
        line, reached = _test_goal(Goal(a.value), b, {target: 0}, _ALL, LARGEST)
        return PairTrial(line, values[target] if reached else None)
    text = f"{a.value} {b.value}:{_results_text(results)}|{' '.join(str(term.value) for term in others)}\n"
    for line, goal in _work_backwards(Goal(target), others, values):
        text += line
        if goal is not None:
            return PairTrial(text, _unwind(goal, values[goal.value]))
    return PairTrial(text, None)


def _work_backwards(
    target: Goal, others: Sequence[Term], values: Mapping[int, Tree]
) -> Iterator[tuple[str, Goal | None]]:
    """Yield the lines that work backwards from the target, the last one with the goal that is a result of the pair."""
    largest = max(values)
    if len(others) == 1:
        yield _test_goal(target, others[0], values, _ALL, largest)
        return
    for turn, (first, second) in enumerate((others, others[::-1])):
        # A goal that is a sum may be the second number times a result of the pair; a product is only little larger.
        bound = {**dict.fromkeys(_SUMS, largest * second.value), **dict.fromkeys(_PRODUCTS, largest + second.value)}
        goals = [
            Goal(term.value, target, op, first)
            for op, term in combine(Term(target.value, 0), first, LARGEST)
            if term.value <= bound[op]
        ]
        if goals:
            yield f"{target.value} {first.value}:{''.join(f'{goal.op}{goal.value}' for goal in goals)}\n", None
        for goal in goals:
            yield _test_goal(goal, second, values, _ALL if turn == 0 else _opposite(goal.op), largest)
    combined = combine(others[0], others[1], min(LARGEST, largest + target.value))
    if combined:
        yield f"{others[0].value} {others[1].value}:{_results_text(combined)}\n", None
    for op, term in combined:
        yield _test_goal(target, term, values, _PRODUCTS if op in _SUMS else _ALL, largest)


def _test_goal(goal: Goal, number: Term, values: Mapping[int, Tree], ops: str, largest: int) -> tuple[str, Goal | None]:
    """Return a line with the goal without the number, up to the first value in ``values``, and the goal of that value.

    The line is "" if there is nothing to write, and the goal None if no value is in ``values``.
    """
    line = ""
    for op, term in combine(Term(goal.value, 0), number, largest):
        if op not in ops:
            continue
        line = (line or f"{goal.value} {number.value}?") + f"{op}{term.value}"
        if term.value in values:
            return f"{line}!\n", Goal(term.value, goal, op, number)
    return line and f"{line}\n", None


def combine(a: Term, b: Term, limit: int) -> list[tuple[str, Term]]:
    """Return the sum, distance, product and quotient of two values that are whole, positive and within the limit."""
    high, low = (a, b) if a.value >= b.value else (b, a)
    results = [("+", high.value + low.value), ("-", high.value - low.value), ("*", high.value * low.value)]
    if low.value > 1 and high.value % low.value == 0:
        results.append(("/", high.value // low.value))
    return [(op, Term(value, (op, high.tree, low.tree))) for op, value in results if 0 < value <= limit]


def _opposite(op: str) -> str:
    return _PRODUCTS if op in _SUMS else _SUMS


def _unwind(goal: Goal, tree: Tree) -> Tree:
    """Return the tree of the target, given the tree of a goal's value."""
    while goal.before is not None:
        whole, number = goal.before.value, goal.number
        if goal.op == "+":
            tree = "-", tree, number.tree
        elif goal.op == "*":
            tree = "/", tree, number.tree
        elif whole >= number.value:
            tree = "+" if goal.op == "-" else "*", tree, number.tree
        else:
            tree = goal.op, number.tree, tree
        goal = goal.before
    return tree


def _results_text(results: Sequence[tuple[str, Term]]) -> str:
    return "".join(f"{op}{term.value}" for op, term in results)


def _solution_steps(solution: Tree) -> str:
    return "".join(f"{step.left}{step.op}{step.right}={step.result}\n" for step in steps(solution))


def _completion(think: str, solution: Tree) -> str:
    return f"<think>{think}</think><answer>{render(solution).replace(' ', '')}</answer>"


# -------------------------------------------------------------------- orders of the pairs


def _pairs(nums: Sequence[int]) -> list[Pair]:
    return list(itertools.combinations(range(len(nums)), 2))


def _systematic(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """Yield the pairs in the order of the numbers."""
    yield from _pairs(nums)


def _shuffled(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """Yield the pairs in random order."""
    yield from shuffled(rng, _pairs(nums))


def _guided(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """Yield with probability `HINTS` a pair that leads to a solution, if there is one, else a random remaining one."""
    remaining = shuffled(rng, _pairs(nums))
    good = [pair for pair in remaining if try_pair(tuple(nums), target, pair).solution is not None]
    while remaining:
        pair = pick(rng, good) if good and rng.random() < HINTS else remaining[0]
        remaining.remove(pair)
        yield pair


ORDERS: dict[str, Callable[[Sequence[int], int, Random], Iterator[Pair]]] = {
    "systematic": _systematic,
    "shuffled": _shuffled,
    "guided": _guided,
}
