"""Run a model with temporary copies of its weights in another precision.

Mixed precision keeps float32 weights for the optimizer, whose steps are too small for bfloat16, and computes in half
precision. Sampling reads all weights for every token, so they should be in half precision in memory: `CastWeights`,
refreshed from the float32 weights by one fused copy whenever they are put in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from explorl.modeling.attention import replaced


class CastWeights:
    """Copies of a model's floating-point parameters in ``dtype``.

    The modules use the copies only inside `in_place`. Buffers (the frequencies of a rotary embedding) keep their
    precision, as with `from_pretrained`, and so do parameters that the model's class keeps in float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.replacements: list[tuple[Any, str, nn.Parameter]] = []
        self.originals: list[Tensor] = []
        self.copies: list[Tensor] = []
        copies_by_id: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype == dtype or not _plain(parameter):
                    continue
                if dtype != torch.float32 and _stays_in_float32(model, f"{path}.{name}"):
                    continue
                copy = copies_by_id.get(id(parameter))
                if copy is None:
                    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
                    copies_by_id[id(parameter)] = copy
                    self.originals.append(parameter.detach())
                    self.copies.append(copy.detach())
                self.replacements.append((module, name, copy))

    @property
    def bytes(self) -> int:
        return sum(copy.numel() * copy.dtype.itemsize for copy in self.copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Refresh the copies from the parameters and use them in the modules."""
        with torch.no_grad():
            if self.copies:
                torch._foreach_copy_(self.copies, self.originals)
        with replaced([(module._parameters, name, copy) for module, name, copy in self.replacements]):
            yield


def _plain(parameter: nn.Parameter) -> bool:
    """Return whether the parameter is an ordinary floating-point tensor, neither quantised nor sharded."""
    halves = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return type(parameter) is nn.Parameter and type(parameter.data) is Tensor and parameter.dtype in halves


def _stays_in_float32(model: nn.Module, path: str) -> bool:
    wrapped: Any = model
    root = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names |= set(getattr(root, attribute, None) or ())
    return any(name in path for name in names)


@contextmanager
def default_torch_settings() -> Iterator[None]:
    """Use torch's original default dtype and device, float32 and the CPU, even if the caller has changed them.

    Otherwise results would be rounded to the caller's dtype, and tensors meant for the host would be elsewhere.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype == torch.float32 and device.type == "cpu":  # change nothing that other threads may rely on
        yield
        return
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def weights_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's floating-point weights."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def has_arithmetic(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device computes natively in this dtype; otherwise a CPU is many times slower in it."""
    if device.type != "cpu":
        return True
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    check = getattr(torch.ops.mkldnn, checks.get(dtype, ""), None) if dtype in checks else None
    return dtype == torch.float32 or (check is not None and bool(check()))
