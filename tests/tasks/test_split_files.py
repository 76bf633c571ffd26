"""Benchmarks whose files have problems to train on: beside each other, in a folder of their own, or by a column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from explorl.tasks import get_task
from explorl.tasks.math.benchmark_files import SOURCES

QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]
PROGRAMS = [
    {
        "task_id": f"own/{n}",
        "prompt": f"def f{n}(x):\n",
        "entry_point": f"f{n}",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
    }
    for n in range(30)
]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lay(folder: Path, stem: str, layout: str, rows: list[dict[str, Any]]) -> None:
    """Twenty rows to train on and ten held out."""
    train, held = rows[10:], rows[:10]
    if layout == "split":
        write(
            folder / f"{stem}.jsonl",
            [*({**r, "split": "train"} for r in train), *({**r, "split": "test"} for r in held)],
        )
    elif layout == "-train":
        write(folder / f"{stem}.jsonl", held)
        write(folder / f"{stem}-train.jsonl", train)
    elif layout == "-test":
        write(folder / f"{stem}.jsonl", train)
        write(folder / f"{stem}-test.jsonl", held)
    elif layout == "both":
        write(folder / f"{stem}-train.jsonl", train)
        write(folder / f"{stem}-validation.jsonl", held)
    elif layout == "folder":
        write(folder / stem / "train.jsonl", train)
        write(folder / stem / "test.jsonl", held)


LAYOUTS = ["split", "-train", "-test", "both", "folder"]
TASKS = [("math:math500", "math500", QUESTIONS), ("math:gsm8k", "gsm8k", QUESTIONS), ("code", "humaneval", PROGRAMS)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "stem", "rows"), TASKS, ids=[name for name, _, _ in TASKS])
def test_files_that_have_problems_to_train_on(
    tmp_path: Path, name: str, stem: str, rows: list[dict[str, Any]], layout: str
) -> None:
    lay(tmp_path, stem, layout, rows)
    task = get_task(name, data_dir=tmp_path)
    train, held = task.problems("train"), task.problems("holdout")
    assert (len(train), len(held)) == (20, 10)
    column = "prompt" if name == "code" else "question"
    assert [problem.data[column] for problem in held] == [row[column] for row in rows[:10]]
    assert not {problem.id for problem in train} & {problem.id for problem in held}


@pytest.mark.parametrize(("name", "stem", "rows"), TASKS, ids=[name for name, _, _ in TASKS])
def test_what_is_held_out_is_not_trained_on(tmp_path: Path, name: str, stem: str, rows: list[dict[str, Any]]) -> None:
    write(tmp_path / f"{stem}-train.jsonl", rows)
    write(tmp_path / f"{stem}-test.jsonl", rows[:10])
    task = get_task(name, data_dir=tmp_path)
    assert (len(task.problems("train")), len(task.problems("holdout"))) == (20, 10)


def test_files_for_evaluation_stay_for_evaluation(tmp_path: Path) -> None:
    write(tmp_path / "math500.jsonl", QUESTIONS)
    write(tmp_path / "humaneval.jsonl", PROGRAMS)
    write(tmp_path / "train.jsonl", QUESTIONS[:1])
    assert len(get_task("math:math500", data_dir=tmp_path).problems("holdout")) == 30
    assert len(get_task("code", data_dir=tmp_path).problems("holdout")) == 30
    with pytest.raises(ValueError, match="'math500' is for evaluation and has no 'train' split"):
        get_task("math:math500", data_dir=tmp_path).problems("train")
    with pytest.raises(ValueError, match="unknown split 'train'; known: holdout"):
        get_task("code", data_dir=tmp_path).problems("train")
    with pytest.raises(FileNotFoundError, match=r"no file aime24\.jsonl"):  # some train.jsonl is not AIME
        get_task("math:aime24", data_dir=tmp_path).problems("holdout")


def test_files_as_gsm8k_and_math_have_them(tmp_path: Path) -> None:
    solved = [{"question": row["question"], "answer": f"Twice that.\n#### {row['answer']}"} for row in QUESTIONS]
    write(tmp_path / "data" / "train.jsonl", solved[10:])
    write(tmp_path / "data" / "test.jsonl", solved[:10])
    task = get_task("math:gsm8k", data_dir=tmp_path / "data")
    assert [problem.data["answer"] for problem in task.problems("holdout")] == [str(2 * n) for n in range(10)]
    boxed = [
        {"problem": r["question"], "solution": f"It is $\\boxed{{{r['answer']}}}$.", "level": "1"} for r in QUESTIONS
    ]
    write(tmp_path / "hendrycks" / "train.jsonl", boxed)
    task = get_task("math:hendrycks", data_dir=tmp_path / "hendrycks")
    assert (len(task.problems("train")), len(task.problems("holdout"))) == (27, 3)
    assert SOURCES["hendrycks"].splits == {"train": "train", "holdout": "test"}


def test_a_bad_split_column(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k.jsonl", [{**QUESTIONS[0], "split": "trian"}])
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl, line 1: split is 'trian'; give train, sft or test"):
        get_task("math:gsm8k", data_dir=tmp_path).problems("train")
