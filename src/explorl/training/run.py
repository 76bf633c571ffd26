"""From a configuration to a GRPO run in a folder, started or resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.integrations import TensorBoardCallback
from trl import GRPOConfig

from explorl.config import Config, check_precision
from explorl.models import Policy, load_policy, lora_config
from explorl.store import RunStore
from explorl.tasks import Task, get_task
from explorl.training.common import (
    disabled_progress,
    evaluate_holdout,
    quiet,
    schedule_type,
    task_options,
    warn_of_lost_steps,
)
from explorl.training.grpo import ExplorationTrainer
from explorl.training.stored import Periodically, ProgressBar, Recorder, StoredCheckpoints, save_model


class StoredExplorationTrainer(StoredCheckpoints, ExplorationTrainer):
    """The trainer with whole checkpoints."""


def grpo_config(config: Config, output_dir: str) -> GRPOConfig:
    """TRL's arguments for a configuration."""
    training, rollout = config.training, config.rollout
    task = get_task(config.task.name, **task_options(config))
    return GRPOConfig(
        output_dir=output_dir,
        max_steps=training.steps * training.iterations,
        per_device_train_batch_size=training.micro_batch,
        gradient_accumulation_steps=training.prompts_per_step * training.generations // training.micro_batch,
        num_generations=training.generations,
        num_iterations=training.iterations,
        learning_rate=training.learning_rate,
        lr_scheduler_type=schedule_type(training.schedule),
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        beta=training.beta,
        loss_type=training.loss,
        importance_sampling_level="sequence" if training.loss == "luspo" else "token",
        use_bias_correction_kl=False,
        epsilon=training.clip_low,
        epsilon_high=training.clip_high,
        scale_rewards=training.scale_rewards,
        shuffle_dataset=training.shuffle,
        gradient_checkpointing=training.gradient_checkpointing,
        reward_weights=list(task.reward_parts.values()),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p or None,
        repetition_penalty=rollout.repetition_penalty,
        max_completion_length=rollout.max_tokens,
        remove_unused_columns=False,
        logging_steps=1,
        save_steps=training.checkpoint_every,
        seed=config.seed,
        **config.model.precision(),
        report_to=training.report_to or "none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def correct_reward(task: Task) -> tuple[str, float]:
    """The reward function that says whether an answer is correct, by the name that TRL gives it, and from where on.

    TRL calls a function by its ``__name__``, here the reward part, and multiplies by the weights afterwards.
    """
    if task.correct_part not in task.reward_parts:
        raise ValueError(
            f"task {task.name!r} has no reward that says which answers are correct: correct_part is "
            f"{task.correct_part!r}; set it to one of {', '.join(task.reward_parts)}"
        )
    return task.correct_part, 1.0


def run_grpo(
    config: Config,
    store: RunStore,
    *,
    console: Console,
    label: str = "GRPO",
    on_step: Callable[[int], bool | None] | None = None,
) -> Path:
    """Trains from the last checkpoint on, or from the start; returns the folder of the trained policy.

    Training ends early where `on_step`, called after each step, returns True.
    """
    from datasets import Dataset

    check_precision(config.model.dtype)
    checkpoint = store.last_checkpoint()
    store.rewind(int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0)
    store.record_start(seed=config.seed, resumed_from=checkpoint.name if checkpoint else None)
    task = get_task(config.task.name, **task_options(config))
    correct = correct_reward(task)
    rows = task.rows("train", template=config.task.template, limit=config.task.train_problems)
    policy = load_policy(config.model.name, dtype=config.model.training_dtype)
    lora = None if config.model.lora is None else lora_config(**config.model.lora.model_dump())

    def save_rollouts(step: int, columns: dict[str, list[Any]]) -> None:
        if config.training.save_rollouts:
            store.write_rollouts(step, columns)

    callbacks = [Recorder(store), ProgressBar(label, console)]
    if on_step is not None:
        callbacks.append(Periodically(1, on_step))
    args = grpo_config(config, str(store.checkpoints))
    args.project, args.run_name = "explorl", run_name(store.folder)  # for trackers
    with disabled_progress():
        trainer = StoredExplorationTrainer(
            model=policy.model,
            reward_funcs=task.reward_functions(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            peft_config=lora,
            strategies=config.strategies,
            engine=config.rollout.engine,
            correct=correct,
            on_rollouts=save_rollouts,
            token_records=config.training.token_records if config.training.save_rollouts else 0,
            callbacks=callbacks,
        )
        trainer.store = store
        trainer.keep_checkpoints = config.training.keep_checkpoints
        quiet(trainer)
        warn_of_lost_steps(config, trainer)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(store.folder / "tensorboard")
        if config.evaluation.every:
            evaluation = _Evaluation(config, store, trainer, policy)
            if checkpoint is None:
                evaluation(0)
            trainer.add_callback(Periodically(config.evaluation.every, evaluation))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return save_model(store, trainer, policy.tokenizer)


def run_name(folder: Path) -> str:
    """What a tracker calls a run: its folder's name, in a study with the study's and the arm's."""
    parts = folder.resolve().parts
    return "/".join((parts[-4], *parts[-2:])) if len(parts) > 4 and parts[-3] == "arms" else parts[-1]


class _Evaluation:
    """Scores the policy during training and writes a line of metrics and the completions."""

    def __init__(self, config: Config, store: RunStore, trainer: ExplorationTrainer, policy: Policy) -> None:
        self.config, self.store, self.trainer, self.policy = config, store, trainer, policy

    def __call__(self, step: int) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        result = evaluate_holdout(self.config, Policy(self.policy.name, model, self.policy.tokenizer))
        result.save(self.store.folder / "evaluations", f"step-{step:06d}")
        scores = {f"pass@{k}": result.pass_at(k).mean for k in result.ks}
        self.store.append_metrics({"step": step, "kind": "evaluation", **scores})


def finished(store: RunStore) -> bool:
    """Whether the run has reached its last step."""
    return (store.folder / "model").is_dir()
