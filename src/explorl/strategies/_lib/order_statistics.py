"""Order within groups, in double precision: who comes where, ranks with ties, largest values."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.masked_stats import group_sum, is_negligible


def group_max(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """For each row the largest value over the present rows of its group; 0 where there is none."""
    ids, index = torch.unique(group, return_inverse=True)
    lowest = values.new_full((len(ids),), -torch.inf)
    largest = lowest.scatter_reduce(0, index, torch.where(present, values, -torch.inf), "amax")[index]
    return torch.where(largest == -torch.inf, 0.0, largest)


def sorted_groups(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """(order, place): the rows group by group, each by rising value with absent rows last, and for each row of that
    order its place in its group, from 0 on."""
    _, index = torch.unique(group, return_inverse=True)
    order = torch.where(present, values, torch.inf).argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    sizes = torch.bincount(index)
    starts = sizes.cumsum(0) - sizes
    return order, torch.arange(len(order), device=order.device) - starts[index[order]]


def group_rank(
    values: Float[Tensor, " batch"], group: Int[Tensor, " batch"], present: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """For each present row how many of its group lie below it; rows that differ by rounding only share their mean rank.

    So the order of the rows decides nothing, and two answers that are the same word for word rank alike. What an absent
    row gets means nothing.
    """
    order, place = sorted_groups(values, group, present)
    ordered, there = values[order], present[order]
    step = (ordered.diff() > 0) & ~is_negligible(ordered.diff(), ordered[:-1])
    new = torch.ones_like(there)
    new[1:] = (place[1:] == 0) | step | ~there[1:]
    tie = new.cumsum(0)
    mean = group_sum(place.to(values.dtype), tie) / group_sum(torch.ones_like(values), tie)
    return torch.empty_like(values).scatter_(0, order, mean)
