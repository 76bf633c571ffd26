"""What counts as a violation of the form: by the mark that an answer has, or by the task's own verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from explorl.evaluation import protocol
from explorl.evaluation.completions import answer_mark_of, completion_columns
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.results_folder import load_evaluation
from explorl.evaluation.sample import PromptedProblem, VerifiedSample
from explorl.rollout.backends.generate import Completion
from explorl.tasks import Problem, get_task


def rows_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def violations(task: Any, problem: Problem, text: str) -> int:
    prompt = task.prompt(problem)
    completion = Completion(0, 0, text, [], "stop")
    sample = VerifiedSample(
        0, 0, PromptedProblem(problem, prompt, prompt, False), completion, task.verify(text, problem)
    )
    return int(completion_columns([sample], answer_mark_of(task, prompt))["format_violations"][0])


@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
        ("last_number", "3 + 4 is 7", "seven"),
        ("last_line", "so\n7", ""),
        ("whole", "7", " "),
        ("boxed", r"it is \boxed{7}", r"\boxed{7} or \boxed{8}"),
        ("tags", "<answer>7</answer>", "7"),
        ("hash", "#### 7", "7"),
    ],
)
def test_each_style_has_its_own_form(style: str, good: str, bad: str, tmp_path: Path) -> None:
    task = get_task("jsonl", path=rows_file(tmp_path, {"prompt": "3 + 4?", "answer": 7}), holdout=0, style=style)
    (problem,) = task.problems("train")
    assert violations(task, problem, good) == 0
    assert violations(task, problem, bad) == 1


def test_a_letter_needs_no_box(tmp_path: Path) -> None:
    """In a file without a style, whose other rows are asked for a box."""
    rows = [{"prompt": "3 + 4?", "answer": 7}, {"prompt": "Which?", "choices": ["7", "8"], "answer": "A"}]
    task = get_task("jsonl", path=rows_file(tmp_path, *rows), holdout=0)
    number, letter = sorted(task.problems("train"), key=lambda problem: "choices" in problem.data)
    assert violations(task, letter, "The answer is (A).") == 0
    assert violations(task, number, "The answer is 7.") == 1


def test_marks_are_the_tasks_or_the_prompts() -> None:
    countdown = get_task("countdown-mini")
    assert answer_mark_of(countdown, "1 2 3=6\n") == "<answer>"
    assert answer_mark_of(object(), r"Put it within \boxed{}.") == r"\boxed{"  # type: ignore[arg-type]
    assert answer_mark_of(object(), "Answer in <answer> </answer> tags.") == "<answer>"  # type: ignore[arg-type]
    assert answer_mark_of(object(), "How many?") is None  # type: ignore[arg-type]


def test_an_evaluation_without_a_mark(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 4?", "answer": n + 4} for n in range(4)]
    options = {"path": str(rows_file(tmp_path, *rows)), "style": "last_number", "holdout": 2}
    how = protocol("plain", samples=4, max_tokens=8)
    (found,) = run_evaluation(["tiny"], ["jsonl"], how, tmp_path / "out", task_options=options)
    kept = load_evaluation(found.folder, ("completion",)).rows
    assert list(kept["format_violations"]) == [int(not formed) for formed in kept["well_formed"]]
    assert any(any(digit in text for digit in "0123456789") for text in kept["completion"])
    assert 0 in kept["format_violations"], "a number was stated, and nothing else was asked for"
