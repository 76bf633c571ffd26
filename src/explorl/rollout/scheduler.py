"""Seats samples, decodes, collects what has ended, and refills: the one loop that all sampling goes through."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from explorl.rollout.looks import Ending, bucket, steps_to_look
from explorl.rollout.memory.page_memory import PageMemory
from explorl.rollout.memory.sharing import Layout
from explorl.rollout.memory.spans import SpanMemory
from explorl.rollout.reading import Reading
from explorl.rollout.runner import Runner
from explorl.rollout.sampling import Active
from explorl.rollout.sequences import Sample, numbers
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
    TOKEN,
    TOP_K,
)
from explorl.rollout.stop_tokens import StopTokens
from explorl.rollout.stops import EVERY, StopStrings
from explorl.rollout.transfer import Download

SYNC_STEPS = {"cuda": 8, "cpu": 1}
"""Decode steps between two looks at what has finished, where a row can end at any of them; see `steps_to_look`."""
AHEAD = {"cuda": True, "cpu": False}
"""Whether the next steps begin before the host has looked at the last ones, so that the device never waits for it."""

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs samples in the seats of a runner.

    Where not all have a seat, those that have begun go first, then, in pages, the ones with the highest limit, so that
    the longest do not run alone in the end, then the oldest. Random numbers belong to a request, so the order changes
    no token. Where memory runs out, the youngest in a seat gives way: the oldest never does, so there is always one
    that gets to its end.

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
        """Samples without a seat that are to go on, in the order in which they will."""
        self.resting: dict[int, Sample] = {}
        """Samples that have ended and of which keys and values are kept, by number, the longest ago first."""
        self.resting_bytes = 0
        self.paged = self.certain = False
        """Whether rows have pages; whether they end at their limits and nowhere else."""
        self._look: tuple[np.ndarray, Download] | None = None
        """Who sat where, and how their seats stood, after steps that the host has not looked at."""
        self._endings: list[Ending] = []
        """Samples that have ended, and whose tokens are on their way."""

    memory: PageMemory | SpanMemory

    def move_in(
        self, runner: Runner, slots: int, active: Active, memory: PageMemory | SpanMemory | None = None
    ) -> None:
        """Works from now on in this runner, where nobody sits yet; ``memory`` is what was known of another."""
        self.runner, self.slots, self.active = runner, slots, active
        self.kind = runner.device.type
        self.owner = np.full(slots, -1)
        """The sample in each seat, −1 where there is none."""
        self.steps = np.zeros(slots, dtype=np.int64)
        """Tokens in each seat's completion after the steps that have begun, if it has not ended before."""
        self.limits = np.zeros(slots, dtype=np.int64)
        self.offsets = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat's prompt but the last."""
        self.crowded = False
        """Whether somebody had to give way since the last sample ended."""
        self.stops = StopStrings(self.strings, self.tokenizer, slots)
        # Where nobody waits for a row that has stopped, those that stop within a few steps are taken together.
        early = self.kind == "cpu" and self.keep
        self.stop_tokens = StopTokens(self.strings, self.tokenizer, runner.state.vocab) if early else None
        if memory is None or not memory.migrate(runner, slots):
            self.abandon()
            memory = PageMemory(runner, slots) if runner.plan.pages else SpanMemory(runner, slots)
        self.memory, memory.resting = memory, self.resting
        self.paged = isinstance(memory, PageMemory)
        self.waiting.sort(key=self._turn)
        runner.state.ints[STATUS] = IDLE

    def move_out(self, keep: bool = True) -> None:
        """Empties all seats; those who sat there wait again."""
        self.settle()
        seats = np.flatnonzero(self.owner >= 0)
        if len(seats):
            samples = self._read(seats)
            for seat, sample in zip(seats.tolist(), samples if keep else (), strict=False):
                sample.kept = self.memory.keep(seat, sample, len(sample.tokens))
            self._free(seats, seats[:0])
            self.wait(*samples)
        self.runner.state.ints[STATUS] = IDLE

    def abandon(self) -> None:
        """Forgets all that is kept in a memory that is given up."""
        for sample in self.samples:
            sample.forget()
        self.resting.clear()
        self.resting_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything left to sample or to look at."""
        return bool(self.waiting or self._look or self._endings) or bool((self.owner >= 0).any())

    def wait(self, *samples: Sample) -> None:
        """Puts samples in the queue."""
        for sample in samples:
            self.wake(sample)
        if len(samples) == 1:
            insort(self.waiting, samples[0], key=self._turn)
        else:
            self.waiting = sorted([*self.waiting, *samples], key=self._turn)

    def _turn(self, sample: Sample) -> Any:
        # Spans have room for few prompts at a time, so there all samples of one go together.
        return sample.priority if self.paged else sample.index

    def advance(self, most: int | None = None, ahead: bool = False) -> int:
        """Decodes up to the next look, or ``most`` steps if that is less; how many it were.

        ``ahead`` allows to leave that look to the next call, after it has begun with its own steps; `settle` takes it.
        """
        ahead = ahead and AHEAD.get(self.kind, False) and self.paged and not any(self.strings)
        if not ahead:
            self.settle()
        self._admit()
        busy = np.flatnonzero(self.owner >= 0)
        if len(busy) == 0 and self._look is None and not self._endings:
            raise _too_large(self.waiting[0])
        steps = self._steps(busy, most, ahead) if len(busy) else 0
        if steps:
            busy = self._make_room(busy, steps)
        if steps == 0 or len(busy) == 0:  # all have ended, or will have at the next look
            self.settle()
            return 0
        held = self.steps[busy]
        layout = self._layout(busy)
        even = bool((held == held[0]).all())
        length = self.memory.length(self.offsets[busy] + held, held)
        self.runner.run(layout, length, even, steps, self.active)
        self.steps[busy] = np.minimum(held + steps, self.limits[busy])
        if not ahead:
            self._begin_look()
            self.settle()
        self._finish_look()
        self._rearrange()
        if ahead:
            self._begin_look()
        return steps

    def _steps(self, busy: np.ndarray, most: int | None, ahead: bool) -> int:
        patience = SYNC_STEPS.get(self.kind, 1)
        steps = steps_to_look(
            self.limits[busy] - self.steps[busy],
            int(busy[-1]) + 1,
            self.slots,
            patience=max(1, patience // 2) if ahead else patience,  # what is found is one look old
            certain=self.certain and patience > 1,
            waiting=bool(self.waiting),
        )
        return min(steps, most or steps)

    def _make_room(self, busy: np.ndarray, steps: int) -> np.ndarray:
        """Gives the seats memory for the next steps; where there is not enough, the youngest gives way and waits."""
        while not self.memory.reserve(
            busy, self.offsets[busy] + np.minimum(self.steps[busy] + steps, self.limits[busy])
        ):
            if self._look is not None or self._endings:
                self.settle()  # somebody may have ended
                busy = np.flatnonzero(self.owner >= 0)
                continue
            youngest = self.samples[self.owner[busy].max()]
            if len(busy) == 1:
                raise _too_large(youngest)
            logger.info("row %d gives way: memory is full", youngest.index)
            self.wait(self.unseat(youngest, keep=False))
            self.crowded = True
            busy = np.flatnonzero(self.owner >= 0)
        self.memory.publish()
        return busy

    def _layout(self, busy: np.ndarray) -> Layout:
        if self.runner.use_graphs:
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
            taken = self.memory.admit(self.waiting, len(free))
            if not taken:
                return
            del self.waiting[: len(taken)]
            self._start(free[: len(taken)], taken)
            free = free[len(taken) :]

    def _start(self, seats: np.ndarray, samples: Sequence[Sample]) -> None:
        state = self.runner.state
        offsets = np.array([sample.prompt.stored for sample in samples])
        had = np.array([len(sample.tokens) for sample in samples])
        limits = np.array([sample.limit for sample in samples])
        params = numbers(samples, ["top_k", *STATE_REALS])
        fields = {
            TOKEN: np.array([(sample.tokens or sample.prompt.tokens)[-1] for sample in samples]),
            POSITION: offsets + had,
            STEP: had,
            LIMIT: limits,
            STATUS: RUNNING,
            KEY: np.array([sample.key for sample in samples]),
            TOP_K: params["top_k"],
            PROMPT: self.memory.start(seats, samples),
            OFFSET: offsets,
            CURVE: np.array([sample.curve for sample in samples]),
            STOP_SET: np.array([sample.stop_set for sample in samples]),
            BIAS_SET: np.array([sample.bias_set for sample in samples]),
        }
        ints = np.stack([np.broadcast_to(fields[i], len(seats)) for i in range(len(fields))]).astype(np.int64)
        reals = np.empty((len(STATE_REALS), len(seats)))
        for name, row in STATE_REALS.items():
            reals[row] = params[name]
        where = state.admit(seats, ints, reals)
        if self.active.repetition:
            state.remember(where, [sample.ids for sample in samples])
        going_on = np.flatnonzero(had)
        if len(going_on):
            state.write(seats[going_on], [samples[i].tokens for i in going_on.tolist()])
        for seat, sample in zip(seats, samples, strict=True):
            sample.seat = int(seat)
            sample.forget()
        self.owner[seats] = [sample.index for sample in samples]
        self.steps[seats], self.limits[seats], self.offsets[seats] = had, limits, offsets
        searched = [min(sample.searched, len(sample.tokens)) for sample in samples]
        self.stops.start(seats, searched, [sample.floor(len(sample.tokens)) for sample in samples])

    # Results

    def settle(self) -> None:
        """Looks at all that has been decoded, and gives what has ended its tokens."""
        while self._look is not None or self._endings:
            self._finish_look()

    def _begin_look(self) -> None:
        seats = int(np.flatnonzero(self.owner >= 0)[-1]) + 1 if (self.owner >= 0).any() else 0
        if seats:
            looked = Download(self.runner.state.ints[STEP : STATUS + 1, :seats])
            self._look = self.owner[:seats].copy(), looked

    def _finish_look(self) -> None:
        """Ends what the look before had found, takes the look that was begun, and frees the seats of what has ended."""
        endings, self._endings = self._endings, []
        for ending in endings:
            ending.land()
        if self._look is not None:
            (owner, looked), self._look = self._look, None
            self._collect(owner, looked.wait()[0].numpy())
        for ending in endings:
            for sample in ending.samples:
                self.on_end(sample)

    def _collect(self, owner: np.ndarray, looked: np.ndarray, every: int = EVERY) -> None:
        state, seats = self.runner.state, len(owner)
        steps, status = looked[0], looked[-1].copy()
        busy = (owner >= 0) & (owner == self.owner[:seats])  # others have come since
        ended = np.flatnonzero(busy & (status != RUNNING))
        self.steps[ended] = steps[ended]
        cut = self._find_stops(np.flatnonzero(busy), status, every)
        done = np.flatnonzero(busy & (status != RUNNING))
        if len(done) == 0:
            return
        lengths = self.steps[done]
        for i, seat in enumerate(done.tolist() if cut else ()):
            if seat in cut:
                lengths[i] = cut[seat][0]
        samples = [self.samples[i] for i in self.owner[done]]
        reading = Reading(state, self.active, samples, done, lengths)
        stops = [cut[seat][1] if seat in cut else None for seat in done.tolist()]
        self._endings.append(Ending(reading, status[done], lengths, stops))
        broken = looked[-1, done] == BROKEN  # also where a stop string came before
        if self.keep:
            for i in np.flatnonzero(~broken).tolist():
                samples[i].kept = self.memory.keep(int(done[i]), samples[i], int(lengths[i]))
                self.rest(samples[i])
        state.idle(done[looked[-1, done] == RUNNING])
        self._free(done, done[broken])
        self.crowded = False

    def _find_stops(self, busy: np.ndarray, status: np.ndarray, every: int) -> dict[int, tuple[int, str]]:
        """`StopStrings.find`, and at once where the newest token may complete a string, if that is free to know."""
        found: dict[int, tuple[int, str]] = {}
        state = self.runner.state
        if self.stop_tokens is not None and any(self.strings):
            newest = state.ints[TOKEN].numpy()[busy]
            likely = busy[self.stop_tokens.among(self.owner[busy], newest)]
            found = self.stops.find(likely, self.owner, self.steps, status, state.out_ints[0], every=1)
        return found | self.stops.find(busy, self.owner, self.steps, status, state.out_ints[0], every)

    def read(self, sample: Sample) -> None:
        """Brings what a seated sample has sampled so far to the host; up to a stop string, where there is one."""
        self.settle()
        if sample.seat >= 0:
            self._search(np.array([sample.seat]))
        self._bring(sample)

    def _search(self, seats: np.ndarray) -> None:
        """Looks for the stop strings of these seats now, not only when enough tokens have come."""
        due = [seat for seat in seats.tolist() if self.strings[self.owner[seat]]]
        due = [seat for seat in due if self.steps[seat] > self.stops.checked[seat]]
        if due:
            owner = np.full(due[-1] + 1, -1)
            owner[due] = self.owner[due]
            looked = self.runner.state.ints[STEP : STATUS + 1, : len(owner)]
            self._collect(owner, looked.cpu().numpy(), every=1)
            self.settle()

    def _bring(self, sample: Sample) -> None:
        self.settle()
        if sample.seat >= 0 and self.steps[sample.seat] > len(sample.tokens):
            self._read(np.array([sample.seat]))

    def _read(self, seats: np.ndarray) -> list[Sample]:
        samples = [self.samples[i] for i in self.owner[seats]]
        Reading(self.runner.state, self.active, samples, seats, self.steps[seats]).land()
        return samples

    def read_all(self) -> None:
        """The same of all that are seated, in one go."""
        self.settle()
        self._search(np.flatnonzero(self.owner >= 0))
        seats = np.flatnonzero(self.owner >= 0)
        if len(seats):
            self._read(seats)

    def unseat(self, sample: Sample, keep: bool = True) -> Sample:
        """Takes a sample off its seat; its keys and values are kept or forgotten."""
        self._bring(sample)
        if sample.seat >= 0:
            if keep:
                sample.kept = self.memory.keep(sample.seat, sample, len(sample.tokens))
            seat = np.array([sample.seat])
            self.runner.state.idle(seat)
            self._free(seat, seat[:0])
        elif sample in self.waiting:
            self.waiting.remove(sample)
        return sample

    def _free(self, seats: np.ndarray, broken: np.ndarray) -> None:
        for seat in seats:
            sample = self.samples[self.owner[seat]]
            sample.seat, sample.searched = -1, int(self.stops.checked[seat])
        self.owner[seats], self.steps[seats], self.limits[seats] = -1, 0, 0
        self.memory.evict(seats, broken)

    def rest(self, sample: Sample) -> None:
        """A sample has ended: what is kept of it stays while there is room, as much as the rows themselves have."""
        self.wake(sample)
        if sample.kept is None:
            return
        self.resting[sample.index] = sample
        self.resting_bytes += sample.kept.bytes
        while self.resting_bytes > max(self.runner.plan.cache_bytes, sample.kept.bytes):
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
            if self.runner.use_graphs:
                worth = bucket(count, self.slots) < bucket(last, self.slots)
            else:
                worth = last - count > count // 16
            if worth:
                source = busy[busy >= count]
                target = np.flatnonzero(self.owner[:count] < 0)
                self._seats_to(source, target)
                self.memory.move_slots(source, target, most)
        self.memory.compact(most, count)

    def _seats_to(self, source: np.ndarray, target: np.ndarray) -> None:
        """Moves what is known of seats, all at once: they may change places."""
        self.runner.state.move(source, target, int(self.steps.max()))
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


def _too_large(sample: Sample) -> MemoryError:
    return MemoryError(f"row {sample.index} does not fit into memory alone; raise memory_budget")
