"""Clip-higher: let unlikely tokens grow further before the ratio is clipped.

    min(r · A, clip(r, 1 − low, 1 + high) · A)

Yu et al. 2025 (DAPO), reviewed in Deng et al. 2025, §4.3.

What to expect: with a symmetric clip of 0.2 a token of probability 0.01 may grow to 0.012 only, one of 0.9 as far as
it likes; the higher ceiling loosens that for the unlikely ones, and entropy falls later or not at all.

When not to: on a batch that is used once: the ratio is then 1 everywhere and no clip ever binds. A ceiling far above
0.28 gives up the trust region.

Deviations: none. The KL term is not clipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_number
from explorl.strategies.base import Batch, Strategy


@dataclass(frozen=True)
class ClipHigher(Strategy):
    """Let unlikely tokens grow further before the ratio is clipped."""

    name = "clip_higher"
    paper = "Yu et al. 2025, DAPO (arXiv:2503.14476)"
    acts_on_parts = True
    needs_reuse = True

    low: Scheduled = 0.2
    high: Scheduled = 0.28

    def __post_init__(self) -> None:
        check_number(self, "low", above=0, at_most=1)
        check_number(self, "high", above=0)

    def clip(self, batch: Batch) -> tuple[float, float]:
        return at(self.low, batch.step), at(self.high, batch.step)

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        low, high = self.clip(batch)
        return {"low": low, "high": high}
