"""Where a model's weights are: whole on every process, spread over processes, or spread over devices.

DDP, ZeRO-1, ZeRO-2     whole: only gradients and the optimizer's state are split
ZeRO-3, FSDP2           spread over processes, and gathered while the engine samples
FSDP1, tensor parallel  spread over processes; what is done with them is left to TRL
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


def zero_stage(accelerator: Any) -> int:
    """The stage of DeepSpeed's ZeRO; 0 without DeepSpeed."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None else int(plugin.zero_stage)


def fsdp_version(accelerator: Any) -> int:
    """1 or 2; 0 without FSDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return 0 if plugin is None else int(plugin.fsdp_version)


def has_sharded_weights(model: nn.Module, accelerator: Any) -> bool:
    """Whether no process holds all weights: they are sharded already, or will be when training begins."""
    return zero_stage(accelerator) == 3 or fsdp_version(accelerator) > 0 or is_sharded(model)


def why_not_gathered(model: nn.Module, accelerator: Any) -> str:
    """What keeps spread weights from being gathered on every process; empty where nothing does."""
    if zero_stage(accelerator) == 3:
        return ""
    if fsdp_version(accelerator) == 1:
        return "weights are sharded over processes by FSDP1; fsdp_version 2 can gather them"
    sharded = [name for name, parameter in model.named_parameters() if "DTensor" in type(parameter.data).__name__]
    if sharded and not fsdp_modules(model):
        return f"weights are split over processes ({sharded[0]} is), and not by FSDP2 or ZeRO-3"
    return ""


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 shards together."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # a torch without distributed
        return []
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered_weights(model: Any, accelerator: Any) -> Iterator[None]:
    """Every process holds all weights; to be entered by all of them. ``model`` is what accelerate has wrapped, or is
    yet to wrap. Nothing happens where they are whole anyway."""
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
    """Also without DeepSpeed's hooks on modules, which would take the weights apart again behind each of them."""
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
    """ZeRO-3's weights can be read, or changed in place: what the first process makes of them is what all get. For
    copies, not for forward passes."""
    parameters = [parameter for model in models for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if change else None):
        yield


@contextmanager
def _unsharded(modules: list[Any]) -> Iterator[None]:
    """Gathered by FSDP2, and kept so behind each forward pass."""
    groups = [group for module in modules for group in _groups(module)]
    before = [group.post_forward_mesh_info for group in groups]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh
        for module in modules:
            module.reshard()


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # one before torch 2.13
    return list(found) if found is not None else [group for group in [state._fsdp_param_group] if group is not None]


def spread_devices(model: nn.Module) -> list[str]:
    """The devices that hold a model, where they are several; "meta" stands for weights that are not in memory."""
    placed = {_device(place) for place in (getattr(inner_model(model), "hf_device_map", None) or {}).values()}
    held = {str(parameter.device) for parameter in model.parameters()}
    for places in (held, placed):
        if len(places) > 1 or "meta" in places:
            return sorted(places)
    return []


def _device(place: Any) -> str:
    return "meta" if place == "disk" else f"cuda:{place}" if isinstance(place, int) else str(place)


def ignored_sharding(args: Any, accelerator: Any) -> str:
    """What was asked for and accelerate has left out without a word, as it does on CPUs; empty where nothing."""

    def asked(name: str, option: Any) -> bool:
        return bool(option) or os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"

    if asked("FSDP", getattr(args, "fsdp", None)) and not fsdp_version(accelerator):
        return "FSDP"
    if (
        asked("DEEPSPEED", getattr(args, "deepspeed", None))
        and getattr(accelerator.state, "deepspeed_plugin", None) is None
    ):
        return "DeepSpeed"
    return ""


def clear_moments(optimizer: Any) -> None:
    """Empties the moments of the optimizer that is at the bottom of accelerate's and DeepSpeed's wrappers."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        if not hasattr(optimizer, "optimizer"):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer of torch's, whose state could be emptied")
        optimizer = optimizer.optimizer
    optimizer.state.clear()
