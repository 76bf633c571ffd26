"""The ability boundary: which problems a model cannot solve, how models' boundaries overlap, how varied answers are.

Deng et al. 2025, §2.1 (k-rollout unsolvable problems, Venn diagrams) and §2.4 (answer diversity).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from explorl.metrics._arrays import answer_rows, first_k, verdicts

Item = TypeVar("Item")


def unsolvable(correct: Any, k: int | None = None) -> set[int]:
    """Return the indices of the problems with no correct answer among their first k samples (all if k is None).

        U_k = {q : max(R(o_1), …, R(o_k)) = 0}

    ``correct`` is problems × samples of 0 and 1, ragged allowed. Deng et al. 2025 §2.1, with k = 640.
    """
    rows, single = verdicts(correct)
    if single:
        raise ValueError("unsolvable needs problems × samples, got the samples of one problem")
    return {index for index, row in enumerate(first_k(rows, k)) if not row.any()}


def set_regions(sets: Mapping[str, Iterable[Item]]) -> dict[frozenset[str], set[Item]]:
    """Return the 2^m − 1 regions of a Venn diagram of m = 2 to 4 sets: names → items in exactly those sets.

    Empty regions are included; single names come first. For more sets use `upset_counts`.
    """
    if not 2 <= len(sets) <= 4:
        raise ValueError(f"a Venn diagram has 2 to 4 sets, got {len(sets)}; upset_counts takes any number")
    names = list(sets)
    regions: dict[frozenset[str], set[Item]] = {
        frozenset(some): set() for size in range(1, len(names) + 1) for some in combinations(names, size)
    }
    for some, items in _exclusive(sets).items():
        regions[some] = items
    return regions


def upset_counts(sets: Mapping[str, Iterable[Any]]) -> dict[frozenset[str], int]:
    """Return the sizes of the exclusive intersections of sets: the bars of an UpSet plot (Lex et al. 2014).

    Empty intersections are left out. The largest come first; ties are ordered by the number of names, then as given.
    """
    position = {name: index for index, name in enumerate(sets)}
    counts = {some: len(items) for some, items in _exclusive(sets).items()}
    order = sorted(counts, key=lambda some: (-counts[some], len(some), sorted(position[name] for name in some)))
    return {some: counts[some] for some in order}


class Diversity(NamedTuple):
    """Number of distinct answers to each problem."""

    distinct: NDArray[np.int64]
    """Distinct answers, correct or not."""
    correct: NDArray[np.int64]
    """Distinct answers of which at least one sample was correct."""


def answer_diversity(answers: Sequence[Any], correct: Any) -> Diversity:
    """Count distinct answers per problem, and distinct correct ones (Deng et al. 2025 §2.4, Figure 1b).

    ``answers`` (hashable, normalised by the task; None for a completion without one) and ``correct``
    (0 or 1) are problems × samples, ragged allowed; the samples of one problem count as one row.
    """
    rows, right, _ = answer_rows(answers, correct)
    distinct = [len(set(row) - {None}) for row in rows]
    solved = [
        len({answer for answer, hit in zip(row, marks, strict=True) if hit} - {None})
        for row, marks in zip(rows, right, strict=True)
    ]
    return Diversity(np.array(distinct, dtype=np.int64), np.array(solved, dtype=np.int64))


def _exclusive(sets: Mapping[str, Iterable[Item]]) -> dict[frozenset[str], set[Item]]:
    """Group the items by the names of exactly those sets that contain them."""
    holders: dict[Item, set[str]] = {}
    for name, items in sets.items():
        for item in items:
            holders.setdefault(item, set()).add(name)
    regions: dict[frozenset[str], set[Item]] = {}
    for item, names in holders.items():
        regions.setdefault(frozenset(names), set()).add(item)
    return regions
