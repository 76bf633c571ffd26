"""Several processes played by threads of one: many small cases cost nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.strategies._lib.collectives import World


class Table:
    """Where the threads of a world lay down what they have, and wait for each other."""

    def __init__(self, seats: int) -> None:
        self.barrier = threading.Barrier(seats, timeout=30)
        self.values: list[Any] = [None] * seats

    def exchanged(self, place: int, value: Any) -> list[Any]:
        self.values[place] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Thread(World):
    """One of them."""

    def __init__(self, table: Table, place: int, rows: Sequence[int]) -> None:
        self.table, self.place, self.rows = table, place, rows

    def total(self, values: Tensor) -> Tensor:
        return self.each(values).sum(0)

    def largest(self, values: Tensor) -> Tensor:
        return self.each(values).amax(0)

    def each(self, values: Tensor) -> Tensor:
        return torch.stack(self.table.exchanged(self.place, values))

    def everywhere(self, rows: Tensor) -> Tensor:
        return torch.cat(self.table.exchanged(self.place, rows))

    def here(self, rows: Tensor) -> Tensor:
        first = sum(self.rows[: self.place])
        return rows[first : first + self.rows[self.place]]

    def objects(self, rows: Sequence[Any]) -> list[Any]:
        return [one for part in self.table.exchanged(self.place, list(rows)) for one in part]


def on_threads(rows: Sequence[int], function: Callable[[World, slice], Any]) -> list[Any]:
    """What the function gives in each thread, called with its world and its rows; or the first one's error."""
    table, results, errors = Table(len(rows)), [None] * len(rows), []

    def run(place: int) -> None:
        first = sum(rows[:place])
        try:
            results[place] = function(Thread(table, place, rows), slice(first, first + rows[place]))
        except Exception as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
