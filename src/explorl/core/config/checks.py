"""Check what a configuration needs of this computer: packages and number formats."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from explorl.core.errors import ConfigError

_TRACKER_PACKAGES = {"azure_ml": "azureml", "flyte": "flytekit"}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker of ``training.report_to`` is not installed."""
    for name in names:
        if importlib.util.find_spec(_TRACKER_PACKAGES.get(name, name)) is None:
            raise ConfigError(f"training.report_to names {name}, which is not installed: pip install {name}")


def check_engine(engine: str | None) -> None:
    """Raise ConfigError if the package that ``rollout.engine`` needs is not installed."""
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine is vllm, which is not installed: pip install explorl[vllm], or use explorl or generate"
        )


def check_precision(dtype: str) -> None:
    """Raise ConfigError if this computer cannot train in ``model.dtype``."""
    if "bfloat16" in dtype and _lacks_bfloat16():
        raise ConfigError(f"model.dtype is {dtype}, and this computer's GPU has no bfloat16; use float16, or float32")
    if dtype == "float16" and not has_accelerator():
        raise ConfigError(
            "model.dtype is float16, which needs a GPU to scale the gradients, and this computer has none; use "
            "bfloat16, or float32"
        )


def _lacks_bfloat16() -> bool:
    """Return whether there is a GPU that does not support bfloat16 in hardware."""
    import torch

    return torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)


def has_accelerator() -> bool:
    """Return whether torch can use a GPU or another accelerator."""
    import torch
    from transformers.utils import is_torch_xla_available

    return bool(torch.accelerator.is_available() or is_torch_xla_available())


def unsandboxed_code(values: Mapping[str, Any]) -> list[str]:
    """Return the warnings to print before a configuration runs code outside the sandbox."""
    model, task, warnings = values["model"], values["task"], []
    if model["trust_remote_code"]:
        warnings.append(f"model.trust_remote_code is true: Python code that comes with {model['name']} will run")
    if task.get("unisolated"):
        warnings.append(f"task.unisolated is true: programs that {model['name']} writes will run without isolation")
    return warnings
