"""Random draws that are the same on every machine and in every version of Python.

Python guarantees the sequence of ``Random(seed).random()``, but not those of ``randrange``, ``shuffle`` and ``choice``.
So every function here uses only ``random()``, which keeps split files reproducible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def below(rng: Random, n: int) -> int:
    """Return a random integer from 0 to n − 1."""
    return int(rng.random() * n)


def between(rng: Random, low: int, high: int) -> int:
    """Return a random integer from low to high, both included."""
    return low + below(rng, high - low + 1)


def pick(rng: Random, items: Sequence[T]) -> T:
    """Return a random item."""
    return items[below(rng, len(items))]


def shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    """Return the items in random order (Fisher–Yates)."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = below(rng, last + 1)
        result[last], result[other] = result[other], result[last]
    return result
