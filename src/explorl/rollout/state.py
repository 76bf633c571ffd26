"""What the decoder keeps of each seat (a request in flight), as a few tensors with fixed addresses.

All whole numbers of a seat are one column of `State.ints` and all real ones one of `State.reals`, so that seats are
filled, moved and read back with one operation each, and a CUDA graph always finds them in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOKEN, POSITION, STEP, LIMIT, STATUS, KEY, TOP_K, PROMPT, OFFSET = range(9)
"""Rows of `State.ints`: next input token, its position, tokens sampled so far, most tokens, status, random key, top-k,
prompt entry, and how many tokens that entry holds."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, BOTTOM_P, FREQUENCY = range(6)
"""Rows of `State.reals`."""
STATE_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "bottom_p", "bottom_p_frequency")
"""What `SamplingParams` calls them, in the same order."""
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
        self.ints = torch.zeros(9, slots, dtype=torch.int64, device=device)
        self.ints[STATUS] = IDLE
        self.reals = torch.ones(6, slots, dtype=torch.float64, device=device)
        self.out_ints = torch.zeros(2, slots, tokens, dtype=torch.int32, device=device)
        self.out_reals = torch.zeros(3, slots, tokens, dtype=torch.float32, device=device)
        self.stops = torch.full((STOP_SLOTS,), -1, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        """Which tokens a seat has had, for the repetition penalty; allocated when it is first needed."""

    @staticmethod
    def bytes(slots: int, tokens: int) -> int:
        """Memory of a state without ``seen``."""
        return slots * (9 * 8 + 6 * 8 + tokens * 5 * 4) + STOP_SLOTS * 8

    def set_stops(self, ids: Sequence[int]) -> bool:
        """Stores the stop tokens; True where they moved to another place in memory."""
        moved = len(ids) > len(self.stops)
        if moved:
            self.stops = self.stops.new_full((1 << len(ids).bit_length(),), -1)
        self.stops.fill_(-1)
        self.stops[: len(ids)] = torch.tensor(list(ids), dtype=torch.int64)
        return moved

    def admit(self, seats: Tensor, ints: Tensor, reals: Tensor) -> None:
        """Starts requests in these seats; ``ints`` and ``reals`` have one column per seat."""
        device = self.ints.device
        self.ints[:, seats] = ints.to(device, non_blocking=True)
        self.reals[:, seats] = reals.to(device, non_blocking=True)

    def write(self, seats: Tensor, tokens: Sequence[Sequence[int]]) -> None:
        """Puts what these seats have of their completions, from elsewhere, where it would be had they sampled it."""
        width = max(len(row) for row in tokens)
        padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens], dtype=self.out_ints.dtype)
        self.out_ints[TOKENS, seats, :width] = padded.to(self.out_ints.device)

    def remember(self, seats: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        """Marks the tokens of these seats' prompts, and of what they have of their completions, as seen."""
        if self.seen is None:
            self.seen = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.ints.device)
        self.seen[seats] = False
        lengths = [len(prompt) for prompt in prompts]
        where = seats.repeat_interleave(torch.tensor(lengths, device=seats.device))
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=seats.device)
        self.seen[where, tokens] = True

    def move(self, source: Tensor, target: Tensor, steps: int) -> None:
        """Moves seats with up to ``steps`` recorded tokens, all at once: they may change places."""
        ints, reals = self.ints[:, source], self.reals[:, source]
        self.ints[STATUS, source] = IDLE
        self.ints[:, target], self.reals[:, target] = ints, reals
        self.out_ints[:, target, :steps] = self.out_ints[:, source, :steps]
        self.out_reals[:, target, :steps] = self.out_reals[:, source, :steps]
        if self.seen is not None:
            self.seen[target] = self.seen[source]
