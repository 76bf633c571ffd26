"""Clip-higher: raise the upper clip bound so that unlikely tokens can gain more probability.

    min(r · A, clip(r, 1 − low, 1 + high) · A)

Yu et al. 2025 (DAPO), reviewed in Deng et al. 2025, §4.3.

What to expect: with a symmetric clip of 0.2 a token of probability 0.01 can only rise to 0.012, while one of 0.9 is
practically unrestricted. A higher upper bound relaxes the limit for unlikely tokens, and entropy falls later or not at
all.

When not to use it: on a batch that is used for one update only: the ratio is then 1 everywhere and nothing is clipped.
An upper bound far above 0.28 abandons the trust region.

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
    """Raise the upper clip bound so that unlikely tokens can gain more probability."""

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
