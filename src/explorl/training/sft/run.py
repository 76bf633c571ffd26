"""Supervised fine-tuning on the completions of a task's reference solutions, or of given examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from trl import SFTConfig

from explorl.core import processes
from explorl.core.config import Config, ConfigError, check_precision
from explorl.core.store import RunStore, write_json
from explorl.core.terminal import literal
from explorl.evaluation.prompts import check_prompts
from explorl.models import Policy, lora_config, tiny_model, tiny_tokenizer, tiny_tools_model
from explorl.tasks import Task, get_task, takes_option
from explorl.tasks.base import completion_text
from explorl.training.callbacks import StoredCheckpoints
from explorl.training.checkpoint_faults import restoring_optimizer
from explorl.training.run_setup import (
    TrainingRun,
    check_one_gpu,
    configured_policy,
    disabled_progress,
    evaluate_holdout,
    trainer_arguments,
)
from explorl.training.sft.data import rows_without_completion
from explorl.training.sft.trainer import NothingToLearn, PackedSFTTrainer


class StoredSFTTrainer(StoredCheckpoints, PackedSFTTrainer):
    """`PackedSFTTrainer` whose checkpoints get their names only when they are complete."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring_optimizer(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)


def run_sft(
    config: Config,
    store: RunStore,
    *,
    console: Console,
    alone: bool = False,
    examples: Sequence[Mapping[str, Any]] | None = None,
    label: str = "SFT",
) -> Path:
    """Train on `sft.examples` reference solutions, from the last complete checkpoint; return the model's folder.

    Nothing is written before the model, the task and the data are loaded. ``alone`` locks the folder against other
    processes. ``examples``, prompts with completions, replace the reference solutions. If `rollout.tools` names a tool,
    its outputs inside completions are not trained on.
    """
    from datasets import Dataset

    settings = config.sft
    check_precision(config.model.dtype)
    options = config.task.options
    if settings.attempts is not None:
        if not takes_option(config.task.name, "attempts"):
            raise ConfigError(
                f"sft.attempts is {settings.attempts}, and task {config.task.name!r} has no such option; leave it out"
            )
        options["attempts"] = settings.attempts
    task = get_task(config.task.name, **options)
    policy = starting_policy(config)
    if examples is None:
        if settings.from_scratch:
            console.print(f"starting from random weights, not those of {config.model.name}: sft.from_scratch is true")
        console.print(literal(f"generating up to {settings.examples:,} reference solutions of {task.name}"))
        examples = list(task.examples(settings.examples, template=config.task.template, seed=config.seed))
        check_completions(examples, task)
    if not examples:
        raise ConfigError(f"task {task.name!r} has no examples to fine-tune on; its method `examples` must return some")
    rows = [conversational(example) for example in examples]
    check_prompts([row["prompt"] for row in rows], policy, task, config.task.template)
    check_chat(rows[0], policy, task, config.task.template)
    has_adapter = make_adapter_trainable(policy.model)
    lora = None if config.model.lora is None or has_adapter else lora_config(**config.model.lora.model_dump())

    steps = math.ceil(len(rows) / settings.batch_size) * settings.epochs
    run = TrainingRun("sft", config, store, console=console, label=label, alone=alone)
    with disabled_progress(), TemporaryDirectory() as placeholder:
        args = SFTConfig(
            **trainer_arguments(config, settings, placeholder),
            max_steps=math.ceil(steps),
            per_device_train_batch_size=rows_of_process(settings.batch_size),
            adam_beta2=settings.adam_beta2,
            max_length=settings.max_length,
            completion_only_loss=True,
            gradient_checkpointing=False,
            logging_first_step=True,
            logging_steps=10,
            logging_nan_inf_filter=False,  # it waits for the GPU in every step; `StopAtDivergence` checks instead
            report_to="none",
        )
        check_one_gpu(args)
        try:
            trainer = StoredSFTTrainer(
                model=policy.model,
                args=args,
                train_dataset=Dataset.from_list(rows),
                processing_class=policy.tokenizer,
                peft_config=lora,
                tool=config.rollout.tool(),
                callbacks=run.callbacks,
            )
        except NothingToLearn as error:
            raise ConfigError(f"sft.max_length is {settings.max_length}: {error}") from error
        left_out = len(rows) - len(trainer.train_dataset)
        if left_out:
            console.print(
                literal(
                    f"leaving out {left_out:,} of {len(rows):,} examples, whose prompts alone have sft.max_length = "
                    f"{settings.max_length} tokens or more"
                )
            )
        folder = run.train(trainer, rows, policy.tokenizer)
    if trainer.accelerator.is_main_process:
        write_recipe(config, folder, console=console)
    trainer.accelerator.wait_for_everyone()
    return folder


def rows_of_process(batch_size: int) -> int:
    """Return the rows per process in an optimizer step; raise `ConfigError` if they cannot be divided equally."""
    count = processes.count()
    if batch_size % count:
        multiple = count * max(round(batch_size / count), 1)
        raise ConfigError(f"sft.batch_size is {batch_size}, not a multiple of the {count} processes; use {multiple}")
    return batch_size // count


def conversational(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an example to TRL's format: if the prompt is messages, the completion becomes an assistant message."""
    prompt, completion = example["prompt"], example["completion"]
    if not isinstance(prompt, str) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return {**example, "prompt": prompt, "completion": completion}


def check_completions(examples: Sequence[Mapping[str, Any]], task: Task) -> None:
    """Raise `ConfigError` for an example with an empty completion."""
    empty = next(rows_without_completion(examples), None)
    if empty is not None:
        raise ConfigError(
            f"example {empty} of task {task.name!r} has an empty completion; leave it out, or give it a solution"
        )


def check_chat(row: Mapping[str, Any], policy: Policy, task: Task, template: str | None) -> None:
    """Raise `ConfigError` if the chat template drops text of messages."""
    if isinstance(row["prompt"], str):
        return
    template = template or next(iter(task.templates), None)
    others = ", ".join(name for name in task.templates if name != template) or "another task"
    rendered = policy.tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
    completion = completion_text(row["completion"])
    if "".join(completion.split()) not in "".join(rendered.split()):
        raise ConfigError(
            f"task.template is {template!r}, whose prompts are messages, but the chat template of {policy.name!r} "
            "drops part of an assistant's message (some drop what is in <think>), which would not be trained on; use "
            f"a text template: {others}"
        )


def write_recipe(config: Config, folder: Path, *, console: Console) -> None:
    """Write recipe.json beside the weights: how they were trained and, with `sft.score`, their pass@k."""
    recipe: dict[str, Any] = {"seed": config.seed, "sft": config.dump()["sft"], "task": config.dump()["task"]}
    if config.rollout.tools is not None:
        recipe["tools"] = config.rollout.tools
    if config.sft.score:
        console.print("scoring the policy on held-out problems")
        result = evaluate_holdout(config, configured_policy(config, str(folder)))
        recipe |= {"problems": len(result.problem_ids), "samples": result.samples, "protocol": result.protocol}
        recipe |= {f"pass@{k}": asdict(result.pass_at(k)) for k in (1, result.samples)}
        scores = ", ".join(f"pass@{k} {recipe[f'pass@{k}']['mean']:.1%}" for k in dict.fromkeys((1, result.samples)))
        console.print(literal(f"{scores} on {recipe['problems']} held-out problems"), highlight=False)
    write_json(folder / "recipe.json", recipe)


def make_adapter_trainable(model: Any) -> bool:
    """Make an existing LoRA adapter trainable and return True; return False if the model has none."""
    if not hasattr(model, "peft_config"):
        return False
    for settings in model.peft_config.values():
        settings.inference_mode = False
    model.set_adapter(model.active_adapter)
    return True


def starting_policy(config: Config) -> Policy:
    """Return the model to fine-tune: the named one, or a tiny policy with random weights."""
    if not config.sft.from_scratch:
        return configured_policy(config, to_train=True)
    factories = {"tiny": tiny_model, "tiny-tools": tiny_tools_model}
    name = config.model.name
    if name not in factories:
        raise ConfigError(
            f"sft.from_scratch is true, but model.name is {name!r}; only {' and '.join(factories)} can be trained "
            "from random weights"
        )
    weights = getattr(torch, config.model.training_dtype)
    return Policy(name, factories[name](config.seed).to(weights), tiny_tokenizer())
