"""SFT warm start on a task's reference solutions, on TRL's `SFTTrainer`; the loss is on completion tokens only."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from trl import SFTConfig, SFTTrainer

from explorl.config import Config, ConfigError
from explorl.models import Policy, load_policy, lora_config, tiny_model, tiny_tokenizer
from explorl.store import RunStore, write_json
from explorl.tasks import get_task
from explorl.training.common import disabled_progress, evaluate_holdout, quiet, schedule_type, task_options
from explorl.training.stored import ProgressBar, Recorder, StoredCheckpoints, save_model


class StoredSFTTrainer(StoredCheckpoints, SFTTrainer):
    """TRL's trainer with whole checkpoints."""


def run_sft(config: Config, store: RunStore, *, console: Console) -> Path:
    """Trains on `sft.examples` reference solutions from the last checkpoint on; returns the folder of the model."""
    from datasets import Dataset

    settings = config.sft
    options = task_options(config)
    if settings.attempts is not None:
        options["attempts"] = settings.attempts
    task = get_task(config.task.name, **options)
    console.print(f"writing {settings.examples:,} reference solutions of {task.name}")
    rows = list(task.examples(settings.examples, template=config.task.template, seed=config.seed))
    policy = starting_policy(config)
    lora = None if config.model.lora is None else lora_config(**config.model.lora.model_dump())

    steps = math.ceil(settings.examples / settings.batch_size) * settings.epochs
    args = SFTConfig(
        output_dir=str(store.checkpoints),
        max_steps=math.ceil(steps),
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule_type(settings.schedule),
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta2=settings.adam_beta2,
        max_length=settings.max_length,
        completion_only_loss=True,
        gradient_checkpointing=False,
        logging_steps=10,
        save_steps=settings.checkpoint_every,
        seed=config.seed,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    with disabled_progress():
        trainer = StoredSFTTrainer(
            model=policy.model,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            peft_config=lora,
            callbacks=[Recorder(store), ProgressBar("SFT", console)],
        )
        trainer.store = store
        folder = _finish(trainer, store, policy)
    write_recipe(config, folder)
    return folder


def _finish(trainer: Any, store: RunStore, policy: Policy) -> Path:
    quiet(trainer)
    checkpoint = store.last_checkpoint()
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return save_model(store, trainer, policy.tokenizer)


def write_recipe(config: Config, folder: Path) -> None:
    """Puts recipe.json beside the weights: how they were made and, where asked, what they score."""
    recipe: dict[str, Any] = {"seed": config.seed, "sft": config.dump()["sft"], "task": config.dump()["task"]}
    if config.sft.score:
        result = evaluate_holdout(config, load_policy(str(folder), dtype=config.model.dtype))
        recipe |= {"problems": len(result.problem_ids), "samples": result.samples, "protocol": result.protocol}
        recipe |= {f"pass@{k}": asdict(result.pass_at(k)) for k in (1, result.samples)}
    write_json(folder / "recipe.json", recipe)


def starting_policy(config: Config) -> Policy:
    """The model to fine-tune: the named one, or the tiny policy with random weights."""
    if not config.sft.from_scratch:
        return load_policy(config.model.name, dtype=config.model.dtype)
    if config.model.name != "tiny":
        raise ConfigError(f"sft.from_scratch is true, but model.name is {config.model.name!r}; only tiny is made so")
    return Policy("tiny", tiny_model(config.seed), tiny_tokenizer())
