"""The fit of an iteration: supervised fine-tuning on the selected responses, by the one path that `explorl sft` has."""

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
    """Fits the policy ``start`` to prompts with completions, from the last whole checkpoint on; its folder."""
    from explorl.training.callbacks import Diverged
    from explorl.training.sft.run import run_sft

    try:
        model = run_sft(sft_config(config, start, len(examples), seed), store, console=console, examples=examples)
    except Diverged as error:
        raise Diverged(str(error).replace("sft.learning_rate", "rft.learning_rate")) from error
    shutil.rmtree(store.checkpoints, ignore_errors=True)
    gc.collect()  # a trainer and its parts hold one another, with the memory of the weights
    return model


def sft_config(config: Config, start: str, examples: int, seed: int) -> Config:
    """The configuration of the fit as an SFT run of its own."""
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
    """A seed of its own for each part of a run, below 2³¹."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *parts))).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def check_turns(prompt: Prompt, policy: Policy, task: Task, template: str | None) -> None:
    """That messages are learnt as they were sampled: a finished turn must begin as the model was asked to begin it."""
    from explorl.training.sft.run import check_chat

    if isinstance(prompt, str):
        return
    answer = {"role": "assistant", "content": "<think>first</think> then 42"}
    check_chat({"prompt": prompt, "completion": [answer]}, policy, task, template)
    asked = policy.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    plain = {"role": "assistant", "content": "42"}
    whole = policy.tokenizer.apply_chat_template([*prompt, plain], tokenize=False)
    if not whole.startswith(asked):
        others = ", ".join(name for name in task.templates if name != template) or "another task"
        raise ConfigError(
            f"the chat template of {policy.name!r} begins an answer with more than it shows of one that is over (some "
            f"open <think>), so that what is sampled could not be learnt as it is; set task.template to one of text: "
            f"{others}"
        )
