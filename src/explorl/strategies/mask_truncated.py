"""Mask truncated: exclude completions that reach the length limit from the loss.

    mask_i ← 0 if sequence i was truncated

Mecklenburg, §3; also part of DAPO (Yu et al. 2025, overlong filtering).

What to expect: a truncated completion is graded as wrong although it may have been on its way to the right answer.
Without such completions, a short length limit no longer penalises long reasoning, and training is more stable.

When not to use it: if completions should become shorter, since nothing then limits their length. He et al. 2025
(Skywork-OR1) used the context better by keeping the penalty. If most completions are truncated, hardly any gradient
remains: increase the limit.

Deviations: none. The sequences are excluded from the loss, including the KL term, but from no statistic: their rewards
still count in the mean of their group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from explorl.strategies.base import Batch, Strategy, per_token


@dataclass(frozen=True)
class MaskTruncated(Strategy):
    """Exclude completions that reach the length limit from the loss."""

    name = "mask_truncated"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §3"
    acts_on_parts = True

    def select(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return per_token((~batch.truncated).float(), batch.mask) * batch.mask

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"truncated": float(batch.collectives.gather_rows(batch.truncated).float().mean())}
