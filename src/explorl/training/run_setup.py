"""What training runs share: policies, held-out problems and the arguments, start and end of TRL's trainers."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from explorl.core import processes
from explorl.core.config import Config, ConfigError, SftSettings, TrainingSettings, changed_keys
from explorl.core.store import RunStore, StoreError, atomic_folder, checkpoint_step, digest_of
from explorl.core.terminal import NOT_FINITE, literal
from explorl.evaluation import Evaluation, evaluate, protocol
from explorl.evaluation.sample import data_digest
from explorl.models import Policy, load_policy
from explorl.tasks import Problem, Task, get_task
from explorl.tasks.base import problems_of
from explorl.training.callbacks import MetricsRecorder, PeriodicCallback, ProgressDisplay, StopAtDivergence
from explorl.training.checkpoint_faults import find_fault
from explorl.training.sharding import fsdp_version, gathered_weights


class TrainingRun:
    """A run of GRPO or SFT in a folder, started or resumed; ``alone`` locks the folder against other processes."""

    def __init__(
        self,
        kind: Literal["grpo", "sft"],
        config: Config,
        store: RunStore,
        *,
        console: Console,
        label: str,
        alone: bool,
    ) -> None:
        self.kind, self.config, self.store, self.console, self.alone = kind, config, store, console, alone
        section = {"grpo": "training", "sft": "sft"}[kind]
        self._divergence = StopAtDivergence(f"{section}.learning_rate", getattr(config, section).learning_rate)
        self._progress = ProgressDisplay(label, console)
        self.callbacks: list[TrainerCallback] = [self._divergence, MetricsRecorder(store), self._progress]
        """The callbacks to create the trainer with."""

    def train(
        self, trainer: Any, rows: Sequence[Any], tokenizer: Any, evaluation: Callable[[int], None] | None = None
    ) -> Path:
        """Train on these rows from the latest valid checkpoint, or from the start; return the trained policy's folder.

        ``evaluation`` is called on all processes at the start, every `evaluation.every` steps, and at the end.
        """
        trainer.store, args = self.store, trainer.args
        args.output_dir = str(self.store.checkpoints)
        args.project, args.run_name = "explorl", run_name(self.store.folder)  # for trackers
        quiet(trainer)
        checkpoint = broadcast_object_list([self._start(rows) if trainer.accelerator.is_main_process else None])[0]
        warn_of_lost_steps(self.config, trainer)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(self.store.folder / "tensorboard")
        if evaluation is not None:
            every = self.config.evaluation.every
            trainer.add_callback(PeriodicCallback(every, evaluation, everywhere=True, last=True))
        try:
            if checkpoint is None and evaluation is not None:
                evaluation(0)
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            if evaluation is not None:
                evaluation(trainer.state.global_step)
        except RuntimeError as error:
            if not any(phrase in str(error) for phrase in NOT_FINITE):
                raise
            step = trainer.state.global_step // getattr(args, "num_iterations", 1) + 1
            raise self._divergence.error(step, "the policy's logits are not finite") from error
        finally:
            self._progress.close()
        return save_model(self.store, trainer, tokenizer)

    def _start(self, rows: Sequence[Any]) -> Path | None:
        """Start or resume the run in its folder; return the checkpoint to resume from, or None."""
        store = self.store
        if self.alone:
            store.lock()
        model = store.folder / "model"
        changed = changed_keys(store.config(), self.config.dump()) if store.has_steps else {}
        checkpoint = store.latest_valid_checkpoint(find_fault, self._print)
        if checkpoint is None and model.exists():
            raise StoreError(
                f"{store.folder} is finished and has no checkpoint to resume from; start a new run from its policy "
                f"with --set model.name={model}"
            )
        step = checkpoint_step(checkpoint) if checkpoint else 0
        if model.exists():
            store.check_kind(self.kind)
            former = store.folder / f"model-step-{step}"
            model.replace(former)
            self._print(f"moved the final policy of the earlier run in {store.folder} to {former}")
        resumed_from = checkpoint.name if checkpoint else None
        facts: dict[str, Any] = {"changed": {key: list(values) for key, values in changed.items()}} if changed else {}
        if processes.count() > 1:
            facts["processes"] = processes.count()
        begin_run(self.kind, self.config, store, rows, step=step, resumed_from=resumed_from, say=self._print, **facts)
        return checkpoint

    def _print(self, text: str) -> None:
        self.console.print(literal(text), soft_wrap=True)


def begin_run(
    kind: str,
    config: Config,
    store: RunStore,
    rows: Sequence[Any],
    *,
    step: int,
    resumed_from: str | None,
    say: Callable[[str], None],
    **facts: Any,
) -> None:
    """Begin a run on these rows in its folder, or resume it after ``step``; ``facts`` are added to its provenance."""
    store.begin(config.dump(), kind)
    store.rewind(step)
    digest = digest_of(rows)
    if resumed_from and (warning := store.data_changed_warning(digest)):
        say(warning)
    store.record_start(kind=kind, seed=config.seed, resumed_from=resumed_from, **facts, rows=digest)


def run_name(folder: Path) -> str:
    """Return the name of a run in trackers: its folder's name, within a study with the study's and the arm's."""
    parts = folder.resolve().parts
    return "/".join((parts[-4], *parts[-2:])) if len(parts) > 4 and parts[-3] == "arms" else parts[-1]


def trainer_arguments(config: Config, settings: TrainingSettings | SftSettings, output_dir: str) -> dict[str, Any]:
    """Return the arguments that TRL's trainers share; ``output_dir`` is created at once."""
    return {
        "output_dir": output_dir,
        "trust_remote_code": config.model.trust_remote_code,
        "learning_rate": settings.learning_rate,
        # all schedules of transformers with these names support warm-up
        "lr_scheduler_type": "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        "warmup_steps": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "save_steps": settings.checkpoint_every,
        "seed": config.seed,
        **config.model.precision(),
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "ddp_timeout": processes.WAIT,
    }


def save_model(store: RunStore, trainer: Any, tokenizer: Any) -> Path:
    """Write the trained policy atomically to `model/` in the run's folder; called on every process."""
    target, accelerator = store.folder / "model", trainer.accelerator
    fsdp = fsdp_version(accelerator) > 0
    weights = {"state_dict": accelerator.get_state_dict(trainer.model_wrapped)} if fsdp else {}
    with nullcontext() if fsdp else gathered_weights(trainer.model_wrapped, accelerator):
        if accelerator.is_main_process:
            with atomic_folder(target) as folder:
                accelerator.unwrap_model(trainer.model).save_pretrained(folder, **weights)
                tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return target


def configured_policy(config: Config, name: str | None = None, *, to_train: bool = False) -> Policy:
    """Load a policy, by default the configured one, in the configured type for evaluation or training."""
    model = config.model
    dtype = model.training_dtype if to_train else model.evaluation_dtype
    return load_policy(name or model.name, dtype=dtype, trust_remote_code=model.trust_remote_code)


def evaluate_holdout(config: Config, policy: Policy, *, problems: int | None = None) -> Evaluation:
    """Evaluate a policy on the task's held-out problems as configured, on at most ``problems`` of them."""
    settings = config.evaluation
    task = get_task(config.task.name, **config.task.options)
    evaluation_protocol = protocol(settings.protocol, samples=settings.samples, **config.rollout.limits())
    limit = settings.problems or config.task.holdout_problems
    return evaluate(
        policy,
        task,
        problems_of(task, "holdout", min(limit, problems) if limit and problems else limit or problems),
        evaluation_protocol,
        name=settings.protocol,
        template=config.task.template,
        seed=config.seed,
        batch_size=settings.batch_size,
        dtype=getattr(torch, config.model.evaluation_dtype),
        tools=config.rollout.tool(),
    )


def check_holdout(config: Config, task: Task, trained: Sequence[Problem]) -> None:
    """Raise if there are no held-out problems to evaluate on; warn if some of them are trained on."""
    try:
        holdout = problems_of(task, "holdout", config.evaluation.problems or config.task.holdout_problems)
    except ValueError as error:
        raise ConfigError(
            f"{error}; to train without held-out problems, set evaluation.ends=0 and evaluation.every=0"
        ) from error
    trained_by_id = {problem.id: problem for problem in trained}
    pairs = [
        (data_digest(problem), data_digest(trained_by_id[problem.id]))
        for problem in holdout
        if problem.id in trained_by_id
    ]
    overlap = sum(digest is not None and digest == other for digest, other in pairs)
    if overlap:
        warnings.warn(
            f"{overlap} of the {len(holdout)} held-out problems of task {task.name!r} are also trained on, so scores "
            "will be too high; use other problems for the split 'holdout'",
            stacklevel=2,
        )


def check_one_gpu(args: Any) -> None:
    """Raise if one process has several GPUs: transformers would use `DataParallel`, which TRL does not support."""
    if args.n_gpu < 2:
        return
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    raise ConfigError(
        f"{args.n_gpu} GPUs are visible, but a process trains on one; choose it with CUDA_VISIBLE_DEVICES={first}\n"
        f"to use all of them, add --launch FILE with num_processes: {args.n_gpu} (docs/scale.md)"
    )


def accumulation_steps(rows: int, micro_batch: int, key: str) -> int:
    """Return the micro-batches per process in an optimizer step on ``rows`` rows; raise if they don't divide evenly."""
    number = processes.count()
    if rows % (micro_batch * number) == 0:
        return rows // (micro_batch * number)
    share = rows // number
    good = f"use {math.gcd(micro_batch, share)}" if rows % number == 0 else f"use as many processes as divide {rows}"
    raise ConfigError(f"{key} is {micro_batch}, and {number} processes share {rows} rows a step; {good}")


def quiet(trainer: Any) -> None:
    """Remove the callbacks that print every log line, which the run folder and the progress bar replace."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def warn_of_lost_steps(config: Config, trainer: Any) -> None:
    """Warn if the optimizer updates bfloat16 weights without a float32 copy; DeepSpeed keeps such a copy."""
    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    if trainer.is_deepspeed_enabled or not any(parameter.dtype == torch.bfloat16 for parameter in trained):
        return
    warnings.warn(
        f"model.dtype is {config.model.dtype}, which trains bfloat16 weights without a float32 copy: a step of less "
        "than about 1/256 of a weight is rounded away, and at a small learning rate most steps are; use bfloat16 "
        "(mixed precision), or a LoRA adapter, which is float32",
        UserWarning,
        stacklevel=4,
    )


@contextmanager
def disabled_progress() -> Iterator[None]:
    """Disable the progress bars and logs of other libraries; Explorl shows its own progress."""
    already_disabled = datasets.are_progress_bars_disabled()
    verbosity = transformers_logging.get_verbosity()
    trl_level = logging.getLogger("trl").level
    datasets.disable_progress_bars()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    try:
        yield
    finally:
        if not already_disabled:
            datasets.enable_progress_bars()
        transformers_logging.set_verbosity(verbosity)
        logging.getLogger("trl").setLevel(trl_level)
