"""The base advantage of GRPO: the reward of a sequence relative to its group.

    A_i = (R_i − mean_group) / (std_group + 1e-4)

Shao et al. 2024 (DeepSeekMath); Deng et al. 2025, Eq. 10. As in TRL, the standard deviation is the sample's (divided by
n − 1), and a completion that no reward function could score (R = NaN) is excluded from both moments and gets A = 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import double, group_moments

EPSILON = 1e-4


def grpo_advantages(
    rewards: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    *,
    scale: Literal["group", "batch", "none"] = "group",
) -> Float[Tensor, " batch"]:
    """Return the advantages of the sequences, divided by the standard deviation that `scale` names."""
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale is {scale!r}; it must be 'group', 'batch' or 'none'")
    values = double(rewards)
    scored = ~values.isnan()
    mean, std = group_moments(values, group, scored, correction=1)
    if scale == "batch":
        _, std = group_moments(values, torch.zeros_like(group), scored, correction=1)
    centred = torch.where(scored, values - mean, 0.0)
    return (centred if scale == "none" else centred / (std + EPSILON)).float()
