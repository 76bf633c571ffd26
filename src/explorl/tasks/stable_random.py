"""Random draws that are the same on every machine and in every Python.

Python promises that ``Random(seed).random()`` keeps its sequence for ever, and says of ``randrange``, ``shuffle`` and
``choice`` that they may change. So everything here is made from ``random()``, and split files stay reproducible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def below(rng: Random, n: int) -> int:
    """An integer from 0 to n − 1."""
    return int(rng.random() * n)


def between(rng: Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + below(rng, high - low + 1)


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of the items."""
    return items[below(rng, len(items))]


def shuffled(rng: Random, items: Iterable[T]) -> list[T]:
    """The items in random order (Fisher–Yates)."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = below(rng, last + 1)
        result[last], result[other] = result[other], result[last]
    return result
