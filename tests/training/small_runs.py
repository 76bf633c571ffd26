"""What small GRPO runs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import GRPOConfig

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 10,
    "learning_rate": 1e-3,
    "max_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "seed": 3,
}


def grpo_config(out: Path, changes: dict[str, Any]) -> GRPOConfig:
    """Settings of a run that writes nothing and logs every step on the CPU in float32, with changes."""
    return GRPOConfig(**{"output_dir": str(out), **SETTINGS, **changes})


def digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward with variance on random text: the share of digits, rounded so that some rewards tie."""
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]
