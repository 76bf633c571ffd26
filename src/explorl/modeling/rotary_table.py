"""Cosine and sine of a rotary embedding for every position, computed once instead of in ten small kernels per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

STEADY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings in which a position's angles do not depend on how long the sequence is."""


class RotaryTable:
    """What a model's rotary embedding gives for positions 0, 1, 2, …; made by that embedding itself."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self._stamp: Any = None

    def up_to(self, length: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine (positions, size) in x's type and on its device; None where there can be no table.

        They stay where they are in memory as long as they suffice: a captured graph may read them.
        """
        if getattr(self.rotary, "rope_type", None) not in STEADY or touched(self.rotary):
            return None
        kind = x.dtype, x.device
        if self.cos is None or self.sin is None or len(self.cos) < length or kind != (self.cos.dtype, self.cos.device):
            if _capturing(x):
                return None
            self._stamp, (self.cos, self.sin) = self._frequencies(), self._computed(length, x)
        return self.cos, self.sin

    def refresh(self) -> None:
        """Computes the table anew, in place, where somebody has changed the frequencies."""
        if self.cos is None or self.sin is None or self._frequencies() == self._stamp:
            return
        cos, sin = self._computed(len(self.cos), self.cos)
        self.cos.copy_(cos)
        self.sin.copy_(sin)
        self._stamp = self._frequencies()

    def _computed(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=x.device)[:, None]  # a row each, as in a step: the same kernel, so bits
        cos, sin = self.rotary(x, position_ids=positions)
        return cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def _frequencies(self) -> Any:
        """Changes where they do; on a GPU, which a look at them would keep waiting, as far as torch notices."""
        tensor = self.rotary.inv_freq
        values = tuple(tensor.tolist()) if tensor.device.type == "cpu" else None
        version = None if tensor.is_inference() else tensor._version
        return id(tensor), version, values, getattr(self.rotary, "attention_scaling", None)


def touched(module: nn.Module) -> bool:
    """Whether somebody waits on the module, or on all modules, with a hook, or has given it a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or everywhere._global_forward_hooks
    return bool(hooks or everywhere._global_forward_pre_hooks or "forward" in module.__dict__)


def _capturing(x: Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
