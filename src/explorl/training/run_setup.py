"""Helpers for setting up training runs."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from explorl.core import processes
from explorl.core.config import Config, ConfigError
from explorl.evaluation import Evaluation, evaluate, protocol
from explorl.evaluation.sample import data_digest
from explorl.models import Policy, load_policy
from explorl.tasks import Problem, Task, get_task
from explorl.tasks.base import problems_of


def task_options(config: Config) -> dict[str, Any]:
    """Return the configured options of `get_task`."""
    return config.task.options


def configured_policy(config: Config, name: str | None = None, *, to_train: bool = False) -> Policy:
    """Load a policy, by default the configured one, in the configured type for evaluation or training."""
    model = config.model
    dtype = model.training_dtype if to_train else model.evaluation_dtype
    return load_policy(name or model.name, dtype=dtype, trust_remote_code=model.trust_remote_code)


def evaluate_holdout(config: Config, policy: Policy, *, problems: int | None = None) -> Evaluation:
    """Evaluate a policy on the task's held-out problems as configured, on at most ``problems`` of them."""
    settings = config.evaluation
    task = get_task(config.task.name, **task_options(config))
    evaluation_protocol = protocol(settings.protocol, samples=settings.samples, **config.rollout.limits())
    limit = settings.problems or config.task.holdout_problems
    import torch

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


def schedule_type(name: str) -> str:
    """Return transformers' name of a learning-rate schedule; all of them support warm-up."""
    return "constant_with_warmup" if name == "constant" else name


def quiet(trainer: Any) -> None:
    """Remove the callbacks that print every log line, which the run folder and the progress bar replace."""
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)


def warn_of_lost_steps(config: Config, trainer: Any) -> None:
    """Warn if the optimizer updates bfloat16 weights without a float32 copy; DeepSpeed keeps such a copy."""
    import torch

    trained = (parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
    if trainer.is_deepspeed_enabled or not any(parameter.dtype == torch.bfloat16 for parameter in trained):
        return
    warnings.warn(
        f"model.dtype is {config.model.dtype}, which trains bfloat16 weights without a float32 copy: a step of less "
        "than about 1/256 of a weight is rounded away, and at a small learning rate most steps are; use bfloat16 "
        "(mixed precision), or a LoRA adapter, which is float32",
        UserWarning,
        stacklevel=3,
    )


@contextmanager
def disabled_progress() -> Iterator[None]:
    """Disable the progress bars and logs of other libraries; Explorl shows its own progress."""
    import datasets
    from transformers.utils import logging as transformers_logging

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
