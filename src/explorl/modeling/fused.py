"""Replace small operations of a model's layers by fused ones while the engine runs.

A decode step is hundreds of tiny operations whose launches cost more than their work. Norms, rotary embeddings and
gated activations are recognised by the attributes of their modules, and replaced only if the replacement gives the
same result on random input. The rest of the model runs as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from explorl.modeling.attention import replaced
from explorl.modeling.fast_paths import TOLERANCE, deviation, random_inputs

Replacement = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its functions, and the replacement."""


def _best(old: Callable[..., Any], makers: Sequence[Any], module: Any, *inputs: Tensor) -> Any:
    """Return the maker whose function is closest to the module's own; None if none is close enough."""
    apart = [deviation(type(module).__name__, make(module), old, inputs, math.inf) for make in makers]
    errors = [math.inf if error is None else error for error in apart]
    least = min(errors)
    return makers[errors.index(least)] if least <= TOLERANCE.get(inputs[0].dtype, 2e-2) else None


class Fusion:
    """The replacements for one model, found once and used during a call."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, use_kernels: bool) -> None:
        self.dtype, self.use_kernels = dtype, use_kernels
        self.device = next(model.parameters()).device
        self.replacements: list[Replacement] = []
        best_makers: dict[Any, Callable[[nn.Module], Callable[..., Any]] | None] = {}
        for module in model.modules():
            if "forward" in module.__dict__:
                continue  # already replaced by other code
            for recognise in (self._norm, self._gate):
                make = recognise(module, best_makers)
                if make is not None:
                    self.replacements.append((module, "forward", make(module)))
        if use_kernels:
            self._rotary(model)

    def __call__(self) -> AbstractContextManager[None]:
        return replaced([(owner.__dict__, name, new) for owner, name, new in self.replacements])

    def _random(self, *shapes: Sequence[int]) -> list[Tensor]:
        return random_inputs(*shapes, dtype=self.dtype, device=self.device)

    # RMS norms

    def _norm(self, module: nn.Module, best_makers: dict[Any, Any]) -> Any:
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
            return None
        if not type(module).__name__.endswith("RMSNorm"):
            return None
        kind = type(module), len(weight), weight.dtype
        if kind not in best_makers:
            (x,) = self._random((3, 1, len(weight)))
            makers = [self._rms_maker(shift, first) for shift in (0.0, 1.0) for first in (True, False)]
            best_makers[kind] = _best(module.forward, makers, module, 3 * x)
        return best_makers[kind]

    def _rms_maker(self, shift: float, round_first: bool) -> Callable[[Any], Callable[[Tensor], Tensor]]:
        if self.use_kernels:
            from explorl.modeling.triton_fused import rms_norm

            return lambda module: (
                lambda hidden_states: rms_norm(hidden_states, module.weight, _eps(module), shift, round_first)
            )

        def plain(module: Any) -> Callable[[Tensor], Tensor]:
            eps, shape, original = _eps(module), (len(module.weight),), module.forward

            def forward(hidden_states: Tensor) -> Tensor:
                if hidden_states.dtype != module.weight.dtype:  # under autocast
                    return original(hidden_states)
                return torch.rms_norm(hidden_states, shape, module.weight + shift if shift else module.weight, eps)

            return forward

        return plain

    # Gated activations

    def _gate(self, module: nn.Module, best_makers: dict[Any, Any]) -> Any:
        parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if not all(isinstance(part, nn.Module) for part in parts) or not callable(getattr(module, "act_fn", None)):
            return None
        width = getattr(parts[0], "in_features", None)
        kind = type(module), width, type(module.act_fn)
        if kind not in best_makers:
            makers = [self._gate_maker(gelu) for gelu in (False, True)]
            best_makers[kind] = _best(module.forward, makers, module, *self._random((3, 1, width or 1)))
        return best_makers[kind]

    def _gate_maker(self, gelu: bool) -> Callable[[Any], Callable[[Tensor], Tensor]]:
        if self.use_kernels:
            from explorl.modeling.triton_fused import gated

            return lambda module: lambda x: module.down_proj(gated(module.gate_proj(x), module.up_proj(x), gelu))

        def plain(module: Any) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                gate = module.gate_proj(x)
                gate = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate, inplace=True)
                return module.down_proj(gate.mul_(module.up_proj(x)))

            return forward

        return plain

    # Rotary embeddings

    def _rotary(self, model: nn.Module) -> None:
        from explorl.modeling.triton_fused import rotary

        sources = {type(module).__module__ for module in model.modules()}
        for source in sorted(sources):
            code = sys.modules.get(source)
            old = getattr(code, "apply_rotary_pos_emb", None)
            if old is None:
                continue

            def new(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, _old: Any = old, **kwargs: Any) -> Any:
                fits = cos.ndim == 3 and cos.shape[1:] == (q.shape[2], q.shape[3]) and cos.shape[0] in (1, len(q))
                if args or kwargs or not fits:
                    return _old(q, k, cos, sin, *args, **kwargs)
                return rotary(q, k, cos, sin)

            inputs = self._random((3, 4, 5, 16), (3, 2, 5, 16), (3, 5, 16), (3, 5, 16))
            if _best(old, [lambda _, new=new: new], None, *inputs) is not None:
                self.replacements.append((code, "apply_rotary_pos_emb", new))


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
