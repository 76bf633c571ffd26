"""Many Countdown problems with searches that solve them, for fine-tuning: made in parallel, and the same everywhere.

Problems are drawn until there are enough whose search ends within a length. Most are like those of the hub's
Countdown-Tasks-3to4, numbers and a target at random; the others are random expressions as in Mecklenburg 2025, §4.
The same arguments give the same rows, however many processes make them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from explorl.core.plugins import unknown
from explorl.tasks.base import Prompt, opens_think
from explorl.tasks.countdown.generator import PAPER, Key, Puzzle, Space, draw_puzzles
from explorl.tasks.countdown.search import ORDERS, search
from explorl.tasks.countdown.templates import TEMPLATES
from explorl.tasks.stable_random import between, pick

HUB = Space(operands=(3, 4), numbers=(1, 99), targets=(10, 100))
"""Countdown-Tasks-3to4."""
KINDS = ("hub four",) * 14 + ("hub three",) * 2 + ("paper",) * 4
"""What a problem is drawn from, by shares of 20: those of three numbers are learnt soon."""
AT_ONCE = 500
"""Rows of one piece of work."""
DRAWN = 512
"""Random problems that are looked at together: most of them have no solution."""


class Piece(NamedTuple):
    """A piece of work: so many rows from a seed of its own."""

    seed: str
    rows: int
    style: str
    template: str
    longest: int


def corpus(
    count: int,
    *,
    style: str = "guided",
    template: str = "paper-opened",
    seed: int = 0,
    exclude: Collection[Key] = frozenset(),
    longest: int = 900,
    processes: int | None = 1,
) -> list[dict[str, Prompt]]:
    """Prompts with completions, none for a problem of ``exclude`` and none beyond ``longest`` characters.

    A problem may come twice, with its numbers in another order. ``processes``: None is one for each core.
    """
    if style not in ORDERS:
        raise unknown("style", style, tuple(ORDERS))
    if template not in TEMPLATES:
        raise unknown("template", template, TEMPLATES)
    if longest < 200:
        raise ValueError(f"longest={longest!r}: few searches are so short; give 200 characters or more, like 900")
    pieces = [
        Piece(f"corpus {seed} {start}", min(AT_ONCE, count - start), style, template, longest)
        for start in range(0, count, AT_ONCE)
    ]
    processes = min(processes or _cores(), max(len(pieces), 1))
    if processes == 1:
        _hide(exclude)
        return list(itertools.chain.from_iterable(map(_made, pieces)))
    how = get_context("spawn")  # a copy of a process that uses a GPU could not work
    with ProcessPoolExecutor(processes, mp_context=how, initializer=_hide, initargs=(frozenset(exclude),)) as pool:
        return list(itertools.chain.from_iterable(pool.map(_made, pieces)))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_hidden: Collection[Key] = frozenset()


def _hide(keys: Collection[Key]) -> None:
    """Sets what this process leaves out."""
    global _hidden
    _hidden = frozenset(keys)


def _made(piece: Piece) -> list[dict[str, Prompt]]:
    rng = Random(piece.seed)
    return list(itertools.islice(_rows(piece, rng), piece.rows))


def _rows(piece: Piece, rng: Random) -> Iterator[dict[str, Prompt]]:
    puzzles = {"paper": draw_puzzles(PAPER, rng), "hub three": _drawn(3, rng), "hub four": _drawn(4, rng)}
    while True:
        kind, text = pick(rng, KINDS), None
        while text is None or len(text) > piece.longest:
            puzzle, text = next(puzzles[kind]), None
            if puzzle.key not in _hidden:
                text = search(puzzle.nums, puzzle.target, rng=rng, order=piece.style)
        prompt = TEMPLATES[piece.template](puzzle.nums, puzzle.target)
        yield {"prompt": prompt, "completion": text.removeprefix("<think>" if opens_think(prompt) else "")}


def _drawn(operands: int, rng: Random) -> Iterator[Puzzle]:
    """Numbers and targets at random, those that have a solution."""
    while True:
        puzzles = [
            Puzzle(tuple(between(rng, *HUB.numbers) for _ in range(operands)), between(rng, *HUB.targets))
            for _ in range(DRAWN)
        ]
        numbers = np.array([puzzle.nums for puzzle in puzzles])
        found = makeable(list(numbers.T), np.array([puzzle.target for puzzle in puzzles]))
        yield from itertools.compress(puzzles, found.tolist())


def makeable(numbers: list[NDArray[Any]], targets: NDArray[Any]) -> NDArray[Any]:
    """Which of many problems have a solution with all numbers through whole positive values, as `search` looks for.

    ``numbers`` has the first number of every problem, then the second, and so on. A 0 is a value that is not there.
    """
    if len(numbers) == 1:
        return numbers[0] == targets
    found = np.zeros(len(targets), dtype=bool)
    for i, j in itertools.combinations(range(len(numbers)), 2):
        left = [column for place, column in enumerate(numbers) if place not in (i, j)]
        high, low = np.maximum(numbers[i], numbers[j]), np.minimum(numbers[i], numbers[j])
        some = np.maximum(low, 1)
        whole = high // some
        for value in (high + low, high - low, high * low, whole * (whole * some == high)):
            found |= makeable([*left, value * (low > 0)], targets)
    return found
