"""The reward that a strategy uses: the total reward, or whether the answer is correct."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from explorl.strategies.base import Batch


def reward_values(batch: Batch, of: Literal["correct", "reward"]) -> Float[Tensor, " batch"]:
    """Return the total rewards, or 1 for a correct answer and 0 for a wrong one; NaN if it could not be scored."""
    if of == "reward":
        return batch.rewards
    return torch.where(batch.correctness.isnan(), torch.nan, batch.correct.to(batch.correctness.dtype))
