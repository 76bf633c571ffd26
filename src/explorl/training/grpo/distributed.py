"""A batch whose rows are spread over processes: what each of them asks of the others, over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from explorl.strategies._lib.collectives import Anything, World


class Distributed(World):
    """Each process has some rows of the batch, in the order of the processes; their numbers may differ."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.place = dist.get_rank()
        self.counts: list[int] = self.each(torch.tensor(rows, device=device)).tolist()
        self.first = sum(self.counts[: self.place])

    def total(self, values: Tensor) -> Tensor:
        found = values.clone()
        dist.all_reduce(found)
        return found

    def largest(self, values: Tensor) -> Tensor:
        # Backends do not agree on the larger one of a number and NaN.
        unknown = values.isnan()
        found = torch.stack([torch.where(unknown, -torch.inf, values), unknown.to(values.dtype)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return torch.where(found[1] > 0, torch.nan, found[0])

    def each(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)  # a single number has no dimension, which not every backend takes
        found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(found, flat.contiguous())
        return torch.stack(found).view(len(found), *values.shape)

    def everywhere(self, rows: Tensor) -> Tensor:
        padding = [0, 0] * (rows.dim() - 1) + [0, max(self.counts) - len(rows)]
        padded = torch.nn.functional.pad(rows, padding)
        return torch.cat([part[:count] for part, count in zip(self.each(padded), self.counts, strict=True)])

    def here(self, rows: Tensor) -> Tensor:
        return rows[self.first : self.first + self.counts[self.place]]

    def objects(self, rows: Sequence[Anything]) -> list[Anything]:
        found: list[list[Anything]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, list(rows))
        return [one for part in found for one in part]


def gather_to_main(rows: Tensor) -> Tensor:
    """The rows of all processes, of which each has as many, on the first of them; the others keep to their own."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(rows, parts, dst=0)
    return rows if parts is None else torch.cat(parts)
