"""`SpanMemory` decides which rows of a span cache belong to which sequences.

Every prompt has an entry that its sequences share, and every row a span of columns for its completion. When a sequence
that may resume later leaves its slot, its span is copied out; when it resumes, the span is copied back.

A *slot* is a sequence's place in the running batch, a *row* a sequence that the model decodes. Samples of one prompt
that have the same tokens so far share a row: the model computes it once, each slot samples from it with its own random
numbers, and the row is split when they differ. Small or collapsed policies repeat themselves so much that this saves
most of the work. The host has to read the tokens after every step, so rows are shared only where reading is free: on
the CPU. With pages every slot uses the row of the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from explorl.rollout.memory.cache import Layout
from explorl.rollout.memory.spans import PromptCache, Span, SpanCache
from explorl.rollout.requests import PromptTokens, SequenceState
from explorl.rollout.runner import Runner
from explorl.rollout.state import TOKEN

Moves = tuple[np.ndarray, np.ndarray]
"""Rows to copy from, and rows to copy to."""


class SharedRows:
    """Assigns rows to ``slots`` slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.row = np.full(slots, -1)
        """The row of each slot, −1 if the slot is empty."""
        self.entry = np.full(slots, -1)
        """The prompt entry of each row, −1 if the row is free."""

    def start(self, slots: np.ndarray, entries: np.ndarray, groups: np.ndarray | None = None) -> None:
        """Start sequences with these prompt entries: one row per group, by default per prompt."""
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
        branches, of = np.unique(self.row[slots] * vocab + tokens[slots], return_inverse=True)
        rows = branches // vocab
        new = rows[1:] == rows[:-1]
        if not new.any():
            return None
        new = np.concatenate([[False], new])
        source = rows[new]
        target = np.flatnonzero(self.entry < 0)[: len(source)]
        self.entry[target] = self.entry[source]
        rows[new] = target
        self.row[slots] = rows[of]
        return source, target

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move sequences to other slots."""
        rows = self.row[source]
        self.row[source] = -1
        self.row[target] = rows

    def compact(self) -> Moves | None:
        """Move the last rows into free ones; return None if there is nothing to move."""
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

    def layout(self, length: int = 0) -> Layout:
        """Return the rows and slots of the next steps."""
        slots = np.flatnonzero(self.row >= 0)
        count, rows = int(slots[-1]) + 1, int(self.row.max()) + 1
        if rows == count and bool((self.row[:count] == np.arange(count)).all()):
            return Layout(rows, rows, length)
        lead = np.full(rows, slots[0])  # unused rows need a lead too; any slot will do
        lead[self.row[slots]] = slots
        return Layout(rows, count, length, lead, np.maximum(self.row[:count], 0))


class SpanMemory:
    """Allocates rows and prompt entries to sequences and computes the keys and values that are not stored yet."""

    def __init__(self, runner: Runner, slots: int) -> None:
        self.stored: dict[PromptTokens, int] = {}
        """Entry of each stored prompt."""
        self._reset(runner, slots)

    def _reset(self, runner: Runner, slots: int) -> None:
        self.runner = runner
        assert isinstance(runner.cache, SpanCache)
        assert isinstance(runner.prefill_cache.cache, PromptCache)
        self.cache, self.prompt_cache = runner.cache, runner.prefill_cache.cache
        self.rows = SharedRows(slots)
        self.offsets = np.zeros(slots, dtype=np.int64)
        """Number of tokens in the prompt entry of each row."""
        self.spoiled_rows: set[int] = set()
        self.spoiled_entries: set[int] = set()

    def migrate(self, runner: Runner, slots: int) -> bool:
        """Move to another runner whose slots are empty; return False if that one uses pages."""
        if runner.plan.pages:
            return False
        before, stored = self.prompt_cache, self.stored
        self.clean()
        self._reset(runner, slots)
        if self.prompt_cache is not before:
            self.stored = {}
            fitting = [item for item in stored.items() if item[0].stored <= runner.plan.prompt_tokens]
            for entry, (prompt, old) in enumerate(fitting[-runner.plan.entries :]):
                self.prompt_cache.copy_in(entry, before.copy_out(old, prompt.stored), prompt.stored)
                self.stored[prompt] = entry
        return True

    # Slots

    def admit(self, waiting: Iterable[SequenceState], most: int) -> list[SequenceState]:
        """Return the first waiting sequences that can start now, with their prompts computed."""
        waiting = list(waiting)
        if waiting[0].prompt not in self.stored and not self._prefill(waiting):
            return []
        admitted = []
        for sequence in waiting[:most]:
            if sequence.prompt not in self.stored:
                break
            admitted.append(sequence)
        return admitted

    def _prefill(self, waiting: Sequence[SequenceState]) -> bool:
        """Compute as many of the next prompts as there are free entries; return False if there is none."""
        used = set(self.rows.entry[self.rows.entry >= 0].tolist())
        idle = {prompt: None for prompt, entry in self.stored.items() if entry not in used}
        room = self.runner.plan.entries - len(self.stored) + len(idle)
        new: dict[PromptTokens, None] = {}
        for sequence in waiting:
            if sequence.prompt in idle:
                del idle[sequence.prompt]
                room -= 1
            elif sequence.prompt not in self.stored:
                new[sequence.prompt] = None
            if len(new) >= room:
                break
        prompts = list(new)[: max(0, room)]
        if not prompts:
            return False
        for prompt in list(idle)[: max(0, len(self.stored) + len(prompts) - self.runner.plan.entries)]:
            del self.stored[prompt]  # least recently used
        occupied = set(self.stored.values())
        entries = [entry for entry in range(self.runner.plan.entries) if entry not in occupied][: len(prompts)]
        self._clean((), entries)
        self.stored.update(zip(prompts, entries, strict=True))
        self.runner.prefill(entries, [prompt.tokens for prompt in prompts])
        return True

    def start(self, slots: np.ndarray, sequences: Sequence[SequenceState]) -> None:
        """Put sequences that `admit` returned into slots."""
        for prompt in dict.fromkeys(sequence.prompt for sequence in sequences):  # moves the prompts in use to the end
            self.stored[prompt] = self.stored.pop(prompt)
        entries = np.array([self.stored[sequence.prompt] for sequence in sequences])
        offsets = np.array([sequence.prompt.stored for sequence in sequences])
        same: dict[tuple[PromptTokens, tuple[int, ...]], int] = {}
        groups = np.array([same.setdefault((s.prompt, tuple(s.tokens)), len(same)) for s in sequences])
        self.rows.start(slots, entries, groups)
        rows, first = np.unique(self.rows.row[slots], return_index=True)
        self.offsets[rows] = offsets[first]
        self._clean(rows.tolist())
        resumed = [(int(row), sequences[i]) for row, i in zip(rows, first, strict=True) if sequences[i].tokens]
        if resumed:
            self._resume(*zip(*resumed, strict=True))

    def _resume(self, rows: Sequence[int], sequences: Sequence[SequenceState]) -> None:
        """Copy the saved spans of sequences back and compute the rest, up to but without their last tokens."""
        starts, missing = [], []
        for row, sequence in zip(rows, sequences, strict=True):
            restored = 0
            if isinstance(sequence.saved_kv, Span):
                restored = min(sequence.saved_kv.length, len(sequence.tokens))
                self.cache.copy_in(row, sequence.saved_kv, restored)
            starts.append(restored)
            missing.append([sequence.prompt.tokens[-1], *sequence.tokens][restored : len(sequence.tokens)])
        incomplete = [i for i, tokens in enumerate(missing) if tokens]
        if incomplete:
            targets = [(rows[i], self.stored[sequences[i].prompt], sequences[i].prompt.stored) for i in incomplete]
            begin = [sequences[i].prompt.stored + starts[i] for i in incomplete]
            self.runner.extend(targets, begin, [missing[i] for i in incomplete])

    def keep(self, slot: int, sequence: SequenceState, tokens: int) -> Span:
        """Return a copy of the keys and values of a slot's first ``tokens`` completion tokens."""
        return self.cache.copy_out(int(self.rows.row[slot]), tokens)

    def evict(self, slots: np.ndarray, broken: np.ndarray) -> None:
        """Free slots; those among them that are ``broken`` may hold NaN."""
        rows = self.rows.row[broken]
        if len(rows):
            # Free rows are decoded along with another row's token, so they may hold NaN too.
            self.spoiled_rows.update(rows.tolist(), np.flatnonzero(self.rows.entry < 0).tolist())
            self.spoiled_entries.update(self.rows.entry[rows].tolist())
        self.rows.evict(slots)

    # Decoding

    def layout(self, slots: np.ndarray, positions: np.ndarray, completions: np.ndarray) -> Layout:
        """Return the rows and slots of the next steps, given how many tokens the slots have."""
        layout = self.rows.layout(int(completions.max()))
        rows = self.rows.entry[: layout.rows]
        self.cache.regroup(rows, self.offsets[: layout.rows][rows >= 0])
        return layout

    def split(self, steps: int) -> np.ndarray | None:
        """Split rows whose slots sampled different tokens.

        Once no row is shared any more, return the slots that the sequences should move to: those with the numbers of
        their rows, so that rows need no lookup.
        """
        state = self.runner.state
        moves = self.rows.split(state.ints[TOKEN].numpy(), state.vocab)
        if moves is None:
            return None
        self._move(*moves, steps)
        slots = np.flatnonzero(self.rows.row >= 0)
        rows = self.rows.row[slots]
        if len(set(rows.tolist())) < len(slots) or bool((rows == slots).all()):
            return None
        self.rows.move_slots(slots, rows)
        return rows

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move sequences from ``source`` slots to ``target`` slots."""
        self.rows.move_slots(source, target)

    def compact(self, steps: int, slots: int) -> None:
        """Close gaps between rows if decoding them costs more than moving rows."""
        if self.rows.holes() > slots // 16 and (moves := self.rows.compact()) is not None:
            self._move(*moves, steps)

    def _move(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """Copy rows of the cache."""
        self._clean(target.tolist())
        self.offsets[target] = self.offsets[source]
        self.cache.move(source, target, steps)

    def clean(self) -> None:
        """Zero all memory that may hold NaN, and forget the prompts stored there."""
        self.stored = {prompt: entry for prompt, entry in self.stored.items() if entry not in self.spoiled_entries}
        self._clean(set(self.spoiled_rows), set(self.spoiled_entries))

    def _clean(self, rows: Iterable[int], entries: Iterable[int] = ()) -> None:
        """Zero the rows and entries that may hold NaN before they are reused: a masked NaN would still spread."""
        for cache, spoiled, reused in (
            (self.cache, self.spoiled_rows, set(rows)),
            (self.prompt_cache, self.spoiled_entries, set(entries)),
        ):
            dirty = sorted(spoiled & reused)
            if dirty:
                cache.clear(dirty)
                spoiled.difference_update(dirty)
