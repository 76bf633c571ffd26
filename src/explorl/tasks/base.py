"""What a task is: problems to ask, prompts to ask them with, a verdict on every completion, and named reward parts.

A task knows nothing of models, tokens or trainers. Its problems are plain JSON values, so that they can be a column of
a dataset, a line of a split file or a cell of a table, and come back as they went in.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from explorl.core.plugins import unknown
from explorl.core.text import clean

Message = dict[str, str]
"""One turn of a conversation: ``{"role": "user", "content": "…"}``."""
Prompt = str | list[Message]
"""Text for a base model, or messages that the model's own chat template turns into text."""
RewardFunction = Callable[..., list[float]]
"""``(prompts, completions, **columns) -> rewards``, as TRL calls it."""
AnswerFunction = Callable[..., list[str | None]]
"""Called in the same way; gives the answer of each completion, None where it has none."""
_LONE = "half of a surrogate pair (U+D800 to U+DFFF)"


@dataclass(frozen=True)
class Problem:
    """One question. ``data`` holds what asks and verifies it, in JSON values only."""

    id: str
    """Stable key: the same problem has the same id in every split, source and run."""
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What a completion is worth."""

    correct: bool
    well_formed: bool = True
    answer: str | None = None
    """The answer in a normal form, equal for answers that say the same (for maj@k and diversity); None: no answer."""
    error: str | None = None
    """Why the completion is not correct."""

    def __post_init__(self) -> None:
        # A policy, a program or a data set wrote these; from here they go to files, figures and terminals.
        for name in ("answer", "error"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{name} of a verdict is {text!r}; give text, like '42', or None")
            if text is not None and not (text.isascii() and text.isprintable()):
                object.__setattr__(self, name, clean(text))
        for name in ("correct", "well_formed"):
            flag = getattr(self, name)
            if isinstance(flag, bool):
                continue
            if isinstance(flag, str) or flag not in (0, 1):
                raise ValueError(f"{name} of a verdict is {flag!r}; give True or False")
            object.__setattr__(self, name, bool(flag))  # 1, or numpy's True


class _ClassName:
    """As a class attribute: the name of the class, in small letters."""

    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__.lower()


class Task(ABC):
    """Base of all tasks. A subclass gives `problems`, `prompt` and `verify`; the rest follows from them."""

    name: str = cast(str, _ClassName())
    """What it is called in tables and folders; the name of its class, unless it says another."""
    splits: ClassVar[tuple[str, ...]] = ("sft", "train", "holdout")
    reads_files: ClassVar[bool] = True
    """Whether ``data_dir`` can say where its problems are; False where they are generated."""
    templates: ClassVar[tuple[str, ...]] = ()
    """Names that `prompt` accepts; the first is the default. Empty where there is one way to ask."""
    reward_parts: ClassVar[Mapping[str, float]] = {"correctness": 1.0, "format": 0.1}
    """Reward parts and their weights in the sum (Mecklenburg 2025, §4)."""
    correct_part: ClassVar[str] = "correctness"
    """Which of ``reward_parts`` says whether an answer is correct: it is where the part, before its weight, is 1.0."""
    has_answers: ClassVar[bool] = True
    """Whether the verdicts of `verify` say what was answered (`Verdict.answer`)."""

    @abstractmethod
    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        """The first ``limit`` problems of a split, in an order that never changes."""

    @abstractmethod
    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """The problem as a model is asked it."""

    @abstractmethod
    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        """Judge a completion. ``opened``: the prompt has already opened ``<think>`` (see `opens_think`)."""

    def verify_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool] | None = None
    ) -> list[Verdict]:
        """Judge completions, each by its problem; a task that runs programs or provers uses all cores for it."""
        flags = [False] * len(completions) if opened is None else opened
        return [
            self._checked(self.verify(completion, problem, opened=flag))
            for completion, problem, flag in zip(completions, problems, flags, strict=True)
        ]

    def _checked(self, verdict: Verdict) -> Verdict:
        if not isinstance(verdict, Verdict):
            raise ValueError(f"verify of task {self.name!r} gave {verdict!r}; give a Verdict, like Verdict(True)")
        return verdict

    def check(self, split: str, limit: int | None) -> None:
        """Refuses a split that the task does not have, and a limit that is no count."""
        if split not in self.splits:
            raise unknown("split", split, self.splits)
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit}: give a count like 100, or None for all")

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """``count`` examples for supervised fine-tuning: ``{"prompt": …, "completion": …}``."""
        raise ValueError(
            f"task {self.name!r} has no reference solutions to fine-tune on: its class has no `examples`; take a task "
            "that has, like 'countdown', or go on with `explorl train`"
        )

    def rewards(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> dict[str, float]:
        """The value of each reward part, before its weight."""
        return _parts(self._checked(self.verify(completion, problem, opened=opened)))

    def rewards_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool]
    ) -> list[dict[str, float]]:
        """`rewards` of each completion, verified together."""
        if type(self).rewards is not Task.rewards:
            return [self.rewards(c, p, opened=o) for c, p, o in zip(completions, problems, opened, strict=True)]
        return [_parts(verdict) for verdict in verdicts_of(self, completions, problems, opened)]

    def reward(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> float:
        """R = Σ weight · part."""
        parts = self.rewards(completion, problem, opened=opened)
        return sum(weight * parts[name] for name, weight in self.reward_parts.items())

    def rows(
        self, split: str, *, template: str | None = None, limit: int | None = None, opened: bool | None = None
    ) -> list[dict[str, Any]]:
        """A split as rows of a dataset, with the columns that `reward_functions` read.

        ``opened`` must be given where the model's chat template opens ``<think>``, which messages do not show.
        """
        rows = []
        for problem in problems_of(self, split, limit):
            if not _has_utf8(problem.id):
                raise ValueError(f"problems of task {self.name!r} gave the id {problem.id!r}; leave out {_LONE}")
            prompt = checked_prompt(self, self.prompt(problem, template))
            is_open = opens_think(prompt) if opened is None else opened
            rows.append({"prompt": prompt, "id": problem.id, "data": dict(problem.data), "opened": is_open})
        return rows

    def reward_functions(self) -> list[RewardFunction]:
        """One function per reward part, in the order of ``reward_parts``, whose values are their weights.

        They read the columns of `rows`; ``data`` may also be JSON text, which a table keeps as it is.
        """
        return self._scorers()[0]

    def scorers(self) -> tuple[list[RewardFunction], AnswerFunction]:
        """`reward_functions`, and a function that gives the answers of the same completions: verified once for all."""
        functions, answers = self._scorers()
        return functions if type(self).reward_functions is Task.reward_functions else self.reward_functions(), answers

    def _scorers(self) -> tuple[list[RewardFunction], AnswerFunction]:
        latest = _Latest(self)

        def part_of(name: str) -> RewardFunction:
            def reward(*args: Any, **columns: Any) -> list[float]:
                return [_value(self, name, parts) for parts in latest.see(*args, **columns).rewards]

            reward.__name__ = name
            return reward

        def answers(*args: Any, **columns: Any) -> list[str | None]:
            return latest.see(*args, **columns).answers

        return [part_of(name) for name in self.reward_parts], answers


class _Latest:
    """The batch that a trainer asks about: for each part of the reward in turn, and for the answers."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._batch: Any = None
        self._answers: list[str | None] | None = None

    def see(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | list[Message]],
        *,
        id: Sequence[str],
        data: Sequence[Mapping[str, Any] | str],
        opened: Sequence[bool] | None = None,
        **columns: Any,
    ) -> _Latest:
        """Verifies these completions, unless they are those of the call before."""
        is_open = [opens_think(prompt) for prompt in prompts] if opened is None else list(opened)
        texts = [completion_text(completion) for completion in completions]
        batch = (texts, list(id), is_open)
        if self._batch == batch:
            return self
        given = [json.loads(fields) if isinstance(fields, str) else fields for fields in data]
        self._problems = [Problem(key, fields) for key, fields in zip(id, given, strict=True)]
        kind = type(self.task)
        if kind.rewards is Task.rewards and kind.rewards_many is Task.rewards_many:
            verdicts = verdicts_of(self.task, texts, self._problems, is_open)
            self.rewards, self._answers = [_parts(one) for one in verdicts], [one.answer for one in verdicts]
        else:  # rewards of its own, which say nothing of the answers
            self.rewards, self._answers = list(self.task.rewards_many(texts, self._problems, opened=is_open)), None
        self._batch = batch
        return self

    @property
    def answers(self) -> list[str | None]:
        if self._answers is None:
            texts, _, is_open = self._batch
            verdicts = verdicts_of(self.task, texts, self._problems, is_open)
            self._answers = [verdict.answer for verdict in verdicts]
        return self._answers


def verdicts_of(
    task: Task, completions: Sequence[str | bytes], problems: Sequence[Problem], opened: Sequence[bool]
) -> list[Verdict]:
    """What `verify_many`, which may be one's own, gives: an error in words where it is not a verdict for each."""
    given = list(task.verify_many(completions, problems, opened=opened))
    if len(given) != len(completions):
        raise ValueError(
            f"verify_many of task {task.name!r} gave {len(given)} verdicts on {len(completions)} completions; give one "
            "for each, in their order"
        )
    for verdict in given:
        if not isinstance(verdict, Verdict):
            raise ValueError(f"verify_many of task {task.name!r} gave {verdict!r}; give Verdicts, like Verdict(True)")
    return given


def _value(task: Task, part: str, parts: Any) -> Any:
    """The value of a part of a reward; None, which TRL leaves out of the sum, stays."""
    if not isinstance(parts, Mapping) or part not in parts:
        raise ValueError(f"reward_parts of task {task.name!r} has {part!r}, of which `rewards` gives no value")
    value = parts[part]
    if value is None or isinstance(value, float):
        return value
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return float(value)
    raise ValueError(f"rewards of task {task.name!r} gave {value!r} for {part!r}; give a number like 1.0, or None")


def problems_of(task: Task, split: str, limit: int | None = None) -> list[Problem]:
    """The problems of a split, at most ``limit``; an error in words where they are none, or cannot be told apart."""
    problems = list(task.problems(split, limit=limit))[:limit]
    if not problems:
        raise ValueError(f"task {task.name!r} has no problems in split {split!r}; its splits: {', '.join(task.splits)}")
    seen: set[str] = set()
    for problem in problems:
        if not isinstance(problem, Problem) or not isinstance(problem.id, str) or not isinstance(problem.data, Mapping):
            raise ValueError(f"problems of task {task.name!r} gave {problem!r}; give Problem('id', {{'key': 'value'}})")
        if problem.id in seen:
            raise ValueError(
                f"problems of task {task.name!r} gave two with the id {problem.id!r} in split {split!r}; give each an "
                "id of its own"
            )
        seen.add(problem.id)
    return problems


def json_text(task: Task, id: str, data: Mapping[str, Any]) -> str:
    """The data of a problem as JSON text."""
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the data of problem {id!r} of task {task.name!r} is not JSON ({error}); give text, numbers, lists and "
            "mappings"
        ) from None


def checked_prompt(task: Task, prompt: Prompt) -> Prompt:
    """The prompt, if it is text or messages."""
    is_text = isinstance(prompt, str)
    if not (is_text and prompt) and not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise ValueError(
            f"prompt of task {task.name!r} gave {prompt!r}; give text, or messages like "
            "[{'role': 'user', 'content': '…'}]"
        )
    if not all(map(_has_utf8, [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt])):
        raise ValueError(f"prompt of task {task.name!r} gave {prompt!r}, which no tokenizer takes; leave out {_LONE}")
    return prompt


def _has_utf8(text: str) -> bool:
    """Whether a text can be encoded: one with half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _parts(verdict: Verdict) -> dict[str, float]:
    return {"correctness": float(verdict.correct), "format": float(verdict.well_formed)}


def opens_think(prompt: Prompt) -> bool:
    """Whether a prompt ends with an open ``<think>``. Of messages only the chat template could tell: False."""
    return isinstance(prompt, str) and prompt.rstrip().endswith("<think>")


def completion_text(completion: str | list[Message]) -> str:
    """The text of a completion, which TRL gives as messages where the prompt was messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion if message.get("role") == "assistant")
