"""What accelerate does with a model: the type it computes in, and how the weights are distributed.

Weights are whole on every process, sharded over processes, or spread over devices:

DDP, ZeRO-1, ZeRO-2     whole: only gradients and the optimizer's state are sharded
ZeRO-3, FSDP2           sharded over processes, and gathered while the engine samples
FSDP1, tensor parallel  sharded over processes, and left to TRL
device_map, offload     spread over devices of one process, or not in memory at all
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from explorl.modeling.answer_states import is_sharded
from explorl.modeling.proof import inner_model


def autocast_dtype(accelerator: Any) -> torch.dtype | None:
    """Return the type that autocast uses for float32; None without autocast."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    # accelerate switches autocast off on devices that do not support it
    return dtypes.get(accelerator.mixed_precision) if accelerator.native_amp else None


def zero_stage(accelerator: Any) -> int:
    """Return the stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None else int(plugin.zero_stage)


def fsdp_version(accelerator: Any) -> int:
    """Return the version of FSDP, 1 or 2; 0 without FSDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return 0 if plugin is None else int(plugin.fsdp_version)


def has_sharded_weights(model: nn.Module, accelerator: Any) -> bool:
    """Tell whether no process holds all weights: they are sharded, or will be when training begins."""
    return zero_stage(accelerator) == 3 or fsdp_version(accelerator) > 0 or is_sharded(model)


def why_not_gathered(model: nn.Module, accelerator: Any) -> str:
    """Return why sharded weights can't be gathered on every process, or ""."""
    if zero_stage(accelerator) == 3:
        return ""
    if fsdp_version(accelerator) == 1:
        return "weights are sharded over processes by FSDP1; fsdp_version 2 can gather them"
    sharded = [name for name, parameter in model.named_parameters() if "DTensor" in type(parameter.data).__name__]
    if sharded and not fsdp_modules(model):
        return f"weights are sharded over processes ({sharded[0]} is), but not by FSDP2 or ZeRO-3"
    return ""


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules whose parameters FSDP2 shards together."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # a torch without distributed
        return []
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered_weights(model: Any, accelerator: Any) -> Iterator[None]:
    """Gather all weights on every process; must be entered by all processes.

    ``model`` is the model before or after accelerate wraps it. Does nothing if its weights are whole.
    """
    inner = accelerator.unwrap_model(model)
    if any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        with _gathered_from_zero3(model, inner):
            yield
    elif modules := fsdp_modules(inner):
        with _unsharded(modules):
            yield
    else:
        yield


@contextmanager
def _gathered_from_zero3(model: Any, inner: nn.Module) -> Iterator[None]:
    """Gather ZeRO-3's weights, without DeepSpeed's hooks, which would shard them again after each module."""
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    with deepspeed.zero.GatheredParameters(list(inner.parameters())):
        remove_hooks(model)
        try:
            yield
        finally:
            add_hooks(model)


@contextmanager
def accessible_parameters(*models: Any, change: bool = False) -> Iterator[None]:
    """Gather ZeRO-3's weights for copying, not for forward passes.

    With ``change`` they can be changed in place, and all processes get the changes of the first one.
    """
    parameters = [parameter for model in models for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if change else None):
        yield


@contextmanager
def _unsharded(modules: list[Any]) -> Iterator[None]:
    """Gather FSDP2's weights, and keep them gathered after each forward pass."""
    groups = [group for module in modules for group in _groups(module)]
    meshes = [group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh
        for module in modules:
            module.reshard()


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # a single group before torch 2.13
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


def spread_devices(model: nn.Module) -> list[str]:
    """Return the devices that hold a model if there are several; "meta" means weights that are not in memory."""
    mapped = {_device_name(device) for device in (getattr(inner_model(model), "hf_device_map", None) or {}).values()}
    actual = {str(parameter.device) for parameter in model.parameters()}
    for devices in (actual, mapped):
        if len(devices) > 1 or "meta" in devices:
            return sorted(devices)
    return []


def _device_name(device: Any) -> str:
    return "meta" if device == "disk" else f"cuda:{device}" if isinstance(device, int) else str(device)


def ignored_sharding(args: Any, accelerator: Any) -> str:
    """Return which configured sharding accelerate has silently ignored, as it does on CPUs, or ""."""

    def configured(name: str, option: Any) -> bool:
        return bool(option) or os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"

    if configured("FSDP", getattr(args, "fsdp", None)) and not fsdp_version(accelerator):
        return "FSDP"
    if (
        configured("DEEPSPEED", getattr(args, "deepspeed", None))
        and getattr(accelerator.state, "deepspeed_plugin", None) is None
    ):
        return "DeepSpeed"
    return ""


def clear_moments(optimizer: Any) -> None:
    """Clear the state of the optimizer inside accelerate's and DeepSpeed's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        if not hasattr(optimizer, "optimizer"):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer, whose state could be cleared")
        optimizer = optimizer.optimizer
    optimizer.state.clear()
