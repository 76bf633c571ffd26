"""Readback: copy what the slots have sampled from device to host, and decide when that is worth it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.requests import SequenceState
from explorl.rollout.rollouts import FinishReason
from explorl.rollout.sampling import Active
from explorl.rollout.state import BRANCHING, BROKEN, ENTROPY, LOGP, LOGQ, STOPPED, TOKENS, SlotState, upload

MAX_STEPS = 32
"""Most steps between two readbacks. Pages are allocated for all of them beforehand."""
FINE_ABOVE = 64
"""Above this many rows there are also graphs for three quarters of a power of two."""

_REASONS: dict[int, FinishReason] = {STOPPED: "stop", BROKEN: "error"}


@cache
def graph_sizes(slots: int) -> tuple[int, ...]:
    """Return the numbers of rows for which graphs are captured, in ascending order.

    These are the powers of two, above `FINE_ABOVE` also three quarters of them, and ``slots`` itself.
    """
    powers = [1 << i for i in range(slots.bit_length())]
    quarters = [3 * power // 4 for power in (*powers, 2 * powers[-1]) if power > FINE_ABOVE]
    return tuple(sorted({size for size in (*powers, *quarters) if size < slots} | {slots}))


def graph_size(rows: int, slots: int) -> int:
    """Return the smallest graph size that holds ``rows``."""
    sizes = graph_sizes(slots)
    return sizes[bisect_left(sizes, rows)]


def steps_until_readback(
    remaining: np.ndarray, rows: int, slots: int, *, patience: int, certain: bool, waiting: bool
) -> int:
    """Return how many steps to decode before the next readback; 0 if no slot may sample another token.

    Args:
        remaining: Tokens that each slot may still sample.
        rows: Rows that are decoded now.
        patience: Steps between two readbacks if a sequence can end at any step, and the minimum otherwise.
        certain: Whether sequences end only at their limits. The host then knows when: it waits until enough of them
            have ended that the rest fits into a smaller graph.
        waiting: Whether other sequences wait for a slot. The first that ends is then enough.
    """
    longest = int(remaining.max())
    if not certain or longest == 0:
        return min(patience, longest)
    left = np.sort(remaining[remaining > 0])
    index = bisect_left(graph_sizes(slots), rows) - 1
    smaller = graph_sizes(slots)[index] if index >= 0 else 0
    enough = 1 if waiting else len(left) - smaller
    steps = int(left[enough - 1]) if enough > 0 else patience
    return min(max(steps, patience), MAX_STEPS, longest)


class Download:
    """Tensors on their way to the host, with the values they have at this point of the GPU's queue.

    ``.cpu()`` would wait until the GPU has finished everything queued before it. A copy to pinned memory takes its
    place in the queue instead. On the CPU there is no queue, and the copy is made at once.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._host: list[Tensor] = []
        self._event: torch.cuda.Event | None = None
        for tensor in tensors:
            pinned = tensor.device.type == "cuda"
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host.append(host.copy_(tensor, non_blocking=pinned))
            if pinned and tensor is tensors[-1]:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> list[Tensor]:
        """Return the tensors once they have arrived. Their memory may be pinned, so copy what is to be kept."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Readback:
    """The tokens and statistics sampled in some slots, on their way to the sequences.

    Args:
        slots: The slot of each sequence.
        lengths: The length of each completion that is read back.
        status: The status with which each sequence has ended; None if they have not.
        stops: The stop string that ended each sequence.
    """

    def __init__(
        self,
        state: SlotState,
        active: Active,
        sequences: Sequence[SequenceState],
        slots: np.ndarray,
        lengths: np.ndarray,
        status: np.ndarray | None = None,
        stops: Sequence[str | None] = (),
    ) -> None:
        self.sequences, self._status, self._stops = sequences, status, stops
        for sequence, length in zip(sequences, lengths.tolist(), strict=True):
            sequence.truncate(length)  # it may have been read before its stop string was found
        self._begins = np.array([len(sequence.tokens) for sequence in sequences])
        self._ends = lengths
        index, self._longest = upload(slots, state.ints.device), int(lengths.max())
        sources = [state.out_ints[:, index, : self._longest], state.out_reals[:, index, : self._longest]]
        if active.min_p_mass and state.out_mass is not None:
            sources.append(state.out_mass[None, index, : self._longest])
        self._download = Download(*sources)

    def finish(self) -> None:
        """Wait for the download, append its tokens and statistics to the sequences, and set why they have ended."""
        sizes = (self._ends - self._begins).tolist()
        column = np.arange(self._longest)
        index = torch.from_numpy(np.flatnonzero((column >= self._begins[:, None]) & (column < self._ends[:, None])))
        ints, reals, *mass = (values.flatten(1, 2).index_select(1, index) for values in self._download.wait())
        tokens = ints[TOKENS].tolist()
        stats = {"logps": reals[LOGP], "sampling_logps": reals[LOGQ], "entropy": reals[ENTROPY]}
        stats |= {"branching": ints[BRANCHING], "sampled": torch.ones(len(tokens), dtype=torch.bool)}
        if mass:
            stats["min_p_mass"] = mass[0][0]
        parts = {name: values.split(sizes) for name, values in stats.items()}
        ends = np.cumsum(sizes).tolist()
        try:
            for i, (sequence, size, end) in enumerate(zip(self.sequences, sizes, ends, strict=True)):
                if size:
                    sequence.append_sampled(
                        tokens[end - size : end], {name: values[i] for name, values in parts.items()}
                    )
            if self._status is not None:
                self._set_reasons(self._status)
        except BaseException:
            self._undo()
            raise

    def _set_reasons(self, statuses: np.ndarray) -> None:
        for sequence, status, length, stop in zip(
            self.sequences, statuses.tolist(), self._ends.tolist(), self._stops, strict=True
        ):
            sequence.reason, sequence.stop = _REASONS.get(status, "length"), stop
            if sequence.reason == "error":
                sequence.error = _non_finite_logits(sequence, length)

    def _undo(self) -> None:
        """Remove the tokens again after an interruption; they will be sampled a second time.

        A sequence with its last token and no reason would be decoded further.
        """
        for sequence, begin in zip(self.sequences, self._begins.tolist(), strict=True):
            if self._status is not None:
                sequence.reason, sequence.stop, sequence.error = None, None, ""
            sequence.truncate(begin)


def _non_finite_logits(sequence: SequenceState, step: int) -> str:
    return (
        f"the model's logits are not finite at step {step} of request {sequence.index} "
        f"(prompt {sequence.prompt_index}, sample {sequence.sample_index}): NaN or infinite weights?"
    )
