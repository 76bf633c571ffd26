r"""Mathematics: a question with one right answer, which the completion states in its last ``\boxed{…}``.

    correctness = 1 if the stated answer has the form and value of the right one and does not repeat the question
    format      = 1 if the completion has exactly one \boxed

The benchmarks are for evaluation: MATH-500, AIME 2024 and 2025, AMC 2023 and Minerva have a holdout only, unless a
folder's files have more. GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al. 2021) have problems for training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import last_boxed, last_boxes, last_hash, read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict
from explorl.tasks.math.answer_text import MAX_LENGTH, normalize
from explorl.tasks.math.benchmark_files import SOURCES, BenchmarkProblem, read_folder, read_hub
from explorl.tasks.math.form import count_elements
from explorl.tasks.math.judge import shared_judge

STYLES: Mapping[str, str] = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "hash": 'Please reason step by step, and give your final answer in a last line of its own, like "#### 42".',
}
"""Maps styles, which say how completions state their answers, to the sentences that ask for them."""


def read_answer(completion: str | bytes, style: str = "boxed", gold: str = "") -> tuple[str | None, bool]:
    """Return the answer that a completion states, and whether the completion is well-formed: states exactly one.

    If the right answer (``gold``) is a list, its elements may be in boxes of their own, side by side.
    Only the end of a completion beyond a million characters is read, and it is not well-formed.
    """
    text, is_whole = read_completion(completion)
    answer, count = last_boxed(text) if style == "boxed" else last_hash(text)
    if not answer:
        return None, False
    if style == "boxed" and count > 1 and gold:
        boxes = last_boxes(text)
        is_list = 1 < len(boxes) == count_elements(gold) and all(count_elements(box) == 1 for box in boxes)
        answer = ", ".join(boxes) if is_list else answer
    # A lone surrogate can neither be sent to a worker nor written to a table.
    return answer.encode(errors="replace").decode(), is_whole and count == 1


@dataclass(frozen=True)
class Math(Task):
    """A mathematics benchmark, from the hub or from a folder with a file like ``math500.jsonl`` (``data_dir``)."""

    name: str = "math"
    dataset: Literal["math500", "aime24", "aime25", "amc23", "minerva", "gsm8k", "hendrycks"] = "math500"
    data_dir: str | Path | None = None
    seed: int = 0
    """Seed that selects the problems to hold out if one file has them all."""
    style: Literal["boxed", "hash"] = "boxed"
    r"""How completions state their answer: ``\boxed{42}``, or ``#### 42`` as in GSM8K's solutions."""
    limit: float = 5.0
    """Seconds that comparing two answers may take; beyond that, the answer is wrong."""
    workers: int | None = None
    """Number of comparing processes; None: one per core, at most 8."""

    splits: ClassVar[tuple[str, ...]] = ("train", "holdout")
    templates: ClassVar[tuple[str, ...]] = ("boxed", "chat", "hash")

    def __post_init__(self) -> None:
        if self.dataset not in SOURCES:
            raise unknown("dataset", self.dataset, SOURCES)
        if self.style not in STYLES:
            raise unknown("style", self.style, STYLES)
        shared_judge(self.workers, self.limit)  # raises for a bad number now, but starts no worker yet

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        in_files = self.data_dir is not None and bool(self._problems_by_split[split])
        if split not in SOURCES[self.dataset].splits and not in_files:
            raise ValueError(
                f"{self.dataset!r} is for evaluation and has no {split!r} split; ask for 'holdout', or use 'gsm8k'"
            )
        return self._problems_by_split[split][:limit]

    def problem(self, question: str, answer: str) -> Problem:
        """Return the problem with this question; its id does not depend on the answer or on white space."""
        digest = hashlib.sha256(" ".join(question.split()).encode()).hexdigest()
        return Problem(f"{self.dataset}:{digest[:16]}", {"question": question, "answer": answer})

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the prompt: ``chat`` gives messages; ``boxed`` and ``hash`` give text that asks for this style."""
        template = template or self.style
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        if template not in ("chat", self.style):
            raise ValueError(f"template {template!r} needs style={template!r}, not style={self.style!r}; give both")
        text = f"{problem.data['question']}\n{STYLES[self.style]}"
        return [{"role": "user", "content": text}] if template == "chat" else f"{text}\n"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return self.verify_many([completion], [problem])[0]

    def verify_many(
        self,
        completions: Sequence[str | bytes],
        problems: Sequence[Problem],
        *,
        opened: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """Return the verdicts on completions, judged by all workers in parallel. An open ``<think>`` has no effect."""
        golds = [str(problem.data["answer"]) for problem in problems]
        answers = [
            read_answer(completion, self.style, gold) for completion, gold in zip(completions, golds, strict=True)
        ]
        cases = [
            ((gold, answer), str(problem.data["question"]))
            for (answer, _), gold, problem in zip(answers, golds, problems, strict=True)
            if answer is not None
        ]
        pairs, prompts = [pair for pair, _ in cases], [prompt for _, prompt in cases]
        judgements = iter(shared_judge(self.workers, self.limit).judge_many(pairs, prompts))
        verdicts = []
        for answer, well_formed in answers:
            if answer is None:
                mark = "\\boxed{…} with an answer in it" if self.style == "boxed" else "answer after ####"
                verdicts.append(Verdict(False, well_formed, error=f"no {mark}"))
                continue
            judgement = next(judgements)
            normal_form = normalize(answer) if len(answer) <= MAX_LENGTH else ""
            error = None if judgement.same else judgement.error or "another answer than the right one"
            verdicts.append(Verdict(judgement.same, well_formed, normal_form or None, error))
        return verdicts

    @cached_property
    def _problems_by_split(self) -> dict[str, list[Problem]]:
        """Each split without duplicates, and train without held-out problems."""
        splits = (
            read_hub(self.dataset)
            if self.data_dir is None
            else read_folder(self.data_dir, self.dataset, seed=self.seed)
        )
        holdout = self._unique(splits["holdout"])
        train = self._unique(splits.get("train", []))
        return {
            "holdout": list(holdout.values()),
            "train": [problem for key, problem in train.items() if key not in holdout],
        }

    def _unique(self, questions: Sequence[BenchmarkProblem]) -> dict[str, Problem]:
        problems: dict[str, Problem] = {}
        for question in questions:
            problem = self.problem(*question)
            problems.setdefault(problem.id, problem)
        return problems
