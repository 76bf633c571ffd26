"""Which row of the cache each seat uses.

A *seat* is a request in flight, a *row* a sequence that the model decodes. Samples of one prompt that have drawn the
same tokens so far are one row: the model computes it once, each seat draws from it with its own random numbers, and
the row is split where they differ. A small or a collapsed policy repeats itself so much that this saves most of the
work. It needs a look at the tokens after every step, so it is done where that is free: on the CPU. Elsewhere every
seat has the row of the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Moves = tuple[np.ndarray, np.ndarray]
"""Rows to copy from, and rows to copy to."""


@dataclass(frozen=True)
class Layout:
    """Rows and seats of the next steps."""

    rows: int
    """Rows to decode: the first ones."""
    slots: int
    """Seats to sample for: the first ones."""
    lead: np.ndarray | None
    """A seat of each row; None where rows and seats are the same."""
    row_of: np.ndarray | None
    """The row of each seat; None likewise."""


class SharedRows:
    """Rows of ``slots`` seats."""

    def __init__(self, slots: int, share: bool) -> None:
        self.slots, self.share = slots, share
        self.row = np.full(slots, -1)
        """The row of each seat, −1 where nobody sits."""
        self.entry = np.full(slots, -1)
        """The prompt entry of each row, −1 where it is free."""

    def start(self, seats: np.ndarray, entries: np.ndarray, groups: np.ndarray | None = None) -> None:
        """Seats requests with these prompts: one row for all of a group, or of the same prompt."""
        if not self.share:
            self.row[seats], self.entry[seats] = seats, entries
            return
        _, first, which = np.unique(entries if groups is None else groups, return_index=True, return_inverse=True)
        rows = np.flatnonzero(self.entry < 0)[: len(first)]
        self.entry[rows] = entries[first]
        self.row[seats] = rows[which]

    def evict(self, seats: np.ndarray) -> None:
        """Frees seats, and the rows that nobody uses any more."""
        rows = self.row[seats]
        self.row[seats] = -1
        self.entry[np.setdiff1d(rows, self.row)] = -1

    def split(self, tokens: np.ndarray, vocab: int) -> Moves | None:
        """Gives seats that drew another token than their row's first seat a row of their own, shared among equals."""
        seats = np.flatnonzero(self.row >= 0)
        if not self.share or len(seats) == 0:
            return None
        branches, of = np.unique(self.row[seats] * vocab + tokens[seats], return_inverse=True)
        rows = branches // vocab
        new = np.concatenate([[False], rows[1:] == rows[:-1]])
        if not new.any():
            return None
        source = rows[new]
        target = np.flatnonzero(self.entry < 0)[: len(source)]
        self.entry[target] = self.entry[source]
        rows[new] = target
        self.row[seats] = rows[of]
        return source, target

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """The requests in these seats sit in others now; without sharing their rows have moved with them."""
        if self.share:
            self.row[target] = self.row[source]
        else:
            self.row[target], self.entry[target], self.entry[source] = target, self.entry[source], -1
        self.row[source] = -1

    def compact(self) -> Moves | None:
        """Moves the last rows into free ones; None where there is nothing to move. Only with sharing."""
        used = np.flatnonzero(self.entry >= 0)
        count = len(used)
        source = used[used >= count]
        if len(source) == 0:
            return None
        target = np.setdiff1d(np.arange(count), used)
        self.entry[target], self.entry[source] = self.entry[source], -1
        moved = np.arange(self.slots)
        moved[source] = target
        self.row = np.where(self.row >= 0, moved[self.row], -1)
        return source, target

    def holes(self) -> int:
        """Free rows below the last used one."""
        used = np.flatnonzero(self.entry >= 0)
        return int(used[-1]) + 1 - len(used) if len(used) else 0

    def layout(self) -> Layout:
        """What the next steps have to decode."""
        seats = np.flatnonzero(self.row >= 0)
        count, rows = int(seats[-1]) + 1, int(self.row.max()) + 1
        if not self.share or (rows == count and bool((self.row[:count] == np.arange(count)).all())):
            return Layout(max(rows, count), max(rows, count), None, None)
        lead = np.full(rows, seats[0])  # of a row that nobody uses: anybody
        lead[self.row[seats]] = seats
        return Layout(rows, count, lead, np.maximum(self.row[:count], 0))
