"""Sample and verify the completions of one model on one task, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from explorl.evaluation.completions import (
    TOOL_COLUMNS,
    answer_text,
    mean_of,
    measured_text,
    records_of,
    sampled_tokens,
    tool_columns,
)
from explorl.evaluation.evaluation import data_digest
from explorl.evaluation.protocols import Protocol
from explorl.evaluation.results_folder import DIGEST, Columns
from explorl.evaluation.seeds import WIDTH, block_seed, seed_at
from explorl.metrics import format_violations, language_mixing, trigram_redundancy
from explorl.models import Policy
from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams
from explorl.rollout.backends.vllm import VllmEngine
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.tasks import Problem, Prompt, Task, Verdict, opens_think
from explorl.tasks.answer_span import requested_mark
from explorl.tasks.base import verdicts_of


@dataclass(frozen=True)
class Chunk:
    """A range of problems × a range of samples of one block."""

    problems: slice
    samples: slice


class Job:
    """The evaluation of one model on one task, with or without a tool."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine | VllmEngine,
        task: Task,
        problems: Sequence[Problem],
        protocol: Protocol,
        template: str | None,
        seed: int,
        tools: ToolUse | None = None,
        pool: InterpreterPool | None = None,
    ) -> None:
        self.policy, self.engine, self.task, self.problems = policy, engine, task, problems
        self.tools, self.pool = tools, pool
        self.sampling, self.seed, self.samples = protocol.sampling, seed, protocol.samples_for(task)
        self.prompts = [task.prompt(problem, template) for problem in problems]
        self.rendered = [render_prompt(policy.tokenizer, prompt) for prompt in self.prompts]
        self.digests = [data_digest(problem) for problem in problems]
        self.limits = [self._limit(prompt) for prompt in self.prompts]
        self.answer_mark = _answer_mark(task, self.rendered[0])
        self.opened = [opens_think(text + self.sampling.prefix) for text in self.rendered]

    def chunks(self, problems: int) -> list[Chunk]:
        """Return all chunks, the first samples of all problems first."""
        return [
            Chunk(slice(i, min(i + problems, len(self.problems))), slice(j, min(j + WIDTH, self.samples)))
            for j in range(0, self.samples, WIDTH)
            for i in range(0, len(self.problems), problems)
        ]

    def draw(self, chunk: Chunk, wanted: np.ndarray, records: bool, tick: Callable[[int], None]) -> Columns:
        """Sample and verify the wanted completions of a chunk.

        The others get one token, which keeps the numbering and costs next to nothing.
        """
        problems = np.flatnonzero(wanted.any(axis=1))
        first, last = chunk.problems.start + int(problems[0]), chunk.problems.start + int(problems[-1]) + 1
        live = np.zeros((last - first, WIDTH), dtype=bool)
        live[:, : wanted.shape[1]] = wanted[problems[0] : problems[-1] + 1]
        limits = np.where(live, np.asarray(self.limits[first:last])[:, None], 1)
        base = chunk.samples.start
        params = replace(
            self.sampling,
            max_tokens=limits.ravel().tolist(),
            seed=seed_at(block_seed(self.seed, base // WIDTH), first * WIDTH),
        )

        def finish(rollout: Rollout) -> None:
            if live[rollout.prompt_index, rollout.sample_index]:
                tick(1)

        finished = self._sample(self.prompts[first:last], params, live, finish).check()
        rollouts = [rollout for rollout in finished if live[rollout.prompt_index, rollout.sample_index]]
        indices = [first + rollout.prompt_index for rollout in rollouts]
        numbers = [base + rollout.sample_index for rollout in rollouts]
        return self._columns(rollouts, indices, numbers, records)

    def _sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, live: np.ndarray, finish: Callable[[Rollout], None]
    ) -> Rollouts:
        if self.tools is None:
            return self.engine.generate(prompts, WIDTH, params, on_finish=finish)
        assert isinstance(self.engine, Engine)
        uses = (live.ravel() * self.tools.tool.max_calls).tolist()
        return generate_with_tools(
            self.engine, prompts, WIDTH, params, self.tools, uses=uses, pool=self.pool, on_finish=finish
        )

    def _columns(self, rollouts: Sequence[Rollout], indices: list[int], numbers: list[int], records: bool) -> Columns:
        """Return the columns of rollouts of these problems and samples, with token statistics if ``records``."""
        measured = [measured_text(rollout) for rollout in rollouts]
        verdicts = self._verify([answer_text(rollout) for rollout in rollouts], indices)
        columns: Columns = {
            "problem_index": indices,
            "problem": [self.problems[index].id for index in indices],
            "sample": numbers,
            "prompt": [self.rendered[index] for index in indices],
            "completion": [rollout.text for rollout in rollouts],
            "tokens": [sampled_tokens(rollout) for rollout in rollouts],
            "finish_reason": [rollout.finish_reason for rollout in rollouts],
            "correct": [verdict.correct for verdict in verdicts],
            "well_formed": [verdict.well_formed for verdict in verdicts],
            "answer": [verdict.answer for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            "entropy": [mean_of(rollout, "entropy") for rollout in rollouts],
            "branching": [mean_of(rollout, "branching") for rollout in rollouts],
            "format_violations": [
                _violations(text, self.answer_mark, verdict) for text, verdict in zip(measured, verdicts, strict=True)
            ],
            "redundancy": [trigram_redundancy(text) for text in measured],
            "cjk": [language_mixing(text) for text in measured],
            DIGEST: [self.digests[index] for index in indices],
        }
        if self.tools is not None:
            calls = [tool_columns(rollout) for rollout in rollouts]
            columns |= {name: [each[name] for each in calls] for name in TOOL_COLUMNS}
        if records:
            columns["token_ids"] = [rollout.token_ids for rollout in rollouts]
            for name in ("entropy", "branching", "logps"):
                columns[f"token_{name}"] = [records_of(rollout, name) for rollout in rollouts]
        return columns

    def _verify(self, texts: list[str], indices: list[int]) -> list[Verdict]:
        problems = [self.problems[index] for index in indices]
        opened = [self.opened[index] for index in indices]
        if hasattr(self.task, "verify_many"):
            return verdicts_of(self.task, texts, problems, opened)
        triples = zip(texts, problems, opened, strict=True)
        return [self.task.verify(text, problem, opened=is_open) for text, problem, is_open in triples]

    def _limit(self, prompt: Prompt) -> int:
        """Return the maximum length of a completion: the protocol's, or what the model's context leaves."""
        limit = int(np.max(self.sampling.max_tokens))
        context = getattr(self.policy.model.config, "max_position_embeddings", None)
        if context is None:
            return limit
        prefix = self.policy.tokenizer(self.sampling.prefix, add_special_tokens=False)["input_ids"]
        length = len(prompt_token_ids(self.policy.tokenizer, prompt)) + len(prefix)
        if length >= context:
            raise ValueError(
                f"a prompt of {length} tokens does not fit into the context of {self.policy.name}: {context}"
            )
        return min(limit, context - length)


def _answer_mark(task: Task, prompt: str) -> str | None:
    """Return the text that an answer begins with, from the task or its prompt; None if answers have no mark."""
    if hasattr(task, "answer_mark"):
        return task.answer_mark or None
    return requested_mark(prompt)


def _violations(text: str, mark: str | None, verdict: Verdict) -> int:
    """Return the number of missing or surplus marks; without a mark, 1 if the verdict is not well formed."""
    return format_violations(text, mark) if mark else int(not verdict.well_formed)
