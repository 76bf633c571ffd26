"""One call of the engine: seats requests, decodes, collects what is finished, and refills."""

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
from explorl.rollout.sharing import Layout, Rows
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
STATE_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "bottom_p", "bottom_p_frequency")
TOPS = ("top_ids", "top_logps")

_REASONS: dict[int, FinishReason] = {STOPPED: "stop", BROKEN: "error"}


class Schedule:
    """Runs all requests of one call in ``slots`` seats."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Requests,
        active: Active,
        slots: int,
        tokenizer: Any,
        on_finish: Callable[[Rollout], object] | None,
    ) -> None:
        self.decoder, self.requests, self.active, self.slots = decoder, requests, active, slots
        self.tokenizer, self.on_finish = tokenizer, on_finish
        self.kind = decoder.device.type
        self.waiting = deque(range(len(requests)))
        self.results: list[Rollout | None] = [None] * len(requests)
        self.owner = np.full(slots, -1)
        """The request in each seat, −1 where there is none."""
        self.steps = np.zeros(slots, dtype=np.int64)
        """Tokens sampled by each seat, as of the last look."""
        self.rows = Rows(slots, share=decoder.shares)
        self.stops = StopStrings(requests.stops, tokenizer, slots)
        self.lengths = np.array([len(requests.different[prompt]) - 1 for prompt in requests.which])
        """Tokens in the prompt entry of each request."""
        self.keys = request_keys(requests.seed, range(len(requests)))
        self.stored: dict[int, int] = {}
        """Entry of each prompt that is kept, by its index in ``requests.different``."""
        self.spoiled_rows: set[int] = set()
        self.spoiled_entries: set[int] = set()

    def run(self) -> list[Rollout]:
        decoder = self.decoder
        decoder.state.ints[STATUS] = IDLE
        while self.waiting or (self.owner >= 0).any():
            self._admit()
            layout = self._layout()
            busy = np.flatnonzero(self.owner >= 0)
            held = self.steps[busy]
            left = self.requests.rows["max_tokens"][self.owner[busy]] - held
            patience = SYNC_STEPS.get(self.kind, 1)
            if patience > 1 and not self.waiting:
                patience *= 2
            steps = int(min(patience, left.max()))
            even = bool((held == held[0]).all())
            decoder.run(layout, int(held.max()), even, steps, self.active)
            self._collect(layout.seats)
            self._rearrange()
        decoder.state.ints[STATUS] = IDLE
        self._clean(set(self.spoiled_rows), set(self.spoiled_entries))
        return [rollout for rollout in self.results if rollout is not None]

    def _layout(self) -> Layout:
        layout = self.rows.layout()
        if self.decoder.use_graphs:
            rows = bucket(layout.rows, self.slots)
            return Layout(rows, rows, None, None)
        lengths = self.lengths[self.owner[self.owner >= 0]]
        self.decoder.cache.regroup(self.rows.entry[: layout.rows], lengths)
        return layout

    # Admission

    def _admit(self) -> None:
        free = np.flatnonzero(self.owner < 0)
        if self.kind == "cpu" and len(free) < min(len(self.waiting), max(1, self.slots // 16)):
            return  # a few idle seats cost less than filling them one by one
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
        used = set(self.rows.entry[self.rows.entry >= 0].tolist())
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

    def _start(self, seats: np.ndarray, requests: Sequence[int]) -> None:
        decoder = self.decoder
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
            CURVE: values["curve"][index],
            STOP_SET: self.requests.stop_set[index],
            BIAS_SET: self.requests.bias_set[index],
        }
        ints = np.stack([np.broadcast_to(fields[i], len(seats)) for i in range(len(fields))])
        reals = np.stack([values[name][index] for name in STATE_REALS])
        where = torch.from_numpy(seats).to(decoder.device)
        decoder.state.admit(where, torch.from_numpy(ints), torch.from_numpy(reals))
        if self.active.repetition:
            decoder.state.remember(where, prompts)
        self.owner[seats], self.steps[seats] = requests, 0
        self.rows.start(seats, entries)
        self.stops.start(seats)
        rows, first = np.unique(self.rows.row[seats], return_index=True)
        self._clean(rows.tolist())
        decoder.cache.start(rows, entries[first], offsets[first])

    # Results

    def _collect(self, seats: int) -> None:
        """Looks at the seats, takes out what has finished and frees its seats."""
        state = self.decoder.state
        looked = state.ints[STEP : STATUS + 1, :seats].cpu().numpy()
        steps, status = looked[0], looked[-1].copy()
        busy = self.owner[:seats] >= 0
        self.steps[:seats] = np.where(busy, steps, 0)
        cut = self.stops.find(np.flatnonzero(busy), self.owner, self.steps, status, state.out_ints[0])
        done = np.flatnonzero(busy & (status != RUNNING))
        if len(done) == 0:
            return
        where = torch.from_numpy(done).to(self.decoder.device)
        longest = int(self.steps[done].max())
        ints = state.out_ints[:, where, :longest].cpu()
        reals = state.out_reals[:, where, :longest].cpu()
        mass = None if not self.active.min_p_mass else state.out_mass[where, :longest].cpu()  # type: ignore[index]
        broken = self.rows.row[done[looked[-1, done] == BROKEN]]  # also where a stop string came before
        if len(broken):
            # Free rows are decoded along with somebody else's token, so theirs may be spoiled too.
            self.spoiled_rows.update(broken.tolist(), np.flatnonzero(self.rows.entry < 0).tolist())
            self.spoiled_entries.update(self.rows.entry[broken].tolist())
        tokens, branching = ints[0].tolist(), ints[1]
        tops = [
            None if record is None else record[where, :longest].cpu() for record in (state.top_ids, state.top_logps)
        ]
        for i, seat in enumerate(done):
            length, stop = cut.get(int(seat), (int(self.steps[seat]), None))
            records: dict[str, Any] = {"branching": branching[i, :length], "entropy": reals[2, i, :length]}
            records |= {"logps": reals[0, i, :length], "sampling_logps": reals[1, i, :length], "stop": stop}
            if k := int(self.requests.rows["logprobs"][self.owner[seat]]):
                records |= {name: top[i, :length, :k] for name, top in zip(TOPS, tops, strict=True) if top is not None}
            if mass is not None:
                records["min_p_mass"] = mass[i, :length]
            self._finish(int(self.owner[seat]), int(status[seat]), tokens[i][:length], records)
        state.ints[STATUS, where] = IDLE
        self.owner[done], self.steps[done] = -1, 0
        self.rows.leave(done)

    def _finish(self, request: int, status: int, tokens: list[int], records: dict[str, Any]) -> None:
        prompt, sample = divmod(request, self.requests.n)
        error = ""
        if status == BROKEN:
            error = (
                f"the model's logits are not finite at step {len(tokens)} of request {request} "
                f"(prompt {prompt}, sample {sample}): NaN or infinite weights?"
            )
        rollout = Rollout(
            request=request,
            prompt_index=prompt,
            sample_index=sample,
            token_ids=tokens,
            **records,
            finish_reason=_REASONS.get(status, "length"),
            error=error,
            tokenizer=self.tokenizer,
        )
        self.results[request] = rollout
        if self.on_finish is not None:
            self.on_finish(rollout)

    # Rows and seats

    def _rearrange(self) -> None:
        """Splits rows whose seats went different ways, and closes gaps that cost more than the closing."""
        state, share = self.decoder.state, self.rows.share
        if share and (moves := self.rows.split(state.ints[TOKEN].numpy(), state.vocab)) is not None:
            self._move(*moves)
            self._reseat()
        busy = np.flatnonzero(self.owner >= 0)
        count = len(busy)
        if count and not self.waiting:
            last = int(busy[-1]) + 1
            if self.decoder.use_graphs:
                worth = bucket(count, self.slots) < bucket(last, self.slots)
            else:
                worth = last - count > count // 16
            if worth:
                moved = self._move_seats(busy)
                if not share:
                    self._move(*moved)
        if share and self.rows.holes() > count // 16 and (moves := self.rows.compact()) is not None:
            self._move(*moves)

    def _reseat(self) -> None:
        """Seats every request at the number of its row once no two share one: then nothing has to be looked up."""
        seats = np.flatnonzero(self.owner >= 0)
        rows = self.rows.row[seats]
        if not self.rows.share or len(set(rows.tolist())) < len(seats) or bool((rows == seats).all()):
            return
        self.decoder.state.move(torch.from_numpy(seats), torch.from_numpy(rows), int(self.steps.max()))
        for values, idle in ((self.owner, -1), (self.steps, 0), (self.stops.checked, 0), (self.rows.row, -1)):
            moved = values[seats]
            values[seats] = idle
            values[rows] = moved

    def _move_seats(self, busy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moves the last seats into free ones."""
        source = busy[busy >= len(busy)]
        target = np.setdiff1d(np.arange(len(busy)), busy)
        device = self.decoder.device
        here, there = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        self.decoder.state.move(here, there, int(self.steps[source].max(initial=0)))
        for values in (self.owner, self.steps, self.stops.checked):
            values[target] = values[source]
        self.owner[source], self.steps[source] = -1, 0
        self.rows.move_seats(source, target)
        return source, target

    def _move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies rows of the cache."""
        self._clean(target.tolist())
        device = self.decoder.device
        here, there = torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)
        self.decoder.cache.move(here, there, int(self.steps.max()))

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


def bucket(rows: int, slots: int) -> int:
    """Rows that a graph is captured for: the next power of two, or all slots."""
    return min(1 << (rows - 1).bit_length(), slots)
