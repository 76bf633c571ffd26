"""Start or resume a GRPO run in a folder from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from trl import GRPOConfig

from explorl.core.config import Config, ConfigError, check_engine, check_precision
from explorl.core.store import RunStore
from explorl.core.terminal import format_scores, literal
from explorl.evaluation.prompts import all_opened, check_prompts
from explorl.models import Policy, lora_config
from explorl.tasks import Problem, Task, get_task
from explorl.tasks.base import json_text
from explorl.training.callbacks import PeriodicCallback, StoredCheckpoints
from explorl.training.grpo.inspection_schedule import Lens, build_observers
from explorl.training.grpo.observers import statistics
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import is_sharded
from explorl.training.run_setup import (
    TrainingRun,
    accumulation_steps,
    check_holdout,
    check_one_gpu,
    configured_policy,
    disabled_progress,
    evaluate_holdout,
    trainer_arguments,
)
from explorl.training.sharding import gathered_weights, why_not_gathered
from explorl.training.tracking import log_scores, store_evaluation


class StoredExplorationTrainer(StoredCheckpoints, ExplorationTrainer):
    """The trainer with complete checkpoints only."""


def grpo_config(config: Config, output_dir: str) -> GRPOConfig:
    """Convert a configuration to TRL's arguments."""
    training, rollout = config.training, config.rollout
    task = get_task(config.task.name, **config.task.options)
    return GRPOConfig(
        **trainer_arguments(config, training, output_dir),
        max_steps=training.steps * training.iterations,
        per_device_train_batch_size=training.micro_batch,
        gradient_accumulation_steps=accumulation_steps(
            training.prompts_per_step * training.generations, training.micro_batch, "training.micro_batch"
        ),
        num_generations=training.generations,
        num_iterations=training.iterations,
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
        generation_kwargs={"stop": list(rollout.stop)} if rollout.stop else None,
        remove_unused_columns=False,
        logging_steps=1,
        report_to=training.report_to or "none",
    )


def correct_reward(task: Task) -> tuple[str, float]:
    """Return the name and the threshold of the reward function that decides whether a completion is correct.

    TRL names a function by its ``__name__``, here the reward part, and multiplies by the weights afterwards.
    """
    if task.correct_part not in task.reward_parts:
        raise ValueError(
            f"task {task.name!r} has no reward part that decides which completions are correct: correct_part is "
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
    alone: bool = False,
) -> Path:
    """Train from the latest valid checkpoint, or from the start; return the folder of the trained policy.

    Nothing is written before everything is loaded and checked.

    Args:
        on_step: Called after each step; training ends early if it returns True.
        alone: Lock the folder against other processes.
    """
    from datasets import Dataset

    check_precision(config.model.dtype)
    check_engine(config.rollout.engine)
    task = get_task(config.task.name, **config.task.options)
    correct = correct_reward(task)
    lens, dynamic, skip = config.training.lens, config.training.dynamic_sampling, config.training.skip_solved
    observers = [] if lens is None else [*statistics(), *build_observers(lens.observers)]
    rows = task.rows("train", template=config.task.template, limit=config.task.train_problems)
    if config.evaluation.every or config.evaluation.ends:
        check_holdout(config, task, [Problem(row["id"], row["data"]) for row in rows])
    for row in rows:  # a table would give all rows the same keys, and all numbers the same type
        row["data"] = json_text(task, row["id"], row["data"])
    policy = configured_policy(config, to_train=True)
    prompts = [row["prompt"] for row in rows]
    check_prompts(prompts, policy, task, config.task.template)
    _check_steps(config, len(rows))
    for row, opened in zip(rows, all_opened(policy.tokenizer, prompts), strict=True):
        row["opened"] = opened
    lora = None if config.model.lora is None else lora_config(**config.model.lora.model_dump())

    run = TrainingRun("grpo", config, store, console=console, label=label, alone=alone)
    callbacks = [*run.callbacks, *([] if on_step is None else [PeriodicCallback(1, on_step)])]
    with disabled_progress(), TemporaryDirectory() as folder:
        args = grpo_config(config, folder)
        check_one_gpu(args)
        reward_functions, answers = task.scorers()
        trainer = StoredExplorationTrainer(
            model=policy.model,
            reward_funcs=reward_functions,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            peft_config=lora,
            strategies=config.strategies,
            engine=config.rollout.engine,
            engine_options={"batch_size": config.rollout.batch_size, "memory_budget": config.rollout.memory_budget},
            interpreter=config.rollout.tool(),
            correct=correct,
            answers=answers if task.has_answers else None,
            observers=observers,
            lens=None if lens is None else Lens(lens.every, lens.answers, lens.rate),
            dynamic_sampling=None if dynamic is None else dynamic.model_dump(),
            skip_solved=None if skip is None else skip.model_dump(),
            callbacks=callbacks,
        )
        _check_steps(config, len(trainer.train_dataset))  # a strategy may have removed some
        if config.training.save_rollouts:
            after = None if lens is None else store.write_rollouts
            trainer.listen(store.write_rollouts, config.training.token_records, after=after)
        trainer.keep_checkpoints = config.training.keep_checkpoints
        is_evaluated = config.evaluation.every or config.evaluation.ends
        evaluation = _Evaluation(config, store, trainer, policy, console) if is_evaluated else None
        return run.train(trainer, rows, policy.tokenizer, evaluation)


def _check_steps(config: Config, problems: int) -> None:
    """Raise if there are fewer problems than prompts in a step."""
    needed = config.training.prompts_per_step
    if problems < needed:
        raise ConfigError(
            f"training.prompts_per_step is {needed}, and there are {problems} problems to train on; use {problems} or "
            "fewer"
        )


class _Evaluation:
    """Evaluates the policy during training and writes a line of metrics and the completions."""

    def __init__(
        self, config: Config, store: RunStore, trainer: ExplorationTrainer, policy: Policy, console: Console
    ) -> None:
        self.config, self.store, self.trainer, self.policy, self.console = config, store, trainer, policy, console
        self._has_named = False
        """True if the task and the strategies have been sent to the trackers."""

    def __call__(self, step: int) -> None:
        """Evaluate on the main process; called on every process, which all have to gather the weights."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if is_sharded(trainer) and (why := why_not_gathered(trainer.model, accelerator)):
            trainer.warn_once(f"the policy is not evaluated during training: {why}")
            return
        with gathered_weights(trainer.model_wrapped, accelerator):
            if accelerator.is_main_process:
                self._score(step)
            accelerator.wait_for_everyone()

    def _score(self, step: int) -> None:
        if step in {record["step"] for record in self.store.metrics() if record.get("kind") == "evaluation"}:
            return
        settings = self.config.evaluation
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        result = evaluate_holdout(
            self.config,
            Policy(self.policy.name, model, self.policy.tokenizer),
            problems=None if settings.every else settings.ends,
        )
        scores = store_evaluation(self.store, step, result)
        trainer = self.trainer
        facts = {} if self._has_named else {"task": result.task, "strategies": ", ".join(map(repr, trainer.strategies))}
        self._has_named = True
        log_scores(trainer.callback_handler, trainer.args, trainer.state, trainer.control, result, facts)
        display_step = step // self.config.training.iterations
        self.console.print(
            literal(f"step {display_step}: {format_scores(scores)} on {len(result.problem_ids)} held-out problems"),
            highlight=False,
        )


def is_finished(store: RunStore) -> bool:
    """Tell whether the run has reached its last step."""
    return (store.folder / "model").is_dir()
