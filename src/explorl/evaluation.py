"""Sample, verify, score: how good a policy is at a task, under a protocol that can be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from explorl.metrics import Interval, Table, bootstrap_mean, pass_at_k
from explorl.models import Policy
from explorl.rollout import Engine, Rollout, SamplingParams, reference
from explorl.store import write_json, write_parquet
from explorl.tasks import Problem, Task, opens_think


@dataclass(frozen=True)
class Protocol:
    """How completions are drawn for an evaluation, and how many."""

    samples: int
    sampling: SamplingParams
    source: str


PROTOCOLS: Mapping[str, Protocol] = {
    "mecklenburg": Protocol(
        5,
        SamplingParams(temperature=0.3, top_p=0.8, top_k=20, repetition_penalty=1.1, max_tokens=1024),
        "Mecklenburg 2025, §4: mean correctness of five samples",
    ),
    "deng": Protocol(
        8,
        SamplingParams(temperature=0.6, top_p=0.95, max_tokens=8192),
        "Deng et al. 2025, §2.4: temperature 0.6, top-p 0.95",
    ),
    "plain": Protocol(
        8, SamplingParams(temperature=1.0, max_tokens=1024), "the policy as it is: temperature 1, nothing cut"
    ),
}


@dataclass(frozen=True)
class Evaluation:
    """Every completion with its verdict, and the scores that follow."""

    task: str
    model: str
    protocol: str
    samples: int
    sampling: SamplingParams
    problem_ids: list[str]
    rows: dict[str, list[Any]]
    """One entry a completion, problem by problem."""

    @property
    def correct(self) -> np.ndarray:
        """problems × samples."""
        return np.asarray(self.rows["correct"], dtype=bool).reshape(len(self.problem_ids), self.samples)

    def per_problem(self, k: int) -> np.ndarray:
        """Unbiased pass@k of each problem."""
        return np.asarray(pass_at_k(self.samples, self.correct.sum(axis=1), k))

    def pass_at(self, k: int) -> Interval:
        """Mean pass@k with a 95 % bootstrap interval over problems."""
        return bootstrap_mean(self.per_problem(k))

    @property
    def ks(self) -> list[int]:
        """1, 2, 4, … up to the number of samples."""
        return sorted({2**i for i in range(self.samples.bit_length()) if 2**i <= self.samples} | {self.samples})

    def summary(self) -> dict[str, Any]:
        """Scores as plain values."""
        return {
            "task": self.task,
            "model": self.model,
            "protocol": self.protocol,
            "problems": len(self.problem_ids),
            "samples": self.samples,
            "sampling": {key: value for key, value in asdict(self.sampling).items() if value not in ((), "", None)},
            "pass_at_k": {str(k): asdict(self.pass_at(k)) for k in self.ks},
            "well_formed": float(np.mean(self.rows["well_formed"])),
            "truncated": float(np.mean([reason == "length" for reason in self.rows["finish_reason"]])),
            "mean_tokens": float(np.mean(self.rows["tokens"])),
            "entropy": self._token_mean("entropy"),
            "branching": self._token_mean("branching"),
        }

    def _token_mean(self, measure: str) -> float | None:
        """Mean over all sampled tokens; None where it was not recorded."""
        values, tokens = self.rows[measure], self.rows["tokens"]
        return None if None in values else float(np.average(values, weights=tokens))

    def table(self) -> Table:
        """pass@k with intervals, and what the completions look like."""
        summary = self.summary()
        rows: list[list[Any]] = [[f"pass@{k}", self.pass_at(k)] for k in self.ks]
        rows += [
            [name.replace("_", " "), summary[name]]
            for name in ("well_formed", "truncated", "mean_tokens", "entropy", "branching")
        ]
        title = (
            f"{self.model} on {self.task}: {len(self.problem_ids)} problems × {self.samples} samples, {self.protocol}"
        )
        return Table(["measure", "value"], rows, title=title)

    def save(self, folder: Path, name: str) -> None:
        """Writes `name`.json (the summary) and `name`.parquet (every completion)."""
        write_parquet(folder / f"{name}.parquet", self.rows)
        write_json(folder / f"{name}.json", self.summary())


def protocol(name: str, **changes: Any) -> Protocol:
    """A protocol by name; `samples` and any sampling parameter may be changed."""
    if name not in PROTOCOLS:
        raise ValueError(f"unknown protocol {name!r}; known are {', '.join(PROTOCOLS)}")
    chosen = PROTOCOLS[name]
    changes = {key: value for key, value in changes.items() if value is not None}
    samples = changes.pop("samples", chosen.samples)
    if samples < 1:
        raise ValueError(f"samples is {samples}; ask for 1 or more")
    return Protocol(samples, replace(chosen.sampling, **changes), chosen.source)


def fitting_template(task: Task, tokenizer: Any, template: str | None = None) -> str | None:
    """The template to ask with: the given one, chat for a model that has a chat template, else the task's default."""
    if template is not None:
        return template
    return "chat" if getattr(tokenizer, "chat_template", None) and "chat" in task.templates else None


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
    engine: Literal["explorl", "generate"] = "explorl",
    on_progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Draws `how.samples` completions of each problem, `batch_size` at a time, and verifies them.

    `engine="generate"` samples by `model.generate`, the reference; it records neither entropy nor branching factor.
    """
    if not problems:
        raise ValueError(f"there are no problems to evaluate {policy.name} on; ask task {task.name} for 1 or more")
    prompts = [task.prompt(problem, template) for problem in problems]
    context = getattr(policy.model.config, "max_position_embeddings", None)
    params = replace(how.sampling, seed=seed)
    if context is not None:
        longest = max(len(reference.prompt_token_ids(policy.tokenizer, prompt)) for prompt in prompts)
        if longest >= context:
            raise ValueError(f"a prompt of {longest} tokens does not fit into the context of {policy.name}: {context}")
        params = replace(params, max_tokens=min(int(np.max(params.max_tokens)), context - longest))
    completions: Sequence[Rollout | reference.Completion]
    if engine == "explorl":
        tick = None if on_progress is None else lambda _: on_progress(1)
        sampler = Engine(policy.model, policy.tokenizer, batch_size=batch_size)
        completions = sampler.generate(prompts, how.samples, params, on_finish=tick).check()
    else:
        completions = reference.generate(
            policy.model,
            policy.tokenizer,
            prompts,
            how.samples,
            params,
            batch_size=batch_size or 64,
            on_batch=on_progress,
        )
    rows: dict[str, list[Any]] = {
        key: []
        for key in (
            "problem", "sample", "prompt", "completion", "tokens", "finish_reason",
            "correct", "well_formed", "answer", "error", "entropy", "branching",
        )
    }  # fmt: skip
    for completion in completions:
        problem, prompt = problems[completion.prompt_index], prompts[completion.prompt_index]
        verdict = task.verify(completion.text, problem, opened=opens_think(prompt))
        values = (
            problem.id, completion.sample_index, prompt if isinstance(prompt, str) else prompt[-1]["content"],
            completion.text, len(completion.token_ids), completion.finish_reason,
            verdict.correct, verdict.well_formed, verdict.answer, verdict.error,
            _mean(completion, "entropy"), _mean(completion, "branching"),
        )  # fmt: skip
        for key, value in zip(rows, values, strict=True):
            rows[key].append(value)
    return Evaluation(task.name, policy.name, name, how.samples, how.sampling, [p.id for p in problems], rows)


def _mean(completion: Rollout | reference.Completion, measure: str) -> float | None:
    values = getattr(completion, measure, None)
    return None if values is None or len(values) == 0 else float(values.float().mean())
