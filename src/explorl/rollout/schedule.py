"""One call of the engine: admits requests into rows, decodes, collects what is finished, and refills."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from explorl.rollout.decoder import Decoder
from explorl.rollout.requests import Requests
from explorl.rollout.rng import request_keys
from explorl.rollout.rollouts import FinishReason, Rollout
from explorl.rollout.sampling import Active
from explorl.rollout.state import (
    BROKEN,
    IDLE,
    KEY,
    LIMIT,
    OFFSET,
    POSITION,
    PROMPT,
    RUNNING,
    STATUS,
    STEP,
    STOPPED,
    TOKEN,
    TOP_K,
)

SYNC_STEPS = {"cuda": 8, "cpu": 1}
"""Decode steps between two looks at which rows have finished."""
STOP_STRING_STEPS = 8
"""The same where stop strings have to be looked for in the text."""
STATE_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "bottom_p", "bottom_p_frequency")

_REASONS: dict[int, FinishReason] = {STOPPED: "stop", BROKEN: "error"}


class Schedule:
    """Runs all requests of one call."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Requests,
        active: Active,
        slots: int,
        tokenizer: Any,
        stop: Sequence[str],
        on_finish: Callable[[Rollout], object] | None,
    ) -> None:
        self.decoder, self.requests, self.active, self.slots = decoder, requests, active, slots
        self.tokenizer, self.stop, self.on_finish = tokenizer, stop, on_finish
        self.kind = decoder.device.type
        self.waiting = deque(range(len(requests)))
        self.results: list[Rollout | None] = [None] * len(requests)
        self.owner = np.full(slots, -1)
        """The request in each row, −1 where there is none."""
        self.steps = np.zeros(slots, dtype=np.int64)
        """Tokens sampled by each row, as of the last look."""
        self.checked = np.zeros(slots, dtype=np.int64)
        """Tokens of each row that were searched for stop strings."""
        self.lengths = np.array([len(requests.different[prompt]) - 1 for prompt in requests.which])
        """Tokens in the prompt entry of each request."""
        self.regroup = True
        self.spoiled_rows: set[int] = set()
        self.spoiled_entries: set[int] = set()
        self.keys = request_keys(requests.seed, range(len(requests)))
        self.stored: dict[int, int] = {}
        """Entry of each prompt that is kept, by its index in ``requests.different``."""
        self.entry = np.full(slots, -1)
        """Prompt entry of each row, −1 where there is none."""

    def run(self) -> list[Rollout]:
        decoder = self.decoder
        decoder.state.ints[STATUS] = IDLE
        while self.waiting or (self.owner >= 0).any():
            self._admit()
            rows, length, even, steps = self._extent()
            decoder.run(rows, length, even, steps, self.active)
            self._collect(rows)
            if not self.waiting:
                self._compact(rows)
        decoder.state.ints[STATUS] = IDLE
        self._clean(set(self.spoiled_rows), set(self.spoiled_entries))
        return [rollout for rollout in self.results if rollout is not None]

    # Admission

    def _admit(self) -> None:
        free = np.flatnonzero(self.owner < 0)
        if self.kind == "cpu" and len(free) < min(len(self.waiting), max(1, self.slots // 16)):
            return  # a few idle rows cost less than starting them one by one
        while self.waiting and len(free):
            if self.requests.which[self.waiting[0]] not in self.stored and not self._prefill():
                return
            taken: list[int] = []
            while self.waiting and len(taken) < len(free) and self.requests.which[self.waiting[0]] in self.stored:
                taken.append(self.waiting.popleft())
            self._start(free[: len(taken)], taken)
            free = free[len(taken) :]

    def _prefill(self) -> bool:
        """Computes the next prompts that are waited for, as many as there is room for; False where there is none."""
        used = set(self.entry[self.entry >= 0].tolist())
        idle = {prompt for prompt, entry in self.stored.items() if entry not in used}
        room = self.decoder.plan.entries - len(self.stored) + len(idle)
        wanted: dict[int, None] = {}
        for request in self.waiting:
            prompt = self.requests.which[request]
            if prompt in idle:
                idle.remove(prompt)
                room -= 1
            elif prompt not in self.stored:
                wanted[prompt] = None
            if len(wanted) >= room:
                break
        prompts = list(wanted)[: max(0, room)]
        if not prompts:
            return False
        for prompt in idle:
            del self.stored[prompt]
        taken = set(self.stored.values())
        entries = [entry for entry in range(self.decoder.plan.entries) if entry not in taken][: len(prompts)]
        self._clean((), entries)
        self.stored.update(zip(prompts, entries, strict=True))
        self.decoder.prefill(entries, [self.requests.different[prompt] for prompt in prompts])
        return True

    def _start(self, rows: np.ndarray, requests: Sequence[int]) -> None:
        decoder, device = self.decoder, self.decoder.device
        prompts = [self.requests.different[self.requests.which[request]] for request in requests]
        values = self.requests.rows
        index = np.asarray(requests)
        offsets = self.lengths[index]
        entries = np.array([self.stored[self.requests.which[request]] for request in requests])
        fields = {
            TOKEN: np.array([prompt[-1] for prompt in prompts]),
            POSITION: offsets,
            STEP: 0,
            LIMIT: values["max_tokens"][index],
            STATUS: RUNNING,
            KEY: self.keys[index],
            TOP_K: values["top_k"][index],
            PROMPT: entries,
            OFFSET: offsets,
        }
        ints = np.stack([np.broadcast_to(fields[i], len(rows)) for i in range(len(fields))])
        reals = np.stack([values[name][index] for name in STATE_REALS])
        where = torch.from_numpy(rows).to(device)
        self._clean(rows.tolist())
        decoder.state.admit(where, torch.from_numpy(ints), torch.from_numpy(reals))
        if self.active.repetition:
            decoder.state.remember(where, prompts)
        self.owner[rows], self.entry[rows] = requests, entries
        self.steps[rows] = self.checked[rows] = 0
        self.regroup = True

    # Decoding

    def _extent(self) -> tuple[int, int, bool, int]:
        """Rows to decode, most tokens in a slot, whether all hold that many, and steps until the next look."""
        busy = np.flatnonzero(self.owner >= 0)
        owners = self.owner[busy]
        left = self.requests.rows["max_tokens"][owners] - self.steps[busy]
        every = SYNC_STEPS.get(self.kind, 1)
        if self.stop:
            every = max(every, STOP_STRING_STEPS)
        rows = int(busy[-1]) + 1
        if self.decoder.use_graphs:
            rows = bucket(rows, self.slots)
        if self.regroup:
            self.decoder.cache.regroup(self.entry[:rows], self.lengths[owners])
            self.regroup = False
        held = self.steps[busy]
        return rows, int(held.max()), bool((held == held[0]).all()), int(min(every, left.max()))

    def _collect(self, rows: int) -> None:
        """Looks at the rows, takes out what has finished and frees its rows."""
        state = self.decoder.state
        looked = state.ints[STEP : STATUS + 1, :rows].cpu().numpy()
        steps, status = looked[0], looked[-1].copy()
        busy = self.owner[:rows] >= 0
        self.steps[:rows] = np.where(busy, steps, 0)
        cut: dict[int, int] = {}
        if self.stop:
            cut = self._find_stops(np.flatnonzero(busy), status)
        done = np.flatnonzero(busy & (status != RUNNING))
        if len(done) == 0:
            return
        where = torch.from_numpy(done).to(self.decoder.device)
        longest = int(self.steps[done].max())
        ints = state.out_ints[:, where, :longest].cpu()
        reals = state.out_reals[:, where, :longest].cpu()
        broken = [row for row in done if status[row] == BROKEN]
        if broken:
            self.spoiled_rows.update(int(row) for row in broken)
            self.spoiled_entries.update(int(entry) for entry in self.entry[broken])
        for i, row in enumerate(done):
            length = cut.get(int(row), int(self.steps[row]))
            self._finish(int(self.owner[row]), int(status[row]), ints[:, i, :length], reals[:, i, :length])
        state.ints[STATUS, where] = IDLE
        self.owner[done] = self.entry[done] = -1
        self.steps[done] = 0
        self.regroup = True

    def _clean(self, rows: Iterable[int], entries: Iterable[int] = ()) -> None:
        """Zeroes memory that holds NaN before anyone else uses it: a masked NaN would still spread."""
        for cache, spoiled, wanted in (
            (self.decoder.cache, self.spoiled_rows, set(rows)),
            (self.decoder.prompts, self.spoiled_entries, set(entries)),
        ):
            dirty = sorted(spoiled & wanted)
            if dirty:
                cache.clear(torch.tensor(dirty, device=self.decoder.device))
                spoiled.difference_update(dirty)

    def _finish(self, request: int, status: int, ints: torch.Tensor, reals: torch.Tensor) -> None:
        prompt, sample = divmod(request, self.requests.n)
        error = ""
        if status == BROKEN:
            error = (
                f"the model's logits are not finite at step {ints.shape[-1]} of request {request} "
                f"(prompt {prompt}, sample {sample}): NaN or infinite weights?"
            )
        rollout = Rollout(
            request=request,
            prompt_index=prompt,
            sample_index=sample,
            token_ids=ints[0].tolist(),
            logps=reals[0].clone(),
            sampling_logps=reals[1].clone(),
            entropy=reals[2].clone(),
            branching=ints[1].long(),
            finish_reason=_REASONS.get(status, "length"),
            error=error,
            tokenizer=self.tokenizer,
        )
        self.results[request] = rollout
        if self.on_finish is not None:
            self.on_finish(rollout)

    def _find_stops(self, busy: np.ndarray, status: np.ndarray) -> dict[int, int]:
        """Marks rows whose text holds a stop string as stopped; the number of tokens up to its end for each."""
        found: dict[int, int] = {}
        # A stop string of c characters can have begun c tokens back, or more where tokens hold less than a character.
        overlap = max(len(text) for text in self.stop) + 8
        tokens = self.decoder.state.out_ints[0, : len(status), : int(self.steps.max())].cpu()
        for row in busy:
            checked, total = int(self.checked[row]), int(self.steps[row])
            self.checked[row] = total
            start = max(0, checked - overlap)
            recent = tokens[row, start:total].tolist()
            if total == checked or not self._stops(recent):
                continue
            end = next(end for end in range(1, len(recent) + 1) if self._stops(recent[:end]))
            found[int(row)] = start + end
            status[row] = STOPPED
        return found

    def _stops(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(stop in text for stop in self.stop)

    def _compact(self, rows: int) -> None:
        """Moves the last rows into free ones, where that makes the next steps cheaper."""
        busy = np.flatnonzero(self.owner >= 0)
        count = len(busy)
        if count == 0:
            return
        if self.decoder.use_graphs:
            worth = bucket(count, self.slots) < bucket(int(busy[-1]) + 1, self.slots)
        else:
            worth = int(busy[-1]) + 1 - count >= max(1, count // 16)
        if not worth:
            return
        source = busy[busy >= count]
        target = np.setdiff1d(np.arange(count), busy)
        device = self.decoder.device
        length = int(self.steps[source].max())
        self._clean(target.tolist())
        here, there = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        self.decoder.cache.move(here, there, length)
        self.decoder.state.move(here, there, length)
        for values in (self.owner, self.entry, self.steps, self.checked):
            values[target] = values[source]
        self.owner[source] = self.entry[source] = -1
        self.steps[source] = 0
        self.regroup = True


def bucket(rows: int, slots: int) -> int:
    """Rows that a graph is captured for: the next power of two, or all slots."""
    return min(1 << (rows - 1).bit_length(), slots)
