"""A policy of random weights that calls a calculator all the time, and a trainer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.rollout.tools import Delimiters, ToolSpec, calculator_tool

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


def digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward with variance: the share of digits, rounded so that some rewards tie."""
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


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
    arguments: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 24,
        "learning_rate": 1e-3,
        "max_steps": 1,
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
        reward_funcs=reward,
        args=GRPOConfig(**{**arguments, **changes}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=policy.tokenizer,
        **{"interpreter": calculator(), **(options or {})},
    )
