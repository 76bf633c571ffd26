"""The weights of a model in another precision, standing in their place for a while.

Mixed precision keeps float32 weights for the optimizer, which takes steps far smaller than bfloat16 can tell, and
computes in half precision. Sampling reads all weights for every token, so it wants them in half precision as they lie
in memory: a *shadow*, refreshed from the float32 weights by one fused copy whenever it is put in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class CastWeights:
    """Copies of a model's floating-point parameters in ``dtype``.

    Parameters stay where they are for everybody else: the modules read the copies only inside `in_place`. Buffers (the
    frequencies of a rotary embedding) keep their precision, as `from_pretrained` leaves it. What the model's class
    keeps in float32 in any case stays as it is.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.places: list[tuple[Any, str, nn.Parameter]] = []
        self.originals: list[Tensor] = []
        self.copies: list[Tensor] = []
        known: dict[int, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype == dtype or not _plain(parameter):
                    continue
                if dtype != torch.float32 and _stays_in_float32(model, f"{path}.{name}"):
                    continue
                copy = known.get(id(parameter))
                if copy is None:
                    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
                    known[id(parameter)] = copy
                    self.originals.append(parameter.detach())
                    self.copies.append(copy.detach())
                self.places.append((module, name, copy))

    @property
    def bytes(self) -> int:
        return sum(copy.numel() * copy.dtype.itemsize for copy in self.copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules read the copies, made anew from what the parameters are now."""
        with torch.no_grad():
            if self.copies:
                torch._foreach_copy_(self.copies, self.originals)
        before = [(module, name, module._parameters[name]) for module, name, _ in self.places]
        try:
            for module, name, copy in self.places:
                module._parameters[name] = copy
            yield
        finally:
            for module, name, original in before:
                module._parameters[name] = original


def _plain(parameter: nn.Parameter) -> bool:
    """Whether it is a floating-point tensor of torch's own, not a quantised or a sharded one."""
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
    """torch's own default type and device, float32 and the host, where a caller has set others.

    What is computed would else be rounded to the caller's type, and what is to be on the host would be elsewhere.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype == torch.float32 and device.type == "cpu":  # which other threads may count on
        yield
        return
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def weights_dtype(model: nn.Module) -> torch.dtype:
    """The type that most of a model's floating-point weights have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


def has_arithmetic(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device computes in this type itself; a processor that does not is many times slower in it."""
    if device.type != "cpu":
        return True
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    asked = getattr(torch.ops.mkldnn, known.get(dtype, ""), None) if dtype in known else None
    return dtype == torch.float32 or (asked is not None and bool(asked()))
