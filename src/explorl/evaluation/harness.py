"""Evaluate many models on many tasks: resumable, in several processes, with hundreds of samples per problem.

Samples are stored: a call for more samples or problems draws only the missing ones, which are those that a single call
for all of them would have drawn (see `seeds`). Statistics of their tokens may differ in the last bits, since sums
depend on the batch size.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from explorl.core.errors import ConfigError
from explorl.core.store import file_name, write_json
from explorl.core.text import clean
from explorl.evaluation.completions import TOKEN_COLUMNS
from explorl.evaluation.evaluation import Evaluation
from explorl.evaluation.job import Chunk, Job
from explorl.evaluation.prompts import check_prompts, fitting_template, token_limits
from explorl.evaluation.protocols import Protocol, task_label
from explorl.evaluation.results_folder import EvaluationFolder, evaluation_of
from explorl.evaluation.sample import AnyEngine, open_engine, prompted_problems
from explorl.evaluation.scores import as_json, scores, table, unsolved
from explorl.models import ModelError, Policy, load_policy, resolve_model
from explorl.rollout import UnsupportedModel
from explorl.rollout.backends.vllm import need_vllm
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import ToolSpec
from explorl.stats import Interval
from explorl.tasks import Task, get_task, takes_option, task_type
from explorl.tasks.base import problems_of

RECORD_BYTES = 2 << 30
"""Token records are stored by default if they take no more bytes than this before compression."""


@dataclass(frozen=True)
class EvaluationProgress:
    """The progress of one evaluation, in completions of this process's share."""

    model: str
    task: str
    done: int
    total: int


@dataclass(frozen=True)
class Evaluated:
    """The result of one model on one task."""

    folder: Path
    drawn: int
    """Number of completions that this call drew; the others were stored already."""
    missing: int
    """Number of completions that other processes have yet to draw."""
    evaluation: Evaluation | None
    """The evaluation; None if completions are missing."""
    scores: Mapping[str, Interval | None]


@dataclass(frozen=True)
class FailedEvaluation:
    """A model and a task that could not be evaluated, and why."""

    model: str
    task: str
    error: str


def run_evaluation(
    models: Sequence[str | Policy] | Mapping[str, str | Policy],
    tasks: Sequence[str | Task],
    how: Protocol,
    out: str | Path,
    *,
    name: str = "custom",
    split: str = "holdout",
    limit: int | None = None,
    template: str | None = None,
    seed: int = 0,
    shard: tuple[int, int] | None = None,
    chunk: int = 32,
    token_records: bool | None = None,
    batch_size: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    task_options: Mapping[str, Any] | None = None,
    tools: ToolUse | ToolSpec | str | None = None,
    engine: Literal["explorl", "vllm"] = "explorl",
    trust_remote_code: bool = False,
    on_progress: Callable[[EvaluationProgress], None] | None = None,
    on_failure: Callable[[FailedEvaluation], None] | None = None,
) -> list[Evaluated]:
    """Evaluate every model on every task, each in ``out/<model>-<task>-<name>``, and resume interrupted evaluations.

    Args:
        models: Policies, or names for `load_policy`; a mapping sets their labels.
        tasks: Tasks, or names for `get_task`, with ``task_options``.
        how: The protocol; ``name`` is its name.
        shard: (index, count): draw only this process's chunks. None is torchrun's RANK and WORLD_SIZE, or all.
        chunk: Number of problems that are sampled and stored at a time, with up to 16 samples each.
        on_failure: Called if a model cannot be evaluated on a task, before continuing with the others; if None, the
            error is raised.
        token_records: Store id, entropy, branching factor and log-probability of every token; None does so up to 2 GiB.
        tools: A tool, such as "python": every model is evaluated without it and with it, text and code side by side
            (Deng et al. 2025, Figure 2). With it, a model is labelled ``<model>+<tool>``.
        engine: "vllm" starts vLLM for each model; the samples differ, the protocol is the same.
        trust_remote_code: Run Python code that comes with a model.

    With several processes, the last one to finish scores them all; the others report what is still missing.
    """
    index, count = _shard(shard)
    if chunk < 1:
        raise ConfigError(key="chunk", value=chunk, hint="sample 1 problem or more at a time, such as 32")
    task_list = _tasks(tasks, task_options or {})
    labelled = _labelled(models)
    for model in labelled.values():  # fail before hours are spent on the first one
        if isinstance(model, str):
            resolve_model(model)
    tool_use = None if tools is None else ToolUse.of(tools)
    if engine not in ("explorl", "vllm"):
        raise ConfigError(key="engine", value=engine, hint="use 'explorl' or 'vllm'")
    if engine == "vllm":
        need_vllm()
        if tool_use is not None:
            raise ValueError(f"engine is 'vllm', which cannot call tool {tool_use.tool.name!r}; use 'explorl'")
    pairs = list(itertools.product(task_list, [None] if tool_use is None else [None, tool_use]))
    results = []

    def report_failure(label: str, task: Task, error: Exception) -> None:
        if on_failure is None:
            raise error
        text = clean(" ".join(str(error).split()) or type(error).__name__)
        on_failure(FailedEvaluation(label, task_label(task), text))

    with nullcontext() if tool_use is None else tool_use.pool() as pool:
        for label, model in labelled.items():
            policy = sampler = None
            try:
                policy, sampler = _open(label, model, how, batch_size, dtype, engine, trust_remote_code)
                if tool_use is not None:
                    tool_use.check(policy.tokenizer, label)
            except Exception as error:
                for (task, _), tool in pairs:
                    report_failure(_tool_label(label, tool), task, error)
                continue
            weights = fingerprint(policy)
            for (task, options), tool in pairs:
                try:
                    problems = problems_of(task, split, limit)
                    fitting = fitting_template(task, policy.tokenizer, template)
                    prompts = [task.prompt(problem, fitting) for problem in problems]
                    check_prompts(prompts, policy, task, fitting, "--template")
                    limits = token_limits(policy, prompts, how.sampling)
                    asked = prompted_problems(policy.tokenizer, problems, prompts, how.sampling.prefix)
                    samples = how.samples_for(task)
                    job = Job(sampler, task, asked, samples, how.sampling, limits, seed, tool, pool)
                    # keep the colon of names like gym:chain_sum
                    task_name = ":".join(map(file_name, task_label(task).split(":")))
                    folder = f"{file_name(_tool_label(label, tool))}-{task_name}-{file_name(name)}"
                    store = EvaluationFolder(Path(out) / folder)
                    identity: dict[str, Any] = {
                        "model": _tool_label(label, tool),
                        "fingerprint": weights,
                        "task": task_label(task),
                        "split": split,
                        "template": fitting,
                        "protocol": name,
                        "sampling": {key: value for key, value in asdict(how.sampling).items() if key != "seed"},
                        "seed": seed,
                        "answer_mark": job.answer_mark,
                        "token_records": _stores_records(store, job, token_records),
                    }
                    if verifying := {key: value for key, value in options.items() if key not in ("data_dir", "path")}:
                        identity["task_options"] = verifying
                    if engine == "vllm":
                        identity["engine"] = engine
                    if tool is not None:
                        identity["tool"] = {**vars(tool.tool), "fence": repr(tool.tool.fence)}
                    store.claim(identity)
                    results.append(_fill(store, job, job.chunks(chunk)[index::count], how, on_progress))
                except Exception as error:
                    report_failure(_tool_label(label, tool), task, error)
            sampler.release()
            del policy, sampler  # the next model needs the memory
    return results


def _tool_label(label: str, tool: ToolUse | None) -> str:
    """Return a model's label, with the tool that it may call."""
    return label if tool is None else f"{label}+{tool.tool.name}"


def _open(
    label: str,
    model: str | Policy,
    how: Protocol,
    batch_size: int | None,
    dtype: Literal["float32", "bfloat16", "float16"],
    kind: Literal["explorl", "vllm"],
    trust_remote_code: bool,
) -> tuple[Policy, AnyEngine]:
    """Return the policy, and an engine that can sample it."""
    if isinstance(model, str):
        policy = load_policy(model, dtype=dtype, device=_device(), trust_remote_code=trust_remote_code)
    else:
        policy = model
    if kind == "vllm":
        source = _source(model)
        return policy, open_engine(
            policy, kind, batch_size=batch_size, source=source, trust_remote_code=trust_remote_code
        )
    try:
        longest = int(np.max(how.sampling.max_tokens))
        return policy, open_engine(policy, kind, longest=longest, batch_size=batch_size)
    except UnsupportedModel as error:
        raise ModelError(
            f"{label} cannot be sampled by Explorl's engine ({error.reason}); in Python, "
            "explorl.evaluation.evaluate(..., engine='generate') samples it with model.generate"
        ) from error


def _source(model: str | Policy) -> str | None:
    """Return where vLLM can read a model's weights; None if they must be written to files for it."""
    if not isinstance(model, str):
        return None
    path = resolve_model(model)
    return path if not Path(path).is_dir() or any(Path(path).glob("model*.safetensors")) else None


def _tasks(tasks: Sequence[str | Task], options: Mapping[str, Any]) -> list[tuple[Task, dict[str, Any]]]:
    """Return the tasks, each with the options that it accepts; an option that no task accepts is an error."""
    names = [task for task in tasks if isinstance(task, str)]
    unknown = {key for key in options if not any(takes_option(name, key) for name in names)}
    result: list[tuple[Task, dict[str, Any]]] = []
    for task in tasks:
        if not isinstance(task, str):
            result.append((task, {}))
            continue
        accepted = {key: value for key, value in options.items() if key in unknown or takes_option(task, key)}
        if any(map(_reads_files, names)) and not _reads_files(task):  # the folder is for the other tasks
            accepted.pop("data_dir", None)
        result.append((get_task(task, **accepted), accepted))  # an unknown option is an error of get_task
    return result


def _reads_files(name: str) -> bool:
    return bool(getattr(task_type(name), "reads_files", True))


def _fill(
    store: EvaluationFolder,
    job: Job,
    chunks: Sequence[Chunk],
    how: Protocol,
    on_progress: Callable[[EvaluationProgress], None] | None,
) -> Evaluated:
    """Sample what is missing of these chunks, and score the evaluation once nothing is missing."""
    identity = store.identity()
    ids = [each.problem.id for each in job.problems]
    stored = store.have(ids, job.samples, [each.digest for each in job.problems])
    share = np.zeros_like(stored)
    for chunk in chunks:
        share[chunk] = True
    done, total, drawn = int((stored & share).sum()), int(share.sum()), 0

    def tick(advance: int) -> None:
        nonlocal done
        done += advance
        if on_progress is not None:
            on_progress(EvaluationProgress(identity["model"], identity["task"], done, total))

    tick(0)
    for chunk in chunks:
        wanted = ~stored[chunk]
        if wanted.any():
            rows = job.draw(chunk, wanted, identity["token_records"], tick)
            store.write(rows)
            drawn += len(rows["sample"])
    missing = int((~store.have(ids, job.samples)).sum())
    if missing:
        return Evaluated(store.folder, drawn, missing, None, {})
    evaluation = evaluation_of(identity, store.read(len(ids), job.samples), job.samples, how.measures)
    return Evaluated(store.folder, drawn, 0, evaluation, _summarize(store, evaluation, how.source))


def _summarize(store: EvaluationFolder, evaluation: Evaluation, source: str) -> dict[str, Interval | None]:
    """Write the summary and tables of a complete evaluation, and return its scores."""
    intervals = scores(evaluation)
    write_json(
        store.summary_path,
        {
            **store.identity(),
            "source": source,
            "measures": list(evaluation.measures),
            "problems": len(evaluation.problem_ids),
            "samples": evaluation.samples,
            "scores": as_json(intervals),
            "unsolvable": unsolved(evaluation),
        },
    )
    for ending in ("json", "csv", "tex"):
        table(evaluation, intervals).write(store.folder / f"table.{ending}")
    return intervals


def _stores_records(store: EvaluationFolder, job: Job, choice: bool | None) -> bool:
    """Return whether token records are stored: as chosen, as in the folder, or if they are small."""
    if choice is not None:
        return choice
    if store.identity_path.exists():
        return bool(store.identity()["token_records"])
    return int(job.limits.sum()) * job.samples * 4 * len(TOKEN_COLUMNS) <= RECORD_BYTES


def fingerprint(policy: Policy) -> str:
    """Return a hash of the weights, their names and dtypes, and of the vocabulary's size and the chat template."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{len(policy.tokenizer)} {getattr(policy.tokenizer, 'chat_template', None)}".encode())
    for name, tensor in sorted(policy.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def parse_shard(text: str) -> tuple[int, int]:
    """Return "0/4" as (0, 4)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None:
        raise ConfigError(key="shard", value=text, hint="use index/count, such as 0/4 for the first of four")
    return _shard((int(match[1]), int(match[2])))


def _labelled(models: Sequence[str | Policy] | Mapping[str, str | Policy]) -> Mapping[str, str | Policy]:
    if isinstance(models, Mapping):
        return models
    labelled: dict[str, str | Policy] = {}
    for model in models:
        label = model_label(model if isinstance(model, str) else model.name)
        if label in labelled:
            raise ValueError(f"two models are called {label!r}; give a mapping of label to model")
        labelled[label] = model
    return labelled


def model_label(name: str) -> str:
    """Return a model's label in tables: a hub id without its owner; the run's name for its model or checkpoint."""
    parts = Path(name).parts
    if len(parts) > 1 and (parts[-1] == "model" or parts[-1].startswith("checkpoint-")):
        run = parts[-3] if len(parts) > 2 and parts[-2] == "checkpoints" else parts[-2]
        return run if parts[-1] == "model" else f"{run}-{parts[-1]}"
    return parts[-1]


def _shard(shard: tuple[int, int] | None) -> tuple[int, int]:
    if shard is None:
        shard = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(f"shard is {index}/{count}; the first of {max(count, 1)} is 0/{max(count, 1)}")
    return index, count


def _device() -> str | None:
    """Return the device of torchrun's LOCAL_RANK, or None without it."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
