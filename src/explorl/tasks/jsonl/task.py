"""A task made of your own rows, without code: prompts and answers in JSONL files, and a verifier by name.

correctness = 1 if the verifier accepts the answer that the completion states
format      = 1 if the completion states exactly one answer

    task: {name: jsonl, data_dir: words, verifier: number, style: tags}

A folder has ``train.jsonl`` and ``test.jsonl`` (or ``holdout.jsonl``), and optionally ``sft.jsonl``. Of a single file,
the column ``split`` gives each row's split; without it, a tenth is held out. The module `rows` describes a row,
`verifiers` how an answer is judged, and `styles` where a completion states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from explorl.core.plugins import unknown
from explorl.tasks.base import Message, Problem, Prompt, Task, Verdict
from explorl.tasks.choice.letters import LETTERS
from explorl.tasks.choice.task import verify as verify_choice
from explorl.tasks.code.extract import defines
from explorl.tasks.code.task import Code
from explorl.tasks.jsonl.files import find_files, read_splits
from explorl.tasks.jsonl.rows import as_messages
from explorl.tasks.jsonl.styles import STYLES, extract_answer
from explorl.tasks.jsonl.verifiers import (
    VERIFIERS,
    CheckedAnswer,
    check_exact,
    check_math,
    check_number,
    check_patterns,
)
from explorl.tasks.stable_random import shuffled

_CHOICE_REQUEST = 'Please reason step by step, and end with "Answer: X", where X is the letter of the right option.'
_CODE_REQUEST = "Answer with the complete function {name}, with the imports it needs, in one ```python block."
_CHECKED_EXAMPLES = 32


@dataclass(frozen=True)
class Jsonl(Task):
    """Problems from JSONL files."""

    name: str = "jsonl"
    data_dir: str | Path | None = None
    """A folder with the files, or a file."""
    path: str | Path | None = None
    """One file; relative to ``data_dir`` if both are given."""
    verifier: Literal["auto", "exact", "number", "math", "choice", "code", "regex"] = "auto"
    """How to judge the answers of rows that name no verifier. "auto" decides row by row: ``code`` with a column
    ``test``, ``choice`` with ``choices``, ``number`` if the answer is one, else ``exact``."""
    style: Literal["boxed", "tags", "hash", "last_line", "last_number", "whole"] | None = None
    """Where a completion states its answer; None: boxed, and whole for ``regex``. Letters and programs are found
    anywhere."""
    instruction: str | None = None
    """Text after the prompt; None: the sentence that asks for the style. Empty: nothing."""
    holdout: float = 0.1
    """How much of a single file to hold out: a share below 1, or a number of rows."""
    tolerance: float = 0.0
    """The largest allowed distance of a number from the right one."""
    ignore_case: bool = True
    """True if ``exact`` accepts "paris" for "Paris"."""
    seed: int = 0
    """Seed that selects the rows to hold out of a single file."""
    seconds: float = 5.0
    """Time limit for judging one completion by ``math``, ``regex`` or ``code``; beyond it, the completion is wrong."""
    workers: int | None = None
    """Number of judging processes; None: one per core."""

    templates: ClassVar[tuple[str, ...]] = ("instructed", "plain", "chat", "text")
    answer_mark: ClassVar[None] = None
    """Each row has its own style, with a mark or without; the verdict says whether a completion follows it."""

    def __post_init__(self) -> None:
        if self.verifier not in ("auto", *VERIFIERS):
            raise unknown("verifier", self.verifier, ("auto", *VERIFIERS))
        if self.style is not None and self.style not in STYLES:
            raise unknown("style", self.style, STYLES)
        is_count = isinstance(self.holdout, int)
        if not _is_number(self.holdout) or not (self.holdout >= 0 if is_count else 0 <= self.holdout < 1):
            raise ValueError(f"holdout={self.holdout!r}: give a share below 1, like 0.1, or a number of rows, like 100")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance={self.tolerance!r}: give a number like 0.01, or 0")
        if not _is_number(self.seconds) or not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds!r}: give a positive number, like 5.0")
        if self.instruction is not None and not isinstance(self.instruction, str):
            raise ValueError(f"instruction={self.instruction!r}: give text, or null for that of the style")
        self._code()
        find_files(self.data_dir, self.path)

    @property
    def dataset(self) -> str:
        """The name of the file or folder, for tables and result folders."""
        source = Path(str(self.path if self.path is not None else self.data_dir)).absolute()
        return source.stem if source.is_file() or self.path is not None else source.name

    # ------------------------------------------------------------------ problems
    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        splits = read_splits(find_files(self.data_dir, self.path), self.verifier, self.holdout, self.seed)
        if not splits.get(split):
            reason = {
                "train": "all are held out",
                "holdout": "none is held out",
                "sft": "none has a completion; add a column 'completion' with the text that a model should write",
            }
            raise ValueError(f"the rows of {self.dataset!r} have no {split!r} split: {reason[split]}")
        return splits[split][:limit]

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield at most ``count`` of the rows that have a completion, shuffled by seed."""
        problems = [problem for problem in self.problems("sft") if "completion" in problem.data]
        first = [problem for problem in problems if problem.data.get("answer") != []][:_CHECKED_EXAMPLES]
        verdicts = self.verify_many([str(problem.data["completion"]) for problem in first], first)
        if verdicts and not any(verdict.correct for verdict in verdicts):
            raise ValueError(
                f"no completion of {self.dataset!r} is correct by its row's answer ({verdicts[0].error}); set "
                f"task.style to where they state it: {', '.join(STYLES)}"
            )
        for chosen in islice(shuffled(Random(seed), problems), count):
            yield {"prompt": self.prompt(chosen, template), "completion": chosen.data["completion"]}

    # ------------------------------------------------------------------ prompts
    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the prompt in a template: ``plain`` is the row's prompt; the others add how to state the answer.

        ``instructed`` keeps the form of the row's prompt, text or messages; ``chat`` gives messages, ``text`` text.
        """
        template = template or self.templates[0]
        if template not in self.templates:
            raise unknown("template", template, self.templates)
        prompt = problem.data["prompt"]
        if template == "plain":
            return prompt
        request = self._request(problem)
        if isinstance(prompt, str) and template != "chat":
            return f"{prompt}\n{request}\n" if request else prompt
        *before, last = as_messages(prompt)
        turns = [*before, {**last, "content": f"{last['content']}\n{request}" if request else last["content"]}]
        return turns if template != "text" else _as_text(turns)

    def _request(self, problem: Problem) -> str:
        """Return the text after the question: its options, and how to state the answer."""
        data = problem.data
        options = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, data.get("choices") or (), strict=False)]
        sentence = self.instruction
        if sentence is None and data["verifier"] == "choice":
            sentence = _CHOICE_REQUEST
        elif sentence is None and data["verifier"] == "code":
            sentence = _CODE_REQUEST.format(name=data["entry_point"])
        elif sentence is None:
            sentence = STYLES[self._style(data["verifier"])].request
        return "\n".join([*options, *([""] if options and sentence else []), *([sentence] if sentence else [])])

    def _style(self, verifier: str) -> str:
        return self.style or ("whole" if verifier == "regex" else "boxed")

    # ------------------------------------------------------------------ verdicts
    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return self.verify_many([completion], [problem], opened=[opened])[0]

    def verify_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool] | None = None
    ) -> list[Verdict]:
        """Return the verdicts on completions; those with the same verifier are judged together."""
        flags = [False] * len(completions) if opened is None else opened
        verdicts: dict[int, Verdict] = {}
        cases = list(zip(completions, problems, flags, strict=True))
        for verifier in dict.fromkeys(problem.data["verifier"] for problem in problems):
            indices = [index for index, (_, problem, _) in enumerate(cases) if problem.data["verifier"] == verifier]
            verdicts |= zip(indices, self._verify_with(verifier, [cases[index] for index in indices]), strict=True)
        return [verdicts[index] for index in range(len(cases))]

    def _verify_with(self, verifier: str, cases: list[tuple[str | bytes, Problem, bool]]) -> list[Verdict]:
        if verifier == "choice":
            return [
                verify_choice(completion, problem.data.get("choices") or list(LETTERS), problem.data["answer"])
                for completion, problem, _ in cases
            ]
        if verifier == "code":
            completions, problems, flags = zip(*cases, strict=True)
            code_problems = [_code_problem(problem) for problem in problems]
            return self._code().verify_many(completions, code_problems, opened=flags)
        style = self._style(verifier)
        stated = [extract_answer(completion, style, opened=flag) for completion, _, flag in cases]
        answers = [
            (extracted.answer, problem)
            for extracted, (_, problem, _) in zip(stated, cases, strict=True)
            if extracted.answer is not None
        ]
        checked_answers = iter(self._check_answers(verifier, answers))
        verdicts = []
        for extracted in stated:
            if extracted.answer is None:
                verdicts.append(Verdict(False, False, error=STYLES[style].missing))
            else:
                checked = next(checked_answers)
                verdicts.append(Verdict(checked.correct, extracted.well_formed, checked.answer, checked.error))
        return verdicts

    def _check_answers(self, verifier: str, answers: Sequence[tuple[str, Problem]]) -> list[CheckedAnswer]:
        if not answers:
            return []
        texts, right = [text for text, _ in answers], [problem.data["answer"] for _, problem in answers]
        if verifier == "math":
            prompts = ["\n".join(turn["content"] for turn in as_messages(p.data["prompt"])) for _, p in answers]
            return check_math(texts, right, prompts, workers=self.workers, seconds=self.seconds)
        if verifier == "regex":
            return check_patterns(texts, right, workers=self.workers, seconds=self.seconds)
        if verifier == "number":
            return [
                check_number(
                    text,
                    problem.data["answer"],
                    tolerance=self.tolerance,
                    question=as_messages(problem.data["prompt"])[-1]["content"],
                )
                for text, problem in answers
            ]
        return [
            check_exact(text, golds, ignore_case=self.ignore_case) for text, golds in zip(texts, right, strict=True)
        ]

    def _code(self) -> Code:
        return Code(seconds=self.seconds, workers=self.workers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_text(turns: Sequence[Message]) -> str:
    """Return messages as text, for a model without a chat template."""
    if all(turn["role"] != "assistant" for turn in turns):
        return "\n\n".join(turn["content"] for turn in turns) + "\n"
    return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns) + "\n\nAssistant:"


def _code_problem(problem: Problem) -> Problem:
    """Return the problem as `Code` expects it: the prompt is the function's head, or empty if it is not one."""
    prompt = problem.data["prompt"]
    name = problem.data["entry_point"]
    head = prompt if isinstance(prompt, str) and defines(prompt, name) else ""
    return Problem(problem.id, {"prompt": head, "entry_point": name, "test": problem.data["test"]})
