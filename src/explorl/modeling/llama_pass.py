"""The unrolled packed forward pass of Llama-like models, with fused neighbouring operations and with gradients.

Between the projections of a layer there are about forty small operations, forward and backward. On a GPU their launches
take the time, on a CPU their memory accesses. The layer is that of `explorl.modeling.llama`: weights are still read
from the modules, and adapters work. Under autocast it computes what the modules compute there: projections and
attention in half precision, sums and norms in float32. With gradient checkpointing each layer is recomputed in the
backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from explorl.modeling.gpu import kernels_run, on
from explorl.modeling.llama import LlamaForward, TorchOps, llama_like


class _Rotated(torch.autograd.Function):
    """x · cos + (halves of x swapped) · sin, in three operations each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        return torch.addcmul(gradients[0] * cos, gradients[0].roll(half, -1), sin.roll(half, -1)), None, None


def _narrow(x: Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes projections; None outside autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class TrainingOps(TorchOps):
    """The operations in torch, with gradients."""

    def add(self, x: Tensor, y: Tensor, projection: nn.Module, norm: Any, last: bool = False) -> tuple[Tensor, Tensor]:
        if _narrow(x) is not None:  # as one operation, autocast would round x too
            x = x + projection(y)
            return x, self.norm(x, norm)
        return super().add(x, y, projection, norm, last)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        if x.dtype != norm.weight.dtype:  # query and key norms under autocast: round before the product, as Llama does
            return norm.weight * torch.rms_norm(x, (x.shape[-1],), None, norm.variance_epsilon)
        return torch.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)

    def rotate(self, query: Tensor, key: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if query.dtype != rotary[0].dtype:
            query, key = query.to(rotary[0].dtype), key.to(rotary[0].dtype)
        return _Rotated.apply(query, *rotary), _Rotated.apply(key, *rotary)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class TrainingKernelOps(TrainingOps):
    """The operations as Triton kernels, with gradients."""

    def __init__(self) -> None:
        from explorl.modeling import triton_training

        self.kernels = triton_training

    def add(self, x: Tensor, y: Tensor, projection: nn.Module, norm: Any, last: bool = False) -> tuple[Tensor, Tensor]:
        # Under autocast projections would round their input, so it is written in that dtype at once.
        dtype = None if last else _narrow(x)
        return self.kernels.AddedNorm.apply(x, projection(y), norm.weight, norm.variance_epsilon, dtype)

    def rotary_factors(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.kernels.Gated.apply(gate, up)


class _KernelRows:
    """Packed rows whose queries and keys are rotated on their way to the padded rows."""

    def __init__(self, rows: Any, ops: TrainingKernelOps) -> None:
        self.rows, self.ops = rows, ops

    def rotate_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Any, layer: int, scale: float, window: int | None
    ) -> Tensor:
        spread = self.ops.kernels.RotatedRows.apply(query, key, value, *rotary, self.rows, _narrow(query))
        return self.rows.attend_spread(*spread, scale, window, None)


class LlamaPass(LlamaForward):
    """Replaces the body's `forward`: computes the hidden states of packed rows."""

    rows: Any = None

    def forward(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> BaseModelOutputWithPast:
        rows = _KernelRows(self.rows, self.ops) if isinstance(self.ops, TrainingKernelOps) else self.rows
        with on(input_ids.device):
            return BaseModelOutputWithPast(last_hidden_state=self.hidden(input_ids, position_ids, rows))

    def layer(
        self, x: Tensor, h: Tensor, index: int, layer: Any, next_norm: Any, rotary: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        once = partial(super().layer, index=index, layer=layer, next_norm=next_norm, rotary=rotary, cache=cache)
        if not (getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled()):
            return once(x, h)
        return layer._gradient_checkpointing_func(once, x, h)


def llama_pass(model: nn.Module, use_kernels: bool | None = None) -> LlamaPass | None:
    """Return the unrolled pass of this model; None if there is none."""
    root = llama_like(model)
    if root is None or getattr(root.config, "attention_dropout", None):
        return None
    if use_kernels is None:
        use_kernels = kernels_run(next(model.parameters()).device)
    return LlamaPass(root, TrainingKernelOps() if use_kernels else TrainingOps())
