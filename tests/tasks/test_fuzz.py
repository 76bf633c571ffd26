"""Random and mutated completions: no exception, none over its time, and nothing is right that holds no answer.

Mathematics and code have fuzz tests of their own, in test_math.py and test_code.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from explorl.tasks import Problem, Task, get_task

PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", "(", ")", "Answer:", "The answer is ", "A",
    "B", "C", "D", "E", "3", "7", "12", "33", "+", "-", "*", "/", "×", "÷", "−", "=", " ", "\n", "**", "####", "0",
    "9" * 40, "é", "中", "\x00", "```", "1e9", ".", ",", "[", "]", "'", '"', "\\", "option", "(C)", "nan", "inf", "-0",
]  # fmt: skip


def completions(seed: int, count: int, good: str) -> Iterator[str | bytes]:
    """Pieces in any order, a good completion with random edits, and bytes."""
    draw = random.Random(seed)
    for index in range(count):
        kind = index % 3
        if kind == 0:
            yield "".join(draw.choices(PIECES, k=draw.randrange(30)))
        elif kind == 1:
            text = list(good)
            for _ in range(draw.randrange(1, 6)):
                position = draw.randrange(len(text) + 1)
                text[position : position + draw.randrange(3)] = draw.choice(PIECES)
            yield "".join(text)
        else:
            yield bytes(draw.randrange(256) for _ in range(draw.randrange(60)))


def cases() -> dict[str, tuple[Task, Problem, str, str]]:
    """A task, a problem, a completion that is right, and what no right completion lacks."""
    countdown = get_task("countdown-mini")
    puzzle = countdown.problem([3, 7, 12], 33)  # type: ignore[attr-defined]
    gym = get_task("gym:chain_sum")
    total = gym.problems("holdout", limit=1)[0]
    answer = total.data["answer"]
    choice = get_task("choice")
    question = Problem("q", {"question": "Which?", "choices": ["north", "south", "east"], "answer": 1})
    return {
        "countdown": (countdown, puzzle, "<think>hm</think><answer>3*7+12</answer>", "<answer>"),
        "gym": (gym, total, f"<think>so</think><answer>{answer}</answer>", "<answer>"),
        "choice": (choice, question, "Reasoning. The answer is (B).", "B"),
    }


def fuzz(name: str, count: int) -> float:
    """Seconds of the slowest verdict."""
    task, problem, good, needed = cases()[name]
    assert task.verify(good, problem).correct
    slowest = 0.0
    texts = list(completions(1, count, good))
    # What is scored in processes of its own has its own limits, and takes milliseconds each.
    many = iter(task.verify_many(texts, [problem] * count) if name == "gym" else ())
    for completion in texts:
        began = time.perf_counter()
        verdict = next(many, None) or task.verify(completion, problem)
        slowest = max(slowest, time.perf_counter() - began)
        text = completion if isinstance(completion, str) else completion.decode(errors="replace")
        assert not (verdict.correct and needed.lower() not in text.lower()), completion
    return slowest


@pytest.mark.parametrize("name", ["countdown", "choice", "gym"])
def test_some(name: str) -> None:
    fuzz(name, 3_000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["countdown", "choice", "gym"])
def test_a_hundred_thousand(name: str) -> None:
    assert fuzz(name, 100_000) < 1.0  # a verdict takes microseconds; the rest is for other programs on the core


@pytest.mark.slow
def test_a_hundred_thousand_countdown_verdicts_take_seconds() -> None:
    task, problem, good, _ = cases()["countdown"]
    wrong = "<think>" + "7*3=21 21+12=33 " * 8 + "</think><answer>(12-3)*7</answer>"
    began = time.process_time()
    for _ in range(50_000):
        task.verify(good, problem)
        task.verify(wrong, problem)
    assert time.process_time() - began < 10.0
