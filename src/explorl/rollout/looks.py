"""When the host looks at what the device has decoded, and what it then finds to have ended."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from explorl.rollout.reading import Reading
from explorl.rollout.rollouts import FinishReason
from explorl.rollout.sequences import Sample
from explorl.rollout.state import BROKEN, STOPPED

LONGEST = 32
"""Most steps between two looks: pages are given out for all of them beforehand."""
FINE = 64
"""Beyond so many rows there are graphs for three quarters of a power of two as well."""

_REASONS: dict[int, FinishReason] = {STOPPED: "stop", BROKEN: "error"}


@cache
def graph_sizes(slots: int) -> tuple[int, ...]:
    """Rows that graphs are captured for: powers of two, beyond `FINE` three quarters of them too, and all slots."""
    powers = [1 << i for i in range(slots.bit_length())]
    quarters = [3 * power // 4 for power in (*powers, 2 * powers[-1]) if power > FINE]
    return tuple(sorted({size for size in (*powers, *quarters) if size < slots} | {slots}))


def bucket(rows: int, slots: int) -> int:
    """The smallest graph for so many rows."""
    sizes = graph_sizes(slots)
    return sizes[bisect_left(sizes, rows)]


def steps_to_look(remaining: np.ndarray, rows: int, slots: int, *, patience: int, certain: bool, waiting: bool) -> int:
    """Steps until a look is worth while, for seats that may have ``remaining`` more tokens each; 0 where none may.

    Where rows can end at any step, that is after ``patience`` of them. Where they end at their limits and nowhere else
    (``certain``), the host knows when: it is time for a look once enough have ended that the rest fits into a smaller
    graph than that of ``rows``, or, where others wait for a seat, once the first one has; but not before ``patience``.
    """
    most = int(remaining.max())
    if not certain or most == 0:
        return min(patience, most)
    left = np.sort(remaining[remaining > 0])
    fewer = bisect_left(graph_sizes(slots), rows) - 1  # the next smaller graph
    smaller = graph_sizes(slots)[fewer] if fewer >= 0 else 0
    enough = 1 if waiting else len(left) - smaller
    steps = int(left[enough - 1]) if enough > 0 else patience
    return min(max(steps, patience), LONGEST, most)


@dataclass
class Ending:
    """Samples that have ended, while their tokens are on their way."""

    reading: Reading
    status: np.ndarray
    lengths: np.ndarray
    stops: Sequence[str | None]
    """The stop string that ended each."""

    @property
    def samples(self) -> Sequence[Sample]:
        return self.reading.samples

    def land(self) -> None:
        """Gives the samples their tokens, and says why they ended."""
        try:
            self.reading.land()
            for sample, status, length, stop in zip(self.samples, self.status, self.lengths, self.stops, strict=True):
                sample.reason, sample.stop = _REASONS.get(int(status), "length"), stop
                if sample.reason == "error":
                    sample.error = _broken(sample, int(length))
        except BaseException:  # a row with its last token and no reason to end would go on
            for sample in self.samples:
                sample.reason, sample.stop, sample.error = None, None, ""
            self.reading.undo()
            raise


def _broken(sample: Sample, step: int) -> str:
    return (
        f"the model's logits are not finite at step {step} of request {sample.index} "
        f"(prompt {sample.prompt_index}, sample {sample.sample_index}): NaN or infinite weights?"
    )
