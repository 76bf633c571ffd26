"""Supervised fine-tuning on a task's reference solutions, or on rows that are given; completion tokens are learnt."""

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
from explorl.core.config import Config, ConfigError
from explorl.core.store import RunStore, write_json
from explorl.core.terminal import literal
from explorl.evaluation.prompts import check_prompts
from explorl.models import Policy, lora_config, tiny_model, tiny_tokenizer, tiny_tools_model
from explorl.tasks import Task, get_task, takes_option
from explorl.tasks.base import completion_text
from explorl.training.callbacks import (
    MetricsRecorder,
    ProgressDisplay,
    StopAtDivergence,
    StoredCheckpoints,
    save_model,
    start_run,
)
from explorl.training.grpo.checkpoint import restoring_optimizer
from explorl.training.run_setup import (
    check_one_gpu,
    configured_policy,
    disabled_progress,
    evaluate_holdout,
    quiet,
    schedule_type,
    task_options,
    warn_of_lost_steps,
)
from explorl.training.sft.data import without_completion
from explorl.training.sft.trainer import NothingToLearn, PackedSFTTrainer


class StoredSFTTrainer(StoredCheckpoints, PackedSFTTrainer):
    """The trainer with whole checkpoints."""

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
    """Trains on `sft.examples` reference solutions from the last whole checkpoint on; returns the folder of the model.

    Nothing is written before all parts are there. ``alone`` keeps other processes out of the folder. ``examples``,
    prompts with completions, are learnt in place of reference solutions. Where `rollout.tools` names a tool, what it
    says in completions is not learnt.
    """
    from datasets import Dataset

    settings = config.sft
    precision = config.model.precision()
    options = task_options(config)
    if settings.attempts is not None:
        if not takes_option(config.task.name, "attempts"):
            raise ConfigError(
                f"sft.attempts is {settings.attempts}, and task {config.task.name!r} has no attempts; leave it out"
            )
        options["attempts"] = settings.attempts
    task = get_task(config.task.name, **options)
    policy = starting_policy(config)
    if examples is None:
        if settings.from_scratch:
            console.print(f"starting from random weights, not those of {config.model.name}: sft.from_scratch is true")
        console.print(literal(f"writing up to {settings.examples:,} reference solutions of {task.name}"))
        examples = list(task.examples(settings.examples, template=config.task.template, seed=config.seed))
        check_completions(examples, task)
    if not examples:
        raise ConfigError(f"task {task.name!r} gave no examples to fine-tune on; its `examples` must give some")
    rows = [conversational(example) for example in examples]
    check_prompts([row["prompt"] for row in rows], policy, task, config.task.template)
    check_chat(rows[0], policy, task, config.task.template)
    goes_on = trains_its_adapter(policy.model)
    lora = None if config.model.lora is None or goes_on else lora_config(**config.model.lora.model_dump())

    steps = math.ceil(len(rows) / settings.batch_size) * settings.epochs
    shown = ProgressDisplay(label, console)
    with disabled_progress(), TemporaryDirectory() as nowhere:
        args = SFTConfig(
            output_dir=nowhere,  # the trainer makes its folder at once
            trust_remote_code=config.model.trust_remote_code,
            max_steps=math.ceil(steps),
            per_device_train_batch_size=rows_of_process(settings.batch_size),
            learning_rate=settings.learning_rate,
            lr_scheduler_type=schedule_type(settings.schedule),
            warmup_steps=settings.warmup_steps,
            weight_decay=settings.weight_decay,
            adam_beta2=settings.adam_beta2,
            max_length=settings.max_length,
            completion_only_loss=True,
            gradient_checkpointing=False,
            logging_first_step=True,
            logging_steps=10,
            logging_nan_inf_filter=False,  # which waits for the GPU in every step; `StopAtDivergence` sees them
            save_steps=settings.checkpoint_every,
            seed=config.seed,
            **precision,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            ddp_timeout=processes.WAIT,
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
                callbacks=[
                    StopAtDivergence("sft.learning_rate", settings.learning_rate),
                    MetricsRecorder(store),
                    shown,
                ],
            )
        except NothingToLearn as error:
            raise ConfigError(f"sft.max_length is {settings.max_length}: {error}") from error
        left_out = len(rows) - len(trainer.train_dataset)
        if left_out:
            console.print(
                literal(
                    f"{left_out:,} of {len(rows):,} examples have a prompt of sft.max_length = {settings.max_length} "
                    "tokens or more, and nothing of their completion can be learnt: they are left out"
                )
            )
        trainer.args.output_dir = str(store.checkpoints)
        quiet(trainer)
        checkpoint = start_run(trainer, store, config, "sft", rows, console=console, alone=alone)
        warn_of_lost_steps(config, trainer)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            shown.close()
        folder = save_model(store, trainer, policy.tokenizer)
    if trainer.accelerator.is_main_process:
        write_recipe(config, folder, console=console)
    trainer.accelerator.wait_for_everyone()
    return folder


def rows_of_process(batch_size: int) -> int:
    """Rows of each process in an optimizer step; `ConfigError` where they cannot share them equally."""
    number = processes.count()
    if batch_size % number:
        good = number * max(round(batch_size / number), 1)
        raise ConfigError(f"sft.batch_size is {batch_size}, which {number} processes cannot share; use {good}")
    return batch_size // number


def conversational(example: Mapping[str, Any]) -> dict[str, Any]:
    """The example as TRL takes it: where the prompt is messages, the completion is the assistant's message."""
    prompt, completion = example["prompt"], example["completion"]
    if not isinstance(prompt, str) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return {**example, "prompt": prompt, "completion": completion}


def check_completions(examples: Sequence[Mapping[str, Any]], task: Task) -> None:
    """Refuses examples that have nothing to learn."""
    empty = next(without_completion(examples), None)
    if empty is not None:
        raise ConfigError(
            f"example {empty} of task {task.name!r} has an empty completion, from which nothing can be learnt; leave "
            "it out, or give it a solution"
        )


def check_chat(row: Mapping[str, Any], policy: Policy, task: Task, template: str | None) -> None:
    """Refuses messages for a model without a chat template, or with one that leaves out part of a completion."""
    if isinstance(row["prompt"], str):
        return
    template = template or next(iter(task.templates), None)
    asked = f"task.template is {template!r}, which asks in messages, and"
    others = ", ".join(name for name in task.templates if name != template) or "another task"
    if not policy.tokenizer.chat_template:
        raise ConfigError(f"{asked} the model {policy.name!r} has no chat template; use a template of text: {others}")
    shown = policy.tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
    written = completion_text(row["completion"])
    if "".join(written.split()) not in "".join(shown.split()):
        raise ConfigError(
            f"{asked} the chat template of {policy.name!r} does not show the whole of an assistant's message (some "
            f"leave out what is in <think>), so that it would not be learnt; use a template of text: {others}"
        )


def write_recipe(config: Config, folder: Path, *, console: Console) -> None:
    """Puts recipe.json beside the weights: how they were made and, where asked, what they score."""
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


def trains_its_adapter(model: Any) -> bool:
    """Whether the model has a LoRA adapter already, which is then trained on: it is loaded as one to sample from."""
    if not hasattr(model, "peft_config"):
        return False
    for settings in model.peft_config.values():
        settings.inference_mode = False
    model.set_adapter(model.active_adapter)
    return True


def starting_policy(config: Config) -> Policy:
    """The model to fine-tune: the named one, or a tiny policy with random weights."""
    if not config.sft.from_scratch:
        return configured_policy(config, to_train=True)
    made = {"tiny": tiny_model, "tiny-tools": tiny_tools_model}
    name = config.model.name
    if name not in made:
        raise ConfigError(
            f"sft.from_scratch is true, but model.name is {name!r}; only {' and '.join(made)} are made so"
        )
    weights = getattr(torch, config.model.training_dtype)
    return Policy(name, made[name](config.seed).to(weights), tiny_tokenizer())
