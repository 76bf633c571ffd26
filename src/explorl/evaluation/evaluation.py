"""Sample completions of a policy, verify and score them, under a named protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from explorl.core.store import digest_of, write_json
from explorl.evaluation.completions import answer_mark_of, completion_columns, write_completions
from explorl.evaluation.prompts import fit_into_context, fitting_template
from explorl.evaluation.protocols import PROTOCOLS, Protocol, protocol
from explorl.evaluation.sample import (
    EngineName,
    PromptedProblem,
    open_engine,
    prompted_problems,
    sample_and_verify,
)
from explorl.metrics import avg_at_k, maj_at_k, pass_at_k
from explorl.models import Policy
from explorl.rollout import SamplingParams
from explorl.rollout.tool_use import ToolUse
from explorl.rollout.tools import ToolSpec
from explorl.stats import Interval
from explorl.stats.arm_differences import problem_interval
from explorl.tasks import Problem, Task

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
            "measures": {
                name.replace("@k", f"@{self.samples}"): asdict(
                    problem_interval(self.measure_per_problem(name), lowest=0.0, highest=1.0)
                )
                for name in self.measures
            },
            "well_formed": float(np.mean(self.rows["well_formed"])),
            "truncated": float(np.mean([reason == "length" for reason in self.rows["finish_reason"]])),
            "mean_tokens": float(np.mean(self.rows["tokens"])),
            **({"tool": self.tool, "calls": float(np.mean(self.rows["calls"]))} if self.tool else {}),
            "entropy": token_mean(self.rows["entropy"], self.rows["tokens"]),
            "branching": token_mean(self.rows["branching"], self.rows["tokens"]),
        }

    def save(self, folder: Path, name: str) -> None:
        """Write `name`.json (the summary) and `name`.parquet (every completion)."""
        write_completions(folder / f"{name}.parquet", self.rows)
        write_json(folder / f"{name}.json", self.summary())


def token_mean(means: Sequence[float | None], tokens: Sequence[int]) -> float | None:
    """Return the mean over all sampled tokens of means per completion, or None if one was not recorded."""
    return None if None in means or not sum(tokens) else float(np.average(np.array(means, float), weights=tokens))


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
    engine: EngineName | None = None,
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
        engine = "explorl"
    if not problems:
        raise ValueError(f"there are no problems to evaluate {policy.name} on; use 1 or more of task {task.name}")
    samples = how.samples_for(task)
    prompts = [task.prompt(problem, template) for problem in problems]
    params, longest = fit_into_context(policy, prompts, replace(how.sampling, seed=seed))
    asked = prompted_problems(policy.tokenizer, problems, prompts, params.prefix)
    sampler = open_engine(policy, engine, longest=longest, batch_size=batch_size, dtype=dtype)
    try:
        verified = sample_and_verify(sampler, task, asked, samples, params, tools=tool_use, on_finish=on_progress)
    finally:
        sampler.release()
    mark = answer_mark_of(task, asked[0].rendered)
    return Evaluation(
        task.name,
        policy.name,
        name,
        samples,
        how.sampling,
        [problem.id for problem in problems],
        completion_columns(verified, mark, with_tool=tool_use is not None),
        how.measures,
        "" if tool_use is None else tool_use.tool.name,
        _digest_of_all(asked),
    )


def _digest_of_all(problems: Sequence[PromptedProblem]) -> str | None:
    """Return a digest of all problems' data that is independent of their order, or None if one has none."""
    pairs = [(each.problem.id, each.digest) for each in problems]
    return None if None in dict(pairs).values() else digest_of(sorted(pairs))
