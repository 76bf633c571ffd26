"""What the runner keeps of each seat (a request in flight), as a few tensors with fixed addresses.

All whole numbers of a seat are one column of `State.ints` and all real ones one of `State.reals`, so that seats are
filled, moved and read back with one operation each, and a CUDA graph always finds them in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.transfer import upload

TOKEN, POSITION, STEP, LIMIT, STATUS, KEY, TOP_K, PROMPT, OFFSET, CURVE, STOP_SET, BIAS_SET = range(12)
"""Rows of `State.ints`: next input token, its position, tokens sampled so far, most tokens, status, random key, top-k,
prompt entry, how many tokens that entry holds, and its rows in `State.curves`, `State.stops` and `State.bias`."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, BOTTOM_P, FREQUENCY = range(6)
"""Rows of `State.reals`."""
STATE_REALS = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "repetition_penalty": REPETITION,
    "bottom_p": BOTTOM_P,
    "bottom_p_frequency": FREQUENCY,
}
"""The same rows by the names that `SamplingParams` has for them."""
RUNNING, STOPPED, LENGTH, BROKEN, IDLE = range(5)
"""Values of a seat's status."""
TOKENS, BRANCHING = range(2)
"""Rows of `State.out_ints`."""
LOGP, LOGQ, ENTROPY = range(3)
"""Rows of `State.out_reals`."""
STOP_SLOTS = 8


class State:
    """Tensors for ``slots`` seats of up to ``tokens`` sampled tokens."""

    def __init__(self, slots: int, tokens: int, vocab: int, device: torch.device) -> None:
        self.slots, self.tokens, self.vocab = slots, tokens, vocab
        self.ints = torch.zeros(12, slots, dtype=torch.int64, device=device)
        self.ints[STATUS] = IDLE
        self.reals = torch.ones(len(STATE_REALS), slots, dtype=torch.float64, device=device)
        self.out_ints = torch.zeros(2, slots, tokens, dtype=torch.int32, device=device)
        self.out_reals = torch.zeros(3, slots, tokens, dtype=torch.float32, device=device)
        self.stops = torch.full((1, STOP_SLOTS), -1, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        """Which tokens a seat has had, for the repetition penalty; allocated when it is first needed."""
        self.curves: Tensor | None = None
        """Temperatures by position, (curves, tokens), where a call has any; allocated when it is first needed."""
        self.out_mass: Tensor | None = None
        """Mass of the min-p set at each sampled token, 0 where that is not in it; allocated when it is first needed."""
        self.bias: Tensor | None = None
        """Rows (sets, vocab) that are added to the logits; allocated when they are first needed."""
        self.top_ids: Tensor | None = None
        """The most likely tokens (slots, tokens, k) at each position; allocated when they are first needed."""
        self.top_logps: Tensor | None = None
        """Their log π."""

    @staticmethod
    def bytes(slots: int, tokens: int) -> int:
        """Memory of a state without ``seen``."""
        return slots * (12 * 8 + len(STATE_REALS) * 8 + tokens * 5 * 4) + STOP_SLOTS * 8

    def set_stops(self, sets: Sequence[Sequence[int]]) -> bool:
        """Stores the sets of stop tokens; True where they moved to another place in memory."""
        longest = max(len(ids) for ids in sets)
        moved = len(sets) > self.stops.shape[0] or longest > self.stops.shape[1]
        if moved:
            width = max(self.stops.shape[1], 1 << longest.bit_length())
            self.stops = self.stops.new_full((max(len(sets), self.stops.shape[0]), width), -1)
        table = torch.full(self.stops.shape, -1, dtype=torch.int64)
        for row, ids in zip(table, sets, strict=False):
            row[: len(ids)] = torch.tensor(list(ids), dtype=torch.int64)
        self.stops.copy_(table)
        return moved

    def set_curves(self, curves: Sequence[Sequence[float]]) -> bool:
        """Stores temperatures by position; True where they moved to another place in memory."""
        if not curves:
            return False
        moved = self.curves is None or len(curves) > len(self.curves)
        if self.curves is None or moved:
            rows = 1 << (len(curves) - 1).bit_length()
            self.curves = torch.ones(rows, self.tokens, dtype=torch.float64, device=self.reals.device)
        for row, curve in enumerate(curves):
            held = torch.tensor(curve[: self.tokens], dtype=torch.float64)
            self.curves[row, : len(held)] = held.to(self.curves.device)
            self.curves[row, len(held) :] = held[-1]
        return moved

    def temper(self) -> None:
        """Gives every seat the temperature of the token that it is about to sample."""
        assert self.curves is not None
        step = self.ints[STEP].clamp(max=self.tokens - 1)
        self.reals[TEMPERATURE] = self.curves[self.ints[CURVE], step]

    def keep_mass(self) -> None:
        """Makes room for the mass of the min-p set."""
        if self.out_mass is None:
            self.out_mass = torch.zeros_like(self.out_reals[0])

    def keep_seen(self) -> None:
        """Makes room for the tokens that seats have had."""
        if self.seen is None:
            self.seen = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.ints.device)

    def set_bias(self, rows: Tensor | None) -> bool:
        """Stores what is added to the logits; True where it moved to another place in memory."""
        if rows is None:
            return False
        moved = self.bias is None or len(rows) > len(self.bias)
        if self.bias is None or moved:
            self.bias = torch.zeros(rows.shape, device=self.ints.device)
        self.bias[: len(rows)] = rows
        return moved

    def keep_tops(self, k: int) -> bool:
        """Makes room for the k most likely tokens of each position; True where it is at another place in memory."""
        if k == (0 if self.top_ids is None else self.top_ids.shape[-1]):
            return False
        shape, device = (self.slots, self.tokens, k), self.ints.device
        ids, logps = torch.zeros(shape, dtype=torch.int32, device=device), torch.zeros(shape, device=device)
        self.top_ids, self.top_logps = (ids, logps) if k else (None, None)
        return True

    def admit(self, seats: np.ndarray, ints: np.ndarray, reals: np.ndarray) -> Tensor:
        """Starts requests in these seats, with one column of ``ints`` and ``reals`` each; the seats on the device."""
        packed = upload(np.concatenate([seats[None], ints, reals.view(np.int64)]), self.ints.device)
        where = packed[0]
        self.ints[:, where] = packed[1 : 1 + len(ints)]
        self.reals[:, where] = packed[1 + len(ints) :].view(torch.float64)
        return where

    def idle(self, seats: np.ndarray) -> None:
        """Nobody goes on in these seats."""
        if len(seats):
            self.ints[STATUS].index_fill_(0, upload(seats, self.ints.device), IDLE)

    def write(self, seats: np.ndarray, tokens: Sequence[Sequence[int]]) -> None:
        """Puts what these seats have of their completions, from elsewhere, where it would be had they sampled it."""
        width = max(len(row) for row in tokens)
        padded = np.array([[*row, *[0] * (width - len(row))] for row in tokens], dtype=np.int32)
        device = self.out_ints.device
        self.out_ints[TOKENS, upload(seats, device), :width] = upload(padded, device)

    def remember(self, seats: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        """Marks the tokens of these seats' prompts, and of what they have of their completions, as seen."""
        self.keep_seen()
        assert self.seen is not None
        self.seen[seats] = False
        which = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        tokens = np.fromiter((token for prompt in prompts for token in prompt), dtype=np.int64, count=len(which))
        where, seen = upload(np.stack([which, tokens]), seats.device)
        self.seen[seats[where], seen] = True

    def move(self, seats: np.ndarray, places: np.ndarray, steps: int) -> None:
        """Moves seats with up to ``steps`` recorded tokens, all at once: they may change places."""
        source, target = upload(np.stack([seats, places]), self.ints.device)
        ints, reals = self.ints[:, source], self.reals[:, source]
        self.ints[STATUS].index_fill_(0, source, IDLE)
        self.ints[:, target], self.reals[:, target] = ints, reals
        self.out_ints[:, target, :steps] = self.out_ints[:, source, :steps]
        self.out_reals[:, target, :steps] = self.out_reals[:, source, :steps]
        for record in (self.top_ids, self.top_logps):
            if record is not None:
                record[target, :steps] = record[source, :steps]
        if self.seen is not None:
            self.seen[target] = self.seen[source]
        if self.out_mass is not None:
            self.out_mass[target, :steps] = self.out_mass[source, :steps]
