"""Seats samples, decodes, collects what has ended, and refills: the one loop that all sampling goes through."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from explorl.rollout.decoder import Decoder
from explorl.rollout.page_memory import PageMemory
from explorl.rollout.rollouts import FinishReason
from explorl.rollout.samples import Sample
from explorl.rollout.sampling import Active
from explorl.rollout.sharing import Layout
from explorl.rollout.spans import SpanMemory
from explorl.rollout.state import (
    BIAS_SET,
    BROKEN,
    CURVE,
    IDLE,
    KEY,
    LIMIT,
    OFFSET,
    POSITION,
    PROMPT,
    RUNNING,
    STATE_REALS,
    STATUS,
    STEP,
    STOP_SET,
    STOPPED,
    TOKEN,
    TOP_K,
)
from explorl.rollout.stops import StopStrings

SYNC_STEPS = {"cuda": 8, "cpu": 1}
"""Decode steps between two looks at what has finished; twice as many where nobody waits for a seat."""
TOPS = ("top_ids", "top_logps")

logger = logging.getLogger(__name__)

_REASONS: dict[int, FinishReason] = {STOPPED: "stop", BROKEN: "error"}


class Schedule:
    """Runs samples in the seats of a decoder; the oldest go first.

    Args:
        samples: All samples of the session, by their number; it may grow.
        keep: Whether a sample that ends may go on later, so that its keys and values are worth keeping.
        on_end: Called with every sample that ends.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        tokenizer: Any,
        strings: Sequence[Sequence[str]],
        keep: bool,
        on_end: Callable[[Sample], object],
    ) -> None:
        self.samples, self.tokenizer, self.strings, self.keep, self.on_end = samples, tokenizer, strings, keep, on_end
        self.waiting: list[Sample] = []
        """Samples without a seat that are to go on, oldest first."""
        self.resting: dict[int, Sample] = {}
        """Samples that have ended and of which keys and values are kept, by number, the longest ago first."""
        self.resting_bytes = 0

    memory: PageMemory | SpanMemory

    def move_in(
        self, decoder: Decoder, slots: int, active: Active, memory: PageMemory | SpanMemory | None = None
    ) -> None:
        """Works from now on in this decoder, where nobody sits yet; ``memory`` is what was known of another."""
        self.decoder, self.slots, self.active = decoder, slots, active
        self.kind = decoder.device.type
        self.owner = np.full(slots, -1)
        """The sample in each seat, −1 where there is none."""
        self.steps = np.zeros(slots, dtype=np.int64)
        """Tokens in each seat's completion, as of the last look."""
        self.limits = np.zeros(slots, dtype=np.int64)
        self.offsets = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat's prompt but the last."""
        self.crowded = False
        """Whether somebody had to give way since the last sample ended."""
        self.stops = StopStrings(self.strings, self.tokenizer, slots)
        if memory is None or not memory.rehouse(decoder, slots):
            self.abandon()
            memory = PageMemory(decoder, slots) if decoder.plan.pages else SpanMemory(decoder, slots)
        self.memory, memory.resting = memory, self.resting
        decoder.state.ints[STATUS] = IDLE

    def move_out(self, keep: bool = True) -> None:
        """Empties all seats; those who sat there wait again."""
        for seat in np.flatnonzero(self.owner >= 0):
            self.wait(self.unseat(self.samples[self.owner[seat]], keep))
        self.decoder.state.ints[STATUS] = IDLE

    def abandon(self) -> None:
        """Forgets all that is kept in a memory that is given up."""
        for sample in self.samples:
            sample.forget()
        self.resting.clear()
        self.resting_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything left to sample."""
        return bool(self.waiting) or bool((self.owner >= 0).any())

    def wait(self, sample: Sample) -> None:
        """Puts a sample in the queue."""
        self.wake(sample)
        insort(self.waiting, sample, key=lambda other: other.index)

    def advance(self, most: int | None = None) -> int:
        """Decodes up to the next look, or ``most`` steps if that is less; how many it were."""
        self._admit()
        busy = np.flatnonzero(self.owner >= 0)
        if len(busy) == 0:
            raise MemoryError(f"row {self.waiting[0].index} does not fit into memory alone; raise memory_budget")
        patience = SYNC_STEPS.get(self.kind, 1)
        if patience > 1 and not self.waiting:
            patience *= 2
        steps = int(min(patience, (self.limits[busy] - self.steps[busy]).max(), most or patience))
        busy = self._make_room(busy, steps)
        held = self.steps[busy]
        layout = self._layout(busy)
        even = bool((held == held[0]).all())
        length = self.memory.length(self.offsets[busy] + held, held)
        self.decoder.run(layout, length, even, steps, self.active)
        self._collect(layout.seats)
        self._rearrange()
        return steps

    def _make_room(self, busy: np.ndarray, steps: int) -> np.ndarray:
        """Gives the seats memory for the next steps; where there is not enough, the youngest gives way and waits."""
        while not self.memory.ready(busy, self.offsets[busy] + np.minimum(self.steps[busy] + steps, self.limits[busy])):
            youngest = self.samples[self.owner[busy].max()]
            logger.info("row %d gives way: memory is full", youngest.index)
            self.wait(self.unseat(youngest, keep=False))
            self.crowded = True
            busy = np.flatnonzero(self.owner >= 0)
        self.memory.publish()
        return busy

    def _layout(self, busy: np.ndarray) -> Layout:
        if self.decoder.use_graphs:
            rows = bucket(int(busy[-1]) + 1, self.slots)
            return Layout(rows, rows, None, None)
        return self.memory.layout(busy)

    # Admission

    def _admit(self) -> None:
        free = np.flatnonzero(self.owner < 0)
        if self.kind == "cpu" and len(free) < min(len(self.waiting), max(1, self.slots // 16)):
            return  # a few idle seats cost less than filling them one by one
        if self.crowded and len(free) < self.slots:
            return  # whoever came now would soon have to give way again
        while self.waiting and len(free):
            taken = self.memory.take(self.waiting, len(free))
            if not taken:
                return
            del self.waiting[: len(taken)]
            self._start(free[: len(taken)], taken)
            free = free[len(taken) :]

    def _start(self, seats: np.ndarray, samples: Sequence[Sample]) -> None:
        state = self.decoder.state
        offsets = np.array([sample.prompt.stored for sample in samples])
        had = np.array([len(sample.tokens) for sample in samples])
        limits = np.array([sample.limit for sample in samples])
        fields = {
            TOKEN: np.array([(sample.tokens or sample.prompt.tokens)[-1] for sample in samples]),
            POSITION: offsets + had,
            STEP: had,
            LIMIT: limits,
            STATUS: RUNNING,
            KEY: np.array([sample.key for sample in samples]),
            TOP_K: np.array([sample.number("top_k") for sample in samples]),
            PROMPT: self.memory.start(seats, samples),
            OFFSET: offsets,
            CURVE: np.array([sample.curve for sample in samples]),
            STOP_SET: np.array([sample.stop_set for sample in samples]),
            BIAS_SET: np.array([sample.bias_set for sample in samples]),
        }
        ints = np.stack([np.broadcast_to(fields[i], len(seats)) for i in range(len(fields))])
        reals = np.array([[sample.number(name) for sample in samples] for name in STATE_REALS], dtype=np.float64)
        where = torch.from_numpy(seats).to(self.decoder.device)
        state.admit(where, torch.from_numpy(ints), torch.from_numpy(reals))
        if self.active.repetition:
            state.remember(where, [sample.ids for sample in samples])
        going_on = np.flatnonzero(had)
        if len(going_on):
            state.write(where[torch.from_numpy(going_on).to(where.device)], [samples[int(i)].tokens for i in going_on])
        for seat, sample in zip(seats, samples, strict=True):
            sample.seat = int(seat)
            sample.forget()
        self.owner[seats] = [sample.index for sample in samples]
        self.steps[seats], self.limits[seats], self.offsets[seats] = had, limits, offsets
        self.stops.start(seats, had, [sample.floor for sample in samples])

    # Results

    def _collect(self, seats: int) -> None:
        """Looks at the seats, takes out what has ended and frees its seats."""
        state = self.decoder.state
        looked = state.ints[STEP : STATUS + 1, :seats].cpu().numpy()
        steps, status = looked[0], looked[-1].copy()
        busy = self.owner[:seats] >= 0
        self.steps[:seats] = np.where(busy, steps, 0)
        cut = self.stops.find(np.flatnonzero(busy), self.owner, self.steps, status, state.out_ints[0])
        done = np.flatnonzero(busy & (status != RUNNING))
        if len(done) == 0:
            return
        lengths = np.array([cut[seat][0] if seat in cut else self.steps[seat] for seat in done.tolist()])
        self._read(done, lengths)
        ended = [self.samples[self.owner[seat]] for seat in done]
        for seat, sample in zip(done, ended, strict=True):
            sample.reason = _REASONS.get(int(status[seat]), "length")
            sample.stop = cut[int(seat)][1] if int(seat) in cut else None
            if sample.reason == "error":
                sample.error = _broken(sample)
            elif self.keep and looked[-1, seat] != BROKEN:
                self._rest(sample, self.memory.keep(int(seat), sample, len(sample.tokens)))
        self._free(done, done[looked[-1, done] == BROKEN])  # also where a stop string came before
        self.crowded = False
        for sample in ended:
            self.on_end(sample)

    def _read(self, seats: np.ndarray, lengths: np.ndarray) -> None:
        """Brings what these seats have sampled, up to these lengths of their completions, to the host."""
        state = self.decoder.state
        where, longest = torch.from_numpy(seats).to(self.decoder.device), int(lengths.max())
        ints, reals = state.out_ints[:, where, :longest].cpu(), state.out_reals[:, where, :longest].cpu()
        tokens = ints[0].tolist()
        mass = state.out_mass[where, :longest].cpu() if self.active.min_p_mass and state.out_mass is not None else None
        tops = [None if top is None else top[where, :longest].cpu() for top in (state.top_ids, state.top_logps)]
        for i, (seat, length) in enumerate(zip(seats, lengths, strict=True)):
            sample = self.samples[self.owner[seat]]
            sample.cut(int(length))  # where somebody looked at it before its stop string was found
            new = slice(len(sample.tokens), int(length))
            records = {"branching": ints[1, i, new], "entropy": reals[2, i, new]}
            records |= {"logps": reals[0, i, new], "sampling_logps": reals[1, i, new]}
            if mass is not None:
                records["min_p_mass"] = mass[i, new]
            if k := int(sample.number("logprobs")):
                records |= {name: top[i, new, :k] for name, top in zip(TOPS, tops, strict=True) if top is not None}
            sample.append(tokens[i][new], records)

    def read(self, sample: Sample) -> None:
        """Brings what a seated sample has sampled so far to the host."""
        if sample.seat >= 0 and self.steps[sample.seat] > len(sample.tokens):
            seat = np.array([sample.seat])
            self._read(seat, self.steps[seat])

    def read_all(self) -> None:
        """The same of all that are seated, in one go."""
        seats = np.flatnonzero(self.owner >= 0)
        if len(seats):
            self._read(seats, self.steps[seats])

    def unseat(self, sample: Sample, keep: bool = True) -> Sample:
        """Takes a sample off its seat; its keys and values are kept or forgotten."""
        if sample.seat >= 0:
            self.read(sample)
            if keep:
                sample.kept = self.memory.keep(sample.seat, sample, len(sample.tokens))
            seat = np.array([sample.seat])
            self._free(seat, seat[:0])
        elif sample in self.waiting:
            self.waiting.remove(sample)
        return sample

    def _free(self, seats: np.ndarray, broken: np.ndarray) -> None:
        for seat in seats:
            self.samples[self.owner[seat]].seat = -1
        self.decoder.state.ints[STATUS, torch.from_numpy(seats).to(self.decoder.device)] = IDLE
        self.owner[seats], self.steps[seats], self.limits[seats] = -1, 0, 0
        self.memory.leave(seats, broken)

    def _rest(self, sample: Sample, kept: Any) -> None:
        """Keeps what a sample holds, while there is room: as much as the rows themselves have."""
        sample.kept = kept
        self.resting[sample.index] = sample
        self.resting_bytes += kept.bytes
        while self.resting_bytes > max(self.decoder.plan.cache_bytes, kept.bytes):
            oldest = next(iter(self.resting.values()))
            self.wake(oldest)
            oldest.forget()

    def wake(self, sample: Sample) -> None:
        """A sample rests no longer: what is kept of it is its own affair."""
        if self.resting.pop(sample.index, None) is not None:
            self.resting_bytes -= sample.kept.bytes

    # Seats

    def _rearrange(self) -> None:
        """Splits rows whose seats went different ways, and closes gaps that cost more than the closing."""
        most = int(self.steps.max())
        busy = np.flatnonzero(self.owner >= 0)
        seats = self.memory.split(most)
        if seats is not None:
            self._seats_to(busy, seats)
        busy = np.flatnonzero(self.owner >= 0)
        count = len(busy)
        if count and not self.waiting:
            last = int(busy[-1]) + 1
            if self.decoder.use_graphs:
                worth = bucket(count, self.slots) < bucket(last, self.slots)
            else:
                worth = last - count > count // 16
            if worth:
                source = busy[busy >= count]
                target = np.setdiff1d(np.arange(count), busy)
                self._seats_to(source, target)
                self.memory.move_seats(source, target, most)
        self.memory.compact(most, count)

    def _seats_to(self, source: np.ndarray, target: np.ndarray) -> None:
        """Moves what is known of seats, all at once: they may change places."""
        device, state = self.decoder.device, self.decoder.state
        state.move(torch.from_numpy(source).to(device), torch.from_numpy(target).to(device), int(self.steps.max()))
        arrays: tuple[tuple[np.ndarray, int], ...] = (
            (self.owner, -1),
            (self.steps, 0),
            (self.limits, 0),
            (self.offsets, 0),
        )
        arrays += (self.stops.checked, 0), (self.stops.floor, 0)
        for values, idle in arrays:
            moved = values[source]
            values[source] = idle
            values[target] = moved
        for seat in target:
            self.samples[self.owner[seat]].seat = int(seat)


def _broken(sample: Sample) -> str:
    return (
        f"the model's logits are not finite at step {len(sample.tokens)} of request {sample.index} "
        f"(prompt {sample.prompt_index}, sample {sample.sample_index}): NaN or infinite weights?"
    )


def bucket(rows: int, slots: int) -> int:
    """Rows that a graph is captured for: the next power of two, or all slots."""
    return min(1 << (rows - 1).bit_length(), slots)
