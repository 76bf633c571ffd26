"""Products: what is 347*286+51? Numbers too large for a small policy's head, and easy with a tool.

    correctness = 1 if the last <answer>…</answer> is the value
    format      = 1 if the completion is exactly <think>…</think><answer>…</answer>

For tool use ([S] §2.5): there are 810,000 products of three-digit numbers, too many for a policy of a million
parameters to know, but with a calculator all that it takes is to copy, into the call and out of it. Reference solutions
call it, at once or step by step; a share of them does not, so that reinforcement learning has something to find out:

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

_SPLITS = ("holdout", "train", "sft")  # so that asking for more training problems never changes the holdout
_INTEGER = re.compile(r"=?\s*(-?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,60})\s*\.?")
_MAX_FRUITLESS = 10_000


@dataclass(frozen=True)
class Products(Task):
    """``a*b``, ``a*b+c`` and ``a*b-c`` for numbers of a range, all generated."""

    name: str = "products"
    numbers: tuple[int, int] = (100, 999)
    """Least and greatest factor and term."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How many problems to generate; see ``default_sizes``."""
    by_heart: float = 0.5
    """Share of reference solutions that make no call."""
    seed: int = 0

    reads_files: ClassVar[bool] = False
    templates: ClassVar[tuple[str, ...]] = ("terse", "chat")
    default_sizes: ClassVar[Mapping[str, int]] = {"sft": 20_000, "train": 4_000, "holdout": 1_000}

    def __post_init__(self) -> None:
        low, high = self.numbers
        object.__setattr__(self, "numbers", (low, high))  # a list, as YAML has it, could not be hashed
        if not 2 <= low <= high <= 10**9:
            raise ValueError(f"numbers={(low, high)!r}: give 2 ≤ least ≤ greatest ≤ 1000000000, like (100, 999)")
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
        """Terse, the expression and a new line; or a message that says how to call Python."""
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
        found = _INTEGER.fullmatch(answer.strip()[:200])
        if found is None:
            return Verdict(False, well_formed, error="the answer is no whole number")
        value = int(found[1] + found[2].replace(",", ""))
        correct = value == problem.data["value"]
        error = None if correct else f"it is {problem.data['value']}, not {value}"
        return Verdict(correct, well_formed, str(value), error)

    def examples(self, count: int, *, template: str | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Reference solutions of the ``sft`` split, pass after pass until there are ``count``."""
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
        """Distinct problems, parted into splits."""
        sizes = {**self.default_sizes, **self.sizes}
        drawn = self._drawn(sum(sizes.values()))
        return {name: list(itertools.islice(drawn, sizes[name])) for name in _SPLITS}

    def _drawn(self, count: int) -> Iterator[Tree]:
        rng = Random(self.seed)
        seen: set[Tree] = set()
        fruitless = 0
        while len(seen) < count:
            a, b, c = (between(rng, *self.numbers) for _ in range(3))
            form = pick(rng, ("", "+", "-"))
            product: Tree = ("*", a, b)
            tree: Tree = (form, product, c) if form else product
            fruitless += 1
            if tree not in seen:
                seen.add(tree)
                fruitless = 0
                yield tree
            elif fruitless > _MAX_FRUITLESS:
                raise ValueError(
                    f"numbers={self.numbers!r} give about {len(seen)} problems, and the splits ask for {count}; give a "
                    "wider range, like (100, 999), or smaller sizes"
                )


def trace(tree: Tree, calls: int, *, python: bool = False) -> str:
    """A correct, well-formed completion with no call, one for the whole expression, or one for each step.

    ``python``: in fenced blocks, each followed by its output, instead of ``<<…=…>>``.
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
