"""Reference solutions for supervised fine-tuning: traces with a few failed attempts before the solution.

A failed attempt is correct arithmetic that misses the target: of a few random ways to combine the numbers, the nearest
miss. There are two styles. ``words`` is English with one equation per step. ``terse``, for a character-level policy,
has only the steps, with one attempt per line:

    <think>7+12=19 19+3=22
    3*7=21 21+12=33</think><answer>3*7+12</answer>

Three further styles, ``systematic``, ``shuffled`` and ``guided``, are searches: see `countdown.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from typing import TypeAlias

from explorl.core.plugins import unknown
from explorl.tasks.countdown.search import ORDERS, search
from explorl.tasks.countdown.solver import solve_tree
from explorl.tasks.expression import Rational, Step, Tree, canonical, compute, evaluate, render, steps
from explorl.tasks.stable_random import between, pick, shuffled

TERSE_ALPHABET = "0123456789+-*/()= \n"
"""All characters of a terse prompt or trace, apart from the four tags."""

_CANDIDATES = 6  # random attempts, of which the nearest miss is written


def trace(
    nums: Sequence[int], target: int, *, rng: Random, style: str = "words", attempts: tuple[int, int] = (0, 3)
) -> str:
    """Return a correct, well-formed completion with a random number of failed attempts, if there are that many.

    It uses all the numbers if that is possible. Styles that search ignore ``attempts``, and raise ValueError for a
    problem that they do not solve.
    """
    if style not in ALL_STYLES:
        raise unknown("style", style, ALL_STYLES)
    if style in ORDERS:
        completion = search(nums, target, rng=rng, order=style)
        if completion is None:
            raise ValueError(
                f"the search of style {style!r} does not get from nums={list(nums)!r} to target={target!r}; use the "
                "style 'words', or another problem"
            )
        return completion
    low, high = attempts
    if not 0 <= low <= high:
        raise ValueError(f"attempts={attempts!r}: give 0 ≤ low ≤ high, like (0, 3)")
    order = shuffled(rng, nums)
    solution = solve_tree(order, target, use_all=True) or solve_tree(order, target)
    if solution is None:
        raise ValueError(f"nums={list(nums)!r} cannot give target={target!r}; use a problem that has a solution")
    failures = near_misses(nums, target, rng=rng, count=between(rng, low, high))
    return STYLES[style](nums, target, [_compound_first(tree) for tree in failures], _compound_first(solution), rng)


def near_misses(nums: Sequence[int], target: int, *, rng: Random, count: int) -> list[Tree]:
    """Return up to ``count`` different ways to combine all the numbers that miss the target, each close to it."""
    misses: dict[str, Tree] = {}
    for _ in range(count):
        attempts = [attempt for _ in range(_CANDIDATES) if (attempt := _random_attempt(nums, target, rng)) is not None]
        for _, tree in sorted(attempts, key=lambda attempt: abs(attempt[0] - target)):
            if (key := canonical(tree)) not in misses:
                misses[key] = tree
                break
    return list(misses.values())


def _random_attempt(nums: Sequence[int], target: int, rng: Random) -> tuple[Rational, Tree] | None:
    """Return a random combination with whole, positive results, or None if one of the results is the target."""
    pool: list[tuple[Rational, Tree]] = [(number, number) for number in nums]
    while len(pool) > 1:
        (a, tree_a), (b, tree_b), *pool = shuffled(rng, pool)
        if a < b:
            a, tree_a, b, tree_b = b, tree_b, a, tree_a
        op = pick(rng, "+*" + "-" * (a > b) + "/" * (b > 1 and not a % b))
        value = compute(op, a, b)
        if value == target:
            return None
        pool.append((value, (op, tree_a, tree_b)))
    return pool[0] if len(nums) > 1 else None


def _compound_first(tree: Tree) -> Tree:
    """Return the tree with compound operands of sums and products first, so that each step continues the last one."""
    if isinstance(tree, int):
        return tree
    op, left, right = tree[0], _compound_first(tree[1]), _compound_first(tree[2])
    if op in "+*" and isinstance(left, int) and not isinstance(right, int):
        left, right = right, left
    return op, left, right


def _completion(think: str, answer: str) -> str:
    return f"<think>{think}</think><answer>{answer}</answer>"


def _terse(nums: Sequence[int], target: int, failures: Sequence[Tree], solution: Tree, rng: Random) -> str:
    lines = (" ".join(_equation(step, "") for step in steps(tree)) for tree in (*failures, solution))
    return _completion("\n".join(lines), render(solution, terse=True))


_OPENINGS = (
    "The numbers are {nums}, and the target is {target}.",
    "I need to make {target} out of {nums}.",
    "Let me look for a way from {nums} to {target}.",
    "Given {nums}, I want an expression equal to {target}.",
)
_FIRST_TRIES = ("I start with", "First I try", "Let me begin with", "A first idea is")
_NEXT_TRIES = ("Next I try", "Another idea is", "Let me try", "I could also do", "Maybe")
_MISSES = (
    "That gives {value}, not {target}: {distance} too {side}.",
    "{value} is {distance} too {side}, so this does not work.",
    "The result is {value}, but I need {target}. It is {distance} too {side}.",
    "This ends at {value} instead of {target}, {distance} too {side}.",
)
_DIRECT = ("Let me work it out step by step.", "I see a way.", "This can be done directly.")
_TURNS = ("Now another way.", "Let me combine them differently.", "Here is a better way.", "Let me go about it anew.")
_HITS = ("That is the target.", "This is exactly {target}.", "{target} is what I need.", "The target is reached.")
_CLOSINGS = ("So the expression is {answer}.", "The solution is {answer}.", "Written as one expression: {answer}")


def _words(nums: Sequence[int], target: int, failures: Sequence[Tree], solution: Tree, rng: Random) -> str:
    answer = render(solution)
    listed = f"{', '.join(map(str, nums[:-1]))} and {nums[-1]}" if len(nums) > 1 else str(nums[0])
    lines = [pick(rng, _OPENINGS).format(nums=listed, target=target)]
    for index, tree in enumerate(failures):
        value = evaluate(tree)
        intro = pick(rng, _NEXT_TRIES if index else _FIRST_TRIES)
        side = "high" if value > target else "low"
        miss = pick(rng, _MISSES).format(value=value, target=target, distance=abs(value - target), side=side)
        lines.append(f"{intro} {', then '.join(_equation(step) for step in steps(tree))}. {miss}")
    lines.append(pick(rng, _TURNS if failures else _DIRECT))
    lines.extend(_equation(step) for step in steps(solution))
    lines.append(pick(rng, _HITS).format(target=target))
    lines.append(pick(rng, _CLOSINGS).format(answer=answer))
    return _completion("\n".join(lines) + "\n", answer)


def _equation(step: Step, space: str = " ") -> str:
    left, right = (f"({value})" if isinstance(value, Fraction) else str(value) for value in (step.left, step.right))
    return space.join((left, step.op, right, "=", str(step.result)))


Style: TypeAlias = Callable[[Sequence[int], int, Sequence[Tree], Tree, Random], str]
STYLES: dict[str, Style] = {"words": _words, "terse": _terse}
ALL_STYLES = (*STYLES, *ORDERS)
