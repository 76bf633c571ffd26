"""Pass threshold: a batch, or a group, with too low a mean reward gives no gradient.

    mask ← 0 where mean R < threshold,   the mean over the batch or over each group
    `of="correct"`: R = 1 for a correct answer, 0 for another, so that the mean is the share of correct answers

Mecklenburg, §3 and §5.2 (there 0.3, over the batch).

What to expect: the policy learns only from prompts or batches that it handles to some degree; the training curve
loses its sudden drops. The author's held-out results did not improve: what is left out is still produced.

When not to: at the start of a hard task, where every batch lies below the threshold and nothing is ever learnt; let
the threshold follow a schedule, or use `level="group"`.

Deviations: the optimizer still takes its step, with a gradient of zero: a momentum built up before moves the weights
on. As in the paper, R is the total reward, the format's part included; with `of="correct"` it is whether the answer is
correct, as the run defines it (a named reward function and a threshold). Answers that could not be scored (NaN) do not
count.
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
    """A batch, or a group, with too low a mean reward gives no gradient."""

    name = "pass_threshold"
    paper = "Mecklenburg 2025, Exploration strategies for reasoning fine-tuning of small language models, §5.2"
    acts_on_parts = True

    threshold: Scheduled = 0.3
    level: Literal["batch", "group"] = "batch"
    of: Literal["reward", "correct"] = "reward"  # the mean total reward, or the share of correct answers

    def __post_init__(self) -> None:
        check_number(self, "threshold")
        check_choice(self, "level", "batch", "group")
        check_choice(self, "of", "reward", "correct")

    @property
    def needs_correct(self) -> bool:  # type: ignore[override]
        return self.of == "correct"

    def passes(self, batch: Batch) -> Bool[Tensor, " batch"]:
        """Whether each sequence stays."""
        decides = batch.rewards if self.of == "reward" else batch.correctness
        values = double(batch.rewards if self.of == "reward" else batch.correct)
        group = batch.group if self.level == "group" else torch.zeros_like(batch.group)
        mean, _ = batch.collectives.map_rows(group_moments, values, group, ~decides.isnan(), correction=0)
        return mean >= at(self.threshold, batch.step) - 1e-6  # 0.7 in float32 is below 0.7

    def select(self, batch: Batch) -> Float[Tensor, "batch time"]:
        return per_token(self.passes(batch).float(), batch.mask) * batch.mask

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"skipped": 1 - float(batch.collectives.gather_rows(self.passes(batch)).float().mean())}
