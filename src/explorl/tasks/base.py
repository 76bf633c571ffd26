"""The task interface: problems, prompts, a verdict on each completion, and named reward parts.

Tasks are independent of models, tokenizers and trainers. Problems are plain JSON values, so that they survive a round
trip through a dataset column, a split file or a table.
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
"""Called in the same way; returns the answer of each completion, or None if it has none."""
_LONE_SURROGATE = "half of a surrogate pair (U+D800 to U+DFFF)"


@dataclass(frozen=True)
class Problem:
    """A problem. ``data`` holds everything that its prompt and its verification need, as JSON values."""

    id: str
    """Stable key: the same problem has the same id in every split, source and run."""
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a completion."""

    correct: bool
    well_formed: bool = True
    answer: str | None = None
    """The answer in a normal form, the same for equivalent answers (for maj@k and diversity); None: no answer."""
    error: str | None = None
    """Why the completion is not correct."""

    def __post_init__(self) -> None:
        # A policy, a program or a data set wrote these texts, and they go to files, figures and terminals.
        for name in ("answer", "error"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"{name} of a verdict is {text!r}; use text, like '42', or None")
            if text is not None and not (text.isascii() and text.isprintable()):
                object.__setattr__(self, name, clean(text))
        for name in ("correct", "well_formed"):
            flag = getattr(self, name)
            if isinstance(flag, bool):
                continue
            if isinstance(flag, str) or flag not in (0, 1):
                raise ValueError(f"{name} of a verdict is {flag!r}; use True or False")
            object.__setattr__(self, name, bool(flag))  # 1, or numpy's True


class _ClassName:
    """A class attribute that holds the name of the class in lower case."""

    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__.lower()


class Task(ABC):
    """Base class of all tasks. A subclass implements `problems`, `prompt` and `verify`; the rest follows from them."""

    name: str = cast(str, _ClassName())
    """The task's name in tables and folders; by default the name of its class."""
    splits: ClassVar[tuple[str, ...]] = ("sft", "train", "holdout")
    reads_files: ClassVar[bool] = True
    """True if ``data_dir`` can name the folder of its problems; False if they are generated."""
    templates: ClassVar[tuple[str, ...]] = ()
    """Names that `prompt` accepts; the first is the default. Empty if there is only one template."""
    reward_parts: ClassVar[Mapping[str, float]] = {"correctness": 1.0, "format": 0.1}
    """Reward parts and their weights in the sum (Mecklenburg 2025, §4)."""
    correct_part: ClassVar[str] = "correctness"
    """The name in ``reward_parts`` that tells whether an answer is correct: it is if that part, unweighted, is 1.0."""
    has_answers: ClassVar[bool] = True
    """True if the verdicts of `verify` contain the answer (`Verdict.answer`)."""

    @abstractmethod
    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        """Return the first ``limit`` problems of a split, in an order that never changes."""

    @abstractmethod
    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the prompt of a problem."""

    @abstractmethod
    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        """Verify a completion. ``opened``: the prompt has already opened ``<think>`` (see `opens_think`)."""

    def verify_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool] | None = None
    ) -> list[Verdict]:
        """Verify each completion by its problem. Tasks that run programs or provers override it to run in parallel."""
        flags = [False] * len(completions) if opened is None else opened
        return [
            self._checked(self.verify(completion, problem, opened=flag))
            for completion, problem, flag in zip(completions, problems, flags, strict=True)
        ]

    def _checked(self, verdict: Verdict) -> Verdict:
        if not isinstance(verdict, Verdict):
            raise ValueError(f"verify of task {self.name!r} returned {verdict!r}; return a Verdict, like Verdict(True)")
        return verdict

    def check(self, split: str, limit: int | None) -> None:
        """Raise ValueError for a split that the task does not have and for a negative limit."""
        if split not in self.splits:
            raise unknown("split", split, self.splits)
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit}: use a count like 100, or None for all")

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield ``count`` examples for supervised fine-tuning: ``{"prompt": …, "completion": …}``."""
        raise ValueError(
            f"task {self.name!r} has no reference solutions to fine-tune on: its class has no `examples`; use a task "
            "that has, like 'countdown', or start with `explorl train`"
        )

    def rewards(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> dict[str, float]:
        """Return the unweighted value of each reward part."""
        return _parts(self._checked(self.verify(completion, problem, opened=opened)))

    def rewards_many(
        self, completions: Sequence[str | bytes], problems: Sequence[Problem], *, opened: Sequence[bool]
    ) -> list[dict[str, float]]:
        """Return the `rewards` of each completion, verified together."""
        if type(self).rewards is not Task.rewards:
            return [self.rewards(c, p, opened=o) for c, p, o in zip(completions, problems, opened, strict=True)]
        return [_parts(verdict) for verdict in verdicts_of(self, completions, problems, opened)]

    def reward(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> float:
        """Return the reward, Σ weight · part."""
        parts = self.rewards(completion, problem, opened=opened)
        return sum(weight * parts[name] for name, weight in self.reward_parts.items())

    def rows(
        self, split: str, *, template: str | None = None, limit: int | None = None, opened: bool | None = None
    ) -> list[dict[str, Any]]:
        """Return a split as rows of a dataset, with the columns that `reward_functions` read.

        Set ``opened`` if the model's chat template opens ``<think>``, which messages do not show.
        """
        rows = []
        for problem in problems_of(self, split, limit):
            if not _has_utf8(problem.id):
                raise ValueError(
                    f"problems of task {self.name!r} returned the id {problem.id!r}; remove {_LONE_SURROGATE}"
                )
            prompt = checked_prompt(self, self.prompt(problem, template))
            is_open = opens_think(prompt) if opened is None else opened
            rows.append({"prompt": prompt, "id": problem.id, "data": dict(problem.data), "opened": is_open})
        return rows

    def reward_functions(self) -> list[RewardFunction]:
        """Return one function per reward part, in the order of ``reward_parts``; its values are their weights.

        They read the columns of `rows`; ``data`` may also be JSON text, which a table stores unchanged.
        """
        return self._scorers()[0]

    def scorers(self) -> tuple[list[RewardFunction], AnswerFunction]:
        """Return `reward_functions` and a function that returns the answers; each batch is verified only once."""
        functions, answers = self._scorers()
        return functions if type(self).reward_functions is Task.reward_functions else self.reward_functions(), answers

    def _scorers(self) -> tuple[list[RewardFunction], AnswerFunction]:
        latest = _LatestBatch(self)

        def part_of(name: str) -> RewardFunction:
            def reward(*args: Any, **columns: Any) -> list[float]:
                return [_part_value(self, name, parts) for parts in latest.verify(*args, **columns).rewards]

            reward.__name__ = name
            return reward

        def answers(*args: Any, **columns: Any) -> list[str | None]:
            return latest.verify(*args, **columns).answers

        return [part_of(name) for name in self.reward_parts], answers


class _LatestBatch:
    """The rewards and answers of the latest batch, which a trainer requests part by part."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._batch: Any = None
        self._answers: list[str | None] | None = None

    def verify(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str | list[Message]],
        *,
        id: Sequence[str],
        data: Sequence[Mapping[str, Any] | str],
        opened: Sequence[bool] | None = None,
        **columns: Any,
    ) -> _LatestBatch:
        """Verify these completions, unless the previous call did, and return self."""
        is_open = [opens_think(prompt) for prompt in prompts] if opened is None else list(opened)
        texts = [completion_text(completion) for completion in completions]
        batch = (texts, list(id), is_open)
        if self._batch == batch:
            return self
        decoded = [json.loads(fields) if isinstance(fields, str) else fields for fields in data]
        self._problems = [Problem(key, fields) for key, fields in zip(id, decoded, strict=True)]
        task_class = type(self.task)
        if task_class.rewards is Task.rewards and task_class.rewards_many is Task.rewards_many:
            verdicts = verdicts_of(self.task, texts, self._problems, is_open)
            self.rewards = [_parts(verdict) for verdict in verdicts]
            self._answers = [verdict.answer for verdict in verdicts]
        else:  # overridden rewards come without answers
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
    """Return the result of `verify_many`; raise ValueError unless it is one verdict per completion."""
    verdicts = list(task.verify_many(completions, problems, opened=opened))
    if len(verdicts) != len(completions):
        raise ValueError(
            f"verify_many of task {task.name!r} returned {len(verdicts)} verdicts for {len(completions)} completions; "
            "return one for each, in the same order"
        )
    for verdict in verdicts:
        if not isinstance(verdict, Verdict):
            raise ValueError(
                f"verify_many of task {task.name!r} returned {verdict!r}; return Verdicts, like Verdict(True)"
            )
    return verdicts


def _part_value(task: Task, part: str, parts: Any) -> Any:
    """Return the value of a reward part as a float; keep None, which TRL leaves out of the sum."""
    if not isinstance(parts, Mapping) or part not in parts:
        raise ValueError(f"reward_parts of task {task.name!r} has {part!r}, but `rewards` returns no value for it")
    value = parts[part]
    if value is None or isinstance(value, float):
        return value
    if not isinstance(value, str):
        with suppress(TypeError, ValueError):
            return float(value)
    raise ValueError(f"rewards of task {task.name!r} returned {value!r} for {part!r}; return a number or None")


def problems_of(task: Task, split: str, limit: int | None = None) -> list[Problem]:
    """Return at most ``limit`` problems of a split; raise ValueError if there are none or ids are not unique."""
    problems = list(task.problems(split, limit=limit))[:limit]
    if not problems:
        raise ValueError(f"task {task.name!r} has no problems in split {split!r}; its splits: {', '.join(task.splits)}")
    ids: set[str] = set()
    for problem in problems:
        if not isinstance(problem, Problem) or not isinstance(problem.id, str) or not isinstance(problem.data, Mapping):
            raise ValueError(
                f"problems of task {task.name!r} returned {problem!r}; return Problem('id', {{'key': 'value'}})"
            )
        if problem.id in ids:
            raise ValueError(
                f"problems of task {task.name!r} returned the id {problem.id!r} twice in split {split!r}; give each "
                "problem a unique id"
            )
        ids.add(problem.id)
    return problems


def json_text(task: Task, id: str, data: Mapping[str, Any]) -> str:
    """Return the data of a problem as JSON text; raise ValueError if it is not JSON."""
    try:
        return json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the data of problem {id!r} of task {task.name!r} is not JSON ({error}); use text, numbers, lists and "
            "mappings"
        ) from None


def checked_prompt(task: Task, prompt: Prompt) -> Prompt:
    """Return the prompt; raise ValueError unless it is text or messages that can be encoded in UTF-8."""
    is_text = isinstance(prompt, str)
    if not (is_text and prompt) and not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise ValueError(
            f"prompt of task {task.name!r} returned {prompt!r}; return text, or messages like "
            "[{'role': 'user', 'content': '…'}]"
        )
    if not all(map(_has_utf8, [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt])):
        raise ValueError(
            f"prompt of task {task.name!r} returned {prompt!r}, which no tokenizer accepts; remove {_LONE_SURROGATE}"
        )
    return prompt


def _has_utf8(text: str) -> bool:
    """Return whether text can be encoded in UTF-8, which text with half of a surrogate pair cannot."""
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
    """Return whether a prompt ends with an open ``<think>``; False for messages, where the chat template decides."""
    return isinstance(prompt, str) and prompt.rstrip().endswith("<think>")


def completion_text(completion: str | list[Message]) -> str:
    """Return the text of a completion, which TRL passes as messages if the prompt was messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion if message.get("role") == "assistant")
