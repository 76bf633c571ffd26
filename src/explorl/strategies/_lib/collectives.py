"""What a strategy may ask of the other processes, where each of them holds its own rows of a batch alone.

A `Batch` that was gathered, or that somebody built by hand, holds all rows: its world is `World` itself, in which every
answer is what was asked with. Where the rows are spread over processes (`explorl.training.grpo.distributed`), the same
questions are answered together: so all processes must ask the same ones in the same order, and what decides whether one
is asked must be the same on all of them, such as a hyperparameter or an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxtyping import Int
from torch import Tensor

Anything = TypeVar("Anything")
Rows = TypeVar("Rows", Tensor, tuple[Tensor, Tensor])


class World:
    """All rows of the batch are here."""

    place: int = 0
    """Which of the processes this is. Its rows come after those of the processes before it."""

    def total(self, values: Tensor) -> Tensor:
        """Element by element, the sum over the processes."""
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Element by element, the largest of the processes; NaN where one has that."""
        return values

    def each(self, values: Tensor) -> Tensor:
        """The values of every process, which have the same shape on all of them."""
        return values.unsqueeze(0)

    def everywhere(self, rows: Tensor) -> Tensor:
        """The rows of all processes. Meant for one number per row: those of a whole batch are few."""
        return rows

    def here(self, rows: Tensor) -> Tensor:
        """This process's own rows of what has the rows of all."""
        return rows

    def objects(self, rows: Sequence[Anything]) -> list[Anything]:
        """What there is one of per row, such as prompts, for the rows of all processes."""
        return list(rows)

    def smallest(self, values: Tensor) -> Tensor:
        """Element by element, the smallest of the processes; NaN where one has that."""
        return -self.largest(-values)

    def before(self, count: Int[Tensor, ""]) -> int:
        """The sum of what the processes before this one counted."""
        return int(self.each(count)[: self.place].sum())

    def by_row(self, function: Callable[..., Rows], *rows: Tensor, **settings: object) -> Rows:
        """A function of rows, such as a statistic over groups, of the rows of all processes; the own rows of it."""
        found = function(*(self.everywhere(values) for values in rows), **settings)
        if isinstance(found, tuple):
            first, second = found
            return self.here(first), self.here(second)
        return self.here(found)


ALONE = World()
"""The world of a batch that holds all its rows."""
