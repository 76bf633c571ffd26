"""What lets verl's own driver and workers run on a CPU: a platform, the FSDP2 engine for it, and a server that samples.

verl loads this module in every process (``VERL_USE_EXTERNAL_MODULES``) and finds these in its own registries. The
server answers requests with a real model, and takes the trained weights after each step, as vLLM's does.
"""

from __future__ import annotations

import functools
import os
import types
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """A CPU that Ray is told to count as a GPU."""

    device_name, vendor_name = "cpu", "none"
    device_module = types.SimpleNamespace(
        **{
            name: (lambda *args, **kwargs: None) for name in ("empty_cache", "synchronize", "set_device", "manual_seed")
        },
        **{
            name: (lambda *args, **kwargs: 0)
            for name in ("max_memory_allocated", "max_memory_reserved", "current_device")
        },
        **{name: (lambda *args, **kwargs: 0) for name in ("memory_allocated", "memory_reserved", "device_count")},
        is_available=lambda: False,
        get_device_name=lambda *args: "CPU",
        mem_get_info=lambda *args: (0, 0),
    )

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Any:
        yield

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = _nothing


def register() -> None:
    import verl.utils.distributed as distributed

    start = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = functools.partial(start, backend="gloo")
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    import verl.workers.rollout.base as rollout_base
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(fsdp.FSDPEngineWithLMHead)
    fsdp.CPUOffloadPolicy = lambda **_: None  # it pins memory, for a device that is not there
    rollout_base._ROLLOUT_REGISTRY[("cpu", "async")] = "cpu_server.Adapter"

    def replica() -> Any:
        from cpu_server import Replica

        return Replica

    RolloutReplicaRegistry.register("cpu", replica)


if os.environ.get("VERL_PLATFORM") == "cpu":
    register()
