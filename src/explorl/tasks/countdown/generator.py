"""Generate Countdown problems from a seed, in splits that have no problem in common.

A problem is a random expression of 3–4 numbers from 1–100 whose value is a whole number below 2,000 (Mecklenburg 2025,
§4). Two problems are the same if their sorted numbers and their target are equal. A space of problems that is small
enough is listed instead of sampled, so that its size is known and a split can take all of it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from random import Random
from typing import NamedTuple, TypeAlias

from explorl.core.plugins import unknown
from explorl.tasks.countdown.solver import MAX_NUMBERS, reachable
from explorl.tasks.expression import MAX_DIGITS, Rational, compute
from explorl.tasks.stable_random import between, pick, shuffled

Key: TypeAlias = tuple[tuple[int, ...], int]
Splits: TypeAlias = dict[str, list["Puzzle"]]

SPLITS = ("sft", "train", "holdout")
_FILL_ORDER = ("holdout", "train", "sft")  # so that a larger training split never changes the holdout
_MAX_LISTED = 10_000  # multisets of three numbers; listing them takes seconds
_MAX_REPEATS = 20_000  # after so many draws in a row without a new problem, the space counts as used up


class Puzzle(NamedTuple):
    """The numbers, in the order of the prompt, and the target."""

    nums: tuple[int, ...]
    target: int

    @property
    def key(self) -> Key:
        """The same for problems that differ only in the order of their numbers."""
        return tuple(sorted(self.nums)), self.target


@dataclass(frozen=True)
class Space:
    """The problems that may be generated; all bounds are inclusive."""

    operands: tuple[int, int] = (3, 4)
    numbers: tuple[int, int] = (1, 100)
    targets: tuple[int, int] = (1, 1999)

    def __post_init__(self) -> None:
        limits = {"operands": MAX_NUMBERS, "numbers": 10**MAX_DIGITS - 1, "targets": 10**MAX_DIGITS - 1}
        for field in fields(self):
            low, high = getattr(self, field.name)
            object.__setattr__(self, field.name, (low, high))  # a list, as YAML has it, could not be hashed
            if not 1 <= low <= high <= limits[field.name]:
                raise ValueError(
                    f"{field.name}={(low, high)!r}: give 1 ≤ low ≤ high ≤ {limits[field.name]}, like {field.default}"
                )

    @property
    def listable(self) -> bool:
        """True if `list_puzzles` lists the space in seconds."""
        size = self.numbers[1] - self.numbers[0] + 1
        low, high = self.operands
        return high <= 3 and sum(math.comb(size + n - 1, n) for n in range(low, high + 1)) <= _MAX_LISTED


PAPER = Space()
"""Mecklenburg 2025, §4."""
MINI = Space(operands=(3, 3), numbers=(1, 20), targets=(1, 100))
"""For tiny policies: 1,540 multisets of numbers and 16,292 problems with a solution that uses all three numbers, in up
to six orders each: 87,553 prompts. (27,057 problems have a solution that may leave out numbers.) None needs a fraction.
"""


@lru_cache(maxsize=4)
def list_puzzles(space: Space) -> tuple[Puzzle, ...]:
    """Return every problem of a space with a solution that uses all its numbers, in a fixed order."""
    low, high = space.targets
    values = range(space.numbers[0], space.numbers[1] + 1)
    return tuple(
        Puzzle(nums, target)
        for count in range(space.operands[0], space.operands[1] + 1)
        for nums in itertools.combinations_with_replacement(values, count)
        for target in sorted(reachable(nums, use_all=True))
        if low <= target <= high
    )


def draw_puzzles(space: Space, rng: Random) -> Iterator[Puzzle]:
    """Yield distinct problems made from random expressions, until very many draws in a row yield nothing new."""
    keys: set[Key] = set()
    repeats = 0
    while repeats < _MAX_REPEATS:
        repeats += 1
        nums = tuple(between(rng, *space.numbers) for _ in range(between(rng, *space.operands)))
        value = _random_value(nums, rng)
        if value is None or value.denominator != 1 or not space.targets[0] <= value <= space.targets[1]:
            continue
        puzzle = Puzzle(nums, value.numerator)
        if puzzle.key not in keys:
            keys.add(puzzle.key)
            repeats = 0
            yield puzzle


def _random_value(nums: Sequence[int], rng: Random) -> Rational | None:
    """Return the value of a random expression of all the numbers, or None if it divides by zero."""
    pool: list[Rational] = list(nums)
    while len(pool) > 1:
        left, right, *pool = shuffled(rng, pool)
        op = pick(rng, "+-*/")
        if op == "/" and not right:
            return None
        pool.append(compute(op, left, right))
    return pool[0]


def make_splits(
    space: Space, sizes: Mapping[str, int | None], *, seed: int = 0, exclude: Collection[Key] = frozenset()
) -> Splits:
    """Return splits of the given sizes (None: all remaining problems) without common problems and those in ``exclude``.

    The same seed gives the same splits on every machine, and the holdout does not depend on the other sizes.
    """
    for name, size in sizes.items():
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        if size is not None and size < 0:
            raise ValueError(f"size of split {name!r} is {size}; give a count like 1000, or None for all the rest")
    rng = Random(seed)
    source = _shuffle_all(space, rng) if space.listable else draw_puzzles(space, rng)
    excluded = frozenset(exclude)
    stream = (puzzle for puzzle in source if puzzle.key not in excluded)
    splits: Splits = {}
    for name in _FILL_ORDER:
        size = sizes.get(name, 0)
        if size is None and not space.listable:
            raise ValueError(
                f"split {name!r} cannot take all remaining problems, because {space} is too large to list; give it a "
                "size, like 10000"
            )
        splits[name] = list(itertools.islice(stream, size))
        if size is not None and len(splits[name]) < size:
            total = sum(map(len, splits.values()))
            raise ValueError(
                f"split {name!r} needs {size} problems but gets {len(splits[name])}: {space} has only {total} that are "
                f"not excluded; give sizes that sum to at most {total}"
            )
    return {name: splits[name] for name in SPLITS}


def _shuffle_all(space: Space, rng: Random) -> Iterator[Puzzle]:
    """Yield all problems of a space in random order, each with its numbers in random order."""
    for puzzle in shuffled(rng, list_puzzles(space)):
        yield Puzzle(tuple(shuffled(rng, puzzle.nums)), puzzle.target)


def is_validation(puzzle: Puzzle) -> bool:
    """Return whether a training problem belongs to the validation part: one in 16, by a hash of its key."""
    digest = hashlib.blake2b(repr(puzzle.key).encode(), digest_size=1).digest()
    return digest[0] % 16 == 0


def deduplicated(puzzles: Sequence[Puzzle], exclude: Collection[Key] = frozenset()) -> list[Puzzle]:
    """Return the puzzles without repetitions and those in ``exclude``, in the same order."""
    first = {puzzle.key: puzzle for puzzle in reversed(puzzles) if puzzle.key not in exclude}
    return list(reversed(first.values()))
