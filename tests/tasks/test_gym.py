"""Data sets of reasoning-gym as tasks: problems that survive a file, answers that stay answers."""

from __future__ import annotations

import builtins
import contextlib
import json
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("reasoning_gym")

import sympy
from reasoning_gym.factory import DATASETS

from explorl.tasks import Problem
from explorl.tasks.gym import Gym
from explorl.tasks.gym_guard import evaluate, is_formula, uses_sympy

SLOW = {"arc_agi", "figlet_font", "group_anagrams", "knight_swap", "sudoku"}
"""Take a second or more for their first entry."""
NO_DEFAULTS = {"composite"}
"""Cannot be made without a config."""
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Many answers are right, and none is given."""
SMALL = {"sft": 6, "train": 5, "holdout": 4}


def small(name: str, **options: Any) -> Gym:
    return Gym(f"gym:{name}", **{"sizes": SMALL, **options})


def test_names() -> None:
    with pytest.raises(ValueError, match="unknown task 'gym:leg_countin'; did you mean 'gym:leg_counting'"):
        Gym("gym:leg_countin")
    with pytest.raises(ValueError, match="unknown task 'leg_counting'; did you mean 'gym:leg_counting'"):
        Gym("leg_counting")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"pip install explorl\[gym\]"):
        Gym("gym:leg_counting")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": {"test": 3}}, "unknown split 'test'"),
        ({"sizes": {"train": -3}}, "sizes: train is -3; give a count up to 1048576, like 500"),
        ({"threshold": 0.0}, "threshold=0.0: give a score above 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small("leg_counting", **options)


@pytest.mark.parametrize("config", [{"legs": 3}, {"min_animals": 9, "max_animals": 3}])
def test_bad_config(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="gym:leg_counting does not take config="):
        small("leg_counting", config=config).problems("train")


def test_splits_are_stable_and_disjoint() -> None:
    task = small("leg_counting")
    splits = {split: task.problems(split) for split in task.splits}
    assert {split: len(problems) for split, problems in splits.items()} == SMALL
    ids = [problem.id for problems in splits.values() for problem in problems]
    assert len(set(ids)) == len(ids)
    assert small("leg_counting").problems("train") == splits["train"]
    assert task.problems("train", limit=2) == splits["train"][:2]
    assert small("leg_counting", seed=1).problems("train") != splits["train"]
    assert small("leg_counting", sizes={**SMALL, "sft": 0}).problems("sft") == []
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task.problems("test")
    with pytest.raises(ValueError, match="limit=-1"):
        task.problems("train", limit=-1)


def test_repeated_questions_stand_in_one_split() -> None:
    config = {"min_trials": 3, "max_trials": 4}
    task = small("coin_flip", sizes={"sft": 60, "train": 60, "holdout": 60}, config=config)
    ids = [problem.id for split in task.splits for problem in task.problems(split)]
    assert len(set(ids)) == len(ids) < 180


def test_prompts() -> None:
    task = small("leg_counting")
    problem = task.problems("train", limit=1)[0]
    (message,) = task.prompt(problem)
    assert problem.data["question"].strip() in message["content"]  # type: ignore[index]
    assert "<answer> 42 </answer>" in message["content"]  # type: ignore[index]
    assert task.prompt(problem, "plain") == message["content"] + "\n"  # type: ignore[index]
    with pytest.raises(ValueError, match="unknown template 'chatt'"):
        task.prompt(problem, "chatt")


def test_verdicts() -> None:
    task = small("leg_counting")
    problem = task.problems("train", limit=1)[0]
    right = problem.data["answer"]
    verdict = task.verify(f"<think>legs</think> <answer> {right}\n</answer>", problem)
    assert (verdict.correct, verdict.well_formed, verdict.answer, verdict.error) == (True, True, right, None)
    verdict = task.verify(b"<answer>-1</answer>", problem)
    assert (verdict.correct, verdict.well_formed, verdict.answer, verdict.error) == (False, False, "-1", "it scores 0")
    assert task.verify("none", problem).error == "no <answer>…</answer>"
    assert task.verify(f"</think><answer>{right}</answer>", problem, opened=True).well_formed
    assert "over 10000 characters" in (task.verify(f"<answer>{'1' * 10_001}</answer>", problem).error or "")
    assert task.rewards("none", problem) == {"correctness": 0.0, "format": 0.0}


def test_partial_scores_are_rewards() -> None:
    task = small("leg_counting")
    problem = task.problems("train", limit=1)[0]
    text = f"<answer>it is {problem.data['answer']} legs</answer>"
    score = task.rewards(text, problem)["correctness"]
    assert 0 < score < 1
    assert not task.verify(text, problem).correct
    assert task.verify(text, problem).error == f"it scores {score:g}"
    assert small("leg_counting", threshold=score).verify(text, problem).correct


@pytest.mark.parametrize(
    ("value", "score", "error"),
    [
        (ZeroDivisionError("x"), 0.0, "the scorer raised ZeroDivisionError: x"),
        (float("nan"), 0.0, "the scorer gave no number"),
        (None, 0.0, "the scorer raised TypeError"),
        (7, 1.0, None),
        (-7, 0.0, "it scores 0"),
    ],
)
def test_scorers_may_do_anything(monkeypatch: pytest.MonkeyPatch, value: Any, score: float, error: str | None) -> None:
    task = small("leg_counting")
    problem = task.problems("train", limit=1)[0]

    def score_answer(answer: str, entry: dict[str, Any]) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(task._dataset, "score_answer", score_answer)
    assert task.rewards("<answer>1</answer>", problem)["correctness"] == score
    found = task.verify("<answer>1</answer>", problem).error
    assert found is None if error is None else error in (found or "")


@pytest.mark.parametrize("name", sorted(set(DATASETS) - SLOW - NO_DEFAULTS))
def test_every_data_set(name: str) -> None:
    task = Gym(f"gym:{name}", sizes={"sft": 0, "train": 1, "holdout": 1})
    (problem,) = task.problems("holdout")
    back = Problem(problem.id, json.loads(json.dumps(problem.data)))
    assert back == problem
    answer = problem.data["answer"]
    if name in WITHOUT_ANSWER:
        assert answer is None
    else:
        assert task.score(answer, back) == (1.0, None)
    for text in ("", "x", "-1", "[[]]", "{", "\ud800", "None", "1 2 3", "(1+1)", "0" * 99):
        verdict = task.verify(f"<answer>{text}</answer>", back)
        assert (verdict.error is None) is verdict.correct


# Answers are never run ------------------------------------------------------------------------------------------------

ATTACKS = [
    "__import__('os').system('touch {file}')",
    "open('{file}', 'w')",
    "[open('{file}', 'w') for _ in [1]]",
    "(lambda: open('{file}', 'w'))()",
    "'{{}}'.__class__.__mro__[1].__subclasses__()",
    "[x for x in ().__class__.__base__.__subclasses__()]",
]
PARSERS = ["simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"]
EVALUATORS = ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"]


@pytest.mark.parametrize("name", PARSERS + EVALUATORS)
def test_answers_are_not_run(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = small(name)
    problem = task.problems("holdout", limit=1)[0]
    assert task._parses is (name in PARSERS)
    file = tmp_path / "made"
    called = []
    monkeypatch.setattr(builtins, "open", lambda *args, **kwargs: called.append(args))
    for attack in ATTACKS:
        assert task.score(attack.format(file=file), problem)[0] < 1
    monkeypatch.undo()
    assert not called
    assert not file.exists()
    start = time.process_time()
    for bomb in (
        "9**9**9**9",
        "(9**99)**(99**9)",
        "factorial(10**9)",
        "1<<10**12",
        "2**(9*9*9*9*9*9*9)",
        "((9**9)**9)**9",
    ):
        assert task.score(bomb, problem)[0] < 1
    assert time.process_time() - start < 5


def test_own_parsers_are_left_alone() -> None:
    assert not uses_sympy(small("propositional_logic")._dataset)
    assert not uses_sympy(small("leg_counting")._dataset)


@pytest.mark.parametrize(
    "text",
    ["3", "x**2/2 + C", "-sin(2*x)*exp(x) + 1.5", "(8 - 4) * (7 - 1)", "x**(1/2)", "x % 2", "log(x, 2)", "E**(2*x)"],
)
def test_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x.y", "x[0]", "'a'", "f(x)", "x**2**3", "(x**2)**3", "x**101", "x**(9*9*9)", "1" * 14, "a if b else c"),
        *("1j", "lambda: 1", "x := 1", "__x", "sin(x=1)", "sin(*x)", "True", "...", "x**'a'", "\0"),
        *("-" * 995 + "1", "1+" * 600 + "1"),
    ],
)
def test_no_formulas(text: str) -> None:
    assert not is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "[1, -2, 'a']",
        "(1, 2)",
        "{'a': None}",
        "{1, 2}",
        "0xa + 3 * (4 - 0b1)",
        "~1 | 3 ^ 2 & 1",
        "1 << 3",
        "1/2",
        "b'a'",
    ],
)
def test_plain_values_are_evaluated(text: str) -> None:
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        *("x", "f()", "'a' * 9", "[1] * 9", "2**9", "1 << 101", "1 << (1 << 99)", "{**{}}", "1 if 1 else 0", "", "1j"),
        "x" * 10_001,
    ],
)
def test_nothing_else_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"characters|not a"):
        evaluate(text)


@settings(deadline=None)
@given(st.text(alphabet="x1290.+-*/()%, sincologE_[]'\"", max_size=60))
def test_formulas_are_safe_to_parse(text: str) -> None:
    if is_formula(text):
        with contextlib.suppress(SyntaxError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            sympy.parse_expr(text)
