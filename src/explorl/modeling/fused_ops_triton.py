"""The unrolled pass with whole products as kernels: see `explorl.modeling.triton_layers`.

A kernel stands in for a group of modules only where those are linear layers and nothing else (no adapter, hook or
quantised weight), and each is compared with them, on random inputs, before it runs the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from explorl.modeling.llama import KernelOps, Normed
from explorl.modeling.rotary_table import touched

logger = logging.getLogger(__name__)

NEAR = 4.0
"""Largest part of a result by which a kernel may differ from the modules, in roundings of its type."""


Form = Callable[..., list[Tensor]]
"""One of two ways to compute something from tensors."""


class FusedTritonOps(KernelOps):
    """Up to `triton_layers.FEW` rows: four products a layer, with norms and sums inside. For more, as far as measured
    to be faster, one product for query, key and value, and one for gate and up."""

    def __init__(self) -> None:
        from explorl.modeling import triton_layers

        super().__init__()
        self.layers = triton_layers
        self.rows = 0
        self.right: dict[Any, bool] = {}
        """Kernels that were compared with the modules, and whether they gave the same."""

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        self.rows = x.numel() // x.shape[-1]

    def first(self, x: Tensor, norm: Any) -> Normed:
        return None if self._norms_inside(x, norm) else super().first(x, norm)

    def heads(self, x: Tensor, h: Normed, norm: Any, attn: Any) -> list[Tensor]:
        modules, kind = super().heads, self.layers.HEADS
        tile, weights = self._plan(kind, x, (attn.q_proj, attn.k_proj, attn.v_proj))
        if weights is None or (h is None and not self._norms_inside(x, norm)):
            return modules(x, h, norm, attn)
        given, inside = self._input(x, h, norm)

        def merged(y: Tensor) -> list[Tensor]:
            outs = self.layers.products(y.flatten(0, -2), weights, tile, inside)
            return [out.unflatten(0, y.shape[:-1]) for out in outs]

        def apart(y: Tensor) -> list[Tensor]:
            return modules(y, None if h is None else y, norm, attn)

        return self._either((kind, tile, h is None, *_kind(weights)), merged, apart, given)

    def inner(self, x: Tensor, h: Normed, norm: Any, mlp: Any) -> Tensor:
        modules, kind = super().inner, self.layers.GATED
        tile, weights = self._plan(kind, x, (mlp.gate_proj, mlp.up_proj))
        if weights is None or (h is None and not self._norms_inside(x, norm)):
            return modules(x, h, norm, mlp)
        given, inside = self._input(x, h, norm)

        def merged(y: Tensor) -> list[Tensor]:
            return [self.layers.gated_products(y.flatten(0, -2), *weights, tile, inside).unflatten(0, y.shape[:-1])]

        def apart(y: Tensor) -> list[Tensor]:
            return [modules(y, None if h is None else y, norm, mlp)]

        return self._either((kind, tile, h is None, *_kind(weights)), merged, apart, given)[0]

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any, last: bool = False) -> tuple[Tensor, Normed]:
        modules, kind = super().add, self.layers.ADDED
        tile, weights = self._plan(kind, x, (projection,))
        key = kind, tile, *_kind(weights or ())
        if weights is None or y.dtype != x.dtype or self.right.get(key) is False:
            return modules(x, y, projection, norm, last)

        def merged(x: Tensor, y: Tensor) -> list[Tensor]:
            outs = self.layers.products(y.flatten(0, -2), weights, tile, residual=x.flatten(0, -2))
            return [out.unflatten(0, x.shape[:-1]) for out in outs]

        def apart(x: Tensor, y: Tensor) -> list[Tensor]:
            return [x + projection(y)]

        (total,) = self._either(key, merged, apart, x.contiguous(), y.contiguous())
        return total, None if not last and self._norms_inside(total, norm) else self.norm(total, norm)

    def _norms_inside(self, x: Tensor, norm: Any) -> bool:
        """Whether the products that follow are to norm their input, so far as they are kernels at all."""
        return self.rows <= self.layers.FEW and norm.weight.dtype == x.dtype

    def _input(self, x: Tensor, h: Normed, norm: Any) -> tuple[Tensor, Any]:
        """What a product reads, and the norm that it applies to that."""
        if h is not None:
            return h.contiguous(), None
        return x.contiguous(), self.layers.Norm(norm.weight, norm.variance_epsilon)

    def _plan(self, kind: str, x: Tensor, projections: Sequence[Any]) -> tuple[Any, list[Any] | None]:
        """How the kernel is launched, and its weights; None where the modules are to be called."""
        tile = self.layers.tile_for(kind, self.rows, x.shape[-1], x.dtype)
        if tile is None or not all(_linear(projection, x.dtype) for projection in projections):
            return None, None
        if len({projection.bias is None for projection in projections}) > 1:
            return None, None
        return tile, [self.layers.Weight(projection.weight, projection.bias) for projection in projections]

    def _either(self, key: Any, merged: Form, apart: Form, *inputs: Tensor) -> list[Tensor]:
        """What the kernel gives, where that is what the modules give."""
        right = self.right.get(key)
        if right is None and not _capturing():
            right = self.right[key] = _agree(key, merged, apart, inputs)
        return merged(*inputs) if right else apart(*inputs)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _linear(projection: Any, dtype: torch.dtype) -> bool:
    """Whether it is a linear layer of plain, contiguous tensors, and nobody waits on it."""
    if type(projection) is not nn.Linear or touched(projection):
        return False
    tensors = [tensor for tensor in (projection.weight, projection.bias) if tensor is not None]
    plain = all(type(tensor) is nn.Parameter and type(tensor.data) is Tensor for tensor in tensors)
    return plain and all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)


def _kind(weights: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((weight.matrix.dtype, weight.bias is None, *weight.matrix.shape) for weight in weights)


def _agree(key: Any, merged: Form, apart: Form, inputs: Sequence[Tensor]) -> bool:
    """Whether both give the same for random inputs: those that are given may hold stopped rows, and thus anything."""
    device = inputs[0].device
    draw = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(x.shape, generator=draw, device=device).to(x.dtype) for x in inputs]
    try:
        got = merged(*drawn)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a device that cannot hold the tile, a compiler that does not know it
        logger.info("%s does not run here (%s: %s); the modules do", key, type(error).__name__, error)
        return False
    wrong = max(_distance(mine, theirs) for mine, theirs in zip(got, apart(*drawn), strict=True))
    if not wrong <= 1:
        logger.warning("%s is %.1f times too far from what the modules compute; they are used instead", key, wrong)
    return wrong <= 1


def _distance(got: Tensor, want: Tensor) -> float:
    """How far apart, in units of what is allowed; where a number is not finite, the other may not be either."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    finite = torch.isfinite(want)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    allowed = NEAR * torch.finfo(want.dtype).eps * float(torch.linalg.vector_norm(want[finite].float()))
    return float(torch.linalg.vector_norm(got[finite].float() - want[finite].float())) / max(allowed, 1e-30)
