"""Mask truncated: answers that hit the length limit give no gradient.

    mask_i ← 0 where sequence i was cut off

Mecklenburg, §3; also part of DAPO (Yu et al. 2025, overlong filtering).

What to expect: an answer that was cut off is graded as wrong although it may have been on its way to the right one.
With such answers left out, a short length limit no longer punishes long thinking, and training is steadier.

When not to: where answers should become shorter; nothing then holds their length back. He et al. 2025 (Skywork-OR1)
got better use of the context by keeping the penalty. If most answers are cut off, hardly a gradient remains: raise the
limit.

Deviations: none. The sequences leave the loss, the KL term included, but no statistic: their reward still counts in
the mean of their group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from explorl.strategies.base import Batch, Strategy, per_token


@dataclass(frozen=True)
class MaskTruncated(Strategy):
    """Answers that hit the length limit give no gradient."""

    name = "mask_truncated"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §3"
    acts_on_parts = True

    def select(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return per_token((~batch.truncated).float(), batch.mask) * batch.mask

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"truncated": float(batch.collectives.gather_rows(batch.truncated).float().mean())}
