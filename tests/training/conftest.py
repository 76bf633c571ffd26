"""Small GRPO runs on a real policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from explorl.models import load_policy
from tests.training.small_runs import digits, grpo_config

PROMPTS = [f"{a} {b} {a + b}={2 * (a + b)}\n" for a in range(1, 5) for b in range(5, 9)]


@pytest.fixture
def make_trainer(small_policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """Builds a trainer class on the small policy; keyword arguments go to `GRPOConfig`."""

    def make(cls: Any, *, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        policy = load_policy(str(small_policy), device="cpu")
        return cls(
            model=policy.model,
            reward_funcs=digits,
            args=grpo_config(tmp_path / "out", changes),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=policy.tokenizer,
            **(options or {}),
        )

    return make
