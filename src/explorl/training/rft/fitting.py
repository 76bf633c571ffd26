"""Fine-tune on the selected responses of an iteration, with the same code as `explorl sft`."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from explorl.core.config import Config, ConfigError
from explorl.core.store import RunStore
from explorl.models import Policy
from explorl.tasks import Prompt, Task


def fit(
    config: Config, store: RunStore, start: str, examples: Sequence[Mapping[str, Any]], *, seed: int, console: Console
) -> Path:
    """Fine-tune the policy ``start`` on prompts with completions, from the last checkpoint; return its folder."""
    from explorl.training.callbacks import Diverged
    from explorl.training.sft.run import run_sft

    try:
        model = run_sft(sft_config(config, start, len(examples), seed), store, console=console, examples=examples)
    except Diverged as error:
        raise Diverged(str(error).replace("sft.learning_rate", "rft.learning_rate")) from error
    shutil.rmtree(store.checkpoints, ignore_errors=True)
    gc.collect()  # a trainer and its parts form reference cycles that hold the weights
    return model


def sft_config(config: Config, start: str, examples: int, seed: int) -> Config:
    """Return the configuration of the fit as an SFT run."""
    rft = config.rft
    settings = config.sft.model_copy(
        update={
            "examples": examples, "epochs": rft.epochs, "batch_size": rft.batch_size, "schedule": rft.schedule,
            "learning_rate": rft.learning_rate, "warmup_steps": rft.warmup_steps,
            "attempts": None, "from_scratch": False, "score": False,
        }
    )  # fmt: skip
    model = config.model.model_copy(update={"name": start})
    return config.model_copy(update={"model": model, "sft": settings, "seed": seed})


def derived_seed(seed: int, *parts: object) -> int:
    """Derive a seed below 2³¹ for a part of a run."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *parts))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def check_turns(prompt: Prompt, policy: Policy, task: Task, template: str | None) -> None:
    """Raise `ConfigError` if the chat template renders a finished turn differently from the generation prompt."""
    from explorl.training.sft.run import check_chat

    if isinstance(prompt, str):
        return
    answer = {"role": "assistant", "content": "<think>first</think> then 42"}
    check_chat({"prompt": prompt, "completion": [answer]}, policy, task, template)
    generation_prompt = policy.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    plain = {"role": "assistant", "content": "42"}
    whole = policy.tokenizer.apply_chat_template([*prompt, plain], tokenize=False)
    if not whole.startswith(generation_prompt):
        others = ", ".join(name for name in task.templates if name != template) or "another task"
        raise ConfigError(
            f"the chat template of {policy.name!r} begins a new turn differently from a finished one (some open "
            f"<think>), so sampled responses could not be trained on as they are; use a text template: {others}"
        )
