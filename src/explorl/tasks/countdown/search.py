"""Countdown by search that a small model can imitate: every value follows from what stands in the line before it.

Two numbers are combined, and from the target one works backwards with the others until both meet:

    35 18:+53-17*630|7 9     the pair, what it gives, and the numbers that are left
    61 7:+68-54*427          the target 61 without the 7: goals for the other three numbers
    68 9?+77-59*612          a goal without the 9: does the pair give one of these?
    54 9?+63-45*486/6
    427 9?+436-418
    61 9:+70-52*549          then the 9 first, where that gives anything new
    70 7?*490/10
    52 7?*364
    549 7?+556-542
    7 9:+16-2*63             then both together
    61 2?*122
    61 63?+124-2

Where a value is one of the pair's, ``!`` follows, then the steps forwards, and the answer. Else the next pair is tried;
none is tried twice. An operation is written with its result alone: ``+`` the sum, ``-`` the distance, ``*`` the
product, ``/`` the quotient where it is whole. If v is what a goal g leaves without a number n, then g is v − n (``+``),
v + n or n − v (``-``), v / n (``*``), v · n or n / v (``/``).

What cannot meet is left out: values larger than all of the pair's, and sums of sums or products of products in
a second order. What the search cannot find are solutions that need a fraction, a zero or a value beyond `LARGEST`.
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
"""The first line of every search has all its signs, each a token of its own: a penalty on tokens that have occurred,
as in Mecklenburg's protocol, then favours none of them; else it would favour the first ``!`` and the first ``/``."""
LARGEST = 4_000
"""Larger values are never written down: products of two large numbers are hard to compute, and seldom needed."""
MOST_NUMBERS = 4
HINTS = 0.5
"""How often a guided search takes a pair that leads to a solution, rather than any that is left."""

_SUMS, _PRODUCTS, _ALL = "+-", "*/", "+-*/"


class Term(NamedTuple):
    """A value and how it was made."""

    value: int
    tree: Tree


class Goal(NamedTuple):
    """What the other numbers have to give, so that ``number`` then makes the goal before of it."""

    value: int
    before: Goal | None = None
    op: str = ""
    number: Term = Term(0, 0)


Pair: TypeAlias = tuple[int, int]
"""Places of two numbers."""


class PairTrial(NamedTuple):
    """What is written down while one pair is tried, and the solution if that was one."""

    text: str
    solution: Tree | None


def search(nums: Sequence[int], target: int, *, rng: Random, order: str = "systematic") -> str | None:
    """A completion that searches up to a solution that uses all the numbers; None where it would find none."""
    if not 1 <= len(nums) <= MOST_NUMBERS:
        raise ValueError(
            f"nums={list(nums)!r}: style {order!r} takes one to {MOST_NUMBERS} numbers; for more use the style 'words'"
        )
    if len(nums) == 1:
        return _completion("", nums[0]) if nums[0] == target else None
    text = f"{SIGNS}\n"
    for pair in ORDERS[order](nums, target, rng):
        found = try_pair(tuple(nums), target, pair)
        text += found.text
        if found.solution is not None:
            return _completion(text + _forwards(found.solution), found.solution)
    return None


@lru_cache(maxsize=16)
def try_pair(nums: tuple[int, ...], target: int, pair: Pair) -> PairTrial:
    """Whether the two numbers at these places, combined first, lead to the target."""
    a, b = (Term(nums[place], nums[place]) for place in pair)
    left = [Term(number, number) for place, number in enumerate(nums) if place not in pair]
    made = combine(a, b, LARGEST)
    values = {term.value: term.tree for _, term in reversed(made)}
    if not left:
        line, hit = _looked(Goal(a.value), b, {target: 0}, _ALL, LARGEST)
        return PairTrial(line, values[target] if hit else None)
    text = f"{a.value} {b.value}:{_listed(made)}|{' '.join(str(term.value) for term in left)}\n"
    for line, goal in _goals(Goal(target), left, values):
        text += line
        if goal is not None:
            return PairTrial(text, _undone(goal, values[goal.value]))
    return PairTrial(text, None)


def _goals(target: Goal, left: Sequence[Term], values: Mapping[int, Tree]) -> Iterator[tuple[str, Goal | None]]:
    """The lines that work backwards from the target, with the goal that the pair meets at the end of the last one."""
    largest = max(values)
    if len(left) == 1:
        yield _looked(target, left[0], values, _ALL, largest)
        return
    for turn, (first, second) in enumerate((left, left[::-1])):
        # A goal that is a sum may be the second number times what the pair gives; a product only little larger.
        bound = {**dict.fromkeys(_SUMS, largest * second.value), **dict.fromkeys(_PRODUCTS, largest + second.value)}
        goals = [
            Goal(term.value, target, op, first)
            for op, term in combine(Term(target.value, 0), first, LARGEST)
            if term.value <= bound[op]
        ]
        if goals:
            yield f"{target.value} {first.value}:{''.join(f'{goal.op}{goal.value}' for goal in goals)}\n", None
        for goal in goals:
            yield _looked(goal, second, values, _ALL if turn == 0 else _other(goal.op), largest)
    together = combine(left[0], left[1], min(LARGEST, largest + target.value))
    if together:
        yield f"{left[0].value} {left[1].value}:{_listed(together)}\n", None
    for op, term in together:
        yield _looked(target, term, values, _PRODUCTS if op in _SUMS else _ALL, largest)


def _looked(goal: Goal, number: Term, values: Mapping[int, Tree], ops: str, largest: int) -> tuple[str, Goal | None]:
    """A line with what the goal leaves without the number, up to the first that is one of the values; "" if nothing."""
    line = ""
    for op, term in combine(Term(goal.value, 0), number, largest):
        if op not in ops:
            continue
        line = (line or f"{goal.value} {number.value}?") + f"{op}{term.value}"
        if term.value in values:
            return f"{line}!\n", Goal(term.value, goal, op, number)
    return line and f"{line}\n", None


def combine(a: Term, b: Term, limit: int) -> list[tuple[str, Term]]:
    """Sum, distance, product and quotient of two values, where they are whole, positive and within the limit."""
    high, low = (a, b) if a.value >= b.value else (b, a)
    found = [("+", high.value + low.value), ("-", high.value - low.value), ("*", high.value * low.value)]
    if low.value > 1 and high.value % low.value == 0:
        found.append(("/", high.value // low.value))
    return [(op, Term(value, (op, high.tree, low.tree))) for op, value in found if 0 < value <= limit]


def _other(op: str) -> str:
    return _PRODUCTS if op in _SUMS else _SUMS


def _undone(goal: Goal, tree: Tree) -> Tree:
    """The way from what meets the goal up to the target."""
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


def _listed(made: Sequence[tuple[str, Term]]) -> str:
    return "".join(f"{op}{term.value}" for op, term in made)


def _forwards(solution: Tree) -> str:
    return "".join(f"{step.left}{step.op}{step.right}={step.result}\n" for step in steps(solution))


def _completion(think: str, solution: Tree) -> str:
    return f"<think>{think}</think><answer>{render(solution).replace(' ', '')}</answer>"


# -------------------------------------------------------------------- which pair comes next


def _pairs(nums: Sequence[int]) -> list[Pair]:
    return list(itertools.combinations(range(len(nums)), 2))


def _systematic(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """In the order in which the numbers are given."""
    yield from _pairs(nums)


def _any(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """In random order."""
    yield from shuffled(rng, _pairs(nums))


def _guided(nums: Sequence[int], target: int, rng: Random) -> Iterator[Pair]:
    """Each time with probability `HINTS` one that leads to a solution, if there is one, and else any that is left."""
    left = shuffled(rng, _pairs(nums))
    good = [pair for pair in left if try_pair(tuple(nums), target, pair).solution is not None]
    while left:
        pair = pick(rng, good) if good and rng.random() < HINTS else left[0]
        left.remove(pair)
        yield pair


ORDERS: dict[str, Callable[[Sequence[int], int, Random], Iterator[Pair]]] = {
    "systematic": _systematic,
    "shuffled": _any,
    "guided": _guided,
}
