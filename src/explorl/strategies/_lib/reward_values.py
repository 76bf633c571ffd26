"""The reward that a strategy reads: the total one, or whether the answer is correct."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies.base import Batch


def reward_values(batch: Batch, of: Literal["correct", "reward"]) -> Float[Tensor, " batch"]:
    """The total reward, or 1 where the answer is correct and 0 where not; NaN where it could not be scored."""
    if of == "reward":
        return batch.rewards
    return torch.where(batch.correctness.isnan(), torch.nan, batch.correct.to(batch.correctness.dtype))
