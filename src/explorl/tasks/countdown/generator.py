"""Countdown problems from a seed, parted into splits that share no problem.

A problem is a random expression of 3–4 numbers from 1–100 whose value is a whole number below 2,000 (Mecklenburg 2025,
§4). Two problems are the same if their sorted numbers and their target are. Where the space of problems is
small enough to be listed, it is, so that a split can take all of it and its end is known.
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
_FILL_ORDER = ("holdout", "train", "sft")  # so that asking for more training problems never changes the holdout
_MAX_LISTED = 10_000  # multisets of three numbers; listing them takes seconds
_MAX_FRUITLESS = 20_000  # draws in a row that give nothing new: the space is as good as used up


class Puzzle(NamedTuple):
    """The numbers in the order in which they are shown, and the target."""

    nums: tuple[int, ...]
    target: int

    @property
    def key(self) -> Key:
        """What makes two problems the same."""
        return tuple(sorted(self.nums)), self.target


@dataclass(frozen=True)
class Space:
    """Which problems may be generated; all bounds are included."""

    operands: tuple[int, int] = (3, 4)
    numbers: tuple[int, int] = (1, 100)
    targets: tuple[int, int] = (1, 1999)

    def __post_init__(self) -> None:
        most = {"operands": MAX_NUMBERS, "numbers": 10**MAX_DIGITS - 1, "targets": 10**MAX_DIGITS - 1}
        for field in fields(self):
            low, high = getattr(self, field.name)
            object.__setattr__(self, field.name, (low, high))  # a list, as YAML has it, could not be hashed
            if not 1 <= low <= high <= most[field.name]:
                raise ValueError(
                    f"{field.name}={(low, high)!r}: give 1 ≤ low ≤ high ≤ {most[field.name]}, like {field.default}"
                )

    @property
    def listable(self) -> bool:
        """Whether `list_puzzles` can list the space in seconds."""
        size = self.numbers[1] - self.numbers[0] + 1
        low, high = self.operands
        return high <= 3 and sum(math.comb(size + n - 1, n) for n in range(low, high + 1)) <= _MAX_LISTED


PAPER = Space()
"""Mecklenburg 2025, §4."""
MINI = Space(operands=(3, 3), numbers=(1, 20), targets=(1, 100))
"""For tiny policies: 1,540 multisets of numbers and 16,292 problems that all three numbers together solve, in up to six
orders each: 87,553 prompts. (27,057 problems can be solved if numbers may be left over.) None needs a fraction."""


@lru_cache(maxsize=4)
def list_puzzles(space: Space) -> tuple[Puzzle, ...]:
    """Every problem of a space that all its numbers together solve, in a fixed order."""
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
    """Distinct problems made from random expressions; ends when very many draws in a row bring nothing new."""
    seen: set[Key] = set()
    fruitless = 0
    while fruitless < _MAX_FRUITLESS:
        fruitless += 1
        nums = tuple(between(rng, *space.numbers) for _ in range(between(rng, *space.operands)))
        value = _random_value(nums, rng)
        if value is None or value.denominator != 1 or not space.targets[0] <= value <= space.targets[1]:
            continue
        puzzle = Puzzle(nums, value.numerator)
        if puzzle.key not in seen:
            seen.add(puzzle.key)
            fruitless = 0
            yield puzzle


def _random_value(nums: Sequence[int], rng: Random) -> Rational | None:
    """The value of a random expression of all the numbers; None if it divides by zero."""
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
    """Splits of the given sizes (None: all that is left) without a common problem, nor one of ``exclude``.

    The same seed gives the same splits on every machine, and the holdout does not depend on the other sizes.
    """
    for name, size in sizes.items():
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        if size is not None and size < 0:
            raise ValueError(f"size of split {name!r} is {size}; give a count like 1000, or None for all that is left")
    rng = Random(seed)
    source = _listed(space, rng) if space.listable else draw_puzzles(space, rng)
    taken = frozenset(exclude)
    stream = (puzzle for puzzle in source if puzzle.key not in taken)
    splits: Splits = {}
    for name in _FILL_ORDER:
        size = sizes.get(name, 0)
        if size is None and not space.listable:
            raise ValueError(f"split {name!r} cannot take all that is left of {space}; give it a size, like 10000")
        splits[name] = list(itertools.islice(stream, size))
        if size is not None and len(splits[name]) < size:
            total = sum(map(len, splits.values()))
            raise ValueError(
                f"split {name!r} asks for {size} problems and gets {len(splits[name])}: {space} has only {total} "
                f"that are not excluded; give sizes that sum to at most {total}"
            )
    return {name: splits[name] for name in SPLITS}


def _listed(space: Space, rng: Random) -> Iterator[Puzzle]:
    for puzzle in shuffled(rng, list_puzzles(space)):
        yield Puzzle(tuple(shuffled(rng, puzzle.nums)), puzzle.target)


def is_validation(puzzle: Puzzle) -> bool:
    """Whether a problem to train on belongs to the validation part: one in 16, by a hash of what makes it the same."""
    digest = hashlib.blake2b(repr(puzzle.key).encode(), digest_size=1).digest()
    return digest[0] % 16 == 0


def deduplicated(puzzles: Sequence[Puzzle], exclude: Collection[Key] = frozenset()) -> list[Puzzle]:
    """The puzzles without repetitions and without those of ``exclude``, in their order."""
    first = {puzzle.key: puzzle for puzzle in reversed(puzzles) if puzzle.key not in exclude}
    return list(reversed(first.values()))
