"""Order statistics within groups: maximum, sorted order, and ranks with ties."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import group_sum, is_negligible


def group_max(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return for each row the maximum over the present rows of its group; 0 if there is none."""
    ids, index = torch.unique(group, return_inverse=True)
    lowest = values.new_full((len(ids),), -torch.inf)
    largest = lowest.scatter_reduce(0, index, torch.where(present, values, -torch.inf), "amax")[index]
    return torch.where(largest == -torch.inf, 0.0, largest)


def sorted_groups(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Sort the rows by group and within a group by rising value, absent rows last.

    Returns (order, position): the row indices in sorted order, and the position, from 0, of each in its group.
    """
    _, index = torch.unique(group, return_inverse=True)
    order = torch.where(present, values, torch.inf).argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    sizes = torch.bincount(index)
    starts = sizes.cumsum(0) - sizes
    return order, torch.arange(len(order), device=order.device) - starts[index[order]]


def group_rank(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Return for each present row how many rows of its group have a smaller value.

    Rows that differ only by rounding share their mean rank, so that ranks do not depend on the order of the rows and
    identical completions get equal ranks. The rank of an absent row is undefined.
    """
    order, position = sorted_groups(values, group, present)
    ordered, is_present = values[order], present[order]
    step = (ordered.diff() > 0) & ~is_negligible(ordered.diff(), ordered[:-1])
    starts_tie = torch.ones_like(is_present)
    starts_tie[1:] = (position[1:] == 0) | step | ~is_present[1:]
    tie = starts_tie.cumsum(0)
    mean = group_sum(position.to(values.dtype), tie) / group_sum(torch.ones_like(values), tie)
    return torch.empty_like(values).scatter_(0, order, mean)
