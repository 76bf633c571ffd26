"""What a GPU can run, found by trying it.

Triton compiles a kernel where it is first launched, and needs a C compiler with Python's headers for that, a GPU that
it knows, and a driver that fits. None of this can be told from what is installed.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it the current device: Triton launches kernels there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kernels_run(device: torch.device) -> bool:
    """Whether Triton's kernels run on this device: one is tried, once. Where it fails, a warning says why."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    fault = kernel_fault(device)
    if fault:
        _warn(fault)
    return not fault


@cache
def kernel_fault(device: torch.device) -> str:
    """What is wrong with a first kernel on this device; empty where nothing is."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from explorl.modeling.triton_fused import rms_norm

        with on(device):
            x = torch.linspace(-2.0, 3.0, 96, device=device, dtype=torch.float32).view(2, 48)
            got = rms_norm(x, torch.ones_like(x[0]), 1e-6, 0.0, False)
            want = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
            return "" if torch.allclose(got, want, rtol=1e-5, atol=1e-6) else "a first one gives wrong numbers"
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # what Triton, a compiler or a driver raises has no common kind
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {lines[0]}"


@cache
def _warn(fault: str) -> None:
    logger.warning(
        "Triton's kernels do not run on this GPU (%s); torch's own operations do their work, several times as slowly. "
        "Triton needs a C compiler and Python's headers (apt install gcc python3-dev) and a GPU that it supports",
        fault,
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block of threads may have."""
    if device.type != "cuda":
        return 1 << 30  # Triton's interpreter has no bound
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)
