"""The unrolled pass with matrix products as Triton kernels: see `explorl.modeling.triton_layers`.

A kernel replaces a group of modules only if they are plain linear layers (no adapter, hook or quantised weight), and is
compared with them on random inputs before its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.modeling.fast_paths import Verified, random_inputs
from explorl.modeling.llama import Normed, TorchOps, is_plain_linear

NEAR = 4.0
"""Largest relative difference between a kernel and the modules, in units of the dtype's epsilon."""

Computation = Callable[..., list[Tensor]]
"""A function of tensors: the fused or the separate computation."""


class FusedTritonOps(TorchOps):
    """The operations as Triton kernels, with fused products.

    Up to `triton_layers.FEW` rows, four products per layer include norms and sums. For more rows, there is one product
    for query, key and value and one for gate and up, where measured to be faster.
    """

    def __init__(self) -> None:
        from explorl.modeling import triton_fused, triton_layers

        self.kernels, self.layers = triton_fused, triton_layers
        self.rows = 0
        self.verified = Verified()

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        self.rows = x.numel() // x.shape[-1]

    def first(self, x: Tensor, norm: Any) -> Normed:
        return None if self._norms_inside(x, norm) else super().first(x, norm)

    def heads(self, x: Tensor, h: Normed, norm: Any, attn: Any) -> list[Tensor]:
        modules, projections = super().heads, (attn.q_proj, attn.k_proj, attn.v_proj)
        return self._normed_products(self.layers.HEADS, x, h, norm, projections, lambda x, h: modules(x, h, norm, attn))

    def inner(self, x: Tensor, h: Normed, norm: Any, mlp: Any) -> Tensor:
        modules, projections = super().inner, (mlp.gate_proj, mlp.up_proj)
        (result,) = self._normed_products(
            self.layers.GATED, x, h, norm, projections, lambda x, h: [modules(x, h, norm, mlp)]
        )
        return result

    def _normed_products(
        self, kind: str, x: Tensor, h: Normed, norm: Any, projections: Sequence[Any], modules: Computation
    ) -> list[Tensor]:
        """Return products of h, or of x after ``norm`` where h is None; ``modules`` returns them for x and h."""
        tile, weights = self._plan(kind, x, projections)
        if weights is None or (h is None and not self._norms_inside(x, norm)):
            return modules(x, h)
        inside = self.layers.Norm(norm.weight, norm.variance_epsilon) if h is None else None

        def fused(y: Tensor) -> list[Tensor]:
            rows = y.flatten(0, -2)
            if kind == self.layers.GATED:
                outs = [self.layers.gated_products(rows, *weights, tile, inside)]
            else:
                outs = self.layers.products(rows, weights, tile, inside)
            return [out.unflatten(0, y.shape[:-1]) for out in outs]

        def separate(y: Tensor) -> list[Tensor]:
            return modules(y, None if h is None else y)

        key = kind, tile, h is None, *_kind(weights)
        return self._run_fused(key, fused, separate, (x if h is None else h).contiguous())

    def add(self, x: Tensor, y: Tensor, projection: Any, norm: Any, last: bool = False) -> tuple[Tensor, Normed]:
        kind = self.layers.ADDED
        tile, weights = self._plan(kind, x, (projection,))
        key = kind, tile, *_kind(weights or ())
        if weights is None or y.dtype != x.dtype or self.verified.get(key) is False:
            return self.kernels.add_rms_norm(x, projection(y), norm.weight, norm.variance_epsilon)

        def fused(x: Tensor, y: Tensor) -> list[Tensor]:
            outs = self.layers.products(y.flatten(0, -2), weights, tile, residual=x.flatten(0, -2))
            return [out.unflatten(0, x.shape[:-1]) for out in outs]

        def separate(x: Tensor, y: Tensor) -> list[Tensor]:
            return [x + projection(y)]

        (total,) = self._run_fused(key, fused, separate, x.contiguous(), y.contiguous())
        return total, None if not last and self._norms_inside(total, norm) else self.norm(total, norm)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        return self.kernels.rms_norm(x, norm.weight, norm.variance_epsilon, 0.0, True)

    def rotary_factors(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def rotate(self, query: Tensor, key: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.kernels.rotary(query, key, *rotary)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.kernels.gated(gate, up, False)

    def _norms_inside(self, x: Tensor, norm: Any) -> bool:
        """Return whether the next products, if they are kernels, norm their input themselves."""
        return self.rows <= self.layers.FEW and norm.weight.dtype == x.dtype

    def _plan(self, kind: str, x: Tensor, projections: Sequence[Any]) -> tuple[Any, list[Any] | None]:
        """Return the tile of the kernel and its weights; None if the modules have to be called."""
        tile = self.layers.tile_for(kind, self.rows, x.shape[-1], x.dtype)
        if tile is None or not all(is_plain_linear(projection, x.dtype) for projection in projections):
            return None, None
        if len({projection.bias is None for projection in projections}) > 1:
            return None, None
        return tile, [self.layers.Weight(projection.weight, projection.bias) for projection in projections]

    def _run_fused(self, key: Any, fused: Computation, separate: Computation, *inputs: Tensor) -> list[Tensor]:
        """Run the kernel if it agrees with the modules, and the modules otherwise."""
        verified = self.verified.get(key)
        if verified is None and not _capturing():
            # The real inputs may contain stopped rows with arbitrary values.
            x = inputs[0]
            samples = random_inputs(*(tensor.shape for tensor in inputs), dtype=x.dtype, device=x.device)
            near = NEAR * torch.finfo(x.dtype).eps
            verified = self.verified.agrees(key, fused, separate, samples, near)
        return fused(*inputs) if verified else separate(*inputs)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _kind(weights: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((weight.matrix.dtype, weight.bias is None, *weight.matrix.shape) for weight in weights)
