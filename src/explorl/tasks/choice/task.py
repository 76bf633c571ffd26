r"""Multiple choice: a question with lettered options, of which completions choose one, as in GPQA (Rein et al. 2023).

correctness = 1 if the last statement of a choice, like "Answer: C", names the right option
format      = 1 if there is exactly one such statement, and it names an existing option
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import ClassVar

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict
from explorl.tasks.choice.letters import LETTERS, chosen_option
from explorl.tasks.choice.question_files import read_file, read_hub
from explorl.tasks.stable_random import shuffled


def verify(completion: str | bytes, choices: Sequence[str], answer: int) -> Verdict:
    """Verify a completion. The answer of the verdict is the text of the option, not its letter."""
    text, whole = read_completion(completion)
    letter, error, statements = chosen_option(text)
    if letter is None:
        return Verdict(False, False, error=error)
    index = LETTERS.index(letter)
    if index >= len(choices):
        return Verdict(False, False, error=f"it chooses {letter}, but the options end with {LETTERS[len(choices) - 1]}")
    well_formed = whole and statements == 1
    option = " ".join(choices[index].split())
    error = None if index == answer else f"it chooses {letter}, another option"
    return Verdict(index == answer, well_formed, option, error)


@dataclass(frozen=True)
class Choice(Task):
    """Questions of GPQA diamond from the hub, or of a JSONL or CSV file in a folder (``data_dir``).

    The options are shuffled by seed and problem, the same on every machine.
    """

    name: str = "choice"
    data_dir: str | Path | None = None
    file: str = "choice.jsonl"
    """The file in ``data_dir``; see `question_files.read_file` for its format."""
    seed: int = 0

    splits: ClassVar[tuple[str, ...]] = ("holdout",)
    templates: ClassVar[tuple[str, ...]] = ("plain", "chat")

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        return self._problems[:limit]

    def problem(self, question: str, choices: Sequence[str], answer: int) -> Problem:
        """Return the problem with this question and these options, shuffled; its id does not depend on their order."""
        parts = (" ".join(part.split()) for part in (question, *sorted(choices)))
        key = f"choice:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
        # Sorted first, so that the result does not depend on the order in the file.
        order = shuffled(Random(f"options {self.seed} {key}"), sorted(choices))
        data = {"question": question, "choices": order, "answer": order.index(choices[answer])}
        return Problem(key, data)

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        template = template or self.templates[0]
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        options = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, problem.data["choices"], strict=False)]
        text = (
            f"{problem.data['question']}\n\n" + "\n".join(options) + "\n\n"
            'Please reason step by step, and end with "Answer: X", where X is the letter of the right option.'
        )
        return [{"role": "user", "content": text}] if template == "chat" else f"{text}\n"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return verify(completion, problem.data["choices"], problem.data["answer"])

    @cached_property
    def _problems(self) -> list[Problem]:
        questions = read_hub() if self.data_dir is None else read_file(Path(self.data_dir) / self.file)
        problems = (self.problem(*question) for question in questions)
        return list({problem.id: problem for problem in problems}.values())
