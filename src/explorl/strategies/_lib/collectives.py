"""Collective operations over the processes that share a generation batch.

A `Batch` that holds all rows, because it was gathered or built by hand, uses `Collectives` itself, in which every
operation returns its argument. When the rows are distributed over processes, `explorl.training.grpo.distributed`
implements the operations with communication. All processes must then call the same operations in the same order, so
the decision whether to call one may depend on a hyperparameter or on the result of another operation, but not on the
rows of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxtyping import Int
from torch import Tensor

Item = TypeVar("Item")
Rows = TypeVar("Rows", Tensor, tuple[Tensor, Tensor])


class Collectives:
    """Collectives of a batch that holds all its rows."""

    rank: int = 0
    """Index of this process. Its rows follow those of the processes with a lower rank."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over the processes."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over the processes; NaN if any process has NaN."""
        return values

    def min(self, values: Tensor) -> Tensor:
        """Return the elementwise minimum over the processes; NaN if any process has NaN."""
        return -self.max(-values)

    def gather(self, values: Tensor) -> Tensor:
        """Stack the values of all processes, which must have the same shape everywhere."""
        return values.unsqueeze(0)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all processes. Intended for one number per row, not for one per token."""
        return rows

    def gather_objects(self, rows: Sequence[Item]) -> list[Item]:
        """Concatenate one object per row, such as its prompt, over all processes."""
        return list(rows)

    def local_rows(self, rows: Tensor) -> Tensor:
        """Select this process's rows from a tensor with the rows of all processes."""
        return rows

    def sum_before(self, count: Int[Tensor, ""]) -> int:
        """Return the sum of the counts of the processes with a lower rank."""
        return int(self.gather(count)[: self.rank].sum())

    def map_rows(self, function: Callable[..., Rows], *rows: Tensor, **settings: object) -> Rows:
        """Apply a function, such as a group statistic, to the rows of all processes and return this process's part."""
        result = function(*(self.gather_rows(values) for values in rows), **settings)
        if isinstance(result, tuple):
            first, second = result
            return self.local_rows(first), self.local_rows(second)
        return self.local_rows(result)


LOCAL = Collectives()
"""Collectives of a batch that holds all its rows: no communication."""
