"""Small GRPO runs on a real policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy

PROMPTS = [f"{a} {b} {a + b}={2 * (a + b)}\n" for a in range(1, 5) for b in range(5, 9)]


def digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward with variance on random text: the share of digits, rounded so that some rewards tie."""
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


@pytest.fixture
def make_trainer(small_policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """Builds a trainer class on the small policy; keyword arguments go to `GRPOConfig`."""

    def make(cls: Any, *, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        policy = load_policy(str(small_policy), device="cpu")
        arguments: dict[str, Any] = {
            "output_dir": str(tmp_path / "out"),
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
        return cls(
            model=policy.model,
            reward_funcs=digits,
            args=GRPOConfig(**{**arguments, **changes}),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=policy.tokenizer,
            **(options or {}),
        )

    return make
