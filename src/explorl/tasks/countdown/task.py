r"""Countdown: reach a target with given numbers, each at most once, and + − * /.

    correctness = 1 if the last <answer>…</answer> is an expression of the given numbers that equals the target
    format      = 1 if the completion is exactly <think>…</think><answer>…</answer>

Mecklenburg 2025, "Exploration Strategies for Reasoning Fine-tuning", §4. Expressions are evaluated in rational
arithmetic. Several ways of writing are as good as the plain one: "= 24" after an expression or "24 =" before it, if 24
is the target; a full stop at the end; ``$…$``, ``$$…$$``, ``\(…\)`` or ``\[…\]`` around the answer or around a side of
it; and what `expression` reads: ``[ ]`` and ``{ }``, ``\times``, ``\frac{a}{b}``. Nothing else may stand in the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import is_well_formed, last_answer, read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict, opens_think
from explorl.tasks.countdown.generator import (
    MINI,
    PAPER,
    SPLITS,
    Puzzle,
    Space,
    Splits,
    deduplicated,
    is_validation,
    make_splits,
)
from explorl.tasks.countdown.problem_files import read_folder, read_hub, read_splits
from explorl.tasks.countdown.search import ORDERS, search
from explorl.tasks.countdown.templates import TEMPLATES
from explorl.tasks.countdown.traces import ALL_STYLES, trace
from explorl.tasks.expression import ExpressionError, canonical, evaluate, numbers, parse
from explorl.tasks.stable_random import shuffled


def verify(completion: str | bytes, nums: Sequence[int], target: int, opened: bool = False) -> Verdict:
    """Verify a completion, whatever is in it. ``opened``: the prompt has already opened ``<think>``.

    Of a completion beyond a million characters only the end is read, and it is not well-formed.
    """
    text, whole = read_completion(completion)
    well_formed = whole and is_well_formed(text, opened=opened)
    answer = last_answer(text)
    if answer is None:
        return Verdict(False, well_formed, error="no <answer>…</answer>")
    normal, mistake = _grade(answer, nums, target)
    return Verdict(mistake is None, well_formed, normal, mistake)


_MATH = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
"""What encloses mathematics; the longer before the shorter."""


def _plain(text: str) -> str:
    """Text without the signs of mathematics around all of it, and without the full stop at its end."""
    text = text.strip().removesuffix(".").rstrip()
    if not text.startswith(("$", "\\")):
        return text
    for start, end in _MATH:
        inner = text[len(start) : -len(end)]
        if text == f"{start}{inner}{end}" and start not in inner and end not in inner:
            return inner.strip().removesuffix(".").rstrip()
    return text


def sides(answer: str, target: str) -> tuple[str, str | None]:
    """Return the expression of an answer, and the result stated beside it, or None."""
    left, equals, right = _plain(answer).partition("=")
    if not equals:
        return left, None
    left, right = _plain(left), _plain(right)
    return (right, left) if left == target else (left, right)


def _grade(answer: str, nums: Sequence[int], target: int) -> tuple[str | None, str | None]:
    """Return an answer's normal form, or None, and what is wrong with it, or None."""
    expression, stated = sides(answer, str(target))
    try:
        tree = parse(expression)
    except ExpressionError as error:
        return None, f"not an expression: {error}"
    normal = canonical(tree)
    unused = list(nums)
    for number in numbers(tree):
        if number not in unused:
            return normal, f"{number} is not given, or not that often"
        unused.remove(number)
    try:
        value = evaluate(tree)
    except ZeroDivisionError:
        return normal, "it divides by zero"
    if value != target:
        return normal, f"it gives {value}, not {target}"
    if stated is not None and stated != str(target):
        return normal, f"it states another result than {target}"
    return normal, None


@dataclass(frozen=True)
class Countdown(Task):
    """Countdown over one source of problems: three or four numbers from 1–100, targets below 2,000.

    Problems come from the hub's Countdown-Tasks-3to4 (``source="hub"``), from a folder of JSONL files (``data_dir``),
    from a file that `write_splits` wrote (``split_file``), or all from the generator (``source="generated"``). Those of
    the hub and of a folder are for training and holdout; their ``sft`` split is generated, as in the paper.
    """

    name: str = "countdown"
    source: Literal["hub", "generated"] = "hub"
    data_dir: str | Path | None = None
    split_file: str | Path | None = None
    space: Space = PAPER
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    """How many problems to generate, or to hold out of the hub's; see ``default_sizes``."""
    seed: int = 0
    attempts: tuple[int, int] = (0, 3)
    """Fewest and most failed attempts in a reference solution."""
    style: str | None = None
    """How reference solutions are written: words, terse, or a search: systematic, shuffled, guided. None is terse for
    the template terse, and words for others."""
    validation: bool = False
    """Hold out one in 16 of the problems to train on, in place of those to test on; neither are trained on."""

    templates: ClassVar[tuple[str, ...]] = tuple(TEMPLATES)
    answer_mark: ClassVar[str] = "<answer>"
    default_sizes: ClassVar[Mapping[str, int | None]] = {"sft": 10_000, "train": 2_000, "holdout": 500}

    def __post_init__(self) -> None:
        if self.source not in ("hub", "generated"):
            raise unknown("source", self.source, ("hub", "generated"))
        if self.data_dir is not None and self.split_file is not None:
            raise ValueError(f"data_dir={self.data_dir!r} and split_file={self.split_file!r}: give only one of them")
        if self.style is not None and self.style not in ALL_STYLES:
            raise unknown("style", self.style, ALL_STYLES)
        if self.validation and (self.split_file is not None or (self.source == "generated" and self.data_dir is None)):
            raise ValueError("validation is for the problems of the hub or of a data_dir; leave it out here")

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        return [self.problem(*puzzle) for puzzle in self._puzzles(split)[:limit]]

    def problem(self, nums: Sequence[int], target: int) -> Problem:
        """Return the problem with these numbers and this target; its id does not depend on their order."""
        key = f"{'-'.join(map(str, sorted(nums)))}={target}"
        return Problem(f"countdown:{key}", {"nums": list(nums), "target": target})

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        template = template or self.templates[0]
        if template not in TEMPLATES:
            raise unknown("template", template, TEMPLATES)
        return TEMPLATES[template](problem.data["nums"], problem.data["target"])

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return verify(completion, problem.data["nums"], problem.data["target"], opened)

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield ``count`` reference solutions of the ``sft`` split, pass after pass.

        Each pass has the problems in a new order, their numbers in a new order, and new failed attempts. A problem
        that the style's search does not solve is left out.
        """
        template = template or self.templates[0]
        puzzles = self._puzzles("sft")
        if count and not puzzles:
            raise ValueError(f"the sft split of {self.name!r} is empty; give sizes like {{'sft': 10000}}")
        style = self.style or ("terse" if template == "terse" else "words")
        rng = Random(f"examples {seed}")
        return itertools.islice(self._examples(puzzles, template, style, rng), count)

    def _examples(self, puzzles: Sequence[Puzzle], template: str, style: str, rng: Random) -> Iterator[dict[str, Any]]:
        while True:
            found = False
            for puzzle in shuffled(rng, puzzles):
                nums = shuffled(rng, puzzle.nums)
                prompt = self.prompt(self.problem(nums, puzzle.target), template)
                if style in ORDERS:
                    completion = search(nums, puzzle.target, rng=rng, order=style)
                else:
                    completion = trace(nums, puzzle.target, rng=rng, style=style, attempts=self.attempts)
                if completion is not None:
                    found = True
                    opened = "<think>" if opens_think(prompt) else ""
                    yield {"prompt": prompt, "completion": completion.removeprefix(opened)}
            if not found:
                raise ValueError(
                    f"style={style!r} solves none of the {len(puzzles)} sft problems of {self.name!r}; use 'words'"
                )

    def _puzzles(self, split: str) -> list[Puzzle]:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        if split == "sft" and split not in self._splits:
            return self._generated_sft
        return self._splits[split]

    @cached_property
    def _splits(self) -> Splits:
        """What the source holds; of real problems, no ``sft``."""
        if self.split_file is not None:
            return read_splits(self.split_file)
        if self.data_dir is None and self.source == "generated":
            return make_splits(self.space, self._sizes, seed=self.seed)
        train, test = self._real
        if not self.validation:
            return {"train": train, "holdout": test}
        held_out = [is_validation(puzzle) for puzzle in train]
        rest = [puzzle for puzzle, out in zip(train, held_out, strict=True) if not out]
        return {"train": rest, "holdout": list(itertools.compress(train, held_out))}

    @cached_property
    def _real(self) -> tuple[list[Puzzle], list[Puzzle]]:
        """The problems of a folder or of the hub to train on and to test on, without a common one."""
        if self.data_dir is not None:
            train, test = read_folder(self.data_dir)
        else:
            puzzles = shuffled(Random(self.seed), read_hub())
            held_out = self._sizes["holdout"] or 0
            train, test = puzzles[held_out:], puzzles[:held_out]
        test = deduplicated(test)
        return deduplicated(train, {puzzle.key for puzzle in test}), test

    @cached_property
    def _generated_sft(self) -> list[Puzzle]:
        """Problems that are neither in a real split nor in the holdout that ``source="generated"`` has."""
        taken = {puzzle.key for puzzles in self._real for puzzle in puzzles}
        sizes = {name: self._sizes[name] for name in ("holdout", "sft")}
        return make_splits(self.space, sizes, seed=self.seed, exclude=taken)["sft"]

    @property
    def _sizes(self) -> dict[str, int | None]:
        return {**self.default_sizes, **self.sizes}


@dataclass(frozen=True)
class CountdownMini(Countdown):
    """Countdown for a tiny policy: three numbers from 1–20, targets 1–100, all generated."""

    name: str = "countdown-mini"
    source: Literal["hub", "generated"] = "generated"
    space: Space = MINI
    attempts: tuple[int, int] = (0, 2)

    reads_files: ClassVar[bool] = False
    templates: ClassVar[tuple[str, ...]] = ("terse", "paper", "paper-opened", "chat")
    default_sizes: ClassVar[Mapping[str, int | None]] = {"sft": None, "train": 4_000, "holdout": 1_000}
    """None takes all that is left: 11,292 of the 16,292 problems."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is not None or self.source != "generated":
            raise ValueError("'countdown-mini' is always generated; leave out data_dir and source, or use 'countdown'")
