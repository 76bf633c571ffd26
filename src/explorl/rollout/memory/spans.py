"""`SpanMemory` decides which rows of a slot cache belong to which sequences.

Every prompt has an entry that its samples share, and every row a span of columns for its completion. When a sequence
that may resume later leaves its slot, its span is copied out; when it resumes, the span is copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from explorl.rollout.memory.sharing import Layout, SharedRows
from explorl.rollout.memory.slots import PromptCache, SlotCache, Span
from explorl.rollout.runner import Runner
from explorl.rollout.sequences import PromptTokens, SequenceState
from explorl.rollout.state import TOKEN


class SpanMemory:
    """Allocates rows and prompt entries to samples and computes the keys and values that are not stored yet."""

    def __init__(self, runner: Runner, slots: int) -> None:
        self.stored: dict[PromptTokens, int] = {}
        """Entry of each stored prompt."""
        self.resting: dict[int, SequenceState] = {}
        self._reset(runner, slots)

    def _reset(self, runner: Runner, slots: int) -> None:
        self.runner = runner
        assert isinstance(runner.cache, SlotCache)
        assert isinstance(runner.filling, PromptCache)
        self.cache, self.prompt_cache = runner.cache, runner.filling
        self.rows = SharedRows(slots, share=runner.shares)
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

    @property
    def shares(self) -> bool:
        """True if several slots may share a row."""
        return self.rows.share

    # Slots

    def admit(self, waiting: Iterable[SequenceState], most: int) -> list[SequenceState]:
        """Return the first waiting samples that can start now, with their prompts computed."""
        waiting = list(waiting)
        if waiting[0].prompt not in self.stored and not self._prefill(waiting):
            return []
        admitted = []
        for sample in waiting[:most]:
            if sample.prompt not in self.stored:
                break
            admitted.append(sample)
        return admitted

    def _prefill(self, waiting: Sequence[SequenceState]) -> bool:
        """Compute as many of the next prompts as there are free entries; return False if there is none."""
        used = set(self.rows.entry[self.rows.entry >= 0].tolist())
        idle = {prompt: None for prompt, entry in self.stored.items() if entry not in used}
        room = self.runner.plan.entries - len(self.stored) + len(idle)
        new: dict[PromptTokens, None] = {}
        for sample in waiting:
            if sample.prompt in idle:
                del idle[sample.prompt]
                room -= 1
            elif sample.prompt not in self.stored:
                new[sample.prompt] = None
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

    def start(self, slots: np.ndarray, samples: Sequence[SequenceState]) -> np.ndarray:
        """Put samples that `admit` returned into slots; return the prompt entry of each."""
        for prompt in dict.fromkeys(sample.prompt for sample in samples):  # moves the prompts in use to the end
            self.stored[prompt] = self.stored.pop(prompt)
        entries = np.array([self.stored[sample.prompt] for sample in samples])
        offsets = np.array([sample.prompt.stored for sample in samples])
        same: dict[tuple[PromptTokens, tuple[int, ...]], int] = {}
        groups = np.array([same.setdefault((s.prompt, tuple(s.tokens)), len(same)) for s in samples])
        self.rows.start(slots, entries, groups)
        rows, first = np.unique(self.rows.row[slots], return_index=True)
        self.offsets[rows] = offsets[first]
        self._clean(rows.tolist())
        self.cache.start(rows, entries[first], offsets[first])
        resumed = [(int(row), samples[i]) for row, i in zip(rows, first, strict=True) if samples[i].tokens]
        if resumed:
            self._resume(*zip(*resumed, strict=True))
        return entries

    def _resume(self, rows: Sequence[int], samples: Sequence[SequenceState]) -> None:
        """Copy the saved spans of samples back and compute the rest, up to but without their last tokens."""
        starts, missing = [], []
        for row, sample in zip(rows, samples, strict=True):
            restored = 0
            if isinstance(sample.saved_kv, Span):
                restored = min(sample.saved_kv.length, len(sample.tokens))
                self.cache.copy_in(row, sample.saved_kv, restored)
            starts.append(restored)
            missing.append([sample.prompt.tokens[-1], *sample.tokens][restored : len(sample.tokens)])
        incomplete = [i for i, tokens in enumerate(missing) if tokens]
        if incomplete:
            targets = [(rows[i], self.stored[samples[i].prompt], samples[i].prompt.stored) for i in incomplete]
            begin = [samples[i].prompt.stored + starts[i] for i in incomplete]
            self.runner.extend(targets, begin, [missing[i] for i in incomplete])

    def keep(self, slot: int, sample: SequenceState, tokens: int) -> Span:
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

    def reserve(self, slots: np.ndarray, tokens: np.ndarray) -> bool:
        """Return True: every row has room for its longest completion."""
        return True

    def publish(self) -> None:
        """Do nothing: the device needs no tables."""

    # Decoding

    def length(self, positions: np.ndarray, completions: np.ndarray) -> int:
        """Return the number of columns that the longest completion has filled."""
        return int(completions.max())

    def layout(self, slots: np.ndarray) -> Layout:
        """Return the rows and slots of the next steps."""
        layout = self.rows.layout()
        rows = self.rows.entry[: layout.rows]
        self.cache.regroup(rows, self.offsets[: layout.rows][rows >= 0])
        return layout

    def split(self, steps: int) -> np.ndarray | None:
        """Split rows whose slots sampled different tokens.

        Once no row is shared any more, return the slots that the sequences should move to: those with the numbers of
        their rows, so that rows need no lookup.
        """
        state = self.runner.state
        moves = self.rows.split(state.ints[TOKEN].numpy(), state.vocab) if self.shares else None
        if moves is None:
            return None
        self._move(*moves, steps)
        slots = np.flatnonzero(self.rows.row >= 0)
        rows = self.rows.row[slots]
        if len(set(rows.tolist())) < len(slots) or bool((rows == slots).all()):
            return None
        self.rows.row[slots] = -1
        self.rows.row[rows] = rows
        return rows

    def move_slots(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """Move sequences from ``source`` slots to ``target`` slots."""
        self.rows.move_slots(source, target)
        if not self.shares:
            self._move(source, target, steps)

    def compact(self, steps: int, slots: int) -> None:
        """Close gaps between rows if decoding them costs more than moving rows."""
        if self.shares and self.rows.holes() > slots // 16 and (moves := self.rows.compact()) is not None:
            self._move(*moves, steps)

    def _move(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """Copy rows of the cache."""
        self._clean(target.tolist())
        self.offsets[target] = self.offsets[source]
        device = self.runner.device
        self.cache.move(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device), steps)

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
                cache.clear(torch.tensor(dirty, device=self.runner.device))
                spoiled.difference_update(dirty)
