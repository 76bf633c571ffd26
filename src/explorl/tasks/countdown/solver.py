"""Exact Countdown solver: find one solution, all solutions, or every target that can be reached.

Values are built bottom-up, subset by subset. To find one solution, the table of the whole set is not needed: for each
value a of one half, the other half must have target − a, a − target, target + a, target / a, a / target or target · a.
A positive target never needs a negative intermediate value: if a op b gives v, then |v| is the sum, distance, product
or quotient of |a| and |b|. Fractions are tried only if there is no solution in whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from explorl.tasks.expression import Rational, Tree, canonical, compute, render

MAX_NUMBERS = 6
"""Six numbers take seconds; each additional number takes a hundred times as long."""


def solve(nums: Sequence[int], target: int, *, use_all: bool = False) -> str | None:
    """Return an expression for the target with each number at most once (exactly once: ``use_all``), or None.

    It prefers whole intermediate results, then fewer numbers. The order of ``nums`` breaks ties.
    """
    tree = solve_tree(nums, target, use_all=use_all)
    return None if tree is None else render(tree)


def solve_tree(nums: Sequence[int], target: int, *, use_all: bool = False) -> Tree | None:
    """Return the solution of `solve` as a tree."""
    _check(nums, target)
    for fractions in (False, True):
        tree = _solve(nums, target, use_all, fractions)
        if tree is not None:
            return tree
    return None


def solutions(nums: Sequence[int], target: int, *, use_all: bool = False) -> list[str]:
    """Return all solutions that differ in more than the order of operands and redundant brackets, shortest first."""
    _check(nums, target)
    whole = (1 << len(nums)) - 1
    tables: list[dict[str, tuple[Rational, Tree]]] = [{} for _ in range(whole + 1)]
    solved: dict[str, Tree] = {}
    for subset in _subsets(len(nums)):
        trees: Iterator[tuple[Rational, Tree]] = _all_trees(nums, tables, subset)
        if subset == whole:
            trees = ((value, tree) for value, tree in trees if value == target)
        for value, tree in trees:
            tables[subset].setdefault(canonical(tree), (value, tree))
        if subset == whole or not use_all:
            solved |= {key: tree for key, (value, tree) in tables[subset].items() if value == target}
    return sorted((render(tree) for tree in solved.values()), key=lambda text: (len(text), text))


def reachable(nums: Sequence[int], *, use_all: bool = False) -> set[int]:
    """Return every positive whole target that the numbers can give."""
    _check(nums, 1)
    table = _tables(nums, fractions=True, upto=len(nums))
    values = table[-1] if use_all else {value for column in table for value in column}
    return {value.numerator for value in values if value.denominator == 1 and value > 0}


def _check(nums: Sequence[int], target: int) -> None:
    if not 1 <= len(nums) <= MAX_NUMBERS or any(number < 1 for number in nums):
        raise ValueError(f"nums={list(nums)!r}: give one to {MAX_NUMBERS} positive integers, like [3, 7, 12]")
    if target < 1:
        raise ValueError(f"target={target!r}: give a positive integer, like 33")


def _subsets(count: int) -> list[int]:
    """Return the bit masks of all non-empty subsets, smaller ones first."""
    return sorted(range(1, 1 << count), key=lambda subset: (subset.bit_count(), subset))


def _halves(subset: int) -> Iterator[tuple[int, int]]:
    """Yield each way to split a subset in two once: the part without the subset's last number comes first."""
    rest = subset ^ (1 << (subset.bit_length() - 1))
    part = rest
    while part:
        yield part, subset ^ part
        part = (part - 1) & rest


def _tables(nums: Sequence[int], *, fractions: bool, upto: int) -> list[dict[Rational, Tree]]:
    """Return the non-negative values of each subset of at most ``upto`` numbers, each with one tree."""
    tables: list[dict[Rational, Tree]] = [{} for _ in range(1 << len(nums))]
    for subset in _subsets(len(nums)):
        size = subset.bit_count()
        if size > upto:
            break
        table = tables[subset]
        if size == 1:
            number = nums[subset.bit_length() - 1]
            table[number] = number
        for part, other in _halves(subset):
            for a, tree_a in tables[part].items():
                for b, tree_b in tables[other].items():
                    table.setdefault(a + b, ("+", tree_a, tree_b))
                    if a >= b:
                        table.setdefault(a - b, ("-", tree_a, tree_b))
                    else:
                        table.setdefault(b - a, ("-", tree_b, tree_a))
                    table.setdefault(a * b, ("*", tree_a, tree_b))
                    if b and (fractions or not a % b):
                        table.setdefault(compute("/", a, b), ("/", tree_a, tree_b))
                    if a and (fractions or not b % a):
                        table.setdefault(compute("/", b, a), ("/", tree_b, tree_a))
    return tables


def _solve(nums: Sequence[int], target: int, use_all: bool, fractions: bool) -> Tree | None:
    tables = _tables(nums, fractions=fractions, upto=len(nums) - 1)
    if len(nums) == 1:
        return target if nums[0] == target else None
    if not use_all:
        for subset in _subsets(len(nums)):
            if target in tables[subset]:
                return tables[subset][target]
    for part, other in _halves(len(tables) - 1):
        small, large = sorted((tables[part], tables[other]), key=len)
        for a, tree in small.items():
            solution = _meet(a, tree, large, target, fractions)
            if solution is not None:
                return solution
    return None


def _meet(a: Rational, tree: Tree, other: dict[Rational, Tree], target: int, fractions: bool) -> Tree | None:
    """Return a tree of a op b or b op a that gives the target, for some b of the other half, or None."""
    if target - a in other:
        return "+", tree, other[target - a]
    if target + a in other:
        return "-", other[target + a], tree
    if a - target in other:
        return "-", tree, other[a - target]
    if not a:
        return None
    if (fractions or not target % a) and compute("/", target, a) in other:
        return "*", tree, other[compute("/", target, a)]
    if target * a in other:
        return "/", other[target * a], tree
    if (fractions or not a % target) and compute("/", a, target) in other:
        return "/", tree, other[compute("/", a, target)]
    return None


def _all_trees(
    nums: Sequence[int], tables: list[dict[str, tuple[Rational, Tree]]], subset: int
) -> Iterator[tuple[Rational, Tree]]:
    """Yield every way to combine the trees of two halves, including negative values."""
    if subset.bit_count() == 1:
        number = nums[subset.bit_length() - 1]
        yield number, number
    for part, other in _halves(subset):
        for a, tree_a in tables[part].values():
            for b, tree_b in tables[other].values():
                for op in "+-*/":
                    if op != "/" or b:
                        yield compute(op, a, b), (op, tree_a, tree_b)
                if a:
                    yield compute("/", b, a), ("/", tree_b, tree_a)
                yield b - a, ("-", tree_b, tree_a)
