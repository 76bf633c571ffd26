"""Load a policy: `tiny`, `tiny-tools`, `smollm2-135m`, a local folder or a hub id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from explorl.core.errors import ExplorlError
from explorl.models.smollm2 import fetch_smollm2, smollm2_folder
from explorl.models.tiny import (
    tiny_checkpoint,
    tiny_model,
    tiny_tokenizer,
    tiny_tools_checkpoint,
    tiny_tools_model,
)

__all__ = [
    "ModelError",
    "Policy",
    "fetch_smollm2",
    "load_policy",
    "lora_config",
    "resolve_model",
    "tiny_checkpoint",
    "tiny_model",
    "tiny_tokenizer",
    "tiny_tools_checkpoint",
    "tiny_tools_model",
]

NAMED = ("tiny", "tiny-tools", "smollm2-135m")
"""Models that Explorl knows by name."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class ModelError(ExplorlError):
    """A model that cannot be found or loaded; the message names it and says what to do."""


@dataclass(frozen=True)
class Policy:
    """A model with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any


def resolve_model(name: str) -> str:
    """Return the folder or hub id of a model's name; raise `ModelError` if there is no such model."""
    if name == "tiny":
        return str(tiny_checkpoint())
    if name == "tiny-tools":
        return str(tiny_tools_checkpoint())
    if name == "smollm2-135m":
        folder = smollm2_folder()
        if not (folder / "config.json").is_file():
            raise ModelError("smollm2-135m is not downloaded yet; get it with `explorl models fetch smollm2-135m`")
        return str(folder)
    name = os.path.expanduser(name)  # the shell does not expand ~ in files or after LABEL=
    folder = Path(name)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            return name
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json")
        if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
            raise ModelError(f"{folder} has a config.json but no weights; expected a file such as model.safetensors")
        return name
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"no model folder at {name}")
    if "/" not in name:
        raise ModelError(
            f"unknown model {name!r}; use {', '.join(NAMED)}, a folder, or a hub id such as Qwen/Qwen2-0.5B"
        )
    return name


def load_policy(
    name: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> Policy:
    """Load a model and its tokenizer; a LoRA adapter is loaded on top of its base model.

    ``trust_remote_code`` runs Python code from the model's folder or repository, as transformers does.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    path = resolve_model(name)
    transformers_logging.disable_progress_bar()  # callers show their own progress
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    adapter = (Path(path) / "adapter_config.json").is_file()
    try:
        if adapter:
            from peft import AutoPeftModelForCausalLM

            model_class = AutoPeftModelForCausalLM
        else:
            model_class = AutoModelForCausalLM
        # passed even if False: transformers would ask on the terminal
        model = model_class.from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # safetensors, torch, pickle and zip all raise their own errors for a damaged file
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        advice = "" if isinstance(error, OSError | ValueError | ImportError) else "; is a file damaged?"
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = "it needs to run its own Python code, which is not allowed"
            advice = "; if you have read the code and trust it, set model.trust_remote_code=true or --trust-remote-code"
        raise ModelError(f"cannot load the model {name!r}: {reason}{advice}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return Policy(name, model.to(device).eval(), tokenizer)


def lora_config(rank: int, alpha: int, dropout: float, targets: str | list[str]) -> Any:
    """Return peft's configuration of a LoRA adapter for a causal language model."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, bias="none", task_type="CAUSAL_LM"
    )
