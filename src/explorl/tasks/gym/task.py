"""Data sets of reasoning-gym, verified by their own scorers: ``gym:<name>``.

    correctness = the scorer's value for the last <answer>…</answer>, from 0 to 1
    format      = 1 if the completion is exactly <think>…</think><answer>…</answer>

Stojanovski et al. 2025, "Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from explorl.core.plugins import unknown
from explorl.core.text import clean
from explorl.tasks.answer_span import is_well_formed, last_answer, read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict
from explorl.tasks.gym.guard import MAX_LENGTH
from explorl.tasks.gym.probe import find_weakness
from explorl.tasks.gym.score import Scorer, shared_scorer
from explorl.tasks.gym.worker import create_dataset, encode_metadata, factory, part_specs

PREFIX = "gym:"
MAX_SIZE = 1 << 20
"""Maximum number of problems in a split."""
INSTRUCTION = (
    "Show your work in <think> </think> tags, and end with the final answer alone in <answer> </answer> tags, for "
    "example <answer> 42 </answer>."
)


@dataclass(frozen=True)
class Gym(Task):
    """One data set of reasoning-gym, with its options (``config``).

    Each split is drawn with a different seed; a question that is in several splits is removed from the larger ones.
    """

    name: str
    """``gym:`` and the name of a data set of reasoning-gym, like ``gym:leg_counting``."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of problems to draw for each split; see ``default_sizes``. Splits are smaller if questions repeat."""
    seed: int = 0
    threshold: float = 1.0
    """Minimum score of a correct answer."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set, like ``{"max_animals": 3}``."""
    allow_exploitable: bool = False
    """Accept a data set although an answer that solves nothing wins on most of its problems (docs/gym.md)."""

    reads_files: ClassVar[bool] = False
    templates: ClassVar[tuple[str, ...]] = ("chat", "plain")
    default_sizes: ClassVar[Mapping[str, int]] = {"sft": 1_000, "train": 2_000, "holdout": 500}

    def __post_init__(self) -> None:
        names = factory().DATASETS
        name = self.name.removeprefix(PREFIX)
        if name not in names or not self.name.startswith(PREFIX):
            raise unknown("task", self.name, (PREFIX + name for name in names))
        if names[name][0].__module__ == "__main__":
            raise ValueError(f"{self.name} is registered in the main program; register it in a module instead")
        for split in self.sizes:
            if split not in self.splits:
                raise unknown("split", split, self.splits)
            if not 0 <= self.sizes[split] <= MAX_SIZE:
                raise ValueError(f"sizes: {split} is {self.sizes[split]}; give a count up to {MAX_SIZE}, like 500")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold}: give a score above 0 and at most 1, like 1.0")
        if not self.allow_exploitable:
            self._reject_exploitable()

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        used: set[str] = set()
        for other in ("holdout", "train", "sft"):  # the holdout first, so that it stays complete
            problems = {key: problem for key, problem in self._draw(other).items() if key not in used}
            if other == split:
                return list(problems.values())[:limit]
            used |= problems.keys()
        raise AssertionError(split)

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the prompt as messages (``chat``) or as text (``plain``)."""
        template = template or self.templates[0]
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        text = f"{problem.data['question'].rstrip()}\n\n{INSTRUCTION}"
        return [{"role": "user", "content": text}] if template == "chat" else f"{text}\n"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return self._verify_and_score([completion], [problem], [opened])[0][0]

    def verify_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool] | None = None
    ) -> list[Verdict]:
        return [verdict for verdict, _ in self._verify_and_score(completions, problems, opened)]

    def rewards(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> dict[str, float]:
        return self.rewards_many([completion], [problem], opened=[opened])[0]

    def rewards_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool]
    ) -> list[dict[str, float]]:
        results = self._verify_and_score(completions, problems, opened)
        return [{"correctness": score, "format": float(verdict.well_formed)} for verdict, score in results]

    def score(self, answer: str, problem: Problem) -> tuple[float, str | None]:
        """Return the scorer's value for an answer, from 0 to 1, and an error or None."""
        return self._scorer.score([(answer, problem.data)])[0]

    def _verify_and_score(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], opened: Sequence[bool] | None
    ) -> list[tuple[Verdict, float]]:
        flags = [False] * len(completions) if opened is None else opened
        texts = [read_completion(completion) for completion in completions]
        forms = [whole and is_well_formed(text, opened=flag) for (text, whole), flag in zip(texts, flags, strict=True)]
        answers = [_answer(text) for text, _ in texts]
        pairs = [
            (answer, problem.data) for answer, problem in zip(answers, problems, strict=True) if answer is not None
        ]
        scores = iter(self._scorer.score(pairs) if pairs else ())
        results = []
        for well_formed, answer in zip(forms, answers, strict=True):
            if answer is None:
                results.append((Verdict(False, well_formed, error="no <answer>…</answer>"), 0.0))
                continue
            score, error = next(scores)
            correct = score >= self.threshold
            normal = " ".join(answer[:MAX_LENGTH].split()) or None
            reason = None if correct else error or f"it scores {score:g}"
            results.append((Verdict(correct, well_formed, normal, reason), score))
        return results

    @cached_property
    def _scorer(self) -> Scorer:
        return shared_scorer(self._dataset_name, self.config)

    @property
    def _dataset_name(self) -> str:
        return self.name.removeprefix(PREFIX)

    def _reject_exploitable(self) -> None:
        """Raise ValueError if a canned answer wins on most problems of the data set or of a part of it."""
        parts = [(self._dataset_name, self.config)]
        if self._dataset_name == "composite":
            create_dataset("composite", self.config, seed=0, size=1)
            parts = [(part["name"], part["config"]) for part in part_specs(self.config)]
        for name, config in parts:
            finding = find_weakness(name, config, self.threshold)
            if finding is not None:
                raise ValueError(
                    f"{PREFIX}{name} can be won without solving anything: {finding}; use another data set, or accept "
                    "what a model will learn from this one with allow_exploitable=True"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the options without cached values: another process cannot use the scorer's processes."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    @cached_property
    def _cache(self) -> dict[str, dict[str, Problem]]:
        return {}

    def _draw(self, split: str) -> dict[str, Problem]:
        """Return the problems of the split's seed by id, without repetitions."""
        if split not in self._cache:
            size = {**self.default_sizes, **self.sizes}[split]
            problems: dict[str, Problem] = {}
            # Entry i of a data set is drawn with its seed + i, so close seeds would give the same entries.
            seed = (len(self.splits) * self.seed + self.splits.index(split)) * MAX_SIZE % (1 << 32)
            data = create_dataset(self._dataset_name, self.config, seed=seed, size=size) if size else ()
            for index in range(size):
                problem = self.problem(data[index])
                problems.setdefault(problem.id, problem)
            self._cache[split] = problems
        return self._cache[split]

    def problem(self, entry: Mapping[str, Any]) -> Problem:
        """Return an entry of the data set as a problem; its id depends only on its question."""
        question = str(entry["question"])
        digest = hashlib.sha256(question.encode(errors="replace")).hexdigest()
        # As text, because the type of the metadata differs between rows, which a table does not support.
        metadata = encode_metadata(self._dataset_name, entry["metadata"])
        return Problem(
            f"{self.name}:{digest[:16]}", {"question": question, "answer": entry["answer"], "metadata": metadata}
        )


def _answer(text: str) -> str | None:
    """Return the answer in a completion with every character printable, or None."""
    answer = last_answer(text)
    return None if answer is None else clean(answer.replace("\r\n", "\n").strip())
