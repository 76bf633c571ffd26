"""Draws and verifies the completions of one model on one task, a chunk at a time."""

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
from explorl.tasks.base import verdicts_of
from explorl.tasks.marks import asked_mark


@dataclass(frozen=True)
class Chunk:
    """Some problems × some samples of one block."""

    problems: slice
    samples: slice


class Job:
    """One model on one task, with a tool that it may call or without."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine | VllmEngine,
        task: Task,
        problems: Sequence[Problem],
        how: Protocol,
        template: str | None,
        seed: int,
        tools: ToolUse | None = None,
        pool: InterpreterPool | None = None,
    ) -> None:
        self.policy, self.engine, self.task, self.problems = policy, engine, task, problems
        self.tools, self.pool = tools, pool
        self.sampling, self.seed, self.samples = how.sampling, seed, how.samples_for(task)
        self.prompts = [task.prompt(problem, template) for problem in problems]
        self.seen = [render_prompt(policy.tokenizer, prompt) for prompt in self.prompts]
        self.digests = [data_digest(problem) for problem in problems]
        self.limits = [self._limit(prompt) for prompt in self.prompts]
        self.answer_mark = _answer_mark(task, self.seen[0])
        prefix = self.sampling.prefix
        if not isinstance(prefix, str):
            raise ValueError(f"prefix is {prefix!r}; an evaluation has one text for all prompts, such as '<think>'")
        self.opened = [opens_think(text + prefix) for text in self.seen]

    def chunks(self, problems: int) -> list[Chunk]:
        """All chunks, the first samples of all problems first."""
        return [
            Chunk(slice(i, min(i + problems, len(self.problems))), slice(j, min(j + WIDTH, self.samples)))
            for j in range(0, self.samples, WIDTH)
            for i in range(0, len(self.problems), problems)
        ]

    def draw(self, chunk: Chunk, wanted: np.ndarray, records: bool, tick: Callable[[int], None]) -> Columns:
        """Samples and verifies the wanted completions of a chunk.

        The others get one token, which keeps the numbering and costs next to nothing.
        """
        asked = np.flatnonzero(wanted.any(axis=1))
        first, last = chunk.problems.start + int(asked[0]), chunk.problems.start + int(asked[-1]) + 1
        live = np.zeros((last - first, WIDTH), dtype=bool)
        live[:, : wanted.shape[1]] = wanted[asked[0] : asked[-1] + 1]
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

        finished = self._sampled(self.prompts[first:last], params, live, finish).check()
        kept = [rollout for rollout in finished if live[rollout.prompt_index, rollout.sample_index]]
        places = [first + rollout.prompt_index for rollout in kept]
        numbers = [base + rollout.sample_index for rollout in kept]
        return self._rows(kept, places, numbers, records)

    def _sampled(
        self, prompts: Sequence[Prompt], params: SamplingParams, live: np.ndarray, finish: Callable[[Rollout], None]
    ) -> Rollouts:
        if self.tools is None:
            return self.engine.generate(prompts, WIDTH, params, on_finish=finish)
        assert isinstance(self.engine, Engine)
        uses = (live.ravel() * self.tools.tool.max_calls).tolist()
        return generate_with_tools(
            self.engine, prompts, WIDTH, params, self.tools, uses=uses, pool=self.pool, on_finish=finish
        )

    def _rows(self, kept: Sequence[Rollout], places: list[int], numbers: list[int], records: bool) -> Columns:
        answers, measured = [answer_text(rollout) for rollout in kept], [measured_text(rollout) for rollout in kept]
        verdicts = self._verify(answers, places)
        rows: Columns = {
            "problem_index": places,
            "problem": [self.problems[place].id for place in places],
            "sample": numbers,
            "prompt": [self.seen[place] for place in places],
            "completion": [rollout.text for rollout in kept],
            "tokens": [sampled_tokens(rollout) for rollout in kept],
            "finish_reason": [rollout.finish_reason for rollout in kept],
            "correct": [verdict.correct for verdict in verdicts],
            "well_formed": [verdict.well_formed for verdict in verdicts],
            "answer": [verdict.answer for verdict in verdicts],
            "error": [verdict.error for verdict in verdicts],
            "entropy": [mean_of(rollout, "entropy") for rollout in kept],
            "branching": [mean_of(rollout, "branching") for rollout in kept],
            "format_violations": [
                _violations(text, self.answer_mark, verdict) for text, verdict in zip(measured, verdicts, strict=True)
            ],
            "redundancy": [trigram_redundancy(text) for text in measured],
            "cjk": [language_mixing(text) for text in measured],
            DIGEST: [self.digests[place] for place in places],
        }
        if self.tools is not None:
            called = [tool_columns(rollout) for rollout in kept]
            rows |= {name: [each[name] for each in called] for name in TOOL_COLUMNS}
        if records:
            rows["token_ids"] = [rollout.token_ids for rollout in kept]
            for name in ("entropy", "branching", "logps"):
                rows[f"token_{name}"] = [records_of(rollout, name) for rollout in kept]
        return rows

    def _verify(self, texts: list[str], places: list[int]) -> list[Verdict]:
        problems = [self.problems[place] for place in places]
        opened = [self.opened[place] for place in places]
        if hasattr(self.task, "verify_many"):
            return verdicts_of(self.task, texts, problems, opened)
        judged = zip(texts, problems, opened, strict=True)
        return [self.task.verify(text, problem, opened=is_open) for text, problem, is_open in judged]

    def _limit(self, prompt: Prompt) -> int:
        """Most tokens of a completion: the protocol's, or what the model's context leaves."""
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
    """What an answer begins with: as the task says, or as its prompt asks for it; None where answers have no mark."""
    if hasattr(task, "answer_mark"):
        return task.answer_mark or None
    return asked_mark(prompt)


def _violations(text: str, mark: str | None, verdict: Verdict) -> int:
    """Marks that are missing or too many; without a mark, 1 where the task says that an answer is not well formed."""
    return format_violations(text, mark) if mark else int(not verdict.well_formed)
