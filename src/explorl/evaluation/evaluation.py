"""Sample completions of a policy, verify and score them, under a named protocol."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from explorl.core.store import digest_of, write_json, write_parquet
from explorl.evaluation.completions import TOOL_COLUMNS, answer_text, mean_of, sampled_tokens, tool_columns
from explorl.evaluation.prompts import all_opened
from explorl.evaluation.protocols import PROTOCOLS, Protocol, protocol
from explorl.metrics import avg_at_k, maj_at_k, pass_at_k
from explorl.models import Policy
from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams, UnsupportedModel
from explorl.rollout.backends import generate as reference
from explorl.rollout.backends.vllm import VllmEngine
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import ToolSpec
from explorl.stats import Interval, Table
from explorl.stats.arm_differences import problem_interval
from explorl.tasks import Problem, Task
from explorl.tasks.base import verdicts_of

__all__ = ["PROTOCOLS", "Evaluation", "Protocol", "evaluate", "fitting_template", "protocol"]


SHARES = ("well_formed", "truncated", "format_violations", "redundancy", "repetitive", "language_mixing")
"""Measures in percent, like all with an @."""


def number_format(measure: str, *, difference: bool = False) -> str:
    """Return the format of a measure, or of a difference of two: percent, points, or a plain number."""
    if "@" in measure or measure in SHARES:
        return "+.1p" if difference else ".1%"
    return "+.3f" if difference else ".3f"


@dataclass(frozen=True)
class Evaluation:
    """Every completion with its verdict, and the scores computed from them."""

    task: str
    model: str
    protocol: str
    samples: int
    sampling: SamplingParams
    problem_ids: list[str]
    rows: dict[str, list[Any]]
    """One entry per completion, problem by problem."""
    measures: tuple[str, ...] = ()
    """The measures that the protocol's source reports, such as "maj@k"; k is the number of samples."""
    tool: str = ""
    """The tool that completions could call; empty if none."""
    data: str | None = None
    """A digest of all problems' data, on which the verdicts depend; None if unknown."""

    @property
    def correct(self) -> np.ndarray:
        """Verdicts as an array of problems × samples."""
        return np.asarray(self.rows["correct"], dtype=bool).reshape(len(self.problem_ids), self.samples)

    def per_problem(self, k: int) -> np.ndarray:
        """Return the unbiased pass@k of each problem."""
        return np.asarray(pass_at_k(self.samples, self.correct.sum(axis=1), k))

    def pass_at(self, k: int) -> Interval:
        """Return the mean pass@k with a 95 % interval over problems."""
        return problem_interval(self.per_problem(k), lowest=0.0, highest=1.0)

    @property
    def answers(self) -> list[list[str | None]]:
        """Answers as lists of problems × samples."""
        answers, n = self.rows["answer"], self.samples
        return [answers[start : start + n] for start in range(0, len(answers), n)]

    def measure_per_problem(self, name: str) -> np.ndarray:
        """Return pass@k, avg@k (of the first k samples) or maj@k of each problem; "k" is the number of samples."""
        kind, _, number = name.partition("@")
        if kind not in ("pass", "avg", "maj") or not (number == "k" or number.isdecimal()):
            raise ValueError(f"unknown measure {name!r}; use one like pass@1, avg@8 or maj@k")
        k = self.samples if number == "k" else int(number)
        if kind == "pass":
            return self.per_problem(k)
        return np.asarray(avg_at_k(self.correct, k) if kind == "avg" else maj_at_k(self.answers, self.correct, k))

    def measured(self) -> dict[str, Interval]:
        """Return the measures of the protocol's source, under names such as "maj@8"."""
        return {
            name.replace("@k", f"@{self.samples}"): problem_interval(
                self.measure_per_problem(name), lowest=0.0, highest=1.0
            )
            for name in self.measures
        }

    @property
    def ks(self) -> list[int]:
        """1, 2, 4, … up to the number of samples."""
        return sorted({2**i for i in range(self.samples.bit_length()) if 2**i <= self.samples} | {self.samples})

    def summary(self) -> dict[str, Any]:
        """Return the scores as plain values."""
        return {
            "task": self.task,
            "model": self.model,
            "protocol": self.protocol,
            "problems": len(self.problem_ids),
            "samples": self.samples,
            **({"data": self.data} if self.data else {}),
            "sampling": {key: value for key, value in asdict(self.sampling).items() if value not in ((), "", None)},
            "pass_at_k": {str(k): asdict(self.pass_at(k)) for k in self.ks},
            "measures": {name: asdict(value) for name, value in self.measured().items()},
            "well_formed": float(np.mean(self.rows["well_formed"])),
            "truncated": float(np.mean([reason == "length" for reason in self.rows["finish_reason"]])),
            "mean_tokens": float(np.mean(self.rows["tokens"])),
            **({"tool": self.tool, "calls": float(np.mean(self.rows["calls"]))} if self.tool else {}),
            "entropy": self._token_mean("entropy"),
            "branching": self._token_mean("branching"),
        }

    def _token_mean(self, measure: str) -> float | None:
        """Return the mean over all sampled tokens, or None if it was not recorded."""
        values, tokens = self.rows[measure], self.rows["tokens"]
        return None if None in values else float(np.average(values, weights=tokens))

    def table(self) -> Table:
        """Return a table of pass@k with intervals and of statistics of the completions."""
        summary = self.summary()
        scores = {**self.measured(), **{f"pass@{k}": self.pass_at(k) for k in self.ks}}
        rows: list[list[Any]] = [[name, value] for name, value in scores.items()]
        rows += [
            [name.replace("_", " "), summary[name]]
            for name in ("well_formed", "truncated", "mean_tokens", "calls", "entropy", "branching")
            if name in summary
        ]
        title = (
            f"{self.model} on {self.task}: {len(self.problem_ids)} problems × {self.samples} samples, {self.protocol}"
        )
        numbers = [number_format(row[0].replace(" ", "_")) for row in rows]
        return Table(["measure", "value"], rows, title=title, row_numbers=numbers)

    def save(self, folder: Path, name: str) -> None:
        """Write `name`.json (the summary) and `name`.parquet (every completion)."""
        write_parquet(folder / f"{name}.parquet", self.rows)
        write_json(folder / f"{name}.json", self.summary())


def fitting_template(task: Task, tokenizer: Any, template: str | None = None) -> str | None:
    """Return the given prompt template, else "chat" for a model with a chat template, else None: the task's default."""
    if template is not None:
        return template
    return "chat" if getattr(tokenizer, "chat_template", None) and "chat" in task.templates else None


def data_digest(problem: Problem) -> str | None:
    """Return a digest of what a problem's verdicts depend on, or None if that is not JSON."""
    try:
        return hashlib.blake2b(json.dumps(problem.data, sort_keys=True).encode(), digest_size=8).hexdigest()
    except (TypeError, ValueError):
        return None


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    how: Protocol,
    *,
    name: str = "custom",
    template: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    engine: Literal["explorl", "generate", "vllm"] | None = None,
    dtype: torch.dtype | None = None,
    tools: ToolUse | ToolSpec | str | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample the protocol's number of completions of each problem, `batch_size` at a time, and verify them.

    `engine="generate"` samples by `model.generate`, the reference, which records neither entropy nor branching factor.
    None uses it, with a warning, if Explorl's engine does not support the model. `engine="vllm"` starts a vLLM with the
    policy's weights, and records by a pass of the policy. `dtype` is the engine's; None is that of the weights.

    `tools`: a tool that completions may call, such as "python" or ``python_tool(max_calls=3)``. Answers are then parsed
    from the model's own text, not from a program's output, and only sampled tokens are counted and measured.
    """
    tool_use = None if tools is None else ToolUse.of(tools)
    if tool_use is not None:
        tool_use.check(policy.tokenizer, policy.name)
        if engine in ("generate", "vllm"):
            raise ValueError(
                f"engine is {engine!r}, which cannot call tool {tool_use.tool.name!r}; use 'explorl' or None"
            )
    samples = how.samples_for(task)
    if not problems:
        raise ValueError(f"there are no problems to evaluate {policy.name} on; use 1 or more of task {task.name}")
    prompts = [task.prompt(problem, template) for problem in problems]
    context = getattr(policy.model.config, "max_position_embeddings", None)
    params = replace(how.sampling, seed=seed)
    longest = max(len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in prompts)
    if context is not None:
        if longest >= context:
            raise ValueError(f"a prompt of {longest} tokens does not fit into the context of {policy.name}: {context}")
        params = replace(params, max_tokens=min(int(np.max(params.max_tokens)), context - longest))
    longest += int(np.max(params.max_tokens))
    completions: Sequence[Rollout | reference.Completion]
    sampler = Engine(policy.model, policy.tokenizer, batch_size=batch_size, dtype=dtype)
    if tool_use is not None:
        sampler.check(longest)
        engine = "explorl"
    if engine is None:
        engine = _fitting_engine(sampler, longest)
    tick = None if on_progress is None else lambda _: on_progress(1)
    if tool_use is not None:
        completions = generate_with_tools(sampler, prompts, samples, params, tool_use, on_finish=tick).check()
    elif engine == "vllm":
        completions = _by_vllm(policy, prompts, samples, params, batch_size, tick)
    elif engine == "explorl":
        completions = sampler.generate(prompts, samples, params, on_finish=tick).check()
    else:
        completions = reference.generate(
            policy.model,
            policy.tokenizer,
            prompts,
            samples,
            params,
            batch_size=batch_size or 64,
            on_batch=on_progress,
        )
    rows: dict[str, list[Any]] = {
        key: []
        for key in (
            "problem", "sample", "prompt", "completion", "tokens", "finish_reason",
            "correct", "well_formed", "answer", "error", "entropy", "branching",
            *(TOOL_COLUMNS if tool_use is not None else ()),
        )
    }  # fmt: skip
    indices = [completion.prompt_index for completion in completions]
    rendered = [render_prompt(policy.tokenizer, prompt) for prompt in prompts]
    opened = all_opened(policy.tokenizer, prompts, params.prefix)
    verdicts = iter(
        verdicts_of(
            task,
            [answer_text(completion) for completion in completions],
            [problems[index] for index in indices],
            [opened[index] for index in indices],
        )
    )
    for completion in completions:
        problem = problems[completion.prompt_index]
        verdict = next(verdicts)
        values = (
            problem.id, completion.sample_index, rendered[completion.prompt_index],
            completion.text, sampled_tokens(completion), completion.finish_reason,
            verdict.correct, verdict.well_formed, verdict.answer, verdict.error,
            mean_of(completion, "entropy"), mean_of(completion, "branching"),
            *(tool_columns(completion).values() if tool_use is not None and isinstance(completion, Rollout) else ()),
        )  # fmt: skip
        for key, value in zip(rows, values, strict=True):
            rows[key].append(value)
    ids = [problem.id for problem in problems]
    tool = "" if tool_use is None else tool_use.tool.name
    digests = [data_digest(problem) for problem in problems]
    data = None if None in digests else digest_of(sorted(zip(ids, digests, strict=True)))  # independent of the order
    return Evaluation(task.name, policy.name, name, samples, how.sampling, ids, rows, how.measures, tool, data)


def _by_vllm(
    policy: Policy, prompts: Sequence[Any], n: int, params: SamplingParams, batch_size: int | None, tick: Any
) -> Rollouts:
    options: dict[str, Any] = {} if batch_size is None else {"max_num_seqs": batch_size}
    sampler = VllmEngine.colocated(policy.model, policy.tokenizer, **options)
    try:
        return sampler.generate(prompts, n, params, on_finish=tick)
    finally:
        sampler.release()


def _fitting_engine(sampler: Engine, longest: int) -> Literal["explorl", "generate"]:
    try:
        sampler.check(longest)
    except UnsupportedModel as error:
        warnings.warn(
            f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}", stacklevel=3
        )
        return "generate"
    return "explorl"
