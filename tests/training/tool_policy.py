"""A policy of random weights that calls a calculator all the time, and a trainer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from explorl.models import load_policy
from explorl.rollout.tools import Delimiters, ToolSpec, calculator_tool
from tests.training.small_runs import digits, grpo_config

WRITTEN = "0123456789*+<="
"""What it mostly writes."""
PROMPTS = [f"{a}*{b}" for a in range(1, 5) for b in range(5, 9)]


def calculator(**options: Any) -> ToolSpec:
    """``<12*34=408>``; of an error four characters are shown."""
    return calculator_tool(**{"fence": Delimiters("<", "=", "", ">"), "output": 8, "max_calls": 3, **options})


def save_tool_policy(small_policy: Path, folder: Path) -> Path:
    """The small policy with a bias: one number of each embedding is constant, and the head reads it."""
    policy = load_policy(str(small_policy), device="cpu")
    model, tokenizer = policy.model, policy.tokenizer
    wanted = [tokenizer.eos_token_id, *tokenizer.encode(WRITTEN, add_special_tokens=False)]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        model.lm_head.weight[:, 0] = -1.5
        model.lm_head.weight[wanted, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_trainer(
    cls: Any,
    folder: Path,
    out: Path,
    *,
    options: dict[str, Any] | None = None,
    reward: Any = digits,
    prompts: list[Any] = PROMPTS,
    **changes: Any,
) -> Any:
    """Keyword arguments go to `GRPOConfig`, ``options`` to the trainer. Prompts may be messages."""
    policy = load_policy(str(folder), device="cpu")
    policy.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return cls(
        model=policy.model,
        reward_funcs=reward,
        args=grpo_config(out, {"max_completion_length": 24, "max_steps": 1, **changes}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=policy.tokenizer,
        **{"interpreter": calculator(), **(options or {})},
    )
