"""Which row of the cache each slot uses.

A *slot* is a sequence's place in the running batch, a *row* a sequence that the model decodes. Samples of one prompt
that have the same tokens so far share a row: the model computes it once, each slot samples from it with its own random
numbers, and the row is split when they differ. Small or collapsed policies repeat themselves so much that this saves
most of the work. The host has to read the tokens after every step, so rows are shared only where reading is free: on
the CPU. Elsewhere every slot uses the row of the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Moves = tuple[np.ndarray, np.ndarray]
"""Rows to copy from, and rows to copy to."""


@dataclass(frozen=True)
class Layout:
    """Rows and slots of the next steps."""

    rows: int
    """Number of rows to decode, from the first on."""
    slots: int
    """Number of slots to sample for, from the first on."""
    lead: np.ndarray | None
    """A slot of each row; None if rows and slots are the same."""
    row_of: np.ndarray | None
    """The row of each slot; None if rows and slots are the same."""


class SharedRows:
    """Assigns rows to ``slots`` slots."""

    def __init__(self, slots: int, share: bool) -> None:
        self.slots, self.share = slots, share
        self.row = np.full(slots, -1)
        """The row of each slot, −1 if the slot is empty."""
        self.entry = np.full(slots, -1)
        """The prompt entry of each row, −1 if the row is free."""

    def start(self, slots: np.ndarray, entries: np.ndarray, groups: np.ndarray | None = None) -> None:
        """Start sequences with these prompt entries: one row per group, by default per prompt."""
        if not self.share:
            self.row[slots], self.entry[slots] = slots, entries
            return
        _, first, which = np.unique(entries if groups is None else groups, return_index=True, return_inverse=True)
        rows = np.flatnonzero(self.entry < 0)[: len(first)]
        self.entry[rows] = entries[first]
        self.row[slots] = rows[which]

    def evict(self, slots: np.ndarray) -> None:
        """Free slots, and the rows that no slot uses any more."""
        rows = self.row[slots]
        self.row[slots] = -1
        self.entry[np.setdiff1d(rows, self.row)] = -1

    def split(self, tokens: np.ndarray, vocab: int) -> Moves | None:
        """Split rows whose slots sampled different tokens; slots with the same token keep sharing."""
        slots = np.flatnonzero(self.row >= 0)
        if not self.share or len(slots) == 0:
            return None
        branches, of = np.unique(self.row[slots] * vocab + tokens[slots], return_inverse=True)
        rows = branches // vocab
        new = np.concatenate([[False], rows[1:] == rows[:-1]])
        if not new.any():
            return None
        source = rows[new]
        target = np.flatnonzero(self.entry < 0)[: len(source)]
        self.entry[target] = self.entry[source]
        rows[new] = target
        self.row[slots] = rows[of]
        return source, target

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move sequences to other slots; without sharing, their rows move with them."""
        if self.share:
            self.row[target] = self.row[source]
        else:
            self.row[target], self.entry[target], self.entry[source] = target, self.entry[source], -1
        self.row[source] = -1

    def compact(self) -> Moves | None:
        """Move the last rows into free ones; return None if there is nothing to move. Only with sharing."""
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
        """Return the number of free rows below the last used one."""
        used = np.flatnonzero(self.entry >= 0)
        return int(used[-1]) + 1 - len(used) if len(used) else 0

    def layout(self) -> Layout:
        """Return the rows and slots of the next steps."""
        slots = np.flatnonzero(self.row >= 0)
        count, rows = int(slots[-1]) + 1, int(self.row.max()) + 1
        if not self.share or (rows == count and bool((self.row[:count] == np.arange(count)).all())):
            return Layout(max(rows, count), max(rows, count), None, None)
        lead = np.full(rows, slots[0])  # unused rows need a lead too; any slot will do
        lead[self.row[slots]] = slots
        return Layout(rows, count, lead, np.maximum(self.row[:count], 0))
