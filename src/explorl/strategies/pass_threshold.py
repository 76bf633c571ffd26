"""Pass threshold: skip batches or groups whose mean reward is too low.

    mask ← 0 if mean R < threshold,   with the mean over the batch or over each group
    `of="correct"`: R = 1 for a correct answer, 0 otherwise, so that the mean is the fraction of correct answers

Mecklenburg, §3 and §5.2 (there 0.3, over the batch).

What to expect: the policy learns only from prompts or batches that it already handles to some degree, and the training
curve has no sudden drops. The author's held-out results did not improve: the policy still produces what is skipped.

When not to use it: at the start of a hard task, when every batch is below the threshold and nothing is ever learned;
use a schedule for the threshold, or `level="group"`.

Deviations: the optimizer still takes its step, with a gradient of zero, so existing momentum continues to move the
weights. As in the paper, R is the total reward including that for the format; with `of="correct"` it is correctness as
defined by the run (a named reward function and a threshold). Completions that could not be scored (NaN) do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments
from explorl.strategies._lib.schedule import Scheduled, at
from explorl.strategies._lib.validate import check_choice, check_number
from explorl.strategies.base import Batch, Strategy, per_token


@dataclass(frozen=True)
class PassThreshold(Strategy):
    """Skip batches or groups whose mean reward is too low."""

    name = "pass_threshold"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §5.2"
    acts_on_parts = True

    threshold: Scheduled = 0.3
    level: Literal["batch", "group"] = "batch"
    of: Literal["reward", "correct"] = "reward"  # the mean total reward, or the fraction of correct answers

    def __post_init__(self) -> None:
        check_number(self, "threshold")
        check_choice(self, "level", "batch", "group")
        check_choice(self, "of", "reward", "correct")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def passes(self, batch: Batch) -> Bool[Tensor, " batch"]:
        """Return whether each sequence stays in the loss."""
        scores = batch.rewards if self.of == "reward" else batch.correctness
        values = double(batch.rewards if self.of == "reward" else batch.correct)
        group = batch.group if self.level == "group" else torch.zeros_like(batch.group)
        mean, _ = batch.collectives.map_rows(group_moments, values, group, ~scores.isnan(), correction=0)
        return mean >= at(self.threshold, batch.step) - 1e-6  # 0.7 in float32 is below 0.7

    def select(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return per_token(self.passes(batch).float(), batch.mask) * batch.mask

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"skipped": 1 - float(batch.collectives.gather_rows(self.passes(batch)).float().mean())}
