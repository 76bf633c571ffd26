"""Replace the attention of transformers models, and run models as sampling or a proof needs it.

transformers looks attention up by the name in the model's config. While our code runs, that name is `NAME`; the
function registered under it passes the call to the active memory (a cache of the engine, or packed rows), which knows
the layout of its rows. No mask is registered under that name, so the models build none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

NAME = "explorl"

_local = threading.local()
_LOCKS: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):  # the threads that hold the locks don't exist in a forked process
    os.register_at_fork(after_in_child=_LOCKS.clear)


class AttentionDropout(NotImplementedError):
    """A model in training has attention dropout, which our memories do not support."""


class AttentionMemory(Protocol):
    """Stores keys and values and computes attention over them."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attend with queries (rows, heads, queries, head size) → (rows, queries, heads, head size)."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    dropout: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    memory: AttentionMemory | None = getattr(_local, "memory", None)
    if memory is None:
        raise RuntimeError(f"attention {NAME!r} works only inside the engine and the packed pass")
    if dropout:
        raise AttentionDropout(f"{type(module).__name__} has attention dropout")
    if s_aux is not None or position_bias is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks or a position bias")
    if not query.dtype == key.dtype == value.dtype:  # autocast does the same for torch's own attention
        narrowest = min((query.dtype, key.dtype, value.dtype), key=lambda dtype: dtype.itemsize)
        query, key, value = query.to(narrowest), key.to(narrowest), value.to(narrowest)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return memory.attend(query, key, value, scale, sliding_window, softcap), None


AttentionInterface.register(NAME, _attention)


def scaled_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Compute softmax(scale · Q Kᵀ) V of (rows, heads, length, size) with any of torch's kernels except cuDNN's.

    cuDNN's takes the host about 60 ms to plan for each new shape, forward and backward, and nearly every batch has new
    shapes: the GPU waited for it during two thirds of an SFT step.
    """
    groups = query.size(1) // key.size(1)
    if query.is_cuda and mask is not None and groups > 1:  # the fast kernel with a mask has no grouped-query attention
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@contextmanager
def attending(memory: AttentionMemory) -> Iterator[None]:
    """Pass attention calls of models to this memory."""
    before = getattr(_local, "memory", None)
    _local.memory = memory
    try:
        yield
    finally:
        _local.memory = before


_MISSING = object()


@contextmanager
def replaced(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set entries of dictionaries, such as the attributes or parameters of modules, and restore them on exit."""
    before = [(values, name, values.get(name, _MISSING)) for values, name, _ in entries]
    try:
        for values, name, new in entries:
            values[name] = new
        yield
    finally:
        for values, name, old in before:
            if old is _MISSING:
                del values[name]
            else:
                values[name] = old


def configs_of(model: nn.Module) -> list[Any]:
    """Return all configurations in which modules look up their attention; copied layers have separate ones."""
    module_configs = (module.__dict__.get("config") for module in model.modules())
    configs = {id(config): config for config in module_configs if isinstance(config, PreTrainedConfig)}
    for config in list(configs.values()):
        text = config.get_text_config(decoder=True)
        configs[id(text)] = text
    return list(configs.values())


@contextmanager
def our_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Make models with these configurations use our attention; see `attending`."""
    before = [(config, config._attn_implementation_internal) for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


def model_lock(model: Any) -> threading.RLock:
    """Return the lock to hold while a model's modes, attention or weights are replaced.

    Without it, another thread could save a replacement as the original and restore it later.
    """
    return _LOCKS.setdefault(model.get_base_model() if hasattr(model, "get_base_model") else model, threading.RLock())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode, without gradients or accelerate's autocast; restore all modes on exit."""
    with model_lock(model):
        training = [module for module in model.modules() if module.training]
        wrapped = model.__dict__.get("forward")
        plain = model.__dict__.get("_original_forward")  # set by accelerate when it wraps forward in autocast
        try:
            for module in training:
                module.training = False
            if wrapped is not None and plain is not None:
                model.__dict__["forward"] = plain
            with torch.no_grad():
                yield
        finally:
            if wrapped is not None:
                model.__dict__["forward"] = wrapped
            for module in training:
                module.training = True


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """Run the model for sampling: in evaluation mode, with our attention, and outside any autocast of the caller."""
    plain = torch.autocast(next(model.parameters()).device.type, enabled=False)
    with evaluating(model), our_attention(configs_of(model)), plain:
        yield
