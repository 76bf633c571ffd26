"""Admit sequences to slots, decode, read back what has ended, and refill: the loop that all sampling goes through."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from explorl.rollout.memory.cache import Layout
from explorl.rollout.memory.page_memory import PageMemory
from explorl.rollout.memory.span_memory import SpanMemory
from explorl.rollout.readback import Download, Readback, graph_size, steps_until_readback
from explorl.rollout.requests import Requests, SequenceState
from explorl.rollout.runner import Runner
from explorl.rollout.sampling import Active
from explorl.rollout.state import (
    BROKEN,
    CURVE,
    IDLE,
    KEY,
    LIMIT,
    OFFSET,
    POSITION,
    RUNNING,
    STATE_REALS,
    STATUS,
    STEP,
    STOP_SET,
    TOKEN,
    TOP_K,
)
from explorl.rollout.stops import EVERY, StopStrings, StopTokens

SYNC_STEPS = {"cuda": 8, "cpu": 1}
"""Decode steps between two readbacks if a sequence can end at any step; see `steps_until_readback`."""
AHEAD = {"cuda": True, "cpu": False}
"""Whether the next steps begin before the host has read back the last ones, so that the device never waits for it."""

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs sequences in the slots of a runner.

    If there are fewer slots than sequences, those that have begun go first. With pages, the ones with the highest limit
    follow, so that the longest do not run alone at the end, then the oldest. Random numbers belong to a request, so the
    order changes no token. When memory runs out, the youngest sequence is evicted. The oldest never is, so at least one
    sequence always finishes.

    Args:
        sequences: All sequences of the session, by number; the list may grow.
        keep: Whether a sequence that has ended may be continued later, so that its keys and values are worth keeping.
        on_end: Called with every sequence that ends.
    """

    def __init__(
        self,
        requests: Requests,
        sequences: Sequence[SequenceState],
        tokenizer: Any,
        keep: bool,
        on_end: Callable[[SequenceState], object],
    ) -> None:
        self.requests, self.sequences, self.tokenizer = requests, sequences, tokenizer
        self.searches = any(requests.stops)
        """True if completions may end at a stop string."""
        self.certain = not any(requests.stop_sets) and not self.searches
        """True if sequences end only at their limits, apart from errors."""
        self.keep, self.on_end = keep, on_end
        self.waiting: list[SequenceState] = []
        """Sequences that wait for a slot, in the order in which they will be admitted."""
        self.resting: dict[int, SequenceState] = {}
        """Sequences that have ended and whose keys and values are kept, by number, the longest ago first."""
        self.resting_bytes = 0
        self.paged = False
        """True if sequences have pages."""
        self._pending: tuple[np.ndarray, Download] | None = None
        """The owners and the states of the slots after steps that have not been read back."""
        self._finished: list[Readback] = []
        """Sequences that have ended and whose tokens are being read back."""

    memory: PageMemory | SpanMemory

    def move_in(
        self, runner: Runner, slots: int, active: Active, memory: PageMemory | SpanMemory | None = None
    ) -> None:
        """Use this runner, all of whose slots are free. ``memory`` is that of an earlier runner, if any."""
        self.runner, self.slots, self.active = runner, slots, active
        self.kind = runner.device.type
        self.owner = np.full(slots, -1)
        """The number of the sequence in each slot, −1 if the slot is free."""
        self.steps = np.zeros(slots, dtype=np.int64)
        """Tokens in each slot's completion after the steps that have begun, unless it has ended before."""
        self.limits = np.zeros(slots, dtype=np.int64)
        self.offsets = np.zeros(slots, dtype=np.int64)
        """Tokens of each slot's prompt, without the last."""
        self.crowded = False
        """True if a sequence has been evicted since one last ended."""
        self.stops = StopStrings(self.requests.stops, self.tokenizer, slots)
        # If `keep` is off, no caller waits for a sequence that has stopped, and sequences are collected a few steps
        # later.
        early = self.kind == "cpu" and self.keep and self.searches
        self.stop_tokens = StopTokens(self.requests.stops, self.tokenizer, runner.state.vocab) if early else None
        moved = [runner.state.set_stops(self.requests.stop_sets), runner.state.set_curves(self.requests.curves)]
        if any(moved):
            runner.drop_graphs()
        runner.state.allocate(active)
        if memory is None or not memory.migrate(runner, slots):
            self.discard_memory()
            memory = PageMemory(runner, slots) if runner.plan.pages else SpanMemory(runner, slots)
        self.memory, self.paged = memory, isinstance(memory, PageMemory)
        if isinstance(memory, PageMemory):
            memory.resting = self.resting
        self.waiting.sort(key=self._turn)
        runner.state.ints[STATUS] = IDLE

    def move_out(self, keep: bool = True) -> None:
        """Free all slots, and put their sequences back in the queue."""
        self.settle()
        slots = np.flatnonzero(self.owner >= 0)
        if len(slots):
            sequences = self._read_back(slots)
            for slot, sequence in zip(slots.tolist(), sequences if keep else (), strict=False):
                sequence.saved_kv = self.memory.keep(slot, sequence, len(sequence.tokens))
            self._free(slots, slots[:0])
            self.enqueue(*sequences)
        self.runner.state.ints[STATUS] = IDLE

    def discard_memory(self) -> None:
        """Discard all keys and values that are kept in a memory which is about to be freed."""
        for sequence in self.sequences:
            sequence.discard_kv()
        self.resting.clear()
        self.resting_bytes = 0

    @property
    def busy(self) -> bool:
        """True if there is anything left to sample or to read back."""
        return bool(self.waiting or self._pending or self._finished) or bool((self.owner >= 0).any())

    def enqueue(self, *sequences: SequenceState) -> None:
        """Put sequences in the queue."""
        for sequence in sequences:
            self.remove_resting(sequence)
        if len(sequences) == 1:
            insort(self.waiting, sequences[0], key=self._turn)
        else:
            self.waiting = sorted([*self.waiting, *sequences], key=self._turn)

    def _turn(self, sequence: SequenceState) -> Any:
        # Spans have room for few prompts at a time, so all sequences of a prompt run together there.
        return sequence.priority if self.paged else sequence.index

    def advance(self, max_steps: int | None = None, ahead: bool = False) -> int:
        """Decode until the next readback, or ``max_steps`` steps if that is less, and return the number of steps.

        ``ahead`` allows leaving that readback to the next call, which begins its own steps first; `settle` does it at
        once.
        """
        ahead = ahead and AHEAD.get(self.kind, False) and self.paged and not self.searches
        if not ahead:
            self.settle()
        self._admit()
        busy = np.flatnonzero(self.owner >= 0)
        if len(busy) == 0 and self._pending is None and not self._finished:
            raise _too_large(self.waiting[0])
        steps = self._steps(busy, max_steps, ahead) if len(busy) else 0
        if steps:
            busy = self._make_room(busy, steps)
        if steps == 0 or len(busy) == 0:  # all have ended, or will have at the next readback
            self.settle()
            return 0
        lengths = self.steps[busy]
        layout = self.memory.layout(busy, self.offsets[busy] + lengths, lengths)
        if self.runner.use_graphs:
            rows = graph_size(layout.rows, self.slots)
            layout = Layout(rows, rows, layout.length)
        even = bool((lengths == lengths[0]).all())
        self.runner.run(layout, even, steps, self.active)
        self.steps[busy] = np.minimum(lengths + steps, self.limits[busy])
        if not ahead:
            self._begin_readback()
            self.settle()
        self._finish_readback()
        self._rearrange()
        if ahead:
            self._begin_readback()
        return steps

    def _steps(self, busy: np.ndarray, max_steps: int | None, ahead: bool) -> int:
        patience = SYNC_STEPS.get(self.kind, 1)
        steps = steps_until_readback(
            self.limits[busy] - self.steps[busy],
            int(busy[-1]) + 1,
            self.slots,
            patience=max(1, patience // 2) if ahead else patience,  # the result is one readback old
            certain=self.certain and patience > 1,
            waiting=bool(self.waiting),
        )
        return min(steps, max_steps or steps)

    def _make_room(self, busy: np.ndarray, steps: int) -> np.ndarray:
        """Allocate memory for the next steps, evicting the youngest sequences if needed; return the busy slots."""
        if isinstance(self.memory, SpanMemory):
            return busy  # every row has room for its longest completion
        while not self.memory.reserve(
            busy, self.offsets[busy] + np.minimum(self.steps[busy] + steps, self.limits[busy])
        ):
            if self._pending is not None or self._finished:
                self.settle()  # a sequence may have ended
                busy = np.flatnonzero(self.owner >= 0)
                continue
            youngest = self.sequences[self.owner[busy].max()]
            if len(busy) == 1:
                raise _too_large(youngest)
            logger.info("evicting sequence %d: memory is full", youngest.index)
            self.enqueue(self.remove(youngest, keep=False))
            self.crowded = True
            busy = np.flatnonzero(self.owner >= 0)
        return busy

    # Admission

    def _admit(self) -> None:
        """Move waiting sequences into free slots."""
        free = np.flatnonzero(self.owner < 0)
        if self.kind == "cpu" and len(free) < min(len(self.waiting), max(1, self.slots // 16)):
            return  # a few idle slots cost less than filling them one by one
        if self.crowded and len(free) < self.slots:
            return  # a sequence admitted now would soon be evicted
        while self.waiting and len(free):
            admitted = self.memory.admit(self.waiting, len(free))
            if not admitted:
                return
            del self.waiting[: len(admitted)]
            self._start(free[: len(admitted)], admitted)
            free = free[len(admitted) :]

    def _start(self, slots: np.ndarray, sequences: Sequence[SequenceState]) -> None:
        state = self.runner.state
        offsets = np.array([sequence.prompt.stored for sequence in sequences])
        lengths = np.array([len(sequence.tokens) for sequence in sequences])
        limits = np.array([sequence.limit for sequence in sequences])
        index = [sequence.request for sequence in sequences]
        params = {name: values[index] for name, values in self.requests.rows.items()}
        self.memory.start(slots, sequences)
        fields = {
            TOKEN: np.array([(sequence.tokens or sequence.prompt.tokens)[-1] for sequence in sequences]),
            POSITION: offsets + lengths,
            STEP: lengths,
            LIMIT: limits,
            STATUS: RUNNING,
            KEY: np.array([sequence.key for sequence in sequences]),
            TOP_K: params["top_k"],
            OFFSET: offsets,
            CURVE: params["curve"],
            STOP_SET: params["stop_set"],
        }
        ints = np.stack([np.broadcast_to(fields[i], len(slots)) for i in range(len(fields))]).astype(np.int64)
        reals = np.empty((len(STATE_REALS), len(slots)))
        for name, row in STATE_REALS.items():
            reals[row] = params[name]
        on_device = state.admit(slots, ints, reals)
        if self.active.repetition:
            state.mark_seen(on_device, [sequence.ids for sequence in sequences])
        continued = np.flatnonzero(lengths)
        if len(continued):
            state.write_tokens(slots[continued], [sequences[i].tokens for i in continued.tolist()])
        for slot, sequence in zip(slots, sequences, strict=True):
            sequence.slot = int(slot)
            sequence.discard_kv()
        self.owner[slots] = [sequence.index for sequence in sequences]
        self.steps[slots], self.limits[slots], self.offsets[slots] = lengths, limits, offsets
        searched = [min(sequence.searched, len(sequence.tokens)) for sequence in sequences]
        self.stops.start(
            slots, index, searched, [sequence.stop_search_start(len(sequence.tokens)) for sequence in sequences]
        )

    # Results

    def settle(self) -> None:
        """Read back all that has been decoded, and give sequences that have ended their tokens."""
        while self._pending is not None or self._finished:
            self._finish_readback()

    def _begin_readback(self) -> None:
        slots = int(np.flatnonzero(self.owner >= 0)[-1]) + 1 if (self.owner >= 0).any() else 0
        if slots:
            download = Download(self.runner.state.ints[STEP : STATUS + 1, :slots])
            self._pending = self.owner[:slots].copy(), download

    def _finish_readback(self) -> None:
        """Complete the sequences found by the last readback, then evaluate the pending one and free its ended slots."""
        finished, self._finished = self._finished, []
        for batch in finished:
            batch.finish()
        if self._pending is not None:
            (owner, download), self._pending = self._pending, None
            self._collect(owner, download.wait()[0].numpy())
        for batch in finished:
            for sequence in batch.sequences:
                self.on_end(sequence)

    def _collect(self, owner: np.ndarray, ints: np.ndarray, every: int = EVERY) -> None:
        """Find the sequences that have ended, start reading back their tokens, and free their slots.

        ``owner`` holds the sequences in the first slots when their ``ints``, from `STEP` to `STATUS`, were downloaded.
        """
        state, count = self.runner.state, len(owner)
        steps, status = ints[0], ints[-1].copy()
        busy = (owner >= 0) & (owner == self.owner[:count])  # other slots have been refilled since
        ended = np.flatnonzero(busy & (status != RUNNING))
        self.steps[ended] = steps[ended]
        stopped = self._find_stops(np.flatnonzero(busy), status, every)
        done = np.flatnonzero(busy & (status != RUNNING))
        if len(done) == 0:
            return
        lengths = self.steps[done]
        for i, slot in enumerate(done.tolist() if stopped else ()):
            if slot in stopped:
                lengths[i] = stopped[slot][0]
        sequences = [self.sequences[i] for i in self.owner[done]]
        stops = [stopped[slot][1] if slot in stopped else None for slot in done.tolist()]
        self._finished.append(Readback(state, self.active, sequences, done, lengths, status[done], stops))
        broken = ints[-1, done] == BROKEN  # also if a stop string came before
        if self.keep:
            for i in np.flatnonzero(~broken).tolist():
                sequences[i].saved_kv = self.memory.keep(int(done[i]), sequences[i], int(lengths[i]))
                self.add_resting(sequences[i])
        state.mark_idle(done[ints[-1, done] == RUNNING])
        self._free(done, done[broken])
        self.crowded = False

    def _find_stops(self, busy: np.ndarray, status: np.ndarray, every: int) -> dict[int, tuple[int, str]]:
        """Return `StopStrings.find`, which also searches slots whose newest token may complete a string if that is
        free to know."""
        if not self.searches:
            return {}
        stopped: dict[int, tuple[int, str]] = {}
        state = self.runner.state
        if self.stop_tokens is not None:
            newest = state.ints[TOKEN].numpy()[busy]
            likely = busy[self.stop_tokens.among(self.stops.request[busy], newest)]
            stopped = self.stops.find(likely, self.steps, status, state.out_ints[0], every=1)
        return stopped | self.stops.find(busy, self.steps, status, state.out_ints[0], every)

    def read_back(self, sequence: SequenceState | None = None) -> None:
        """Read back what a sequence, or all in slots, have sampled so far, up to a stop string if there is one."""
        self.settle()
        self._search(self._slots(sequence))
        self._read_back(self._slots(sequence))

    def _slots(self, sequence: SequenceState | None) -> np.ndarray:
        """Return the slot of a sequence if it has one, or all slots in use."""
        busy = np.flatnonzero(self.owner >= 0)
        return busy if sequence is None else busy[busy == sequence.slot]

    def _search(self, slots: np.ndarray) -> None:
        """Search these slots for stop strings now instead of after enough new tokens."""
        due = [slot for slot in slots.tolist() if self.sequences[self.owner[slot]].strings]
        due = [slot for slot in due if self.steps[slot] > self.stops.checked[slot]]
        if due:
            owner = np.full(due[-1] + 1, -1)
            owner[due] = self.owner[due]
            download = Download(self.runner.state.ints[STEP : STATUS + 1, : len(owner)])
            self._collect(owner, download.wait()[0].numpy(), every=1)
            self.settle()

    def _read_back(self, slots: np.ndarray) -> list[SequenceState]:
        """Read back the sequences in these slots, and return them."""
        sequences = [self.sequences[i] for i in self.owner[slots]]
        if any(self.steps[slot] > len(s.tokens) for slot, s in zip(slots, sequences, strict=True)):
            Readback(self.runner.state, self.active, sequences, slots, self.steps[slots]).finish()
        return sequences

    def remove(self, sequence: SequenceState, keep: bool = True) -> SequenceState:
        """Remove a sequence from its slot, keeping its keys and values if ``keep``, or from the queue; return it."""
        self.settle()
        self._read_back(self._slots(sequence))
        if sequence.slot >= 0:
            if keep:
                sequence.saved_kv = self.memory.keep(sequence.slot, sequence, len(sequence.tokens))
            slot = np.array([sequence.slot])
            self.runner.state.mark_idle(slot)
            self._free(slot, slot[:0])
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        return sequence

    def _free(self, slots: np.ndarray, broken: np.ndarray) -> None:
        """Free slots; the keys and values of ``broken`` ones may hold NaN."""
        for slot in slots:
            sequence = self.sequences[self.owner[slot]]
            sequence.slot, sequence.searched = -1, int(self.stops.checked[slot])
        self.owner[slots], self.steps[slots], self.limits[slots] = -1, 0, 0
        self.memory.evict(slots, broken)

    def add_resting(self, sequence: SequenceState) -> None:
        """Keep the keys and values of a sequence that has ended, discarding the oldest beyond the size of the cache."""
        self.remove_resting(sequence)
        if sequence.saved_kv is None:
            return
        self.resting[sequence.index] = sequence
        self.resting_bytes += sequence.saved_kv.bytes
        while self.resting_bytes > max(self.runner.plan.cache_bytes, sequence.saved_kv.bytes):
            oldest = next(iter(self.resting.values()))
            self.remove_resting(oldest)
            oldest.discard_kv()

    def remove_resting(self, sequence: SequenceState) -> None:
        """Take a sequence off the resting ones, without discarding its keys and values."""
        if self.resting.pop(sequence.index, None) is not None:
            self.resting_bytes -= sequence.saved_kv.bytes

    # Slots

    def _rearrange(self) -> None:
        """Split shared rows whose slots sampled different tokens, and close gaps if that is worth it."""
        longest = int(self.steps.max())
        spans = self.memory if isinstance(self.memory, SpanMemory) else None
        if spans is not None and (slots := spans.split(longest)) is not None:
            self._move_slots(np.flatnonzero(self.owner >= 0), slots)
        busy = np.flatnonzero(self.owner >= 0)
        count = len(busy)
        if count and not self.waiting:
            last = int(busy[-1]) + 1
            if self.runner.use_graphs:
                worthwhile = graph_size(count, self.slots) < graph_size(last, self.slots)
            else:
                worthwhile = last - count > count // 16
            if worthwhile:
                source = busy[busy >= count]
                target = np.flatnonzero(self.owner[:count] < 0)
                self._move_slots(source, target)
                self.memory.move_slots(source, target)
        if spans is not None:
            spans.compact(longest, count)

    def _move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move the state of slots, all at once, so that they may swap."""
        self.runner.state.move(source, target, int(self.steps.max()))
        stops = self.stops
        for values in (self.owner, self.steps, self.limits, self.offsets, stops.request, stops.checked, stops.floor):
            moved = values[source]
            values[source] = -1 if values is self.owner else 0
            values[target] = moved
        for slot in target:
            self.sequences[self.owner[slot]].slot = int(slot)


def _too_large(sequence: SequenceState) -> MemoryError:
    return MemoryError(f"sequence {sequence.index} does not fit into memory on its own; raise memory_budget")
