"""Cosine and sine of a rotary embedding for every position, computed once instead of in ten small kernels per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

STEADY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose cosine and sine at a position do not depend on the length of the sequence."""


class RotaryTable:
    """The cosine and sine of a model's rotary embedding for positions 0, 1, 2, …, computed by that embedding."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self._version: Any = None

    def up_to(self, length: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cosine and sine (positions, size) in x's dtype and on its device; None if a table is impossible.

        They stay at the same address while they are long enough, because a captured graph may read them.
        """
        if getattr(self.rotary, "rope_type", None) not in STEADY or is_hooked(self.rotary):
            return None
        dtype_and_device = x.dtype, x.device
        if (
            self.cos is None
            or self.sin is None
            or len(self.cos) < length
            or dtype_and_device != (self.cos.dtype, self.cos.device)
        ):
            if _capturing(x):
                return None
            self._version, (self.cos, self.sin) = self._frequencies(), self._compute(length, x)
        return self.cos, self.sin

    def refresh(self) -> None:
        """Recompute the table in place if the frequencies have changed."""
        if self.cos is None or self.sin is None or self._frequencies() == self._version:
            return
        cos, sin = self._compute(len(self.cos), self.cos)
        self.cos.copy_(cos)
        self.sin.copy_(sin)
        self._version = self._frequencies()

    def _compute(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=x.device)[:, None]  # one row each as in a step, for identical bits
        cos, sin = self.rotary(x, position_ids=positions)
        return cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def _frequencies(self) -> Any:
        """Return a key that changes with the frequencies; on a GPU, to avoid a sync, with torch's version count."""
        tensor = self.rotary.inv_freq
        values = tuple(tensor.tolist()) if tensor.device.type == "cpu" else None
        version = None if tensor.is_inference() else tensor._version
        return id(tensor), version, values, getattr(self.rotary, "attention_scaling", None)


def is_hooked(module: nn.Module) -> bool:
    """Return whether the module has hooks (its own or global ones) or a replaced forward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or everywhere._global_forward_hooks
    return bool(hooks or everywhere._global_forward_pre_hooks or "forward" in module.__dict__)


def _capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
