"""Sample and verify the completions of one model on one task, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from explorl.evaluation.completions import Columns, answer_mark_of, completion_columns
from explorl.evaluation.prompts import room
from explorl.evaluation.protocols import Protocol
from explorl.evaluation.sample import AnyEngine, prompted_problems, sample_and_verify
from explorl.evaluation.seeds import WIDTH, block_seed, seed_at
from explorl.models import Policy
from explorl.rollout.requests import prompt_token_ids
from explorl.rollout.tool_use import ToolUse
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.tasks import Problem, Prompt, Task


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
        engine: AnyEngine,
        task: Task,
        problems: Sequence[Problem],
        prompts: Sequence[Prompt],
        protocol: Protocol,
        seed: int,
        tools: ToolUse | None = None,
        pool: InterpreterPool | None = None,
    ) -> None:
        self.engine, self.task, self.seed, self.tools, self.pool = engine, task, seed, tools, pool
        self.sampling, self.samples = protocol.sampling, protocol.samples_for(task)
        prefix, tokenizer = self.sampling.prefix, policy.tokenizer
        if not isinstance(prefix, str):
            raise ValueError(f"prefix is {prefix!r}; use one text for all prompts, such as '<think>'")
        self.problems = prompted_problems(tokenizer, problems, prompts, prefix)
        self.answer_mark = answer_mark_of(task, self.problems[0].rendered)
        begun = len(tokenizer(prefix, add_special_tokens=False)["input_ids"])
        limit = int(np.max(self.sampling.max_tokens))
        self.limits = [
            int(min(limit, room(policy, len(prompt_token_ids(tokenizer, prompt)) + begun))) for prompt in prompts
        ]
        """The most tokens of a completion of each problem."""

    def chunks(self, problems: int) -> list[Chunk]:
        """Return all chunks, the first samples of all problems first."""
        return [
            Chunk(slice(i, min(i + problems, len(self.problems))), slice(j, min(j + WIDTH, self.samples)))
            for j in range(0, self.samples, WIDTH)
            for i in range(0, len(self.problems), problems)
        ]

    def draw(self, chunk: Chunk, wanted: np.ndarray, with_tokens: bool, on_finish: Callable[[int], None]) -> Columns:
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
        verified = sample_and_verify(
            self.engine, self.task, self.problems[first:last], WIDTH, params,
            wanted=live, tools=self.tools, pool=self.pool, on_finish=on_finish,
        )  # fmt: skip
        samples = [replace(s, problem_index=first + s.problem_index, sample=base + s.sample) for s in verified]
        return completion_columns(samples, self.answer_mark, with_tool=self.tools is not None, with_tokens=with_tokens)
