"""Any data set of reasoning-gym, scored by its own scorer: ``gym:<name>``.

    correctness = the scorer's value for the last <answer>…</answer>, from 0 to 1
    format      = 1 if the completion is exactly <think>…</think><answer>…</answer>

Stojanovski et al. 2025, "Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

from explorl.tasks.base import Problem, Prompt, Task, Verdict, unknown
from explorl.tasks.gym_guard import MAX_LENGTH, guard, is_formula, uses_sympy
from explorl.tasks.plain import decode, encode
from explorl.tasks.tags import is_well_formed, last_answer, read

PREFIX = "gym:"
MAX_SIZE = 1 << 20
"""Most problems of a split."""
INSTRUCTION = (
    "Show your work in <think> </think> tags, and end with the final answer alone in <answer> </answer> tags, for "
    "example <answer> 42 </answer>."
)


@dataclass(frozen=True)
class Gym(Task):
    """One data set of reasoning-gym, with its own options (``config``).

    The splits are drawn with seeds of their own; a question of one that stands in another, too, is left out of the
    larger one.
    """

    name: str
    """``gym:`` and a name of reasoning-gym, like ``gym:leg_counting``."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How many problems to draw; see ``default_sizes``. A split may be smaller where questions repeat."""
    seed: int = 0
    threshold: float = 1.0
    """Least score of a correct answer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set, like ``{"max_animals": 3}``."""

    reads_files: ClassVar[bool] = False
    templates: ClassVar[tuple[str, ...]] = ("chat", "plain")
    default_sizes: ClassVar[Mapping[str, int]] = {"sft": 1_000, "train": 2_000, "holdout": 500}

    def __post_init__(self) -> None:
        names = _reasoning_gym().factory.DATASETS
        if self.name.removeprefix(PREFIX) not in names or not self.name.startswith(PREFIX):
            raise unknown("task", self.name, (PREFIX + name for name in names))
        for split in self.sizes:
            if split not in self.splits:
                raise unknown("split", split, self.splits)
            if not 0 <= self.sizes[split] <= MAX_SIZE:
                raise ValueError(f"sizes: {split} is {self.sizes[split]}; give a count up to {MAX_SIZE}, like 500")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}: give a score above 0 and at most 1, like 1.0")

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        taken: set[str] = set()
        for other in ("holdout", "train", "sft"):  # what is held out stays whole
            problems = {key: problem for key, problem in self._drawn(other).items() if key not in taken}
            if other == split:
                return list(problems.values())[:limit]
            taken |= problems.keys()
        raise AssertionError(split)

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """``chat`` asks in messages, ``plain`` in text."""
        template = template or self.templates[0]
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        text = f"{problem.data['question'].rstrip()}\n\n{INSTRUCTION}"
        return [{"role": "user", "content": text}] if template == "chat" else f"{text}\n"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return self._judge(completion, problem, opened)[0]

    def rewards(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> dict[str, float]:
        verdict, score = self._judge(completion, problem, opened)
        return {"correctness": score, "format": float(verdict.well_formed)}

    def score(self, answer: str, problem: Problem) -> tuple[float, str | None]:
        """The scorer's value for an answer, from 0 to 1, and what went wrong with it."""
        if len(answer) > MAX_LENGTH:
            return 0.0, f"an answer of over {MAX_LENGTH} characters"
        if self._parses and not is_formula(answer):
            return 0.0, f"not a formula: {answer[:60]!r}"
        entry = {**problem.data, "metadata": decode(json.loads(problem.data["metadata"]))}
        try:
            value = float(self._dataset.score_answer(answer, entry))
        except Exception as error:  # scorers are many, and answers are anything
            return 0.0, f"the scorer raised {type(error).__name__}: {str(error)[:200]}"
        return (0.0, "the scorer gave no number") if math.isnan(value) else (min(max(value, 0.0), 1.0), None)

    def _judge(self, completion: str | bytes, problem: Problem, opened: bool) -> tuple[Verdict, float]:
        text, whole = read(completion)
        well_formed = whole and is_well_formed(text, opened=opened)
        answer = last_answer(text)
        if answer is None:
            return Verdict(False, well_formed, error="no <answer>…</answer>"), 0.0
        answer = answer.strip()
        score, error = self.score(answer, problem)
        correct = score >= self.threshold
        said = " ".join(answer[:MAX_LENGTH].split()).encode(errors="replace").decode() or None
        return Verdict(correct, well_formed, said, None if correct else error or f"it scores {score:g}"), score

    @cached_property
    def _dataset(self) -> Any:
        """The data set as a scorer; its seed and size do not matter."""
        return self._create(seed=0, size=1)

    @cached_property
    def _parses(self) -> bool:
        return uses_sympy(self._dataset)

    @cached_property
    def _cache(self) -> dict[str, dict[str, Problem]]:
        return {}

    def _drawn(self, split: str) -> dict[str, Problem]:
        """What the split's own seed gives, by id, without repetitions."""
        if split not in self._cache:
            size = {**self.default_sizes, **self.sizes}[split]
            problems: dict[str, Problem] = {}
            # Entry i of a data set is drawn with its seed + i: seeds that are close would give the same entries.
            seed = (len(self.splits) * self.seed + self.splits.index(split)) * MAX_SIZE % (1 << 32)
            data = self._create(seed=seed, size=size) if size else ()
            for index in range(size):
                problem = self.problem(data[index])
                problems.setdefault(problem.id, problem)
            self._cache[split] = problems
        return self._cache[split]

    def problem(self, entry: Mapping[str, Any]) -> Problem:
        """An entry of the data set as a problem; its id is that of its question."""
        question = str(entry["question"])
        digest = hashlib.sha256(question.encode(errors="replace")).hexdigest()
        # As text, because a table cannot hold what differs in kind from row to row.
        metadata = json.dumps(encode(entry["metadata"]))
        return Problem(
            f"{self.name}:{digest[:16]}", {"question": question, "answer": entry["answer"], "metadata": metadata}
        )

    def _create(self, *, seed: int, size: int) -> Any:
        name = self.name.removeprefix(PREFIX)
        try:
            dataset = _reasoning_gym().create_dataset(name, **{**self.config, "seed": seed, "size": size})
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"{self.name} does not take config={dict(self.config)!r}: {error}") from error
        guard(dataset)
        return dataset


def _reasoning_gym() -> ModuleType:
    try:
        import reasoning_gym  # here, because it is optional and takes seconds
        import reasoning_gym.factory
    except ImportError as error:
        raise ImportError("tasks 'gym:…' need reasoning-gym: pip install explorl[gym]") from error
    return reasoning_gym
