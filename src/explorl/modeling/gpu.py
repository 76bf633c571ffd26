"""Find out what a GPU can run by trying it.

Triton compiles a kernel at its first launch, for which it needs a C compiler with Python's headers, a supported GPU and
a matching driver. The installed packages do not tell whether all of this is there.
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
    """Make this the current device: Triton launches kernels on the current device, not on that of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kernels_run(device: torch.device) -> bool:
    """Return whether Triton's kernels run on this device. The first call tries one and warns if it fails."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    fault = kernel_fault(device)
    if fault:
        _warn(fault)
    return not fault


@cache
def kernel_fault(device: torch.device) -> str:
    """Return why a test kernel fails on this device, or ""."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from explorl.modeling.triton_fused import rms_norm

        with on(device):
            x = torch.linspace(-2.0, 3.0, 96, device=device, dtype=torch.float32).view(2, 48)
            got = rms_norm(x, torch.ones_like(x[0]), 1e-6, 0.0, False)
            want = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
            return "" if torch.allclose(got, want, rtol=1e-5, atol=1e-6) else "a test kernel gives wrong numbers"
    except torch.OutOfMemoryError:  # has nothing to do with the kernel
        raise
    except Exception as error:  # errors of Triton, compilers and drivers have no common base class
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {lines[0]}"


@cache
def _warn(fault: str) -> None:
    logger.warning(
        "Triton's kernels do not run on this GPU (%s); using torch's operations, which are several times slower. "
        "Triton needs a C compiler and Python's headers (apt install gcc python3-dev) and a GPU that it supports",
        fault,
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that one block of threads can have."""
    if device.type != "cuda":
        return 1 << 30  # Triton's interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)
