"""Whose the pages are: `PageMemory`.

Pages are counted: samples share their prompt's full pages, and forks those of the row that they come from; only the
last page, which is written to, is copied. So memory follows the tokens that exist. What nobody decodes at the moment
(prompts, rows that have ended) keeps its pages until others need them, the longest unused first; where that is not
enough, the youngest row gives way, and is computed again from its tokens later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from explorl.rollout.pages import BLANK, NOBODYS, pages_for
from explorl.rollout.samples import PromptTokens, Sample
from explorl.rollout.sharing import Layout


class Kept:
    """The pages of a sequence's first tokens, held for somebody who may go on from there."""

    def __init__(self, memory: PageMemory, pages: Sequence[int], length: int) -> None:
        self.memory, self.pages, self.length = memory, list(pages), length
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
        self.pages = []


class PageMemory:
    """Gives samples pages, and computes what they do not hold."""

    shares = False

    def __init__(self, decoder: Any, slots: int) -> None:
        self.decoder, self.cache, self.page = decoder, decoder.cache, decoder.cache.page
        self.refs = np.zeros(self.cache.pages, dtype=np.int64)
        self.free = list(range(NOBODYS, self.cache.pages))
        """A heap: the first free page is the next, so that what was done before changes no place."""
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.prompts: dict[PromptTokens, list[int]] = {}
        """Pages of prompts, the longest unused first."""
        self.resting: dict[int, Sample] = {}
        self.waiting: Sequence[Sample] = ()
        self.spoiled: set[int] = set()
        """Pages that may hold NaN, and are zeroed when nobody has them any more."""
        self._changed = set(range(slots))
        """Seats whose table the device does not know."""

    def rehouse(self, decoder: Any, slots: int) -> bool:
        """Goes on in another decoder, where nobody sits yet; False where its pages are others, or fewer."""
        old, new = self.cache, decoder.cache
        if not decoder.plan.pages or new.page != self.page or new.pages < old.pages:
            return False
        if new is not old:
            for block, before in zip(new.blocks, old.blocks, strict=True):
                block[:, : old.pages] = before
            self.refs = np.concatenate([self.refs, np.zeros(new.pages - old.pages, dtype=np.int64)])
            for page in range(old.pages, new.pages):
                heapq.heappush(self.free, page)
        self.decoder, self.cache = decoder, new
        self.tables = [[] for _ in range(slots)]
        self._changed = set(range(slots))
        return True

    # Counting

    def hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.refs[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Takes one owner off each page, and back those that have none."""
        freed = []
        for page in pages:
            self.refs[page] -= 1
            if self.refs[page] == 0:
                freed.append(page)
                heapq.heappush(self.free, page)
        dirty = sorted(self.spoiled.intersection(freed))
        if dirty:
            self.cache.clear(dirty)
            self.spoiled.difference_update(dirty)

    def _new(self, count: int) -> list[int]:
        pages = [heapq.heappop(self.free) for _ in range(count)]
        self.hold(pages)
        return pages

    def _room(self, count: int, sparing: Sequence[Sample] = ()) -> bool:
        """Whether so many pages are free, after taking back what nobody decodes; not from ``sparing``."""
        while len(self.free) < count and self._take_back(sparing):
            pass
        return len(self.free) >= count

    def _take_back(self, sparing: Sequence[Sample]) -> bool:
        """Gives up the keys and values of one that is not being decoded; False where there is none."""
        needed = {sample.prompt for sample in sparing}
        for prompt, pages in self.prompts.items():
            if prompt not in needed:
                del self.prompts[prompt]
                self.give(pages)
                return True
        for index, sample in self.resting.items():
            del self.resting[index]
            sample.forget()
            return True
        for sample in reversed(self.waiting):
            if sample.kept is not None and sample not in sparing:
                sample.forget()
                return True
        return False

    # Seats

    def take(self, waiting: Sequence[Sample], most: int) -> list[Sample]:
        """The first of those who wait that can be seated now, their prompts computed.

        A page for every row that is being decoded stays free: else the first page they need would cost somebody a seat.
        """
        self.waiting = waiting
        busy = sum(bool(table) for table in self.tables)
        taken: list[Sample] = []
        need = 0
        wanted: dict[PromptTokens, None] = {}
        for sample in waiting[:most]:
            known = sample.prompt.stored if sample.kept is None else sample.kept.length
            more = pages_for(sample.prompt.stored + len(sample.tokens) + 1, self.page) - known // self.page
            if sample.kept is None and sample.prompt not in wanted:
                wanted[sample.prompt] = None
                if sample.prompt not in self.prompts:
                    more += pages_for(sample.prompt.stored, self.page)
            spare = busy + len(taken)
            if not self._room(need + more + spare, [*taken, sample]) and not (
                spare == 0 and self._room(need + more, [sample])
            ):
                break
            need += more
            taken.append(sample)
        self._prefill([prompt for prompt in wanted if any(s.prompt is prompt for s in taken)])
        return taken

    def _prefill(self, prompts: Sequence[PromptTokens]) -> None:
        new = [prompt for prompt in prompts if prompt not in self.prompts]
        for prompt in prompts:  # the latest used stand last
            pages = self.prompts.pop(prompt, None)
            self.prompts[prompt] = self._new(pages_for(prompt.stored, self.page)) if pages is None else pages
        if new:
            self.decoder.prefill([self.prompts[prompt] for prompt in new], [prompt.tokens for prompt in new])

    def start(self, seats: np.ndarray, samples: Sequence[Sample]) -> np.ndarray:
        """Seats samples that `take` gave."""
        copies: list[tuple[int, int]] = []
        known = []
        for seat, sample in zip(seats, samples, strict=True):
            if sample.kept is not None:
                pages, length = sample.kept.pages, sample.kept.length
            else:
                pages, length = self.prompts[sample.prompt], sample.prompt.stored
            full = length // self.page
            table = list(pages[:full])
            self.hold(table)
            table += self._new(pages_for(sample.prompt.stored + len(sample.tokens) + 1, self.page) - full)
            if length % self.page:
                copies.append((pages[full], table[full]))
            self.tables[seat] = table
            self._changed.add(int(seat))
            known.append(length)
        if copies:
            self.cache.copy(*zip(*copies, strict=True))
        for sample in samples:
            sample.forget()
        todo = [i for i, sample in enumerate(samples) if known[i] < sample.prompt.stored + len(sample.tokens)]
        if todo:
            ids = [samples[i].ids[known[i] : samples[i].prompt.stored + len(samples[i].tokens)] for i in todo]
            self.decoder.extend([self.tables[seats[i]] for i in todo], [known[i] for i in todo], ids)
        return np.zeros(len(seats), dtype=np.int64)

    def keep(self, seat: int, sample: Sample, tokens: int) -> Kept:
        """The keys and values of a seat's first completion tokens, to go on from."""
        length = sample.prompt.stored + tokens
        return Kept(self, self.tables[seat][: pages_for(length, self.page)], length)

    def leave(self, seats: np.ndarray, broken: np.ndarray) -> None:
        """Frees seats; ``broken`` ones among them may hold NaN."""
        for seat in broken:
            self.spoiled.update(self.tables[seat])
        for seat in seats:
            self.give(self.tables[seat])
            self.tables[seat] = []
            self._changed.add(int(seat))
        for prompt, pages in list(self.prompts.items()) if len(broken) else ():
            if self.spoiled.intersection(pages):
                del self.prompts[prompt]
                self.give(pages)

    def ready(self, seats: np.ndarray, tokens: np.ndarray) -> bool:
        """Gives these seats the pages for so many tokens; False where one has to give way first."""
        need = [pages_for(int(n), self.page) - len(self.tables[seat]) for seat, n in zip(seats, tokens, strict=True)]
        if not self._room(sum(n for n in need if n > 0)):
            return False
        for seat, count in zip(seats, need, strict=True):
            if count > 0:
                self.tables[seat] += self._new(count)
                self._changed.add(int(seat))
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
        if not self._changed:
            return
        seats = sorted(self._changed)
        rows = np.full((len(seats), self.cache.table.shape[1]), BLANK, dtype=np.int32)
        for row, seat in zip(rows, seats, strict=True):
            row[: len(self.tables[seat])] = self.tables[seat]
        where = torch.tensor(seats, device=self.cache.table.device)
        self.cache.table[where] = torch.from_numpy(rows).to(self.cache.table.device)
        self._changed.clear()

    def split(self, steps: int) -> np.ndarray | None:
        """Every seat has a row of its own."""
        return None

    def move_seats(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """The requests in these seats sit in others now."""
        for here, there in zip(source, target, strict=True):
            self.tables[there], self.tables[here] = self.tables[here], []
        self._changed.update(int(seat) for seat in (*source, *target))

    def compact(self, steps: int, seats: int) -> None:
        """There are no gaps but those of the seats."""
