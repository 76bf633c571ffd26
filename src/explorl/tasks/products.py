"""Products, like 347*286+51: too hard for a small policy to compute, and easy with a tool.

    correctness = 1 if the last <answer>…</answer> is the value
    format      = 1 if the completion is exactly <think>…</think><answer>…</answer>

For tool use ([S] §2.5): there are 810,000 products of three-digit numbers, too many for a policy of a million
parameters to memorize, but with a calculator it only has to copy numbers into the call and out of it. Reference
solutions call it, for the whole expression or step by step; a share of them makes no call, so that reinforcement
learning has something to discover:

    <think><<347*286=99242>><<99242+51=99293>></think><answer>99293</answer>
    <think>347*286+51=99293</think><answer>99293</answer>

The ``chat`` template asks for fenced blocks of Python instead (`explorl.rollout.tools` reads both).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any, ClassVar

from explorl.core.plugins import unknown
from explorl.tasks.answer_span import is_well_formed, last_answer, read_completion
from explorl.tasks.base import Problem, Prompt, Task, Verdict
from explorl.tasks.expression import Tree, evaluate, render, steps
from explorl.tasks.stable_random import between, pick, shuffled

_SPLITS = ("holdout", "train", "sft")  # so that a larger training split never changes the holdout
_INTEGER = re.compile(r"=?\s*(-?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,60})\s*\.?")
_MAX_REPEATS = 10_000  # after so many repetitions in a row, the space of problems counts as used up


@dataclass(frozen=True)
class Products(Task):
    """Generated expressions ``a*b``, ``a*b+c`` and ``a*b-c`` with numbers from a range."""

    name: str = "products"
    numbers: tuple[int, int] = (100, 999)
    """Smallest and largest factor and term."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of problems to generate for each split; see ``default_sizes``."""
    by_heart: float = 0.5
    """Share of reference solutions that make no tool call."""
    seed: int = 0

    reads_files: ClassVar[bool] = False
    templates: ClassVar[tuple[str, ...]] = ("terse", "chat")
    default_sizes: ClassVar[Mapping[str, int]] = {"sft": 20_000, "train": 4_000, "holdout": 1_000}

    def __post_init__(self) -> None:
        low, high = self.numbers
        object.__setattr__(self, "numbers", (low, high))  # a list, as YAML has it, could not be hashed
        if not 2 <= low <= high <= 10**9:
            raise ValueError(f"numbers={(low, high)!r}: give 2 ≤ smallest ≤ largest ≤ 1000000000, like (100, 999)")
        if not 0 <= self.by_heart <= 1:
            raise ValueError(f"by_heart={self.by_heart!r}: give a share from 0 to 1, like 0.5")
        for name, size in self.sizes.items():
            if name not in self.splits:
                raise unknown("split", name, self.splits)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"size of split {name!r} is {size!r}; give a count like 1000")

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        self.check(split, limit)
        return [_problem(tree) for tree in self._trees[split][:limit]]

    def prompt(self, problem: Problem, template: str | None = None) -> Prompt:
        """Return the expression and a newline (``terse``), or a message that also explains Python calls (``chat``)."""
        template = template or self.templates[0]
        expression = problem.data["expression"]
        if template == "terse":
            return f"{expression}\n"
        if template != "chat":
            raise unknown("template", template, self.templates)
        question = (
            f"What is {expression}? You can run Python: write a block that begins with ```python and ends with ```, "
            "and you will see what it prints. Show your work in <think> </think> tags, and return the number in "
            "<answer> </answer> tags, for example <answer>12</answer>."
        )
        return [{"role": "user", "content": question}]

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        text, whole = read_completion(completion)
        well_formed = whole and is_well_formed(text, opened=opened)
        answer = last_answer(text)
        if answer is None:
            return Verdict(False, well_formed, error="no <answer>…</answer>")
        match = _INTEGER.fullmatch(answer.strip()[:200])
        if match is None:
            return Verdict(False, well_formed, error="the answer is not a whole number")
        sign, digits = match.groups()
        value = int(sign + digits.replace(",", ""))
        correct = value == problem.data["value"]
        error = None if correct else f"it is {problem.data['value']}, not {value}"
        return Verdict(correct, well_formed, str(value), error)

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield reference solutions of the ``sft`` split, pass after pass, until there are ``count``."""
        template = template or self.templates[0]
        trees = self._trees["sft"]
        if count and not trees:
            raise ValueError(f"the sft split of {self.name!r} is empty; give sizes like {{'sft': 20000}}")
        rng = Random(f"examples {seed}")
        passes = (shuffled(rng, trees) for _ in itertools.count())
        for tree in itertools.islice(itertools.chain.from_iterable(passes), count):
            prompt = self.prompt(_problem(tree), template)
            calls = 0 if rng.random() < self.by_heart else between(rng, 1, len(steps(tree)))
            yield {"prompt": prompt, "completion": trace(tree, calls, python=template == "chat")}

    @cached_property
    def _trees(self) -> dict[str, list[Tree]]:
        """The expressions of each split, without a common one."""
        sizes = {**self.default_sizes, **self.sizes}
        trees = self._distinct_trees(sum(sizes.values()))
        return {name: list(itertools.islice(trees, sizes[name])) for name in _SPLITS}

    def _distinct_trees(self, count: int) -> Iterator[Tree]:
        """Yield ``count`` distinct random expressions; raise ValueError if the range of numbers has too few."""
        rng = Random(self.seed)
        trees: set[Tree] = set()
        repeats = 0
        while len(trees) < count:
            a, b, c = (between(rng, *self.numbers) for _ in range(3))
            form = pick(rng, ("", "+", "-"))
            product: Tree = ("*", a, b)
            tree: Tree = (form, product, c) if form else product
            repeats += 1
            if tree not in trees:
                trees.add(tree)
                repeats = 0
                yield tree
            elif repeats > _MAX_REPEATS:
                raise ValueError(
                    f"numbers={self.numbers!r} yields about {len(trees)} problems, but the splits need {count}; give a "
                    "wider range, like (100, 999), or smaller sizes"
                )


def trace(tree: Tree, calls: int, *, python: bool = False) -> str:
    """Return a correct, well-formed completion with no call, one for the whole expression, or one for each step.

    ``python``: write calls as fenced blocks, each followed by its output, instead of ``<<…=…>>``.
    """
    expression, value = render(tree, terse=True), evaluate(tree)
    if calls == 0:
        think = f"{expression}={value}"
    elif calls == 1:
        think = _call(expression, value, python)
    else:
        parts = [(f"{step.left}{step.op}{step.right}", step.result) for step in steps(tree)]
        think = "".join(_call(part, result, python) for part, result in parts)
    return f"<think>{think}</think><answer>{value}</answer>"


def _call(expression: str, value: object, python: bool) -> str:
    if python:
        return f"\n```python\nprint({expression})\n```\n```output\n{value}\n```\n"
    return f"<<{expression}={value}>>"


def _problem(tree: Tree) -> Problem:
    expression = render(tree, terse=True)
    return Problem(f"products:{expression}", {"expression": expression, "value": int(evaluate(tree))})
