"""The operations of a decode step on a CPU, for `explorl.modeling.llama`: without gradients and with few calls.

A step of a small model has hundreds of operations on a few thousand numbers, for which the calls take most of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from explorl.modeling.llama import Normed, TorchOps, plain_weight

WIDE = 256
"""Width from which a product with the transposed input is worth transposing the result."""


class CpuOps(TorchOps):
    """`TorchOps` for one token per row: plain projections without their modules, and a rotary table."""

    tabled = True

    def __init__(self) -> None:
        self._epsilons: dict[float, Tensor] = {}

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        self.few = self.few and x.shape[-1] >= WIDE

    def project(self, x: Tensor, projection: Any) -> Tensor:
        weight = None if self.few else plain_weight(projection)
        return super().project(x, projection) if weight is None else F.linear(x, weight)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        if x.dtype != torch.float32:
            return super().norm(x, norm)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        epsilon = self._epsilons.get(norm.variance_epsilon)
        if epsilon is None:
            epsilon = self._epsilons[norm.variance_epsilon] = torch.tensor(norm.variance_epsilon, dtype=torch.float32)
        scale = torch.addcmul(epsilon, size, size, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(norm.weight)

    def rotated_heads(
        self, x: Tensor, h: Normed, norm: Any, attn: Any, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (plain_weight(projection) for projection in (attn.q_proj, attn.k_proj, attn.v_proj))
        simple = x.shape[1] == 1 and x.dtype == torch.float32 and "q_norm" not in attn._modules
        if not simple or query is None or key is None or value is None:
            return super().rotated_heads(x, h, norm, attn, rotary)
        h = (self.norm(x, norm) if h is None else h)[:, 0]
        shape = len(h), -1, 1, attn.head_dim
        if not self.few:
            first, second, third = (F.linear(h, weight).view(shape) for weight in (query, key, value))
            return self._rotate(first, rotary), self._rotate(second, rotary), third
        transposed = h.t()
        both = torch.cat([torch.mm(weight, transposed) for weight in (query, key)]).t().contiguous()
        rotated, heads = self._rotate(both.view(shape), rotary), len(query) // attn.head_dim
        return rotated[:, :heads], rotated[:, heads:], torch.mm(value, transposed).t().contiguous().view(shape)

    def _rotate(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return (x * rotary[0]).addcmul_(x.roll(x.shape[-1] // 2, -1), rotary[1])
