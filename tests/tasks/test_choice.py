"""Multiple choice: what counts as choosing an option, the order of options, and the files they come from."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.tasks.base import Problem
from explorl.tasks.choice import Choice, verify
from explorl.tasks.choice_files import HUB_ID, Question, read_file, read_hub
from explorl.tasks.choice_letters import LETTERS, chosen

ROWS = [
    {"question": "Which is a metal?", "choices": ["iron", "neon", "sulphur", "helium"], "answer": "iron"},
    {"question": "Which is even?", "choices": ["3", "7", "8"], "answer": 2},
    {"question": "Which is a vowel?", "choices": ["b", "c", "d", "e", "f", "g", "h", "j", "k", "l"], "answer": 3},
]
GPQA = {
    "Question": "Which planet is nearest to the Sun?",
    "Correct Answer": "Mercury",
    "Incorrect Answer 1": "Venus",
    "Incorrect Answer 2": "Earth, the third",
    "Incorrect Answer 3": "Mars\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "choice.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        # each form, tolerant of case and markdown
        ("Answer: C", "C"), ("answer: c", "C"), ("**Answer:** C", "C"), ("Answer: **C**", "C"), ("**Answer: C**", "C"),
        ("Answer: (C)", "C"), ("Answer: [C]", "C"), ("Answer: $C$", "C"), (r"Answer: $\text{C}$", "C"),
        (r"final answer: \(C\)", "C"), ("Answer: __C__", "C"), ("Answer：C", "C"), ("### Answer\nC", "C"),
        ("Answer:\nC", "C"), ("Answer = C", "C"), ("<answer>C</answer>", "C"), ("Answer: C. iron", "C"),
        ("Answer: C) iron", "C"), ("Answer: C: iron", "C"), ("Answer: C – iron", "C"), ("Answer: C, I think", "C"),
        ("The answer is C.", "C"), ("The answer is: C", "C"), ("the answer is c.", "C"), ("The answer is (C) as", "C"),
        ("The answer is C because …", "C"), ("The answer is A because …", "A"), ("The answer is A, since", "A"),
        ("The answer would be C.", "C"), ("The correct option is D.", "D"), ("The answer is option D", "D"),
        (r"so $\boxed{C}$.", "C"), (r"\boxed{\text{C}}", "C"), (r"\boxed{\textbf{(C)}}", "C"), (r"\boxed{c}", "C"),
        (r"\boxed{C) 5 m/s}", "C"), (r"\fbox{C.}", "C"),
        ("hm\n\nC", "C"), ("hm\nC.", "C"), ("hm\n**C**\n\n", "C"), ("hm\n(c)", "C"), ("C", "C"), ("A", "A"),
        ("So it must be (C).", "C"), ("(C)", "C"), ("(C) 7", "C"),
        # the last statement counts, and a letter in brackets is none where an answer is stated
        ("Answer: A. No!\nAnswer: B", "B"), (r"\boxed{A}, no. Answer: B", "B"), (r"Answer: B, no: \boxed{A}", "A"),
        ("The answer is C. For (A) is wrong.", "C"), ("Answer: B\n\nC", "C"),
        # words and symbols
        ("Answer: A good one would be iron", None), ("The answer is a number", None), ("The answer is a", None),
        ("I think A is nice", None), ("Answer: I think so", None), ("Answer: I don't know", None), ("so\na", None),
        ("The answer is I'm not sure", None), ("A man walks. I see.", None), (r"\boxed{A good one}", None),
        ("The answer is C = 5", None), ("Answer: D-glucose", None), ("Answer: C6H12O6", None), ("P(A)", None),
        ("Answer: i.e. this", None), ("The answer is c, the speed of light", None), (r"\boxed{B vitamins}", None),
        # neither here nor there
        ("Answer: A or B", None), ("Answer: A/B", None), ("Answer: A, B", None), ("Answer: (A) and (B)", None),
        ("Answer: A.\nAnswer: A or B", None), ("(A) or (B)", None), ("(A) 5\n(B) 6\n(C) 7", None), ("A) 5\nB) 6", None),
        ("The answer is not A.", None), ("wrong answer: A", None), ("Answer C is incorrect.", None),
        ("Answer: X", None), ("Answer: K", None), (r"\boxed{}", None), (r"\boxed{C", None), ("", None), (" \n ", None),
    ],
)  # fmt: skip
def test_letters_by_hand(completion: str, letter: str | None) -> None:
    choice = chosen(completion)
    assert choice.letter == letter
    assert (choice.error is None) is (letter is not None)


def test_the_verdict_is_about_the_text_of_the_option() -> None:
    choices = ["iron \n oxide", "neon"]
    verdict = verify("hm\nAnswer: A", choices, 0)
    assert verdict.correct
    assert verdict.well_formed
    assert verdict.answer == "iron oxide"
    assert verdict.error is None
    wrong = verify("Answer: B", choices, 0)
    assert (wrong.correct, wrong.well_formed, wrong.answer, wrong.error) == (
        False, True, "neon", "it chooses B, another option",
    )  # fmt: skip
    beyond = verify("Answer: C", choices, 0)
    assert (beyond.correct, beyond.well_formed, beyond.answer) == (False, False, None)
    assert beyond.error == "it chooses C, but the options end with B"
    assert verify("no idea", choices, 0).error == "it chooses no option"
    assert verify("Answer: A or B", choices, 0).error == "it chooses more than one option"
    twice = verify(b"Answer: A\nAnswer: A", choices, 0)
    assert twice.correct
    assert not twice.well_formed


def test_options_are_shuffled_the_same_everywhere(folder: Path) -> None:
    first = Choice(data_dir=folder).problems("holdout")
    assert [problem.data["choices"] for problem in first] == [
        ["helium", "sulphur", "neon", "iron"],
        ["3", "8", "7"],
        ["l", "h", "j", "g", "d", "f", "c", "b", "k", "e"],
    ]
    for problem, row in zip(first, ROWS, strict=True):
        assert sorted(problem.data["choices"]) == sorted(row["choices"])  # type: ignore[call-overload]
        right = row["answer"] if isinstance(row["answer"], str) else row["choices"][row["answer"]]  # type: ignore[index, call-overload]
        assert problem.data["choices"][problem.data["answer"]] == right
    other = Choice(data_dir=folder, seed=1).problems("holdout")
    assert [problem.id for problem in other] == [problem.id for problem in first]
    assert [problem.data["choices"] for problem in other] != [problem.data["choices"] for problem in first]
    turned = Choice().problem("Which is  a metal?", ["helium", "sulphur", "neon", "iron"], 3)
    assert turned.id == first[0].id
    assert turned.data["choices"] == first[0].data["choices"]
    json.dumps([dict(problem.data) for problem in first])


def test_prompts(folder: Path) -> None:
    task = Choice(data_dir=folder)
    problem = task.problems("holdout", limit=1)[0]
    text = task.prompt(problem)
    assert isinstance(text, str)
    assert text.startswith("Which is a metal?\n\nA) helium\nB) sulphur\nC) neon\nD) iron\n\nPlease reason")
    assert text.endswith("where X is the letter of the right option.\n")
    assert task.prompt(problem, "chat") == [{"role": "user", "content": text.rstrip()}]
    assert chosen(text).letter is None  # a policy that repeats its prompt chooses nothing
    with pytest.raises(ValueError, match="unknown template 'plian'; did you mean 'plain'"):
        task.prompt(problem, "plian")
    assert task.reward("Answer: D", problem) == pytest.approx(1.1)
    assert task.rows("holdout", limit=2)[1]["data"]["answer"] == 1


def test_splits_and_limits(folder: Path) -> None:
    task = Choice(data_dir=folder)
    assert len(task.problems("holdout", limit=2)) == 2
    with pytest.raises(ValueError, match="unknown split 'train'; known: holdout"):
        task.problems("train")
    with pytest.raises(ValueError, match="limit=-1"):
        task.problems("holdout", limit=-1)


def test_gpqas_own_columns(tmp_path: Path) -> None:
    (tmp_path / "gpqa.jsonl").write_text(json.dumps(GPQA))
    (tmp_path / "gpqa.csv").write_text(
        "\ufeffRecord,Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3\n"
        'x,Which planet is nearest to the Sun?,Mercury,Venus,"Earth, the third","Mars\n"\n'
    )
    expected = [Question(GPQA["Question"], ("Mercury", "Venus", "Earth, the third", "Mars"), 0)]
    assert read_file(tmp_path / "gpqa.jsonl") == read_file(tmp_path / "gpqa.csv") == expected
    tasks = [Choice(data_dir=tmp_path, file=name) for name in ("gpqa.jsonl", "gpqa.csv")]
    assert tasks[0].problems("holdout") == tasks[1].problems("holdout")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Which?", "not a JSON object"),
        ('{"choices": ["a", "b"], "answer": 0}', "no field 'question'"),
        ('{"question": "x", "answer": 0}', "no field 'choices'"),
        ('{"question": "x", "choices": ["a", "b"]}', "no field 'answer'"),
        ('{"question": " ", "choices": ["a", "b"], "answer": 0}', "question is ' '"),
        ('{"question": "x", "choices": "ab", "answer": 0}', "choices is 'ab'; give a list of texts"),
        ('{"question": "x", "choices": ["a", 2], "answer": 0}', "choices is"),
        ('{"question": "x", "choices": ["a", ""], "answer": 0}', "choices is"),
        ('{"question": "x", "choices": ["a"], "answer": 0}', "give 2 to 10 that differ"),
        ('{"question": "x", "choices": ["a", "a "], "answer": 0}', "give 2 to 10 that differ"),
        (json.dumps({"question": "x", "choices": list("abcdefghijk"), "answer": 0}), "give 2 to 10 that differ"),
        ('{"question": "x", "choices": ["a", "b"], "answer": 2}', "answer is 2; give a number from 0 to 1 or one of"),
        ('{"question": "x", "choices": ["a", "b"], "answer": -1}', "answer is -1"),
        ('{"question": "x", "choices": ["a", "b"], "answer": true}', "answer is True"),
        ('{"question": "x", "choices": ["a", "b"], "answer": "c"}', "answer is 'c'"),
        ('{"Question": "x", "Correct Answer": "a"}', "Incorrect Answer 1 is None"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "choice.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"choice\.jsonl, line 3: .*{message}") as error:
        read_file(file)
    assert "give " in str(error.value)


def test_a_bad_row_of_a_table_is_named(tmp_path: Path) -> None:
    columns = ",".join(GPQA)
    (tmp_path / "gpqa.csv").write_text(f"{columns}\nx,a,b,c,d\nx,a,b\n")
    with pytest.raises(ValueError, match=r"gpqa\.csv, line 3: Incorrect Answer 2 is None; give a text"):
        read_file(tmp_path / "gpqa.csv")


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file choice\.jsonl in "):
        Choice(data_dir=tmp_path).problems("holdout")
    (tmp_path / "choice.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"choice\.jsonl: no questions"):
        Choice(data_dir=tmp_path).problems("holdout")


def test_the_hub_offline_says_what_to_do() -> None:
    with pytest.raises(FileNotFoundError, match=f"{HUB_ID} .* it is gated: .* --data-dir"):
        Choice().problems("holdout")


def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str, split: str) -> list[dict[str, Any]]:
        assert (name, config, split) == ("Idavidrein/gpqa", "gpqa_diamond", "train")
        return [GPQA, {**GPQA, "Question": "Which is hottest?"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [question.text for question in read_hub()] == [GPQA["Question"], "Which is hottest?"]
    assert len(Choice().problems("holdout")) == 2


OPTIONS = ["iron", "neon", "sulphur", "helium"]


@given(st.text(), st.integers(0, 3))
def test_no_text_raises_and_a_statement_after_it_counts(text: str, answer: int) -> None:
    letter = LETTERS[answer]
    verdict = verify(text, OPTIONS, answer)
    json.dumps([verdict.answer, verdict.error])
    for statement in (f"\nAnswer: {letter}", f"\nThe answer is {letter}.", f"\n\n{letter}"):
        assert verify(text + statement, OPTIONS, answer).correct
        assert not verify(text + statement, OPTIONS, (answer + 1) % 4).correct


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    assert verify(data + b"\nAnswer: B", OPTIONS, 1).correct


WORDS = [
    "a",
    "A",
    "I",
    "is",
    "the",
    "metal",
    "think",
    "good",
    "not",
    "of",
    "b-field",
    "vitamin",
    "C6",
    "x",
    "e.g.",
    "i.e.",
]


@given(
    st.lists(st.sampled_from(WORDS), max_size=12),
    st.sampled_from(["", "The answer is ", "Answer: ", "So the answer is "]),
)
def test_prose_chooses_nothing(words: list[str], start: str) -> None:
    """Articles are words of a sentence: "Answer: A good metal"."""
    text = f"{start}{' '.join(words)} metal of the good."
    choice = chosen(text)
    # Only a letter that "is" follows can be meant: "Answer: A is the metal".
    assert choice.letter is None or text.startswith((f"{start}A is", f"{start}I is", f"{start}a is"))


MEGABYTE = 1_000_000
HOSTILE = {
    "answers": "Answer: " * 120_000,
    "answers and letters": "Answer: A or B, " * 60_000,
    "spaces": "answer is" + " " * MEGABYTE + "A",
    "answers and spaces": ("answer is" + " " * 100) * 9_000,
    "boxes": "\\boxed{" * 140_000,
    "nested boxes": "\\boxed{" * 100_000 + "A" + "}" * 100_000,
    "letters": "A " * 500_000,
    "brackets": "(A)" * 300_000,
    "letters in brackets": "(A) " * 250_000,
    "stars": "Answer: " + "*" * MEGABYTE,
    "new lines": "\n" * MEGABYTE,
    "letter and spaces": "Answer: A" + " " * MEGABYTE + "b",
    "nulls": "\0" * MEGABYTE,
    "surrogates": "\ud800" * MEGABYTE,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_takes_linear_time(name: str) -> None:
    started = time.perf_counter()
    verify(HOSTILE[name], OPTIONS, 0)
    assert time.perf_counter() - started < 5.0


def test_a_problem_that_came_back_from_json() -> None:
    problem = Choice().problem("Which?", OPTIONS, 2)
    again = Problem(problem.id, json.loads(json.dumps(dict(problem.data))))
    assert Choice().verify(f"Answer: {LETTERS[problem.data['answer']]}", again).correct
