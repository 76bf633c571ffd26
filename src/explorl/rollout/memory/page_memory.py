"""`PageMemory` decides which sequence owns which pages.

Pages are reference-counted: the sequences of a prompt share its full pages, and forks share those of their origin. Only
the last page of a sequence, which is still written to, is copied. So memory grows with the number of tokens. Prompts
and sequences that are not being decoded keep their pages until others need them; the least recently used are reclaimed
first. If that is not enough, the youngest sequence is evicted and recomputed from its tokens later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from explorl.rollout.memory.cache import Layout
from explorl.rollout.memory.pages import BLANK, RESERVED_PAGES, pages_for
from explorl.rollout.requests import PromptTokens, SequenceState


class RetainedPages:
    """The pages of a sequence's first tokens, retained so that the sequence or a fork can resume from them."""

    def __init__(self, memory: PageMemory, pages: np.ndarray, length: int) -> None:
        self.memory, self.pages, self.length = memory, pages.copy(), length
        memory.retain(self.pages)

    @property
    def bytes(self) -> int:
        return 0  # the memory reclaims them when it needs them

    def first(self, length: int, prompt: int) -> RetainedPages:
        """Return the pages of the first ``length`` completion tokens after ``prompt`` stored prompt tokens."""
        length = min(self.length, prompt + length)
        return RetainedPages(self.memory, self.pages[: pages_for(length, self.memory.page)], length)

    def drop(self) -> None:
        """Release the pages."""
        self.memory.release(self.pages)
        self.pages = self.pages[:0]


class PageMemory:
    """Allocates pages to sequences and computes the keys and values that are not stored yet."""

    def __init__(self, runner: Any, slots: int) -> None:
        self.runner, self.cache, self.page = runner, runner.cache, runner.cache.page
        self.refs = np.zeros(self.cache.pages, dtype=np.int64)
        """Number of owners of each page."""
        self.free_count = self.cache.pages - RESERVED_PAGES
        """Number of free pages."""
        self._reset(slots)
        self.prompts: dict[PromptTokens, np.ndarray] = {}
        """Pages of prompts, least recently used first."""
        self.resting: dict[int, SequenceState] = {}
        self.waiting: Sequence[SequenceState] = ()
        self.spoiled: set[int] = set()
        """Pages that may hold NaN; they are zeroed when they become free."""

    def _reset(self, slots: int) -> None:
        """Start with this number of slots, all empty."""
        self.tables = np.full((slots, self.cache.table.shape[1]), BLANK, dtype=np.int32)
        """Pages of each slot."""
        self.page_counts = np.zeros(slots, dtype=np.int64)
        """Number of pages of each slot."""
        self._stale = True
        """True if the tables on the device are out of date."""

    @property
    def free(self) -> np.ndarray:
        """Free pages, without the reserved ones."""
        return np.flatnonzero(self.refs[RESERVED_PAGES:] == 0) + RESERVED_PAGES

    def migrate(self, runner: Any, slots: int) -> bool:
        """Move to another runner whose slots are empty; return False if its pages differ in size or are fewer."""
        old, new = self.cache, runner.cache
        if not runner.plan.pages or new.page != self.page or new.pages < old.pages:
            return False
        if new is not old:
            for block, before in zip(new.blocks, old.blocks, strict=True):
                block[:, : old.pages] = before
            self.refs = np.concatenate([self.refs, np.zeros(new.pages - old.pages, dtype=np.int64)])
            self.free_count += new.pages - old.pages
        self.runner, self.cache = runner, new
        self._reset(slots)
        return True

    # Reference counts

    def retain(self, pages: np.ndarray) -> None:
        """Increment the reference counts of pages in use; a page may be listed several times."""
        np.add.at(self.refs, pages, 1)

    def release(self, pages: np.ndarray) -> None:
        """Decrement reference counts; free pages that reach zero."""
        np.subtract.at(self.refs, pages, 1)
        freed = np.unique(pages[self.refs[pages] == 0])
        self.free_count += len(freed)
        dirty = sorted(self.spoiled.intersection(freed.tolist())) if self.spoiled else []
        if dirty:
            self.cache.clear(dirty)
            self.spoiled.difference_update(dirty)

    def _allocate(self, count: int) -> np.ndarray:
        """Return the first ``count`` free pages, now with one owner; so earlier calls do not change the placement."""
        pages = self.free[:count]
        self.refs[pages] = 1
        self.free_count -= count
        return pages

    def _grow(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Append ``counts`` new pages to the tables of these slots."""
        total = int(counts.sum())
        if total == 0:
            return
        before = np.cumsum(counts) - counts
        column = np.repeat(self.page_counts[slots] - before, counts) + np.arange(total)
        self.tables[np.repeat(slots, counts), column] = self._allocate(total)
        self.page_counts[slots] += counts
        self._stale = True

    def _make_room(self, count: int, protected: Sequence[SequenceState] = ()) -> bool:
        """Reclaim pages until ``count`` are free, sparing ``protected`` sequences; return whether there are enough."""
        while self.free_count < count and self._reclaim(protected):
            pass
        return self.free_count >= count

    def _reclaim(self, protected: Sequence[SequenceState]) -> bool:
        """Drop the pages of one prompt or sequence that is not being decoded; return False if there is none."""
        needed = {sequence.prompt for sequence in protected if sequence.saved_kv is None}
        for prompt, pages in self.prompts.items():
            if prompt not in needed:
                del self.prompts[prompt]
                self.release(pages)
                return True
        for index, sequence in self.resting.items():
            del self.resting[index]
            sequence.discard_kv()
            return True
        for sequence in reversed(self.waiting):
            if sequence.saved_kv is not None and sequence not in protected:
                sequence.discard_kv()
                return True
        return False

    # Slots

    def admit(self, waiting: Sequence[SequenceState], most: int) -> list[SequenceState]:
        """Return the first waiting sequences that fit into memory now, with their prompts computed.

        One page per running sequence stays free. Otherwise the next page that one needs would evict another.
        """
        self.waiting = waiting
        busy = int((self.page_counts > 0).sum())
        admitted: list[SequenceState] = []
        total = 0
        new_prompts: dict[PromptTokens, None] = {}
        for sequence in waiting[:most]:
            stored = sequence.prompt.stored if sequence.saved_kv is None else sequence.saved_kv.length
            needed = pages_for(sequence.prompt.stored + len(sequence.tokens) + 1, self.page) - stored // self.page
            from_prompt = sequence.saved_kv is None and sequence.prompt not in new_prompts
            if from_prompt and sequence.prompt not in self.prompts:
                needed += pages_for(sequence.prompt.stored, self.page)
            spare = busy + len(admitted)
            if total + needed + spare > self.free_count and not self._fits(sequence, admitted, total + needed, spare):
                break
            if from_prompt:
                new_prompts[sequence.prompt] = None
            total += needed
            admitted.append(sequence)
        self._prefill(list(new_prompts))
        return admitted

    def _fits(self, sequence: SequenceState, admitted: Sequence[SequenceState], needed: int, spare: int) -> bool:
        """Reclaim pages until a sequence fits beside the admitted ones; return whether it does."""
        return self._make_room(needed + spare, [*admitted, sequence]) or (
            spare == 0 and self._make_room(needed, [sequence])
        )

    def _prefill(self, prompts: Sequence[PromptTokens]) -> None:
        new = [prompt for prompt in prompts if prompt not in self.prompts]
        for prompt in prompts:  # moves the prompts in use to the end
            pages = self.prompts.pop(prompt, None)
            self.prompts[prompt] = self._allocate(pages_for(prompt.stored, self.page)) if pages is None else pages
        if new:
            self.runner.prefill([self.prompts[prompt] for prompt in new], [prompt.tokens for prompt in new])

    def start(self, slots: np.ndarray, sequences: Sequence[SequenceState]) -> None:
        """Put sequences that `admit` returned into slots."""
        stored = np.zeros(len(slots), dtype=np.int64)
        self.page_counts[slots] = 0
        shared: list[np.ndarray] = []
        copied = np.full(len(slots), BLANK)
        """The page that each sequence copies after its full ones."""
        for members, pages, length in _stored_beginnings(sequences, self.prompts):
            full = length // self.page
            stored[members] = length
            self.tables[slots[members], :full] = pages[:full]
            self.page_counts[slots[members]] = full
            shared += [pages[:full]] * len(members)
            if length % self.page:
                copied[members] = pages[full]
        if shared:
            self.retain(np.concatenate(shared))
        lengths = np.array([sequence.prompt.stored + len(sequence.tokens) for sequence in sequences])
        full_pages = self.page_counts[slots]
        self._grow(slots, pages_for(lengths + 1, self.page) - full_pages)
        copies = np.flatnonzero(copied != BLANK)
        if len(copies):
            self.cache.copy(copied[copies], self.tables[slots[copies], full_pages[copies]])
        for sequence in sequences:
            sequence.discard_kv()
        incomplete = np.flatnonzero(stored < lengths)
        if len(incomplete):
            ids = [sequences[i].ids[stored[i] : lengths[i]] for i in incomplete.tolist()]
            self.runner.extend([self._pages(slot) for slot in slots[incomplete]], stored[incomplete].tolist(), ids)

    def _pages(self, slot: int) -> np.ndarray:
        """Return the pages of a slot."""
        return self.tables[slot, : self.page_counts[slot]]

    def keep(self, slot: int, sequence: SequenceState, tokens: int) -> RetainedPages:
        """Return the retained keys and values of a slot's first ``tokens`` completion tokens."""
        length = sequence.prompt.stored + tokens
        return RetainedPages(self, self.tables[slot, : pages_for(length, self.page)], length)

    def evict(self, slots: np.ndarray, broken: np.ndarray) -> None:
        """Free slots; those among them that are ``broken`` may hold NaN."""
        for slot in broken:
            self.spoiled.update(self._pages(slot).tolist())
        used = np.arange(self.tables.shape[1]) < self.page_counts[slots][:, None]
        pages = self.tables[slots][used]
        self.tables[slots], self.page_counts[slots], self._stale = BLANK, 0, True
        self.release(pages)
        for prompt, prompt_pages in list(self.prompts.items()) if len(broken) else ():
            if self.spoiled.intersection(prompt_pages.tolist()):
                del self.prompts[prompt]
                self.release(prompt_pages)

    def reserve(self, slots: np.ndarray, tokens: np.ndarray) -> bool:
        """Allocate pages for ``tokens`` tokens in each slot, and publish the tables on the device.

        Return False if a sequence has to be evicted first.
        """
        missing = np.maximum(pages_for(tokens, self.page) - self.page_counts[slots], 0)
        if not self._make_room(int(missing.sum())):
            return False
        self._grow(slots, missing)
        if self._stale:
            self.cache.put_tables(self.tables)
            self._stale = False
        return True

    def clean(self) -> None:
        """Release the pages of all prompts."""
        for pages in self.prompts.values():
            self.release(pages)
        self.prompts.clear()

    # Decoding

    def layout(self, slots: np.ndarray, positions: np.ndarray, completions: np.ndarray) -> Layout:
        """Return the rows and slots of the next steps, given how many tokens the slots have."""
        rows = int(slots[-1]) + 1
        return Layout(rows, rows, int(positions.max()))

    def move_slots(self, source: np.ndarray, target: np.ndarray) -> None:
        """Move sequences from ``source`` slots to ``target`` slots."""
        for values, empty in ((self.tables, BLANK), (self.page_counts, 0)):
            moved = values[source]
            values[source] = empty
            values[target] = moved
        self._stale = True


def _stored_beginnings(
    sequences: Sequence[SequenceState], prompts: Mapping[PromptTokens, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield indices of sequences, the pages they begin with (retained or of their prompt), and the tokens in these."""
    by_prompt: dict[PromptTokens, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.saved_kv is not None:
            yield np.array([i]), sequence.saved_kv.pages, sequence.saved_kv.length
        else:
            by_prompt.setdefault(sequence.prompt, []).append(i)
    for prompt, members in by_prompt.items():
        yield np.array(members), prompts[prompt], prompt.stored
