"""The state of each slot on the device, in a few tensors with fixed addresses.

All whole numbers of a slot are one column of `SlotState.ints` and all real ones one of `SlotState.reals`, so that slots
are filled, moved and read back with one operation each, and a CUDA graph always finds them at the same address.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.sampling.params import Active

TOKEN, POSITION, STEP, LIMIT, STATUS, KEY, TOP_K, OFFSET, CURVE, STOP_SET = range(10)
"""Rows of `SlotState.ints`: next input token, its position, tokens sampled so far, most tokens, status, random key,
top-k, the number of stored prompt tokens, and the slot's rows in `curves` and `stops`."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, BOTTOM_P, FREQUENCY = range(6)
"""Rows of `SlotState.reals`."""
STATE_REALS = {
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "repetition_penalty": REPETITION,
    "bottom_p": BOTTOM_P,
    "bottom_p_frequency": FREQUENCY,
}
"""The same rows by their names in `SamplingParams`."""
RUNNING, STOPPED, LENGTH, BROKEN, IDLE = range(5)
"""Values of a slot's status."""
TOKENS, BRANCHING = range(2)
"""Rows of `SlotState.out_ints`."""
LOGP, LOGQ, ENTROPY = range(3)
"""Rows of `SlotState.out_reals`."""
STOP_SLOTS = 8


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for what is queued there. On the CPU it shares the memory.

    A plain ``.to`` waits until the GPU has finished everything queued before it. A copy from pinned memory takes its
    place in the queue instead.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    # The pinned copy may go out of scope at once: torch does not reuse its memory before the transfer has finished.
    return tensor.pin_memory().to(device, non_blocking=True)


class SlotState:
    """Tensors for ``slots`` slots of up to ``tokens`` sampled tokens."""

    def __init__(self, slots: int, tokens: int, vocab: int, device: torch.device) -> None:
        self.slots, self.tokens, self.vocab = slots, tokens, vocab
        self.ints = torch.zeros(STOP_SET + 1, slots, dtype=torch.int64, device=device)
        self.ints[STATUS] = IDLE
        self.reals = torch.ones(len(STATE_REALS), slots, dtype=torch.float64, device=device)
        self.out_ints = torch.zeros(2, slots, tokens, dtype=torch.int32, device=device)
        self.out_reals = torch.zeros(3, slots, tokens, dtype=torch.float32, device=device)
        self.stops = torch.full((1, STOP_SLOTS), -1, dtype=torch.int64, device=device)
        # The tensors below are allocated when they are first needed.
        self.seen: Tensor | None = None
        """Tokens that each slot's prompt and completion contain, for the repetition penalty."""
        self.curves: Tensor | None = None
        """Temperatures by position, (curves, tokens)."""
        self.out_mass: Tensor | None = None
        """Mass of the min-p set at each sampled token, 0 if the token is not in the set."""

    @staticmethod
    def bytes(slots: int, tokens: int) -> int:
        """Return the memory that the state takes, without the tensors that are allocated on demand."""
        return slots * ((STOP_SET + 1) * 8 + len(STATE_REALS) * 8 + tokens * 5 * 4) + STOP_SLOTS * 8

    def set_stops(self, sets: Sequence[Sequence[int]]) -> bool:
        """Store the sets of stop tokens, and return whether their address has changed."""
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
        """Store temperatures by position, and return whether their address has changed."""
        if not curves:
            return False
        moved = self.curves is None or len(curves) > len(self.curves)
        if self.curves is None or moved:
            rows = 1 << (len(curves) - 1).bit_length()
            self.curves = torch.ones(rows, self.tokens, dtype=torch.float64, device=self.reals.device)
        for row, curve in enumerate(curves):
            values = torch.tensor(curve[: self.tokens], dtype=torch.float64)
            self.curves[row, : len(values)] = values.to(self.curves.device)
            self.curves[row, len(values) :] = values[-1]
        return moved

    def apply_curves(self) -> None:
        """Set every slot's temperature to that of the token it samples next."""
        assert self.curves is not None
        step = self.ints[STEP].clamp(max=self.tokens - 1)
        self.reals[TEMPERATURE] = self.curves[self.ints[CURVE], step]

    def allocate(self, active: Active) -> None:
        """Allocate what these steps of sampling need."""
        if active.min_p_mass and self.out_mass is None:
            self.out_mass = torch.zeros_like(self.out_reals[0])
        if active.repetition and self.seen is None:
            self.seen = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.ints.device)

    def admit(self, slots: np.ndarray, ints: np.ndarray, reals: np.ndarray) -> Tensor:
        """Start sequences in these slots, each with one column of ``ints`` and ``reals``.

        Return the slots as a tensor on the device.
        """
        packed = upload(np.concatenate([slots[None], ints, reals.view(np.int64)]), self.ints.device)
        index = packed[0]
        self.ints[:, index] = packed[1 : 1 + len(ints)]
        self.reals[:, index] = packed[1 + len(ints) :].view(torch.float64)
        return index

    def mark_idle(self, slots: np.ndarray) -> None:
        """Mark slots as idle."""
        if len(slots):
            self.ints[STATUS].index_fill_(0, upload(slots, self.ints.device), IDLE)

    def write_tokens(self, slots: np.ndarray, tokens: Sequence[Sequence[int]]) -> None:
        """Write completions that were not sampled in these slots to where they would be if they had been."""
        width = max(len(row) for row in tokens)
        padded = np.array([[*row, *[0] * (width - len(row))] for row in tokens], dtype=np.int32)
        device = self.out_ints.device
        self.out_ints[TOKENS, upload(slots, device), :width] = upload(padded, device)

    def mark_seen(self, slots: Tensor, token_ids: Sequence[Sequence[int]]) -> None:
        """Mark the tokens of each slot's prompt and completion as seen, and no others."""
        assert self.seen is not None
        self.seen[slots] = False
        rows = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
        tokens = np.fromiter((token for ids in token_ids for token in ids), dtype=np.int64, count=len(rows))
        index, seen = upload(np.stack([rows, tokens]), slots.device)
        self.seen[slots[index], seen] = True

    def move(self, source: np.ndarray, target: np.ndarray, steps: int) -> None:
        """Move slots with up to ``steps`` sampled tokens, all at once, so that they may swap."""
        here, there = upload(np.stack([source, target]), self.ints.device)
        ints, reals = self.ints[:, here], self.reals[:, here]
        self.ints[STATUS].index_fill_(0, here, IDLE)
        self.ints[:, there], self.reals[:, there] = ints, reals
        self.out_ints[:, there, :steps] = self.out_ints[:, here, :steps]
        self.out_reals[:, there, :steps] = self.out_reals[:, here, :steps]
        if self.seen is not None:
            self.seen[there] = self.seen[here]
        if self.out_mass is not None:
            self.out_mass[there, :steps] = self.out_mass[here, :steps]
