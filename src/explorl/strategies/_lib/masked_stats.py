"""Statistics over counted tokens and over groups, in double precision.

Double precision makes a statistic of float32 or bfloat16 values exact to the last returned bit, so that it does not
depend on the order of the rows or on padding. Devices without it (mps) use float32.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def double(values: Tensor) -> Tensor:
    """Return the values in double precision, without gradient."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def masked_double(
    values: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"]
) -> Float[Tensor, "batch time"]:
    """Return the values in double precision, 0 for uncounted tokens: padding may hold anything, including NaN."""
    return torch.where(mask > 0, double(values), 0.0)


def is_negligible(spread: Tensor, size: Tensor) -> Tensor:
    """Return whether a spread can be rounding error of values of this size: at most 1e-6 · max(1, |size|)."""
    return spread <= 1e-6 * size.abs().clamp(min=1.0)


def selection_size(fraction: float, tokens: int) -> int:
    """Return ⌊fraction · tokens⌋, but at least 1 if there is a token. Tolerates rounding: 0.29 · 100 is 29."""
    return min(tokens, max(1, math.floor(fraction * tokens + 1e-9)))


def group_sum(values: Float[Tensor, " batch"], group: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return for each row the sum over its group. The group ids may be any integers in any order."""
    ids, index = torch.unique(group, return_inverse=True)
    return values.new_zeros(len(ids)).index_add_(0, index, values)[index]


def group_moments(
    values: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    present: Bool[Tensor, " batch"],
    *,
    correction: int,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return for each row the mean and the standard deviation over the present rows of its group.

    correction: 0 for the population's deviation, 1 for the sample's (Bessel). The deviation of a single row is 0.
    """
    size = group_sum(present.to(values.dtype), group)
    mean = group_sum(torch.where(present, values, 0.0), group) / size.clamp(min=1)
    squares = torch.where(present, (values - mean) ** 2, 0.0)
    return mean, (group_sum(squares, group) / (size - correction).clamp(min=1)).sqrt()
