"""Collectives between threads of one process, so that many small cases are cheap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.strategies._lib.collectives import Collectives


class Exchange:
    """Values that the threads share, and a barrier on which they wait for each other."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads, timeout=30)
        self.values: list[Any] = [None] * threads

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


class ThreadCollectives(Collectives):
    """Collectives of one thread, which has some of the rows."""

    def __init__(self, exchange: Exchange, rank: int, rows: Sequence[int]) -> None:
        self.exchange, self.rank, self.rows = exchange, rank, rows

    def sum(self, values: Tensor) -> Tensor:
        return self.gather(values).sum(0)

    def max(self, values: Tensor) -> Tensor:
        return self.gather(values).amax(0)

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange.all_gather(self.rank, values))

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.cat(self.exchange.all_gather(self.rank, rows))

    def local_rows(self, rows: Tensor) -> Tensor:
        first = sum(self.rows[: self.rank])
        return rows[first : first + self.rows[self.rank]]

    def gather_objects(self, rows: Sequence[Any]) -> list[Any]:
        return [row for part in self.exchange.all_gather(self.rank, list(rows)) for row in part]


def on_threads(rows: Sequence[int], function: Callable[[Collectives, slice], Any]) -> list[Any]:
    """Return the result of each thread, called with its collectives and its rows; raise the first error."""
    exchange, results, errors = Exchange(len(rows)), [None] * len(rows), []

    def run(rank: int) -> None:
        first = sum(rows[:rank])
        try:
            results[rank] = function(ThreadCollectives(exchange, rank, rows), slice(first, first + rows[rank]))
        except Exception as error:
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
