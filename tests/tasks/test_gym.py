"""Data sets of reasoning-gym as tasks: problems that survive a file, answers that stay answers.

Answers are scored here in this process; test_gym_score.py has them scored where they are shut in.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import pickle
import sys
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("reasoning_gym")

import sympy
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from explorl.sandbox.codec import decode
from explorl.tasks import Problem, get_task
from explorl.tasks.gym.guard import evaluate, is_formula, replace_eval, uses_sympy
from explorl.tasks.gym.task import Gym, _answer
from explorl.tasks.gym.worker import create_dataset, decode_metadata, encode_metadata, score_answer

SLOW = {"arc_agi", "figlet_font", "group_anagrams", "knight_swap", "sudoku"}
"""Take a second or more for their first entry."""
NO_DEFAULTS = {"composite"}
"""Cannot be made without a config."""
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Many answers are right, and none is given."""
SMALL = {"sft": 6, "train": 5, "holdout": 4}


def small(name: str, **options: Any) -> Gym:
    return Gym(f"gym:{name}", **{"sizes": SMALL, "allow_exploitable": True, **options})


def test_names() -> None:
    with pytest.raises(ValueError, match="unknown task 'gym:leg_countin'; did you mean 'gym:leg_counting'"):
        Gym("gym:leg_countin")
    with pytest.raises(ValueError, match="unknown task 'leg_counting'; did you mean 'gym:leg_counting'"):
        Gym("leg_counting")


def test_data_sets_of_the_main_program(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Mine", (), {"__module__": "__main__"})
    monkeypatch.setitem(DATASETS, "mine", (kind, object))
    with pytest.raises(ValueError, match="gym:mine is registered in the main program; register it in a module"):
        Gym("gym:mine")


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
@pytest.mark.parametrize("allow_exploitable", [False, True])
def test_bad_config(config: dict[str, int], allow_exploitable: bool) -> None:
    with pytest.raises(ValueError, match="gym:leg_counting does not take config="):
        small("leg_counting", config=config, allow_exploitable=allow_exploitable).problems("train")


@pytest.mark.parametrize("datasets", [[], ["chain_sum"], [{"name": "chain_sum"}], 3])
def test_bad_composites(datasets: Any) -> None:
    with pytest.raises(ValueError, match="gym:composite does not take config="):
        small("composite", config={"datasets": datasets}, allow_exploitable=False)


def test_composites() -> None:
    parts: list[Any] = [
        {"name": "chain_sum", "weight": 1, "config": {"min_terms": 2, "max_terms": 2}},
        DatasetSpec("leg_counting", 1, {}),
    ]
    task = small("composite", config={"datasets": parts}, allow_exploitable=False)
    sources = {json.loads(problem.data["metadata"])["dict"][0][1] for problem in task.problems("sft")}
    assert sources == {"chain_sum", "leg_counting"}


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


def test_what_is_remembered_is_not_passed_on() -> None:
    task = small("leg_counting")
    problems = task.problems("train")
    _ = task._scorer
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert set(vars(again)) == {"name", "sizes", "seed", "threshold", "config", "allow_exploitable"}
    assert again.problems("train") == problems


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
        (-7, 0.0, None),
    ],
)
def test_scorers_may_do_anything(value: Any, score: float, error: str | None) -> None:
    class Anything:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

    scored = score_answer(Anything(), "1", {"answer": "1", "metadata": {}})
    assert scored[0] == score
    assert scored[1] is None if error is None else error in (scored[1] or "")


@pytest.mark.parametrize("name", sorted(set(DATASETS) - SLOW - NO_DEFAULTS))
def test_every_data_set(name: str) -> None:
    task = Gym(f"gym:{name}", sizes={"sft": 0, "train": 1, "holdout": 1}, allow_exploitable=True)
    (problem,) = task.problems("holdout")
    back = Problem(problem.id, json.loads(json.dumps(problem.data)))
    assert back == problem
    entry = {**back.data, "metadata": decode(json.loads(back.data["metadata"]))}
    dataset = create_dataset(name, {}, seed=0, size=1)
    answer = problem.data["answer"]
    if name in WITHOUT_ANSWER:
        assert answer is None
    else:
        assert score_answer(dataset, _answer(f"<answer> {answer}\r\n</answer>") or "", entry) == (1.0, None)
    for text in ("", "x", "-1", "[[]]", "{", "\ud800", "None", "1 2 3", "(1+1)", "0" * 99, "1" * 10_001):
        score, error = score_answer(dataset, text, entry)
        assert 0.0 <= score <= 1.0
        assert error is None or score == 0.0


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


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of reasoning-gym get back the ``eval`` that they had."""
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym"):
            monkeypatch.setattr(module, "eval", builtins.eval, raising=False)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("name", PARSERS + EVALUATORS)
def test_answers_are_not_run(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = create_dataset(name, {}, seed=0, size=1)
    replace_eval(dataset)
    entry = dataset[0]
    assert uses_sympy(type(dataset)) is (name in PARSERS)
    file = tmp_path / "made"
    called = []
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", lambda *args, **kwargs: called.append(args))
        for attack in ATTACKS:
            assert score_answer(dataset, attack.format(file=file), entry)[0] < 1
    assert not called
    assert not file.exists()
    start = time.process_time()
    for bomb in (
        "9**9**9**9",
        "(9**99)**(99**9)",
        "factorial(10**9)",
        "1<<10**12",
        "1<<999999999999",
        "2**(9*9*9*9*9*9*9)",
        "((9**9)**9)**9",
    ):
        assert score_answer(dataset, bomb, entry)[0] < 1
    assert time.process_time() - start < 5


@pytest.mark.usefixtures("guarded")
def test_all_modules_are_guarded() -> None:
    replace_eval(create_dataset("chain_sum", {}, seed=0, size=1))
    string_insertion = sys.modules["reasoning_gym.algorithmic.string_insertion"]
    assert vars(string_insertion)["eval"] is evaluate


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bitwise_arithmetic", {"difficulty": 10}),
        ("basic_arithmetic", {"min_digits": 13, "max_digits": 18, "operators": ["+", "-"]}),
    ],
)
def test_guarded_scorers_still_know_their_answers(name: str, config: dict[str, Any]) -> None:
    dataset = create_dataset(name, config, seed=0, size=20)
    replace_eval(dataset)
    for index in range(20):
        entry = dataset[index]
        assert score_answer(dataset, entry["answer"], entry) == (1.0, None)


def test_own_parsers_are_left_alone() -> None:
    assert not uses_sympy(DATASETS["propositional_logic"][0])
    assert not uses_sympy(DATASETS["leg_counting"][0])


@pytest.mark.parametrize(
    "answer",
    [
        "{target}e0 + 0e0*({sum})",
        "0x{target:x} + 0x0*({sum})",
        "{target}_0/1_0 + 0_0*({sum})",
        "({one})*({two})*({two}) + (E-E)*({sum})",
        "x - x + {sum}",
        "{sum} # 1 2 3",
    ],
)
def test_numbers_that_scorers_do_not_see(answer: str) -> None:
    dataset = create_dataset("countdown", {}, seed=0, size=1)
    entry = dataset[0]
    assert score_answer(dataset, entry["answer"], entry) == (1.0, None)
    target, numbers = entry["metadata"]["target"], entry["metadata"]["numbers"]
    ones = "+".join(["E/E"] * (target // 4))
    text = answer.format(target=target, sum="+".join(map(str, numbers)), one=ones, two="E/E+E/E")
    assert score_answer(dataset, text, entry)[0] == 0.0
    assert "not a formula" in (score_answer(dataset, text, entry)[1] or "")


@pytest.mark.parametrize(
    "text",
    ["3", "x**2/2 + C", "-sin(2*x)*exp(x) + 1.5", "(8 - 4) * (7 - 1)", "x**(1/2)", "x % 2", "log(x, 2)", "E**(2*x)"],
)
def test_formulas(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x.y", "x[0]", "'a'", "f(x)", "x**2**3", "(x**2)**3", "x**101", "x**(9*9*9)", "a if b else c"),
        *("1e3", "0x1f", "1_000", "2x", "1 # 2", "1 + \\\n1", "9" * 31, "1E-3"),
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
        "-(2 << 3 >> (1 + 1))",
        "7 // 2 % 3 - +1.5",
        "123456789012345678901234567890 * 9",
        "[True, (None,), {'a': [1, {2}]}, {(1, 2): ''}]",
        "1/2",
        "b'a'",
    ],
)
def test_plain_values_are_evaluated(text: str) -> None:
    assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        *("x", "f()", "'a' * 9", "[1] * 9", "2**9", "1 << (1 << 17)", "{**{}}", "1 if 1 else 0", "", "1j", "True + 1"),
        *("{[]: 1}", "{{1}}", "[*[1]]", "not 1", "f'{1}'", "[1][0]", "...", "x" * 10_001, "-" * 5_000 + "1"),
        "1 << (1 << 99)",
    ],
)
def test_nothing_else_is_evaluated(text: str) -> None:
    with pytest.raises(ValueError, match=r"characters|not a"):
        evaluate(text)


@pytest.mark.parametrize("text", ["1/0", "1 % 0", "1.5 << 2", "1 << -1", "~1.5"])
def test_arithmetic_that_python_refuses(text: str) -> None:
    with pytest.raises((ArithmeticError, TypeError, ValueError)):
        eval(text)
    with pytest.raises((ArithmeticError, TypeError, ValueError)):
        evaluate(text)


@settings(deadline=None)
@given(st.text(alphabet="1290.+-*/()%, []{}:~&|^<>'x\n", max_size=40))
def test_what_is_evaluated_is_what_python_says(text: str) -> None:
    try:
        value = evaluate(text)
    except (ArithmeticError, TypeError, ValueError):
        return
    assert repr(value) == repr(eval(text.strip()))


@settings(deadline=None)
@given(st.text(alphabet="x1290.+-*/()%, sincologE_[]'\"", max_size=60))
def test_formulas_are_safe_to_parse(text: str) -> None:
    if is_formula(text):
        with contextlib.suppress(SyntaxError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            sympy.parse_expr(text)


def test_fractions_in_the_metadata() -> None:
    """gsm_symbolic draws some of its numbers as fractions, which JSON has not."""
    task = get_task("gym:gsm_symbolic", sizes={"train": 40, "holdout": 0, "sft": 0})
    problems = task.problems("train")
    values = [
        value for problem in problems for value in decode_metadata(problem.data["metadata"])["variables"].values()
    ]
    assert any(isinstance(value, Fraction) for value in values)
    verdicts = task.verify_many([f"<answer>{problem.data['answer']}</answer>" for problem in problems], problems)
    assert all(verdict.correct for verdict in verdicts)


def test_metadata_comes_back_as_it_was() -> None:
    metadata = {"a": [Fraction(1, 3), (Fraction(-2), "x")], ("b", 1): {Fraction(5, 7)}, "c": {"d": None, "e": 1 << 70}}
    assert decode_metadata(encode_metadata("chain_sum", metadata)) == metadata


def test_metadata_that_cannot_be_stored_is_refused_in_words() -> None:
    task = get_task("gym:leg_counting")
    with pytest.raises(ValueError, match=r"gym:leg_counting .*'Decimal'.*use another data set"):
        task.problem({"question": "?", "answer": "1", "metadata": {"x": [Decimal(1)]}})  # type: ignore[attr-defined]
