"""Generate Countdown problems with searches that solve them, for fine-tuning, in parallel and reproducibly.

Problems are sampled until there are enough whose search is short enough. Most are like those of the hub's
Countdown-Tasks-3to4, with random numbers and a random target; the others are random expressions as in Mecklenburg 2025,
§4. The same arguments give the same rows, whatever the number of processes.
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
"""Sources of problems, in twentieths; those with three numbers are learned quickly."""
ROWS_PER_PIECE = 500
"""Rows in one piece of work."""
CANDIDATES = 512
"""Random problems that are checked together; most of them have no solution."""


class CorpusPiece(NamedTuple):
    """A piece of work: a number of rows, generated from their own seed."""

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
    """Return prompts with completions of at most ``longest`` characters, for problems not in ``exclude``.

    A problem may occur twice, with its numbers in different order. ``processes``: None uses one per core.
    """
    if style not in ORDERS:
        raise unknown("style", style, tuple(ORDERS))
    if template not in TEMPLATES:
        raise unknown("template", template, TEMPLATES)
    if longest < 200:
        raise ValueError(f"longest is {longest!r}, but few searches are that short; use 200 or more, such as 900")
    pieces = [
        CorpusPiece(f"corpus {seed} {start}", min(ROWS_PER_PIECE, count - start), style, template, longest)
        for start in range(0, count, ROWS_PER_PIECE)
    ]
    processes = min(processes or _cores(), max(len(pieces), 1))
    if processes == 1:
        _exclude(exclude)
        return list(itertools.chain.from_iterable(map(_build_piece, pieces)))
    context = get_context("spawn")  # a fork of a process that uses a GPU fails
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_exclude, initargs=(frozenset(exclude),)
    ) as pool:
        return list(itertools.chain.from_iterable(pool.map(_build_piece, pieces)))


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_excluded: Collection[Key] = frozenset()


def _exclude(keys: Collection[Key]) -> None:
    """Set the problems that this process leaves out."""
    global _excluded
    _excluded = frozenset(keys)


def _build_piece(piece: CorpusPiece) -> list[dict[str, Prompt]]:
    rng = Random(piece.seed)
    return list(itertools.islice(_rows(piece, rng), piece.rows))


def _rows(piece: CorpusPiece, rng: Random) -> Iterator[dict[str, Prompt]]:
    puzzles = {
        "paper": draw_puzzles(PAPER, rng),
        "hub three": _random_puzzles(3, rng),
        "hub four": _random_puzzles(4, rng),
    }
    while True:
        kind, text = pick(rng, KINDS), None
        while text is None or len(text) > piece.longest:
            puzzle, text = next(puzzles[kind]), None
            if puzzle.key not in _excluded:
                text = search(puzzle.nums, puzzle.target, rng=rng, order=piece.style)
        prompt = TEMPLATES[piece.template](puzzle.nums, puzzle.target)
        yield {"prompt": prompt, "completion": text.removeprefix("<think>" if opens_think(prompt) else "")}


def _random_puzzles(operands: int, rng: Random) -> Iterator[Puzzle]:
    """Yield random problems that have a solution."""
    while True:
        puzzles = [
            Puzzle(tuple(between(rng, *HUB.numbers) for _ in range(operands)), between(rng, *HUB.targets))
            for _ in range(CANDIDATES)
        ]
        numbers = np.array([puzzle.nums for puzzle in puzzles])
        solvable = makeable(list(numbers.T), np.array([puzzle.target for puzzle in puzzles]))
        yield from itertools.compress(puzzles, solvable.tolist())


def makeable(numbers: list[NDArray[Any]], targets: NDArray[Any]) -> NDArray[Any]:
    """Return which problems have a solution of the kind that `search` finds: all numbers, positive integer values.

    ``numbers`` holds the first number of every problem, then the second, and so on. 0 marks an impossible value.
    """
    if len(numbers) == 1:
        return numbers[0] == targets
    solvable = np.zeros(len(targets), dtype=bool)
    for i, j in itertools.combinations(range(len(numbers)), 2):
        others = [column for position, column in enumerate(numbers) if position not in (i, j)]
        high, low = np.maximum(numbers[i], numbers[j]), np.minimum(numbers[i], numbers[j])
        divisor = np.maximum(low, 1)
        quotient = high // divisor
        for value in (high + low, high - low, high * low, quotient * (quotient * divisor == high)):
            solvable |= makeable([*others, value * (low > 0)], targets)
    return solvable
