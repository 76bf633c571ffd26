"""The packed forward pass of Llama-like models, written out, so that neighbouring operations are fused; with gradients.

Between the projections of a layer stand some forty small operations there and back. A GPU waits for their launch, a CPU
for their memory. See `explorl.rollout.llama`, whose layer this is: the modules are still where the weights are read and
where adapters act, and the pass is used only where it gives what the model itself gives.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast

from explorl.rollout.llama import LlamaForward, TorchOps, agree, cannot, llama_like


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


class TrainingOps(TorchOps):
    """The operations in torch, with gradients."""

    def add(self, x: Tensor, y: Tensor, projection: nn.Module, norm: Any) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(x.device.type):  # which would round x too, if it were one operation
            x = x + projection(y)
            return x, self.norm(x, norm)
        return super().add(x, y, projection, norm)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        return torch.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)

    def rotate(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _Rotated.apply(query, *angles), _Rotated.apply(key, *angles)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class TrainingKernelOps(TrainingOps):
    """The same as Triton kernels."""

    def __init__(self) -> None:
        from explorl.training import triton_training

        self.kernels = triton_training

    def add(self, x: Tensor, y: Tensor, projection: nn.Module, norm: Any) -> tuple[Tensor, Tensor]:
        return self.kernels.AddedNorm.apply(x, projection(y), norm.weight, norm.variance_epsilon)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def rotate(self, query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Later, by the kernel that spreads them."""
        self.latest = angles
        return query, key

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.kernels.Gated.apply(gate, up)


class _KernelRows:
    """Packed rows whose queries and keys are rotated on their way to the padded rows."""

    def __init__(self, rows: Any, ops: TrainingKernelOps) -> None:
        self.rows, self.ops = rows, ops

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        spread = self.ops.kernels.RotatedRows.apply(query, key, value, *self.ops.latest, self.rows)
        return self.rows.attend_spread(*spread, scale, window, cap)


class LlamaPass(LlamaForward):
    """What takes the place of the body's `forward`: hidden states of packed rows."""

    rows: Any = None

    def forward(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.states(input_ids, position_ids, self.rows))

    def states(self, ids: Tensor, positions: Tensor, rows: Any) -> Tensor:
        """What the head reads, (1, tokens, width)."""
        rows = _KernelRows(rows, self.ops) if isinstance(self.ops, TrainingKernelOps) else rows
        return self.hidden(ids, positions, rows)


def llama_pass(model: nn.Module, probe: Any, use_kernels: bool | None = None) -> LlamaPass | None:
    """The written-out pass of this model; None where it has none, or one that does not agree with it.

    ``probe`` is packed rows of some short sequences.
    """
    root = llama_like(model)
    if root is None or getattr(root.config, "attention_dropout", None):
        return None
    device = next(model.parameters()).device
    if use_kernels is None:
        use_kernels = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    found = LlamaPass(root, TrainingKernelOps() if use_kernels else TrainingOps())
    positions = probe.positions.unsqueeze(0)
    ids = (positions * 31 + 5) % root.get_input_embeddings().weight.shape[0]
    with torch.no_grad():
        want = root.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        try:
            got = found.states(ids, positions, probe)
        except (AttributeError, TypeError, RuntimeError) as error:
            cannot(error)
            return None
    return found if got.shape == want.shape and agree(got, want, next(model.parameters()).dtype) else None
