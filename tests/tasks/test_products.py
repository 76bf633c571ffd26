"""Products: problems, verdicts, and reference solutions whose calls really give what stands behind them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.models import tiny_tokenizer
from explorl.rollout.tools import calculator_tool, find_call, output_block, python_tool
from explorl.tasks import Problem, Task, get_task
from explorl.tasks.products import trace

SIZES = {"sft": 60, "train": 30, "holdout": 20}
PROBLEM = Problem("products:347*286+51", {"expression": "347*286+51", "value": 99293})


@pytest.fixture(scope="module")
def task() -> Task:
    return get_task("products", sizes=SIZES)


def test_problems_are_right_distinct_and_stable(task: Task) -> None:
    problems = {split: task.problems(split) for split in task.splits}
    assert {split: len(part) for split, part in problems.items()} == SIZES
    everything = [problem for part in problems.values() for problem in part]
    assert len({problem.id for problem in everything}) == len(everything)
    for problem in everything:
        assert eval(problem.data["expression"]) == problem.data["value"]
        assert problem.data["value"] >= 100 * 100 - 999
        assert json.loads(json.dumps(problem.data)) == problem.data
    more = get_task("products", sizes={**SIZES, "train": 50, "sft": 90})
    assert more.problems("holdout") == problems["holdout"]
    assert task.problems("train", limit=3) == problems["train"][:3]
    assert get_task("products", sizes=SIZES, seed=1).problems("train") != problems["train"]


def test_prompts(task: Task) -> None:
    assert task.prompt(PROBLEM) == "347*286+51\n"
    messages = task.prompt(PROBLEM, "chat")
    assert isinstance(messages, list)
    assert "What is 347*286+51?" in messages[0]["content"]
    with pytest.raises(ValueError, match="unknown template 'ters'; did you mean 'terse'"):
        task.prompt(PROBLEM, "ters")


@pytest.mark.parametrize(
    ("answer", "correct", "normal", "error"),
    [
        ("99293", True, "99293", None),
        (" 99293.\n", True, "99293", None),
        ("= 99293", True, "99293", None),
        ("99,293", True, "99293", None),
        ("099293", True, "99293", None),
        ("99294", False, "99294", "it is 99293, not 99294"),
        ("-99293", False, "-99293", "it is 99293, not -99293"),
        ("9,9293", False, None, "the answer is not a whole number"),
        ("347*286+51", False, None, "the answer is not a whole number"),
        ("99293 or 5", False, None, "the answer is not a whole number"),
        ("٩٩٢٩٣", False, None, "the answer is not a whole number"),
        ("9" * 100_000, False, None, "the answer is not a whole number"),
        ("", False, None, "the answer is not a whole number"),
    ],
)
def test_verdicts(task: Task, answer: str, correct: bool, normal: str | None, error: str | None) -> None:
    verdict = task.verify(f"<think>x</think><answer>{answer}</answer>", PROBLEM)
    assert (verdict.correct, verdict.well_formed, verdict.answer, verdict.error) == (correct, True, normal, error)


@given(st.text() | st.binary())
def test_any_completion_gets_a_verdict(text: str | bytes) -> None:
    assert not get_task("products").verify(text, PROBLEM).correct


@pytest.mark.parametrize("template", ["terse", "chat"])
def test_reference_solutions_are_correct(task: Task, template: str) -> None:
    by_prompt: dict[str, Problem] = {str(task.prompt(problem, template)): problem for problem in task.problems("sft")}
    examples = list(task.examples(200, template=template))
    assert examples == list(task.examples(200, template=template))
    tool = python_tool() if template == "chat" else calculator_tool()
    for example in examples:
        verdict = task.verify(example["completion"], by_prompt[str(example["prompt"])])
        assert verdict.correct
        assert verdict.well_formed
    share = sum(find_call(example["completion"], tool) is not None for example in examples) / len(examples)
    assert 0.35 < share < 0.65  # half of 200: five standard deviations


@pytest.mark.parametrize("python", [False, True])
def test_calls_give_what_stands_behind_them(python: bool) -> None:
    """Replayed with a real interpreter, a trace comes out as it was written."""
    tool = python_tool() if python else calculator_tool()
    tree: Any = ("+", ("*", 347, 286), 51)
    with tool.pool(warm=0) as pool:
        for calls in (1, 2):
            written, position, made = trace(tree, calls, python=python), 0, 0
            interpreter = pool.open()
            while (call := find_call(written, tool, position)) is not None:
                block = output_block(interpreter.run(call.source), tool, written[: call.end])
                assert written[call.end :].startswith(block)
                position, made = call.end + len(block), made + 1
            assert made == calls
    assert find_call(trace(tree, 0), tool) is None


def test_tiny_policy_can_write_it(task: Task) -> None:
    tokenizer = tiny_tokenizer()
    for example in task.examples(100):
        text = example["prompt"] + example["completion"]
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert len(tokens) <= 90
    chat = next(iter(get_task("products", sizes=SIZES, by_heart=0).examples(1, template="chat")))
    assert tokenizer.unk_token_id not in tokenizer.encode(chat["completion"])  # it could even write Python


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": (9, 3)}, r"numbers=\(9, 3\): give 2 ≤ smallest ≤ largest"),
        ({"by_heart": 2}, "by_heart=2: give a share from 0 to 1, like 0.5"),
        ({"sizes": {"test": 3}}, "unknown split 'test'"),
        ({"sizes": {"sft": -1}}, "size of split 'sft' is -1; give a count like 1000"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task("products", **options)


def test_too_few_problems() -> None:
    with pytest.raises(ValueError, match=r"numbers=\(2, 4\) yields about 63 problems, but the splits need 25000"):
        get_task("products", numbers=[2, 4]).problems("train")
    with pytest.raises(ValueError, match="the sft split of 'products' is empty"):
        list(get_task("products", sizes={"sft": 0}).examples(1))
