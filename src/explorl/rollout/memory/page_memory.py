"""Whose the pages are: `PageMemory`.

Pages are counted: samples share their prompt's full pages, and forks those of the row that they come from; only the
last page, which is written to, is copied. So memory follows the tokens that exist. What nobody decodes at the moment
(prompts, rows that have ended) keeps its pages until others need them, the longest unused first; where that is not
enough, the youngest row gives way, and is computed again from its tokens later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from explorl.rollout.memory.pages import BLANK, NOBODYS, pages_for
from explorl.rollout.memory.sharing import Layout
from explorl.rollout.sequences import PromptTokens, SequenceState


class Kept:
    """The pages of a sequence's first tokens, held for somebody who may go on from there."""

    def __init__(self, memory: PageMemory, pages: np.ndarray, length: int) -> None:
        self.memory, self.pages, self.length = memory, pages.copy(), length
        memory.hold(self.pages)

    @property
    def bytes(self) -> int:
        return 0  # they are taken back when others need them

    def first(self, length: int, prompt: int) -> Kept:
        """The pages of the first completion tokens, after a prompt of so many stored tokens."""
        length = min(self.length, prompt + length)
        return Kept(self.memory, self.pages[: pages_for(length, self.memory.page)], length)

    def drop(self) -> None:
        """Gives the pages back."""
        self.memory.give(self.pages)
        self.pages = self.pages[:0]


class PageMemory:
    """Gives samples pages, and computes what they do not hold."""

    shares = False

    def __init__(self, runner: Any, slots: int) -> None:
        self.runner, self.cache, self.page = runner, runner.cache, runner.cache.page
        self.refs = np.zeros(self.cache.pages, dtype=np.int64)
        """How many have each page."""
        self.room = self.cache.pages - NOBODYS
        """Free pages."""
        self._sit(slots)
        self.prompts: dict[PromptTokens, np.ndarray] = {}
        """Pages of prompts, the longest unused first."""
        self.resting: dict[int, SequenceState] = {}
        self.waiting: Sequence[SequenceState] = ()
        self.spoiled: set[int] = set()
        """Pages that may hold NaN, and are zeroed when nobody has them any more."""

    def _sit(self, slots: int) -> None:
        """There are so many seats, and nobody sits there."""
        self.tables = np.full((slots, self.cache.table.shape[1]), BLANK, dtype=np.int32)
        """Pages of each seat."""
        self.held = np.zeros(slots, dtype=np.int64)
        """How many it has."""
        self._stale = True
        """Whether the device knows other tables."""

    @property
    def free(self) -> np.ndarray:
        """Pages that nobody has, but for those that are nobody's."""
        return np.flatnonzero(self.refs[NOBODYS:] == 0) + NOBODYS

    def rehouse(self, runner: Any, slots: int) -> bool:
        """Goes on in another runner, where nobody sits yet; False where its pages are others, or fewer."""
        old, new = self.cache, runner.cache
        if not runner.plan.pages or new.page != self.page or new.pages < old.pages:
            return False
        if new is not old:
            for block, before in zip(new.blocks, old.blocks, strict=True):
                block[:, : old.pages] = before
            self.refs = np.concatenate([self.refs, np.zeros(new.pages - old.pages, dtype=np.int64)])
            self.room += new.pages - old.pages
        self.runner, self.cache = runner, new
        self._sit(slots)
        return True

    # Counting

    def hold(self, pages: np.ndarray) -> None:
        """One owner more for each of these pages, which somebody has already; some may be named several times."""
        np.add.at(self.refs, pages, 1)

    def give(self, pages: np.ndarray) -> None:
        """Takes one owner off each page, and back those that have none."""
        np.subtract.at(self.refs, pages, 1)
        freed = np.unique(pages[self.refs[pages] == 0])
        self.room += len(freed)
        dirty = sorted(self.spoiled.intersection(freed.tolist())) if self.spoiled else []
        if dirty:
            self.cache.clear(dirty)
            self.spoiled.difference_update(dirty)

    def _new(self, count: int) -> np.ndarray:
        """Pages with one owner: the first free ones, so that what was done before changes no place."""
        pages = self.free[:count]
        self.refs[pages] = 1
        self.room -= count
        return pages

    def _grow(self, seats: np.ndarray, counts: np.ndarray) -> None:
        """So many more pages for each of these seats."""
        total = int(counts.sum())
        if total == 0:
            return
        before = np.cumsum(counts) - counts
        column = np.repeat(self.held[seats] - before, counts) + np.arange(total)
        self.tables[np.repeat(seats, counts), column] = self._new(total)
        self.held[seats] += counts
        self._stale = True

    def _room(self, count: int, sparing: Sequence[SequenceState] = ()) -> bool:
        """Whether so many pages are free, after taking back what nobody decodes; not from ``sparing``."""
        while self.room < count and self._take_back(sparing):
            pass
        return self.room >= count

    def _take_back(self, sparing: Sequence[SequenceState]) -> bool:
        """Gives up the keys and values of one that is not being decoded; False where there is none."""
        needed = {sample.prompt for sample in sparing if sample.saved_kv is None}
        for prompt, pages in self.prompts.items():
            if prompt not in needed:
                del self.prompts[prompt]
                self.give(pages)
                return True
        for index, sample in self.resting.items():
            del self.resting[index]
            sample.discard_kv()
            return True
        for sample in reversed(self.waiting):
            if sample.saved_kv is not None and sample not in sparing:
                sample.discard_kv()
                return True
        return False

    # Seats

    def take(self, waiting: Sequence[SequenceState], most: int) -> list[SequenceState]:
        """The first of those who wait that can be seated now, their prompts computed.

        A page for every row that is being decoded stays free: else the first page they need would cost somebody a seat.
        """
        self.waiting = waiting
        busy = int((self.held > 0).sum())
        taken: list[SequenceState] = []
        need = 0
        wanted: dict[PromptTokens, None] = {}
        for sample in waiting[:most]:
            known = sample.prompt.stored if sample.saved_kv is None else sample.saved_kv.length
            more = pages_for(sample.prompt.stored + len(sample.tokens) + 1, self.page) - known // self.page
            fresh = sample.saved_kv is None and sample.prompt not in wanted
            if fresh and sample.prompt not in self.prompts:
                more += pages_for(sample.prompt.stored, self.page)
            spare = busy + len(taken)
            if need + more + spare > self.room and not self._find(sample, taken, need + more, spare):
                break
            if fresh:
                wanted[sample.prompt] = None
            need += more
            taken.append(sample)
        self._prefill(list(wanted))
        return taken

    def _find(self, sample: SequenceState, taken: Sequence[SequenceState], need: int, spare: int) -> bool:
        """Whether there is room for one more beside those taken, after taking back what nobody decodes."""
        return self._room(need + spare, [*taken, sample]) or (spare == 0 and self._room(need, [sample]))

    def _prefill(self, prompts: Sequence[PromptTokens]) -> None:
        new = [prompt for prompt in prompts if prompt not in self.prompts]
        for prompt in prompts:  # the latest used stand last
            pages = self.prompts.pop(prompt, None)
            self.prompts[prompt] = self._new(pages_for(prompt.stored, self.page)) if pages is None else pages
        if new:
            self.runner.prefill([self.prompts[prompt] for prompt in new], [prompt.tokens for prompt in new])

    def start(self, seats: np.ndarray, samples: Sequence[SequenceState]) -> np.ndarray:
        """Seats samples that `take` gave."""
        known = np.zeros(len(seats), dtype=np.int64)
        self.held[seats] = 0
        shared: list[np.ndarray] = []
        copied = np.full(len(seats), BLANK)
        """The page that a sample begins with a copy of, after its full ones."""
        for at, pages, length in _beginnings(samples, self.prompts):
            full = length // self.page
            known[at] = length
            self.tables[seats[at], :full] = pages[:full]
            self.held[seats[at]] = full
            shared += [pages[:full]] * len(at)
            if length % self.page:
                copied[at] = pages[full]
        if shared:
            self.hold(np.concatenate(shared))
        wanted = np.array([sample.prompt.stored + len(sample.tokens) for sample in samples])
        own = self.held[seats]
        self._grow(seats, pages_for(wanted + 1, self.page) - own)
        copies = np.flatnonzero(copied != BLANK)
        if len(copies):
            self.cache.copy(copied[copies], self.tables[seats[copies], own[copies]])
        for sample in samples:
            sample.discard_kv()
        todo = np.flatnonzero(known < wanted)
        if len(todo):
            ids = [samples[i].ids[known[i] : wanted[i]] for i in todo.tolist()]
            self.runner.extend([self._pages(seat) for seat in seats[todo]], known[todo].tolist(), ids)
        return np.zeros(len(seats), dtype=np.int64)

    def _pages(self, seat: int) -> np.ndarray:
        """The pages of a seat."""
        return self.tables[seat, : self.held[seat]]

    def keep(self, seat: int, sample: SequenceState, tokens: int) -> Kept:
        """The keys and values of a seat's first completion tokens, to go on from."""
        length = sample.prompt.stored + tokens
        return Kept(self, self.tables[seat, : pages_for(length, self.page)], length)

    def leave(self, seats: np.ndarray, broken: np.ndarray) -> None:
        """Frees seats; ``broken`` ones among them may hold NaN."""
        for seat in broken:
            self.spoiled.update(self._pages(seat).tolist())
        mine = np.arange(self.tables.shape[1]) < self.held[seats][:, None]
        pages = self.tables[seats][mine]
        self.tables[seats], self.held[seats], self._stale = BLANK, 0, True
        self.give(pages)
        for prompt, held in list(self.prompts.items()) if len(broken) else ():
            if self.spoiled.intersection(held.tolist()):
                del self.prompts[prompt]
                self.give(held)

    def ready(self, seats: np.ndarray, tokens: np.ndarray) -> bool:
        """Gives these seats the pages for so many tokens; False where one has to give way first."""
        need = np.maximum(pages_for(tokens, self.page) - self.held[seats], 0)
        if not self._room(int(need.sum())):
            return False
        self._grow(seats, need)
        return True

    def clean(self) -> None:
        """Gives everything back."""
        for pages in self.prompts.values():
            self.give(pages)
        self.prompts.clear()

    # Decoding

    def length(self, positions: np.ndarray, held: np.ndarray) -> int:
        """Columns that the rows have filled."""
        return int(positions.max())

    def layout(self, seats: np.ndarray) -> Layout:
        """Rows and seats of the next steps."""
        rows = int(seats[-1]) + 1
        return Layout(rows, rows, None, None)

    def publish(self) -> None:
        """Tells the device about tables that have changed."""
        if self._stale:
            self.cache.put_tables(self.tables)
            self._stale = False

    def split(self, steps: int) -> np.ndarray | None:
        """Every seat has a row of its own."""
        return None

    def move_seats(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """The requests in these seats sit in others now."""
        for values, nothing in ((self.tables, BLANK), (self.held, 0)):
            moved = values[source]
            values[source] = nothing
            values[target] = moved
        self._stale = True

    def compact(self, steps: int, seats: int) -> None:
        """There are no gaps but those of the seats."""


def _beginnings(
    samples: Sequence[SequenceState], prompts: Mapping[PromptTokens, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Which samples begin with which pages, and how many tokens those hold: what is kept of them, or their prompt."""
    fresh: dict[PromptTokens, list[int]] = {}
    for i, sample in enumerate(samples):
        if sample.saved_kv is not None:
            yield np.array([i]), sample.saved_kv.pages, sample.saved_kv.length
        else:
            fresh.setdefault(sample.prompt, []).append(i)
    for prompt, members in fresh.items():
        yield np.array(members), prompts[prompt], prompt.stored
