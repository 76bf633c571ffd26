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
from explorl.tasks.choice.letters import LETTERS, chosen_option
from explorl.tasks.choice.question_files import HUB_ID, Question, read_file, read_hub
from explorl.tasks.choice.task import Choice, verify

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
        ("I'm not sure the answer is B", None), ("I doubt that the answer is B.", None), ("Answer: B (wrong)", None),
        ("One might say the answer is B, but that is wrong.", None), ("Everything except B is the answer", None),
        ("It would be wrong to say that the answer is B.", None), ("不选B", None), ("我们不应选B", None),
        ("A common mistake is to think the answer is B. So C.", "C"), ("Some people say the answer is B", None),
        ("No doubt the answer is B", "B"), ("Answer: B ✓", "B"), ("Answer: B (a wrong turn)", "B"), ("应选B", "B"),
        ("Answer: X", None), ("Answer: K", None), (r"\boxed{}", None), (r"\boxed{C", None), ("", None), (" \n ", None),
    ],
)  # fmt: skip
def test_letters_by_hand(completion: str, letter: str | None) -> None:
    choice = chosen_option(completion)
    assert choice.letter == letter
    assert (choice.error is None) is (letter is not None)


HONEST = {
    "A": [
        "Answer: A", "The answer is A, since B, C and D are wrong.", "A is correct.", "Option A is the correct answer.",
        "The correct answer is A (iron).", "I choose A.", "Answer - A", "A) iron", "A. iron",
        "A because it is a metal.",
        "Answer: A, not B.", "The answer is (A), not (B).", "Answer: A) B", "So the answer is A.", "So A.", "(a)",
        r"\boxed{A} because \text{B} is wrong", "Answer: A\n\n(B) is wrong because it is a gas.",
        "Answer: A\n- B is a gas\n- C is a liquid", "Answer: A\n\nB and C are wrong.", "Wait, A.",
        "**A** is the right choice.", "Answer: A. I think that is right.", "Only A is correct.",
        "Answer: A, B is wrong", "答案是A。", "The answer is A; B would be too light.",
    ],
    "B": [
        "Answer: **B** Paris", "The answer is *B* Paris.", "I would choose B over C.", "Answer: 'B'",
        "I'd go with B", "I’d go with B.", "I would go with option B.", "I'll go with (B)", "I am going with B.",
        "Let's go with B.", "**B**", "(b)", "b)", "b.", "B", "B.", "The correct answer is: \n\nB) Paris",
        "The correct answer is **B) Paris**.", "The correct answer is **B**: Paris", "Answer: B, since A is wrong",
        "B) Paris", "B. Paris", "**B. Paris**", "B: Paris", "B - Paris",
        "Answer: B, because (A) and (C) are wrong.", "My answer is B.", "my final answer: B", "I pick B",
        "I select (B).",
        "I think it's B.", "I think the answer is B.", "I believe B is correct.", "My guess is B.", "I'd say B.",
        "The answer is probably B.", "The answer is most likely (B).", "The answer seems to be B.", "The answer's B.",
        "The answer to the question is B.", "The correct answer among the options is (B).", "Ans: B", "ANSWER: B",
        "The answer choice is B.", "The right one is B.", "<think>Maybe the answer is A.</think>B",
        "<think>A or B? The answer is A.</think>\n\nThe answer is B.", "<think>The answer is B.</think>",
        "Therefore, option B.", "Hence B.", "Option B", "Answer B", "Final Answer: **(B) Paris**",
        "A is wrong, C is wrong, so the answer is B.", "The answer is not A. It is B.",
    ],
    "C": [
        "Option C is correct", "Option C is correct.", "option (C) is correct because …", "Choice C is right.",
        "C is the correct answer.", "C is the answer.", "(C) is the right option.", "**C** is correct.",
        "Answer - C", "Answer – C", "Answer — C", "Answer: C (not D)", "Answer: C (iron)", "Answer: C, not D",
        "Answer: C and not D", "Answer: C rather than D", "Answer:C.", "Answer:C", "Answer: C!", "<answer>C</answer>",
        "<answer>\nC\n</answer>", "<answer>(C)</answer>", "<answer>Option C</answer>", "<answer>C) iron</answer>",
        "<answer>A</answer><answer>C</answer>", r"<answer>\boxed{C}</answer>", "not B but C\nAnswer: C",
        "The answer is not B but C.", "The answer is not (B) but (C).", "The answer is not (A), it must be (C).",
        "A. No wait, C", "Answer: A. No wait, C", "Answer: A. Wait, no, C.", "Answer: A... actually, C",
        "Answer: B. Sorry, I mean C.", "答案：C", "答案: C", "答案是C", "正确答案为 C。", "故选C。",
        "（C）", "答案：（C）",
        "Antwort: C", "Die Antwort ist C.", "Die richtige Antwort ist (C).", "Réponse : C", "La réponse est C.",
        "Respuesta: C", "La respuesta correcta es la C.", "Ответ: C", "정답: C", "答え：C", "#### C", "####C",
        r"\boxed{\text{Option C}}", r"\boxed{\text{(C)}\ 5}", r"$\boxed{\mathbf{C}}$", r"\boxed{\text{C: iron}}",
        "Not (A), not (B): it is (C).", "(A) is wrong and (B) isn't right, so (C).", "We rule out (A), leaving (C).",
        "Suppose the answer is A. That fails.\nAnswer: C", "The wrong answer is A.\nThe answer is C.",
        "(C) rather than (A)", "Answer: C, although D is close.", "The answer is clearly C.", '"C"\nAnswer: "C"',
        "Answer: C\r\n", "Answer: C </s>", "Answer: C<|im_end|>", "Answer: C\n```", "- Answer: C", "| Answer: C |",
    ],
}  # fmt: skip
HEDGES = [
    "Answer: A; B", "Answer: A or B", "Answer: A/B", "Answer: A and B", "both A and C", "Answer: both A and C",
    "The answer is both A and C.", "The answer is either A or B.", "Answer: A, or B",
    "Answer: A, B, C, D", "Answer: A & B",
    "Answer: A + B", "Answer: A|B", "Answer: A;B", "Answer: A,B", "Answer: A or maybe B", "Answer: A, possibly B",
    "Answer: A (or B)", "Answer: A (maybe B)", "Answer: A? B?", "Answer: (A)(B)", "Answer: (A) (B)", "Answer: A (B)",
    "Answer: A to D", "Answer: A-D", "Answer: A through D", "Answer: A, A, B", "Answer: A and/or B", "Answer: A oder B",
    "Answer: (a) or (b)", "Answer: A und B", "答案：A或B", "答案：A、B", "答案：A和B", "Answer: A or (B)",
    "Answer: (A) or B",
    "Answer: **A** or **B**", "Answer: $A$ or $B$", r"\boxed{A, B}", r"\boxed{A \text{ or } B}", r"\boxed{AB}",
    r"\boxed{A} or \boxed{B}", r"$\boxed{A}$ and $\boxed{B}$", r"\boxed{\text{A and B}}", "<answer>A, B</answer>",
    "<answer>A or B</answer>", "Options A and C are correct.", "A and C are both correct.", "Both A and C are correct.",
    "A or B", "A, B", "A/B", "A and B", "hm\nA\nB", "Answer: A\n\nA or B", "I'd go with A or B.", "I choose A and C.",
    "It is either (A) or B.", "So A or (B).", "Answer: A.\nThe answer is A or B.", "A) iron\nB) neon", "A. B. C. D.",
    "<think>The answer is A.</think>The answer is A or B.", "Answer: option A or option B", "Answer: A or answer B",
]  # fmt: skip
DENIALS = [
    "The answer is not (A), …", "The answer is not (A).", "The answer is not A.", "Answer: not A", "Answer: not (A)",
    "The answer isn't A.", "The answer isn't (A).", "The answer cannot be (A).", "The answer can't be A.", "not (A)",
    "Answer: A is wrong", "Answer: (A) is wrong", "Answer: (A) is not right", "A is not the answer.", "(A) is wrong.",
    "Option A is not correct.", "Option A is incorrect.", "Option (A) isn't correct.", "It is not (A).", "Not (A).",
    "None of the above", "Answer: None of the above", "Answer: none", "All of the above", "Answer: all of them",
    "The worst answer is A", "Bad answer: A", "The least correct answer is A", "The second-best answer is A",
    "Answer to avoid: A", "Answer to eliminate: A", "Answer: A (no)", "Answer: A, not", "The answer is A? No",
    "Answer: neither (A) nor B", "The wrong answer is A.", "Incorrect answer: A", "This is not the answer: A",
    "If the answer is A, then iron is a gas", "Suppose the answer is A", "Whether option A is correct I do not know",
    "I doubt that (A) is not wrong, and so not (A)", "We can rule out (A).", "Eliminate (A).", "everything except (A)",
    "Answer: A. Wait, that's wrong.", "Answer: A. No wait.", "Answer: A — scratch that", "There is no C.",
    "Unless the answer is A", "I don't think (A)", "A) iron is wrong", "Options A to D", "Question A", "Answer key",
]  # fmt: skip


@pytest.mark.parametrize(("letter", "text"), [(letter, text) for letter, texts in HONEST.items() for text in texts])
def test_honest_statements(letter: str, text: str) -> None:
    assert chosen_option(text).letter == letter
    assert chosen_option(f"Let me think about A, B, C and D.\n\n{text}").letter == letter


def test_an_option_as_it_was_given() -> None:
    assert chosen_option("B) Paris\n\nParis is the capital of France.").letter == "B"
    assert (
        chosen_option("Paris?\nB) Paris\nParis is the capital of France.").letter is None
    )  # a line in the midst of others
    assert chosen_option("A) Rome\n\nI see.\n\nB) Paris").letter is None
    assert chosen_option("I. Newton found it.").letter is None


@pytest.mark.parametrize("text", HEDGES)
def test_two_options_are_none(text: str) -> None:
    assert chosen_option(text).letter is None
    assert not any(verify(text, OPTIONS, answer).correct for answer in range(4))


@pytest.mark.parametrize("text", DENIALS)
def test_what_is_denied_is_not_chosen(text: str) -> None:
    assert chosen_option(text).letter is None


@given(st.lists(st.sampled_from([*"ABCD", "(A)", "(B)", " or ", " and ", ", ", "; ", "not ", " is ", "wrong", "correct",
    "Answer: ", "The answer is ", "Option ", r"\boxed{", "}", ".", "\n", "No wait, ", "</think>", "I'd go with "]),
    max_size=12))  # fmt: skip
def test_a_completion_is_right_for_one_option_at_most(parts: list[str]) -> None:
    text = "".join(parts)
    assert sum(verify(text, OPTIONS, answer).correct for answer in range(4)) <= 1


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
    assert chosen_option(text).letter is None  # a policy that repeats its prompt chooses nothing
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
    choice = chosen_option(text)
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
    "a list": "Answer: " + "A, " * 300_000,
    "a list of words": "Answer: A or " + "maybe " * 150_000,
    "remarks": "A and B is correct " * 50_000,
    "subjects": "A, " * 26 + " is correct" * 90_000,
    "almost remarks": "A is the " * 100_000,
    "doubts": "if the answer is A, " * 50_000,
    "withdrawals": "Answer: A. No wait, " * 50_000,
    "choices": "I'd go with " * 80_000,
    "boxes in a row": r"\boxed{A} or " * 70_000,
    "thoughts": "</think>" * 120_000,
    "answers to": "answer to " + "the " * 250_000,
    "many answers to": "answer to the one of a " * 40_000,
    "lines of a list": "A) iron\n" * 120_000,
    "denials": "not (A) " * 120_000,
    "nulls": "\0" * MEGABYTE,
    "surrogates": "\ud800" * MEGABYTE,
}


QUICK = ("new lines", "a list of words", "subjects", "denials", "surrogates", "choices", "answers to")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE]
)
def test_hostile_text_takes_linear_time(name: str) -> None:
    started = time.process_time()
    verify(HOSTILE[name], OPTIONS, 0)
    assert time.process_time() - started < 10.0, "it takes 1 to 2 s; the square of it would take minutes"


def test_a_problem_that_came_back_from_json() -> None:
    problem = Choice().problem("Which?", OPTIONS, 2)
    again = Problem(problem.id, json.loads(json.dumps(dict(problem.data))))
    assert Choice().verify(f"Answer: {LETTERS[problem.data['answer']]}", again).correct


def test_broken_text_of_a_file_is_mended(tmp_path: Path) -> None:
    row = {"question": "Which \ud800?", "choices": ["a\udfff", "b", "\U0001f600"], "answer": 0}
    (tmp_path / "choice.jsonl").write_text(json.dumps(row) + "\n")
    task = Choice(data_dir=tmp_path)
    (problem,) = task.problems("holdout")
    prompt = task.prompt(problem)
    assert isinstance(prompt, str)
    assert "Which \ufffd?" in prompt.encode().decode()
    assert sorted(problem.data["choices"]) == ["a\ufffd", "b", "\U0001f600"]
    right = task.verify(f"Answer: {LETTERS[problem.data['answer']]}", problem)
    assert right.correct
    assert right.answer == "a\ufffd"
