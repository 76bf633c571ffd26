"""Where the rows of a session lie in a slot cache: `SpanMemory`.

Every prompt has an entry that its samples share, and every row one stretch of columns for its completion. What a row
holds is copied out when it leaves its seat and may go on later, and copied back when it does.
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
    """Gives samples rows and prompt entries, and computes what they do not hold."""

    def __init__(self, runner: Runner, slots: int) -> None:
        self.stored: dict[PromptTokens, int] = {}
        """Entry of each prompt that is kept."""
        self.resting: dict[int, SequenceState] = {}
        self._enter(runner, slots)

    def _enter(self, runner: Runner, slots: int) -> None:
        self.runner = runner
        assert isinstance(runner.cache, SlotCache)
        assert isinstance(runner.filling, PromptCache)
        self.cache, self.prompt_cache = runner.cache, runner.filling
        self.rows = SharedRows(slots, share=runner.shares)
        self.offsets = np.zeros(slots, dtype=np.int64)
        """Tokens in the prompt entry of each row."""
        self.spoiled_rows: set[int] = set()
        self.spoiled_entries: set[int] = set()

    def rehouse(self, runner: Runner, slots: int) -> bool:
        """Goes on in another runner, where nobody sits yet; False where that is of another kind."""
        if runner.plan.pages:
            return False
        before, stored = self.prompt_cache, self.stored
        self.clean()
        self._enter(runner, slots)
        if self.prompt_cache is not before:
            self.stored = {}
            fitting = [item for item in stored.items() if item[0].stored <= runner.plan.prompt_tokens]
            for entry, (prompt, old) in enumerate(fitting[-runner.plan.entries :]):
                self.prompt_cache.put(entry, before.take(old, prompt.stored), prompt.stored)
                self.stored[prompt] = entry
        return True

    @property
    def shares(self) -> bool:
        """Whether several seats may have one row."""
        return self.rows.share

    # Seats

    def take(self, waiting: Iterable[SequenceState], most: int) -> list[SequenceState]:
        """The first of those who wait that can be seated now, their prompts computed."""
        waiting = list(waiting)
        if waiting[0].prompt not in self.stored and not self._prefill(waiting):
            return []
        taken = []
        for sample in waiting[:most]:
            if sample.prompt not in self.stored:
                break
            taken.append(sample)
        return taken

    def _prefill(self, waiting: Sequence[SequenceState]) -> bool:
        """Computes the next prompts that are waited for, as many as there is room for; False where there is none."""
        used = set(self.rows.entry[self.rows.entry >= 0].tolist())
        idle = {prompt: None for prompt, entry in self.stored.items() if entry not in used}
        room = self.runner.plan.entries - len(self.stored) + len(idle)
        wanted: dict[PromptTokens, None] = {}
        for sample in waiting:
            if sample.prompt in idle:
                del idle[sample.prompt]
                room -= 1
            elif sample.prompt not in self.stored:
                wanted[sample.prompt] = None
            if len(wanted) >= room:
                break
        prompts = list(wanted)[: max(0, room)]
        if not prompts:
            return False
        for prompt in list(idle)[: max(0, len(self.stored) + len(prompts) - self.runner.plan.entries)]:
            del self.stored[prompt]  # the longest unused
        taken = set(self.stored.values())
        entries = [entry for entry in range(self.runner.plan.entries) if entry not in taken][: len(prompts)]
        self._clean((), entries)
        self.stored.update(zip(prompts, entries, strict=True))
        self.runner.prefill(entries, [prompt.tokens for prompt in prompts])
        return True

    def start(self, seats: np.ndarray, samples: Sequence[SequenceState]) -> np.ndarray:
        """Seats samples that `take` gave; the entry of each one's prompt."""
        for prompt in dict.fromkeys(sample.prompt for sample in samples):  # the latest used stand last
            self.stored[prompt] = self.stored.pop(prompt)
        entries = np.array([self.stored[sample.prompt] for sample in samples])
        offsets = np.array([sample.prompt.stored for sample in samples])
        same: dict[tuple[PromptTokens, tuple[int, ...]], int] = {}
        groups = np.array([same.setdefault((s.prompt, tuple(s.tokens)), len(same)) for s in samples])
        self.rows.start(seats, entries, groups)
        rows, first = np.unique(self.rows.row[seats], return_index=True)
        self.offsets[rows] = offsets[first]
        self._clean(rows.tolist())
        self.cache.start(rows, entries[first], offsets[first])
        going_on = [(int(row), samples[i]) for row, i in zip(rows, first, strict=True) if samples[i].tokens]
        if going_on:
            self._resume(*zip(*going_on, strict=True))
        return entries

    def _resume(self, rows: Sequence[int], samples: Sequence[SequenceState]) -> None:
        """Puts back what was kept of these samples and computes the rest, all but their last tokens."""
        starts, missing = [], []
        for row, sample in zip(rows, samples, strict=True):
            kept = 0
            if isinstance(sample.saved_kv, Span):
                kept = min(sample.saved_kv.length, len(sample.tokens))
                self.cache.put(row, sample.saved_kv, kept)
            starts.append(kept)
            missing.append([sample.prompt.tokens[-1], *sample.tokens][kept : len(sample.tokens)])
        todo = [i for i, tokens in enumerate(missing) if tokens]
        if todo:
            where = [(rows[i], self.stored[samples[i].prompt], samples[i].prompt.stored) for i in todo]
            begin = [samples[i].prompt.stored + starts[i] for i in todo]
            self.runner.extend(where, begin, [missing[i] for i in todo])

    def keep(self, seat: int, sample: SequenceState, tokens: int) -> Span:
        """The keys and values of a seat's first completion tokens, to go on from."""
        return self.cache.take(int(self.rows.row[seat]), tokens)

    def leave(self, seats: np.ndarray, broken: np.ndarray) -> None:
        """Frees seats; ``broken`` ones among them may hold NaN."""
        rows = self.rows.row[broken]
        if len(rows):
            # Free rows are decoded along with somebody else's token, so theirs may be spoiled too.
            self.spoiled_rows.update(rows.tolist(), np.flatnonzero(self.rows.entry < 0).tolist())
            self.spoiled_entries.update(self.rows.entry[rows].tolist())
        self.rows.leave(seats)

    def ready(self, seats: np.ndarray, tokens: np.ndarray) -> bool:
        """Every row has room for all that it may sample."""
        return True

    def publish(self) -> None:
        """Nothing that the device does not know."""

    # Decoding

    def length(self, positions: np.ndarray, held: np.ndarray) -> int:
        """Columns that the rows have filled."""
        return int(held.max())

    def layout(self, seats: np.ndarray) -> Layout:
        """Rows and seats of the next steps."""
        layout = self.rows.layout()
        rows = self.rows.entry[: layout.rows]
        self.cache.regroup(rows, self.offsets[: layout.rows][rows >= 0])
        return layout

    def split(self, steps: int) -> np.ndarray | None:
        """Splits rows whose seats drew different tokens.

        Once no two seats share a row, the seats that they should have: those of their rows' numbers, so that nothing
        has to be looked up.
        """
        state = self.runner.state
        moves = self.rows.split(state.ints[TOKEN].numpy(), state.vocab) if self.shares else None
        if moves is None:
            return None
        self._move(*moves, steps)
        seats = np.flatnonzero(self.rows.row >= 0)
        rows = self.rows.row[seats]
        if len(set(rows.tolist())) < len(seats) or bool((rows == seats).all()):
            return None
        self.rows.row[seats] = -1
        self.rows.row[rows] = rows
        return rows

    def move_seats(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """The requests in these seats sit in others now."""
        self.rows.move_seats(source, target)
        if not self.shares:
            self._move(source, target, steps)

    def compact(self, steps: int, seats: int) -> None:
        """Closes gaps between rows where they cost more than the closing."""
        if self.shares and self.rows.holes() > seats // 16 and (moves := self.rows.compact()) is not None:
            self._move(*moves, steps)

    def _move(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """Copies rows of the cache."""
        self._clean(target.tolist())
        self.offsets[target] = self.offsets[source]
        device = self.runner.device
        here, there = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        self.cache.move(here, there, steps)

    def clean(self) -> None:
        """Leaves nothing that holds NaN to those who come later."""
        self.stored = {prompt: entry for prompt, entry in self.stored.items() if entry not in self.spoiled_entries}
        self._clean(set(self.spoiled_rows), set(self.spoiled_entries))

    def _clean(self, rows: Iterable[int], entries: Iterable[int] = ()) -> None:
        """Zeroes memory that holds NaN before anyone else uses it: a masked NaN would still spread."""
        for cache, spoiled, wanted in (
            (self.cache, self.spoiled_rows, set(rows)),
            (self.prompt_cache, self.spoiled_entries, set(entries)),
        ):
            dirty = sorted(spoiled & wanted)
            if dirty:
                cache.clear(torch.tensor(dirty, device=self.runner.device))
                spoiled.difference_update(dirty)
