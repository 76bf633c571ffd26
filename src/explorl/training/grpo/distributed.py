"""A batch whose rows are distributed over processes: collectives over torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from explorl.strategies._lib.collectives import Collectives, Item


class Distributed(Collectives):
    """Collectives of a batch of which each process has some rows, in the order of their ranks."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.counts: list[int] = self.gather(torch.tensor(rows, device=device)).tolist()
        self.first = sum(self.counts[: self.rank])

    def sum(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    def max(self, values: Tensor) -> Tensor:
        # Backends differ in the maximum of a number and NaN.
        missing = values.isnan()
        reduced = torch.stack([torch.where(missing, -torch.inf, values), missing.to(values.dtype)])
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
        return torch.where(reduced[1] > 0, torch.nan, reduced[0])

    def gather(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1)  # some backends reject tensors without a dimension
        gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, flat.contiguous())
        return torch.stack(gathered).view(len(gathered), *values.shape)

    def gather_rows(self, rows: Tensor) -> Tensor:
        padding = [0, 0] * (rows.dim() - 1) + [0, max(self.counts) - len(rows)]
        padded = torch.nn.functional.pad(rows, padding)
        return torch.cat([part[:count] for part, count in zip(self.gather(padded), self.counts, strict=True)])

    def local_rows(self, rows: Tensor) -> Tensor:
        return rows[self.first : self.first + self.counts[self.rank]]

    def gather_objects(self, rows: Sequence[Item]) -> list[Item]:
        gathered: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, list(rows))
        return [row for part in gathered for row in part]


def gather_to_main(rows: Tensor) -> Tensor:
    """Return the rows of all processes on the first one, and a process's own rows on the others.

    Every process must have equally many rows.
    """
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(rows, parts, dst=0)
    return rows if parts is None else torch.cat(parts)
