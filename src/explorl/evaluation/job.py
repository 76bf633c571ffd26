"""Sample and verify the completions of one model on one task, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from explorl.evaluation.completions import Columns, answer_mark_of, completion_columns
from explorl.evaluation.sample import AnyEngine, PromptedProblem, sample_and_verify
from explorl.evaluation.seeds import WIDTH, block_seed, seed_at
from explorl.rollout import SamplingParams
from explorl.rollout.tool_use import ToolUse
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.tasks import Task

Chunk = tuple[slice, slice]
"""A range of problems, and a range of samples of one block."""


@dataclass(frozen=True)
class Job:
    """The evaluation of one model on one task, with or without a tool."""

    engine: AnyEngine
    task: Task
    problems: Sequence[PromptedProblem]
    samples: int
    """Number of completions of each problem."""
    sampling: SamplingParams
    limits: np.ndarray
    """The most tokens of a completion of each problem."""
    seed: int
    tools: ToolUse | None = None
    pool: InterpreterPool | None = None

    @property
    def answer_mark(self) -> str | None:
        """The text that answers begin with."""
        return answer_mark_of(self.task, self.problems[0].rendered)

    def chunks(self, size: int) -> list[Chunk]:
        """Return all chunks of ``size`` problems, the first samples of all problems first."""
        return [
            (slice(i, min(i + size, len(self.problems))), slice(j, min(j + WIDTH, self.samples)))
            for j in range(0, self.samples, WIDTH)
            for i in range(0, len(self.problems), size)
        ]

    def draw(self, chunk: Chunk, wanted: np.ndarray, with_tokens: bool, on_finish: Callable[[int], None]) -> Columns:
        """Sample and verify the wanted completions of a chunk.

        The others get one token, which keeps the numbering and costs next to nothing.
        """
        rows, base = np.flatnonzero(wanted.any(axis=1)), chunk[1].start
        first, last = chunk[0].start + int(rows[0]), chunk[0].start + int(rows[-1]) + 1
        live = np.zeros((last - first, WIDTH), dtype=bool)
        live[:, : wanted.shape[1]] = wanted[rows[0] : rows[-1] + 1]
        limits = np.where(live, self.limits[first:last, None], 1)
        seed = seed_at(block_seed(self.seed, base // WIDTH), first * WIDTH)
        params = replace(self.sampling, max_tokens=limits.ravel().tolist(), seed=seed)
        verified = sample_and_verify(
            self.engine, self.task, self.problems[first:last], WIDTH, params,
            wanted=live, tools=self.tools, pool=self.pool, on_finish=on_finish,
        )  # fmt: skip
        samples = [replace(s, problem_index=first + s.problem_index, sample=base + s.sample) for s in verified]
        return completion_columns(samples, self.answer_mark, with_tool=self.tools is not None, with_tokens=with_tokens)
