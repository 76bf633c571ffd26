"""Mathematics: answers found and judged, problems from files and the hub, and a hundred thousand completions."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.tasks.answer_span import box_spans, last_boxed, last_hash
from explorl.tasks.base import Problem
from explorl.tasks.math.benchmark_files import SOURCES, BenchmarkProblem, read_folder, read_hub, read_jsonl
from explorl.tasks.math.form import worker_texts
from explorl.tasks.math.judge import shared_judge
from explorl.tasks.math.sympy_worker import same_answer
from explorl.tasks.math.task import Math, read_answer

DATA = Path(__file__).parents[3] / "shared" / "data"
COUNTS = {"math500": 500, "aime24": 30, "aime25": 30, "amc23": 40, "minerva": 272}
ROWS = [
    {"question": "What is 6 · 7?", "answer": "42"},
    {"question": "Half of one?", "answer": r"\frac{1}{2}"},
    {"question": "Sum of k and k + 2?", "answer": "2k+2"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "math500.jsonl", ROWS)
    write(
        tmp_path / "gsm8k.jsonl",
        [{"question": f"{n} + 1?", "answer": f"So.\n#### {n + 1:,}"} for n in range(990, 1_020)],
    )
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("text", "answer", "count"),
    [
        (r"It is $\boxed{42}$.", "42", 1),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}", 1),
        (r"\boxed{1} or \boxed{2}", "2", 2),
        (r"\boxed{\boxed{5}}", "5", 2),
        (r"\boxed 5$", "5", 1),
        (r"\boxed5.", "5", 1),
        (r"\boxed -1,024.", "-1,024", 1),
        (r"\boxed {7}", "7", 1),
        (r"\fbox{a}", "a", 1),
        (r"\\boxed{5}", "5", 1),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", 1),
        (r"\boxed{\left\{1 \right.}", r"\left\{1 \right.", 1),
        (r"\boxed{a\\}", "a\\\\", 1),
        (r"} } \boxed{7} } {", "7", 1),
        (r"\boxed{ }", "", 1),
        # an unclosed box is no answer
        (r"\boxed{5", None, 1),
        (r"\boxed{\frac{1}{2}", None, 1),
        (r"\boxed{5\}", None, 1),
        (r"\boxed{5} or \boxed{6", "5", 2),
        (r"\boxed{5 or \boxed{6}", "6", 2),
        # no box
        (r"in \boxed and so on", None, 1),
        (r"\boxedtext{5}", None, 0),
        ("boxed{5}", None, 0),
        ("42", None, 0),
        ("", None, 0),
        ("\\boxed", None, 1),
        ("\\", None, 0),
    ],
)
def test_the_last_box(text: str, answer: str | None, count: int) -> None:
    assert last_boxed(text) == (answer, count)


@pytest.mark.parametrize(
    ("completion", "gold", "correct"),
    [
        (r"$\boxed{1}$ and $\boxed{-2}$", "1,-2", True),
        (r"First \boxed{4}. So $\boxed{x = 1}$, $\boxed{x = -2}$.", r"\{-2, 1\}", True),
        (r"\boxed{1} \text{ or } \boxed{-2}", "1,-2", True),
        (r"\boxed{1}, \boxed{-2}, \boxed{5}", "1,-2", False),
        (r"\boxed{1}, \boxed{2}", "1,-2", False),
        (r"\boxed{1}. No: it is \boxed{-2}", "1,-2", False),
        (r"\boxed{1} and \boxed{1,-2}", "1,-2", True),  # as many boxes, but the last has all
        (r"\boxed{5}, \boxed{7}", "7", True),
        (r"\boxed{5}, \boxed{7}", "5", False),
    ],
)
def test_boxes_side_by_side_are_a_list(completion: str, gold: str, correct: bool) -> None:
    verdict = Math(limit=20.0, workers=1).verify(completion, Problem("x", {"question": "?", "answer": gold}))
    assert verdict.correct is correct
    assert not verdict.well_formed


@pytest.mark.parametrize(
    ("text", "answer", "count"),
    [
        ("So.\n#### 42", "42", 1),
        ("#### 1\n####  1,024 \nbye", "1,024", 2),
        ("it is #### 5", "5", 1),
        ("#### ", "", 1),
        ("####\n5", "", 1),
        ("### 5", None, 0),
    ],
)
def test_the_last_hash(text: str, answer: str | None, count: int) -> None:
    assert last_hash(text) == (answer, count)


def test_verdicts(folder: Path) -> None:
    task = Math(data_dir=folder)
    number, half, sum_ = task.problems("holdout")
    verdict = task.verify(r"6 · 7 is $\boxed{42.0}$", number)
    assert (verdict.correct, verdict.well_formed, verdict.answer, verdict.error) == (True, True, "42", None)
    assert task.verify(rb"$\boxed{\dfrac12}$", half).answer == task.verify(r"\boxed{1/2}", half).answer == "1/2"
    wrong = task.verify(r"\boxed{43}", number)
    assert (wrong.correct, wrong.well_formed, wrong.answer) == (False, True, "43")
    assert wrong.error == "another answer than the right one"
    twice = task.verify(r"\boxed{1} \boxed{42}", number)
    assert twice.correct
    assert not twice.well_formed
    for completion in ("42", r"\boxed{42", r"\boxed{}", "#### 42", "", b"\xff"):
        none = task.verify(completion, number)
        assert (none.correct, none.well_formed, none.answer) == (False, False, None)
        assert none.error == r"no \boxed{…} with an answer in it"
    assert task.verify(r"\boxed{2(k+1)}", sum_).correct
    assert task.verify(r"\boxed{" + "1" * 2_000 + "}", number).error == "the answer is longer than 1,000 characters"
    assert not task.verify(" " * 2_000_000 + r"\boxed{42}", number).well_formed
    assert task.verify(" " * 2_000_000 + r"\boxed{42}", number).correct
    assert task.verify("\\boxed{\ud800}", number).answer == "?"
    assert task.reward(r"\boxed{42}", number, opened=True) == pytest.approx(1.1)


def test_the_hash_style(folder: Path) -> None:
    task = Math(dataset="gsm8k", data_dir=folder, style="hash")
    problem = task.problem("999 + 1?", "1,000")
    assert task.verify("It is.\n#### 1000", problem).correct
    assert task.verify("It is.\n#### $1,000", problem).well_formed
    assert not task.verify("#### 999\n#### 1000", problem).well_formed
    assert task.verify(r"\boxed{1000}", problem).error == "no answer after ####"


def test_an_answer_that_would_hang_is_wrong(folder: Path) -> None:
    task = Math(data_dir=folder, limit=1.5, workers=1)
    problem = task.problems("holdout")[0]
    verdict = task.verify(r"\boxed{9^{9^{9^{9}}}}", problem)
    assert (verdict.correct, verdict.answer) == (False, "9^{9^{9^9}}")
    assert verdict.error == "the answer is not accepted: a power of numbers, which the right answer does not have"
    assert task.verify(r"\boxed{42}", problem).correct


def test_slow_answers_leave_time_for_the_others() -> None:
    """Each union of 38 intervals would take seconds; an answer after them that takes one has that second."""
    task = Math(limit=20.0, workers=2)
    unions = [r"\cup".join(f"({2 * n + first},{2 * n + first + 1})" for n in range(38)) for first in range(8)]
    union = task.problem("Where is it positive?", r"(-\infty,2)\cup(3,\infty)")
    total = task.problem("Add them.", r"\sum_{k=1}^n k^5 + \sum_{k=1}^n k^6")
    answers = [*unions, r"\sum_{j=0}^{n-1} (j+1)^5 + \sum_{j=0}^{n-1} (j+1)^6"]
    verdicts = task.verify_many([rf"\boxed{{{answer}}}" for answer in answers], [union] * 8 + [total])
    assert [verdict.correct for verdict in verdicts] == [False] * 8 + [True]


def test_many_at_once(folder: Path) -> None:
    task = Math(data_dir=folder, workers=2)
    problems = task.problems("holdout")
    completions = [rf"\boxed{{{answer}}}" for answer in ("42", "0.5", "k+k+2", "nothing", "43")]
    verdicts = task.verify_many([*completions, "no box"], [*problems, *problems], opened=[False] * 6)
    assert [verdict.correct for verdict in verdicts] == [True, True, True, False, False, False]
    assert verdicts[0] == task.verify(completions[0], problems[0])
    assert task.verify_many([], []) == []
    with pytest.raises(ValueError, match="zip"):
        task.verify_many(["x"], [])


def test_prompts(folder: Path) -> None:
    task = Math(data_dir=folder)
    problem = task.problems("holdout")[0]
    text = "What is 6 · 7?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert task.prompt(problem) == task.prompt(problem, "boxed") == text + "\n"
    assert task.prompt(problem, "chat") == [{"role": "user", "content": text}]
    hashed = Math(data_dir=folder, style="hash")
    assert "#### 42" in hashed.prompt(problem)
    assert "#### 42" in hashed.prompt(problem, "chat")[0]["content"]  # type: ignore[index]
    with pytest.raises(ValueError, match="template 'hash' needs style='hash', not style='boxed'"):
        task.prompt(problem, "hash")
    with pytest.raises(ValueError, match="unknown template 'box'; did you mean 'boxed'"):
        task.prompt(problem, "box")
    json.dumps(task.rows("holdout"))


def test_splits(folder: Path) -> None:
    task = Math(data_dir=folder)
    assert len(task.problems("holdout", limit=2)) == 2
    with pytest.raises(ValueError, match="'math500' is for evaluation and has no 'train' split; ask for 'holdout'"):
        task.problems("train")
    with pytest.raises(ValueError, match="unknown split 'test'"):
        task.problems("test")
    with pytest.raises(ValueError, match="limit=-2"):
        task.problems("holdout", limit=-2)
    grade_school = Math(dataset="gsm8k", data_dir=folder)
    train, holdout = grade_school.problems("train"), grade_school.problems("holdout")
    assert (len(train), len(holdout)) == (27, 3)
    assert not {problem.id for problem in train} & {problem.id for problem in holdout}
    assert train[0].data["answer"].replace(",", "") == str(int(train[0].data["question"].split()[0]) + 1)
    assert Math(dataset="gsm8k", data_dir=folder).problems("holdout") == holdout
    assert Math(dataset="gsm8k", data_dir=folder, seed=1).problems("holdout") != holdout
    assert pickle.loads(pickle.dumps(grade_school)) == grade_school


def test_a_test_file_is_held_out(folder: Path) -> None:
    write(folder / "gsm8k-test.jsonl", [{"question": "990  + 1?", "answer": "#### 991"}] * 2)
    task = Math(dataset="gsm8k", data_dir=folder)
    assert len(task.problems("holdout")) == 1
    assert len(task.problems("train")) == 29  # the one that is held out is not in it


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="unknown dataset 'math5000'; did you mean 'math500'"):
        Math(dataset="math5000")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown style 'box'"):
        Math(style="box")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit=-1"):
        Math(limit=-1)
    with pytest.raises(ValueError, match="workers=0"):
        Math(workers=0)


def test_fields_of_files(tmp_path: Path) -> None:
    rows = [
        {"problem": " What? ", "answer": 27, "solution": r"\boxed{28}"},
        {"question": "What?", "answer": 27.0},
        {"question": "What?", "solution": r"\boxed{1}, so \boxed{\frac{1}{2}} cm"},
        {"question": "What?", "answer": "It is 3.\n#### 1,003"},
    ]
    write(tmp_path / "minerva.jsonl", rows)
    assert read_jsonl(tmp_path / "minerva.jsonl") == [
        BenchmarkProblem("What?", answer) for answer in ("27", "27.0", r"\frac{1}{2}", "1,003")
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("6 · 7", "not a JSON object: '6 · 7"),
        ('["6 · 7"]', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"answer": "42"}', "no field 'question'"),
        ('{"question": "", "answer": "42"}', "question is ''"),
        ('{"question": 6, "answer": "42"}', "question is 6"),
        ('{"question": "x"}', "no field 'answer' or 'solution'"),
        ('{"question": "x", "solution": "y"}', r"no \\boxed in solution 'y'; end it like"),
        ('{"question": "x", "answer": " "}', "answer is ' '"),
        ('{"question": "x", "answer": true}', "answer is True; give a text like '42'"),
        ('{"question": "x", "answer": ["42"]}', r"answer is \['42'\]"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "aime24.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"aime24\.jsonl, line 3: {message}"):
        read_jsonl(file)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file amc23\.jsonl in "):
        read_folder(tmp_path, "amc23")
    (tmp_path / "amc23.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"amc23\.jsonl: no problems"):
        Math(dataset="amc23", data_dir=tmp_path).problems("holdout")


def test_the_hub_offline_says_what_to_do() -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot load math-ai/aime25 .* --data-dir .* aime25\.jsonl"):
        Math(dataset="aime25").problems("holdout")


@pytest.mark.parametrize("dataset", SOURCES)
def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"problem": f"{split}: what is 6 · 7?", "answer": "#### 42"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_hub(dataset)["holdout"][0].answer == "42"
    source = SOURCES[dataset]
    assert asked == [(source.hub_id, source.config, split) for split in source.splits.values()]
    assert len(Math(dataset=dataset).problems("holdout")) == 1  # type: ignore[arg-type]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
@pytest.mark.parametrize("dataset", COUNTS)
def test_every_right_answer_is_right(dataset: str) -> None:
    task = Math(dataset=dataset, data_dir=DATA)  # type: ignore[arg-type]
    problems = task.problems("holdout")
    assert len(problems) == len({problem.id for problem in problems}) == COUNTS[dataset]
    verdicts = task.verify_many([f"So it is $\\boxed{{{problem.data['answer']}}}$." for problem in problems], problems)
    assert all(verdict.correct and verdict.well_formed and verdict.answer for verdict in verdicts)
    assert len({verdict.answer for verdict in verdicts}) > 20


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the real problems are not here")
@pytest.mark.parametrize("dataset", COUNTS)
def test_math_verify_agrees_that_every_right_answer_is_right(dataset: str) -> None:
    """Without the fast path, which takes equal texts for the same."""
    task = Math(dataset=dataset, data_dir=DATA)  # type: ignore[arg-type]
    golds = [problem.data["answer"] for problem in task.problems("holdout")]
    trees = {gold: texts for gold in golds if (texts := worker_texts(gold, gold))[0].startswith("[")}  # no words
    assert len(trees) > 0.95 * len(set(golds))
    assert [gold for gold, texts in trees.items() if not same_answer(*texts)] == []


@given(st.text())
def test_no_text_raises(text: str) -> None:
    for completion in (text, f"\\boxed{{{text}}}", f"{text}\\boxed{{", f"\\boxed{text}", f"#### {text}"):
        for style in ("boxed", "hash"):
            answer, _ = read_answer(completion, style)
            (answer or "").encode()
        found = box_spans(completion)
        assert all(span is None or 0 <= span[0] <= span[1] <= len(completion) for span in found)
    if "\\" not in text and "{" not in text and "}" not in text:
        assert last_boxed(f"{text}\\boxed{{{text}}}{text}") == (text.strip(), 1)


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    assert read_answer(data + b" \\boxed{42}")[0] == "42"
    assert read_answer(data.replace(b"\\", b""))[0] is None


@given(
    st.recursive(st.just("x"), lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"))
)
def test_nested_braces(inner: str) -> None:
    assert last_boxed(f"a \\boxed{{{inner}}} b") == (inner, 1)
    assert last_boxed(f"a \\boxed{{{inner} b") == (None, 1)


MEGABYTE = 1_000_000
HOSTILE = {
    "boxes": "\\boxed{" * 140_000,
    "nested": "\\boxed{" * 100_000 + "5" + "}" * 100_000,
    "braces": "\\boxed{" + "{" * MEGABYTE,
    "closing": "\\boxed{5}" + "}" * MEGABYTE,
    "backslashes": "\\boxed{" + "\\" * MEGABYTE,
    "spaces": "\\boxed" + " " * MEGABYTE,
    "boxes and spaces": ("\\boxed" + " " * 100) * 9_000,
    "digits": "\\boxed " + "9" * MEGABYTE,
    "commas": "\\boxed 5" + "," * MEGABYTE,
    "long answer": "\\boxed{" + "5" * MEGABYTE + "}",
    "hashes": "#" * MEGABYTE,
    "surrogates": "\\boxed{" + "\ud800" * MEGABYTE + "}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name: str) -> None:
    task, problem = Math(), Problem("x", {"question": "?", "answer": "42"})
    started = time.process_time()
    assert not task.verify(HOSTILE[name], problem).correct
    assert not Math(style="hash").verify(HOSTILE[name], problem).correct
    assert time.process_time() - started < 8.0


TOKENS = [
    *"0123456789+-*/^_=<>(){}[]|!,.:;'\"$%&~ xyzabeiπ", "\\frac", "\\sqrt", "\\boxed", "\\text", "\\left", "\\right",
    "\\cdot", "\\times", "\\pm", "\\cup", "\\in", "\\infty", "\\sum", "\\int", "\\begin{pmatrix}", "\\end{pmatrix}",
    "\\{", "\\}", "\\circ", "10", "1/2", "e5", "\n", "\0", "\ud800", "é", "####", "and", "or", "{1}", "^{2}", "_{3}",
    "\\pi", "\\\\",
]  # fmt: skip
GOLDS = [
    "42", r"\frac{14}{3}", "p - q", r"\left( 3, \frac{\pi}{2} \right)", "x=5", "1,-2", r"90^\circ", "(3,4]", "6 - 5i",
    r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", "4.5e33", r"1 \pm \sqrt{19}", r"\text{east}",
]  # fmt: skip


def completions(count: int, seed: int) -> Iterator[tuple[str | bytes, str, bool]]:
    """Completions that a policy might write, the right answer, and whether they may be right."""
    rng = Random(seed)
    for _ in range(count):
        gold = rng.choice(GOLDS)
        soup = "".join(rng.choices(TOKENS, k=rng.randrange(1, 12)))
        kind = rng.randrange(8)
        if kind == 0:
            yield rng.randbytes(rng.randrange(60)), gold, False
        elif kind == 1:  # the right answer, but not in a box
            yield f"The answer is ${gold}$. {soup}".replace("\\boxed", ""), gold, False
        elif kind == 2:  # in a box that is not closed
            yield f"{soup} \\boxed{{{gold}".replace("}", ""), gold, False
        elif kind == 3:
            yield f"{gold} \\boxed{{{''.join(rng.choices('  .,;:!?~$%', k=rng.randrange(6)))}}}", gold, False
        elif kind == 4:
            number = rng.randrange(-99, 99)
            yield f"\\boxed{{{number}}}", gold, (gold, number) in {("42", 42), ("x=5", 5), (r"90^\circ", 90)}
        elif kind == 5:
            yield f"so $\\boxed{{{soup}}}$", gold, True
        else:
            at = rng.randrange(len(gold))
            cut = gold[:at] + rng.choice([*TOKENS, gold[at:][:2], ""]) + gold[at + rng.randrange(2) :]
            yield f"so $\\boxed{{{cut}}}$.", gold, True


def fuzz(count: int, limit: float, seed: int) -> list[float]:
    """The seconds of all comparisons."""
    task, judge = Math(limit=limit, workers=2), shared_judge(2, limit)
    cases = list(completions(count, seed))
    seconds: list[float] = []
    for start in range(0, count, 1_000):
        part = cases[start : start + 1_000]
        problems = [Problem("x", {"question": "?", "answer": gold}) for _, gold, _ in part]
        verdicts = task.verify_many([text for text, _, _ in part], problems)
        for (text, gold, may_be_right), verdict in zip(part, verdicts, strict=True):
            assert may_be_right or not verdict.correct, (text, gold)
            json.dumps([verdict.answer, verdict.error]).encode()
            (verdict.answer or "").encode()
        stated = [(gold, read_answer(text)[0]) for text, gold, _ in part]
        pairs = [(gold, answer) for gold, answer in stated if answer is not None]
        seconds += [judgement.seconds for judgement in judge.judge_many(pairs)]  # as remembered
    return seconds


def test_completions_of_all_kinds() -> None:
    assert max(fuzz(400, 10.0, seed=1)) < 11.0


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_a_hundred_thousand_completions() -> None:
    seconds = fuzz(100_000, 2.0, seed=2)
    slow = [second for second in seconds if second > 0]
    print(f"{len(slow)} compared by workers, {sum(s >= 2 for s in slow)} too long, longest {max(slow):.2f} s")
    assert max(slow) < 3.0  # the limit, and what a busy machine takes to see that it is over
