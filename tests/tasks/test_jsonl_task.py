"""Rows of anybody's as a task: what they may hold, what is wrong with them, splits, prompts and verdicts."""

from __future__ import annotations

import json
import random
import re
import time
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.tasks import Jsonl, Problem, get_task
from explorl.tasks.jsonl.numbers import Number, format_number, is_number, last_number, parse_number, same_number
from explorl.tasks.jsonl.styles import STYLES, extract_answer
from explorl.tasks.jsonl.verifiers import VERIFIERS

ROWS = [{"prompt": f"What is {n} plus 3?", "answer": n + 3} for n in range(40)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say yes."}]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def task_of(folder: Path, *rows: dict[str, Any], **options: Any) -> Jsonl:
    return Jsonl(path=write(folder / "rows.jsonl", list(rows)), holdout=0, **options)


def only(folder: Path, row: dict[str, Any], **options: Any) -> tuple[Jsonl, Problem]:
    task = task_of(folder, row, **options)
    (problem,) = task.problems("train")
    return task, problem


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "verifier"),
    [
        ({"prompt": "6 · 7?", "answer": 42}, "6 · 7?", ["42"], "number"),
        ({"question": "6 · 7?", "answer": "42"}, "6 · 7?", ["42"], "number"),
        ({"problem": " 6 · 7?\n", "answer": 42.0}, " 6 · 7?\n", ["42.0"], "number"),
        ({"prompt": "?", "answer": "1,000"}, "?", ["1,000"], "number"),
        ({"prompt": "?", "answer": " $5 "}, "?", ["$5"], "number"),
        ({"prompt": "?", "answer": "-7 %"}, "?", ["-7 %"], "number"),
        ({"prompt": "?", "answer": "007"}, "?", ["007"], "exact"),
        ({"prompt": "?", "answer": "1.2.3"}, "?", ["1.2.3"], "exact"),
        ({"prompt": "?", "answer": "x+1"}, "?", ["x+1"], "exact"),
        ({"prompt": "?", "answer": "北京"}, "?", ["北京"], "exact"),
        ({"prompt": "?", "answer": True}, "?", ["true"], "exact"),
        ({"prompt": "?", "answer": ["yes", "yeah", 1]}, "?", ["yes", "yeah", "1"], "exact"),
        ({"prompt": "?", "answer": [1, "2"]}, "?", ["1", "2"], "number"),
        ({"prompt": "?", "answer": "2 + 3 is 5.\n#### 5"}, "?", ["5"], "number"),
        ({"prompt": "?", "solution": r"So it is $\boxed{\frac12}$."}, "?", [r"\frac12"], "exact"),
        ({"prompt": "?", "answer": "1/2", "verifier": "math"}, "?", ["1/2"], "math"),
        ({"prompt": CHAT, "answer": "yes"}, CHAT, ["yes"], "exact"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
             "answer": "yes"},
            [{"role": "user", "content": "ab"}],
            ["yes"],
            "exact",
        ),
    ],
)  # fmt: skip
def test_rows_that_people_bring(
    tmp_path: Path, row: dict[str, Any], prompt: object, answer: list[str], verifier: str
) -> None:
    _, problem = only(tmp_path, {**row, "level": 3, "tags": {"a": [1, None]}})
    assert problem.data["prompt"] == prompt
    assert problem.data["answer"] == answer
    assert problem.data["verifier"] == verifier
    assert problem.data["level"] == 3
    assert problem.data["tags"] == {"a": [1, None]}
    assert json.loads(json.dumps(problem.data)) == problem.data


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not a JSON object: '{'; give a line like"),
        (b'[{"prompt": "a", "answer": 1}]', "one object per line instead of an array"),
        (b'"text"', "not a JSON object"),
        (b'{"prompt": "caf\xe9", "answer": 1}', 'byte 0xe9 after \'{"prompt": "caf\' is not UTF-8'),
        (b'{"answer": 1}', "no field 'prompt'; give a line like"),
        (b'{"prompt": "", "answer": 1}', "prompt is ''; give text, or messages"),
        (b'{"prompt": null, "answer": 1}', "prompt is None"),
        (b'{"question": 7, "answer": 1}', "question is 7"),
        (b'{"prompt": [], "answer": 1}', r"prompt is \[\]"),
        (b'{"prompt": ["a"], "answer": 1}', "a message is 'a'"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', "a message is {'role': 'user'}"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1}', "a message is"),
        (b'{"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}', "into a column 'completion'"),
        (b'{"prompt": "a"}', "no field 'answer'"),
        (b'{"prompt": "a", "answer": null}', "answer is None; give text like '42', a number, or a list"),
        (b'{"prompt": "a", "answer": " "}', "answer is ' '"),
        (b'{"prompt": "a", "answer": []}', r"answer is \[\]"),
        (b'{"prompt": "a", "answer": ["b", null]}', "answer is"),
        (b'{"prompt": "a", "answer": {"b": 1}}', "answer is"),
        (b'{"prompt": "a", "answer": NaN}', "answer is nan"),
        (b'{"prompt": "a", "answer": 1e999}', "answer is inf"),
        (b'{"prompt": "a", "solution": "none"}', r"no \\boxed in solution"),
        (b'{"prompt": "a", "answer": "b", "verifier": "numbr"}', "unknown verifier 'numbr'; did you mean 'number'"),
        (b'{"prompt": "a", "answer": "blue", "verifier": "number"}', "answer is 'blue', which is not one number"),
        (b'{"prompt": "a", "answer": "(", "verifier": "regex"}', "an invalid pattern: missing"),
        (b'{"prompt": "a", "answer": "b*", "verifier": "regex"}', "matches any text"),
        (b'{"prompt": "a", "answer": "Z", "verifier": "choice"}', "give a letter like 'C', or a list 'choices'"),
        (b'{"prompt": "a", "answer": 2, "choices": ["b", "c"]}', "answer is 2; give one of the choices, its letter"),
        (b'{"prompt": "a", "answer": 0, "choices": ["b", "b"]}', "give 2 to 10 that differ"),
        (b'{"prompt": "a", "answer": 0, "choices": "bc"}', "choices is 'bc'"),
        (b'{"prompt": "a", "test": ["assert f(1)"]}', "entry_point is None"),
        (b'{"prompt": "a", "test": ["assert g(1)"], "entry_point": "f"}', "no test calls 'f'"),
        (b'{"prompt": "a", "test": ["assert f(1"], "entry_point": "f"}', "test is not valid Python"),
        (b'{"prompt": "a", "answer": 1, "completion": 7}', "completion is 7; give text"),
        (b'{"prompt": "What is 0  plus 3?", "answer": 4}', r"the same prompt as in .*line 1, but another answer"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:2])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 4: .*{message}") as error:
        Jsonl(path=path).problems("train")
    assert len(str(error.value)) < 500


def test_files_from_other_systems(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    plain = Jsonl(path=path).problems("train")
    content = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    assert Jsonl(path=path).problems("train") == plain
    path.write_bytes(content.decode().encode("utf-16"))
    with pytest.raises(ValueError, match=r"rows\.jsonl is UTF-16, not plain UTF-8; save it as UTF-8"):
        Jsonl(path=path).problems("train")
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match="is compressed"):
        Jsonl(path=path).problems("train")
    path.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match=r"rows\.jsonl: no rows; give lines like"):
        Jsonl(path=path).problems("train")
    path.write_text(r'{"prompt": "half \ud800", "answer": "\ud83d\ude00"}')
    (problem,) = Jsonl(path=path, holdout=0).problems("train")
    assert problem.data["prompt"] == "half \ufffd"
    assert problem.data["answer"] == ["😀"]


def test_repetitions_are_one_problem(tmp_path: Path) -> None:
    task = task_of(tmp_path, *ROWS[:3], ROWS[0], {"question": "What is 0\nplus 3? ", "answer": "3", "source": "other"})
    assert len(task.problems("train")) == 3


# --- splits -----------------------------------------------------------------------------------------------------------


def test_ids_and_the_holdout_do_not_depend_on_the_order(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    task = Jsonl(path=path)
    held, train = task.problems("holdout"), task.problems("train")
    assert (len(held), len(train)) == (4, 36)
    assert [problem.data["prompt"] for problem in train] == [
        row["prompt"] for row in ROWS if row["prompt"] not in {problem.data["prompt"] for problem in held}
    ]
    by_prompt = {problem.data["prompt"]: problem.id for problem in held + train}
    mixed = random.Random(0).sample(ROWS, len(ROWS))
    again = Jsonl(path=write(tmp_path / "mixed.jsonl", [{**row, "answer": str(row["answer"])} for row in mixed]))
    assert again.problems("holdout") == held
    assert {problem.data["prompt"]: problem.id for problem in held + again.problems("train")} == by_prompt
    assert Jsonl(path=path, seed=1).problems("holdout") != held
    assert len(Jsonl(path=path, holdout=7).problems("holdout")) == 7
    assert len(Jsonl(path=path, holdout=0.5).problems("holdout")) == 20
    assert task.problems("train", limit=3) == train[:3]


@pytest.mark.parametrize("layout", ["train and test", "train and holdout", "a split column", "one other file"])
def test_a_folder(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "words"
    if layout == "a split column":
        tagged = [{**row, "split": "train" if n > 9 else "Test"} for n, row in enumerate(ROWS)]
        write(folder / "anything.jsonl", tagged)
    elif layout == "one other file":
        write(folder / "anything.jsonl", ROWS)
    else:
        write(folder / "train.jsonl", ROWS[10:])
        write(folder / f"{layout.split()[-1]}.jsonl", ROWS[:10])
    task = get_task("jsonl", data_dir=folder)
    assert task.dataset == "words"  # type: ignore[attr-defined]
    sizes = (len(task.problems("train")), len(task.problems("holdout")))
    assert sizes == ((36, 4) if layout == "one other file" else (30, 10))


def test_no_question_of_the_holdout_is_in_another_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:20])
    write(tmp_path / "test.jsonl", ROWS[15:30])
    write(tmp_path / "sft.jsonl", [{"prompt": row["prompt"], "completion": "Well."} for row in ROWS[25:40]])
    task = Jsonl(data_dir=tmp_path)
    with pytest.warns(UserWarning, match="5 of the 20 prompts in 'train' are also in the holdout") as warned:
        train = task.problems("train")
    assert any("5 of the 15 prompts in 'sft'" in str(warning.message) for warning in warned)
    held = {problem.id for problem in task.problems("holdout")}
    assert (len(train), len(held), len(task.problems("sft"))) == (15, 15, 10)
    assert not held & {problem.id for split in ("train", "sft") for problem in task.problems(split)}


def test_splits_that_are_not_there(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="'rows' have no 'sft' split: none has a completion; add a column"):
        Jsonl(path=rows).problems("sft")
    with pytest.raises(ValueError, match="no 'holdout' split: none is held out"):
        Jsonl(path=rows, holdout=0).problems("holdout")
    with pytest.raises(ValueError, match="holdout=40 would hold out all 40 rows"):
        Jsonl(path=rows, holdout=40).problems("train")
    with pytest.raises(ValueError, match="unknown split 'tran'; did you mean 'train'"):
        Jsonl(path=rows).problems("tran")
    write(rows, [{**ROWS[0], "split": "test"}, ROWS[1]])
    with pytest.raises(ValueError, match="line 2: no split, but other lines have one"):
        Jsonl(path=rows).problems("train")
    write(rows, [{**ROWS[0], "split": "tset"}])
    with pytest.raises(ValueError, match="line 1: split is 'tset'; give train, sft or test"):
        Jsonl(path=rows).problems("train")
    write(rows, [{**ROWS[0], "split": "test"}])
    with pytest.raises(ValueError, match="no 'train' split: all are held out"):
        Jsonl(path=rows).problems("train")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'jsonl' needs data_dir, a folder with train\.jsonl in it, or path"):
        get_task("jsonl")
    with pytest.raises(FileNotFoundError, match=r"there is no file '.*none\.jsonl'; give one with lines like"):
        Jsonl(path=tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl file in .*; give a folder with lines like"):
        Jsonl(data_dir=tmp_path)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"write rows\.csv as JSONL, one object per line"):
        Jsonl(data_dir=tmp_path)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"has 2 files \(a\.jsonl, b\.jsonl\); choose one with path"):
        Jsonl(data_dir=tmp_path)
    assert Jsonl(data_dir=tmp_path, path="b.jsonl").dataset == "b"
    assert Jsonl(data_dir=tmp_path / "a.jsonl").problems("train") == Jsonl(path=tmp_path / "b.jsonl").problems("train")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    task = task_of(tmp_path, *ROWS[:3])
    first = task.problems("train")
    assert task_of(tmp_path, *ROWS[:3]).problems("train") == first
    write(tmp_path / "rows.jsonl", ROWS[:5])
    assert len(task.problems("train")) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verifier": "maths"}, "unknown verifier 'maths'; did you mean 'math'"),
        ({"style": "box"}, "unknown style 'box'; did you mean 'boxed'"),
        ({"holdout": -1}, "holdout=-1: give a share below 1, like 0.1, or a number of rows"),
        ({"holdout": 1.0}, r"holdout=1\.0"),
        ({"holdout": "a tenth"}, "holdout='a tenth'"),
        ({"holdout": True}, "holdout=True"),
        ({"tolerance": -0.1}, "tolerance=-0.1"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"seconds": 0}, "seconds=0"),
        ({"workers": 0}, "workers=0"),
        ({"instruction": 3}, "instruction=3"),
        ({"verifer": "math"}, "'verifer'; did you mean 'verifier'"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task("jsonl", path=write(tmp_path / "rows.jsonl", ROWS), **options)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_of_text(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": "6 · 7?", "answer": 42})
    request = STYLES["boxed"].request
    assert task.prompt(problem) == task.prompt(problem, "text") == f"6 · 7?\n{request}\n"
    assert task.prompt(problem, "plain") == "6 · 7?"
    assert task.prompt(problem, "chat") == [{"role": "user", "content": f"6 · 7?\n{request}"}]
    with pytest.raises(ValueError, match="unknown template 'chatt'; did you mean 'chat'"):
        task.prompt(problem, "chatt")
    for style, words in STYLES.items():
        assert words.request in task_of(tmp_path, ROWS[0], style=style).prompt(problem)
    assert task_of(tmp_path, ROWS[0], instruction="Be quick.").prompt(problem) == "6 · 7?\nBe quick.\n"
    assert task_of(tmp_path, ROWS[0], instruction="").prompt(problem) == "6 · 7?"
    assert task_of(tmp_path, ROWS[0], instruction="").prompt(problem, "chat") == [{"role": "user", "content": "6 · 7?"}]


def test_prompts_of_messages(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": CHAT, "answer": "yes"}, style="whole")
    messages = [CHAT[0], {"role": "user", "content": f"Say yes.\n{STYLES['whole'].request}"}]
    assert task.prompt(problem) == task.prompt(problem, "chat") == messages
    assert task.prompt(problem, "plain") == CHAT
    assert task.prompt(problem, "text") == f"Be brief.\n\nSay yes.\n{STYLES['whole'].request}\n"
    turns = [CHAT[1], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Again."}]
    task, problem = only(tmp_path, {"prompt": turns, "answer": "yes"}, instruction="")
    assert task.prompt(problem, "text") == "User: Say yes.\n\nAssistant: Yes.\n\nUser: Again.\n\nAssistant:"


def test_text_and_messages_in_one_table(tmp_path: Path) -> None:
    from datasets import Dataset

    task = task_of(tmp_path, ROWS[0], {"prompt": CHAT, "answer": "yes"})
    table = Dataset.from_list([{"prompt": row["prompt"]} for row in task.rows("train", template="plain")])
    assert table[0]["prompt"] == [{"role": "user", "content": ROWS[0]["prompt"]}]
    assert table[1]["prompt"] == CHAT


def test_prompts_of_options_and_functions(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": "Which?", "choices": ["iron", "neon"], "answer": "neon"})
    text = task.prompt(problem)
    assert isinstance(text, str)
    assert text.startswith("Which?\nA) iron\nB) neon\n\nPlease reason step by step, and end with")
    assert task.prompt(problem, "plain") == "Which?"
    row = {"prompt": "Write f, which doubles.", "entry_point": "f", "test": ["assert f(2) == 4"]}
    task, problem = only(tmp_path, row)
    assert "complete function f, with the imports it needs" in str(task.prompt(problem))


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "completion", "answer", "well_formed"),
    [
        ("boxed", r"so \boxed{5}", "5", True),
        ("boxed", r"\boxed{4} no, \boxed{5}", "5", False),
        ("boxed", r"<think>\boxed{4}</think>\boxed{5}", "5", True),
        ("boxed", r"<think>\boxed{4}</think>done", None, False),
        ("boxed", r"\boxed{}", None, False),
        ("boxed", "5", None, False),
        ("tags", "<answer> 5 </answer>", "5", True),
        ("tags", "<answer>4</answer><answer>5</answer>", "5", False),
        ("tags", "<answer>5", None, False),
        ("hash", "It is.\n#### 5\n", "5", True),
        ("hash", "####", None, False),
        ("last_line", "It is\n5\n\n", "5", True),
        ("last_line", " \n", None, False),
        ("last_number", "2 and 3 make 5.", "5", True),
        ("last_number", "It costs $1,250.50, no more", "1,250.50", True),
        ("last_number", "five", None, False),
        ("whole", " 5\n", "5", True),
        ("whole", "<think>hm</think> 5", "5", True),
        ("whole", "", None, False),
        ("whole", "x" * (1 << 21), "x" * (1 << 20), False),
        ("tags", b"<answer>5</answer>", "5", True),
        ("tags", b"\xff<answer>5</answer>", "5", True),
    ],
)
def test_where_an_answer_is_stated(style: str, completion: str | bytes, answer: str | None, well_formed: bool) -> None:
    assert extract_answer(completion, style) == (answer, well_formed)


def test_an_open_think_must_be_closed() -> None:
    assert extract_answer("#### 5", "hash", opened=True) == ("5", False)
    assert extract_answer("hm</think>#### 5", "hash", opened=True) == ("5", True)


@given(st.sampled_from([*STYLES]), st.text() | st.lists(st.sampled_from(["\\boxed{", "}", "####", "<answer>", "5,", "\n", "-", "</answer>", "\\frac{1}{2}", "e9", "/0", "\ud800", "</think>"])).map("".join))  # fmt: skip  # noqa: E501
def test_reading_never_raises(style: str, text: str) -> None:
    extracted = extract_answer(text, style)
    if extracted.answer is not None:
        parse_number(extracted.answer)


@pytest.mark.parametrize("piece", ["1", "1,", "1,111", ".", "-", "1/", "\\frac{1", "e1", "1e", " ", "{", "$", "\n"])
def test_reading_takes_linear_time(piece: str) -> None:
    text = piece * ((1 << 20) // len(piece))
    start = time.process_time()
    for style in STYLES:
        extract_answer(text, style)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("42.0", "42"),
        ("-42", "-42"),
        ("−42", "-42"),
        ("+42", "42"),
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"1\,000", "1000"),
        ("1\u202f000", "1000"),
        ("$5", "5"),
        (r"\$5.50", "5.5"),
        ("-$5", "-5"),
        ("5 dollars", "5"),
        ("5km", "5"),
        ("5 cm^2", "5"),
        (r"5\text{ cm}^{2}", "5"),
        ("€ 5", "5"),
        ("50%", "50"),
        (r"50\%", "50"),
        ("1e3", "1000"),
        (".5", "0.5"),
        ("3/4", "0.75"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\dfrac{3}{4}", "-0.75"),
        ("x = 5", "5"),
        ("2 + 3 = 5", "5"),
        ("**5**", "5"),
        ("the 5 apples.", "5"),
        ("1e-7", "0.0000001"),
        ("0.0", "0"),
        ("-0", "0"),
        ("3 1/2", "3.5"),
        (r"3\frac{1}{2}", "3.5"),
        (r"-3 \tfrac{1}{2}", "-3.5"),
        ("5 million", "5000000"),
        ("1.5 Million dollars", "1500000"),
        ("2 hundred thousand", "200000"),
        ("minus 5", "-5"),
        ("Negative $5", "-5"),
        ("25 cm²", "25"),
    ],
)
def test_numbers_as_people_write_them(text: str, value: str) -> None:
    number = parse_number(text)
    assert number is not None
    assert format_number(number) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "five",
        "5 or 6",
        "3-5",
        "10^5",
        "x2",
        "H2O",
        "1.2.3",
        "10:30",
        "5/0",
        "1,00",
        "9" * 1_001,
        "2^{10}",
        "1e99999",
        "5²",
        "√25",
        "5√2",
        "5½",
        "5π",
        r"5\pi",
        "1_000",
        "0x10",
        "5 7/2",
        "10 minus 5",
    ],
)
def test_what_is_not_one_number(text: str) -> None:
    assert parse_number(text) is None


def test_numbers_that_are_the_same() -> None:
    def numbers(stated: str, right: str, tolerance: float = 0.0) -> bool:
        return same_number(
            parse_number(stated) or Number(Decimal(0)), parse_number(right) or Number(Decimal(0)), tolerance
        )

    assert numbers("0.3", str(0.1 + 0.2))
    assert not numbers("0.3001", "0.3")
    assert not numbers("12345678901235", "12345678901234")
    assert numbers("1/3", str(1 / 3))
    assert numbers("3.1", "3", 0.1)
    assert not numbers("3.11", "3", 0.1)
    assert not numbers("1e9999", "1", 1e300)
    for digits in (29, 61, 400):
        assert numbers("9" * digits, "9" * digits)
        assert not numbers("9" * digits, "9" * (digits - 1) + "8")
    with localcontext() as context:
        context.prec = 5  # a library of the process may have set it
        assert not numbers("12345678901235", "12345678901234")
        assert not numbers("-12345678901235", "-12345678901234")
    assert not is_number("x")
    assert last_number("no") is None


@pytest.mark.parametrize(
    ("right", "answer", "correct"),
    [
        ("Paris", "paris", True),
        ("Paris", " **Paris**. ", True),
        ("Paris", '"Paris."', True),
        ("Paris", r"\text{Paris}", True),
        ("New  York", "new york", True),
        ("Paris", "London", False),
        ("Paris", "Paris, France", False),
        (["Paris", "Lutetia"], "lutetia", True),
        ("Straße", "STRASSE", True),
        ("é", "é", True),
        ("x²", "x2", False),
        ("A*", "A", False),
        ("A*", "**A***", True),
        ("A", "A*", False),
        ("f'", "f", False),
        ("x", "x'", False),
        ("C", "C`", False),
        ("$HOME", "HOME", False),
        ("*args", "args", False),
        ("*args", "**args", False),
        ("__init__", "init", False),
        ("__init__", "`__init__`", True),
        ("cat", "act", False),
        ("cat", "cat!", False),
        ("cat", "c a t", False),
        ("cat", "dog or cat", False),
        ("Paris", "_Paris_", True),
        ("Paris", "Paris**", True),
        ("Paris", "**Paris.**", True),
        ("Paris", r"$\text{Paris}$", True),
        ("'Paris'", "Paris", True),
        ("U.S.", "U.S.", True),
        ("...", "...", True),
        ("*", "*", True),
        ("*", "", False),
        (False, "False", True),
    ],
)
def test_exact(tmp_path: Path, right: Any, answer: str, correct: bool) -> None:
    task, problem = only(tmp_path, {"prompt": "?", "answer": right}, verifier="exact", style="tags")
    verdict = task.verify(f"<answer>{answer}</answer>", problem)
    assert verdict.correct is correct
    assert verdict.well_formed is bool(answer)


def test_exact_takes_no_longer_than_the_text_is(tmp_path: Path) -> None:
    """Unicode orders the marks on a letter, which takes quadratic time: for these, a minute and more."""
    task, problem = only(tmp_path, {"prompt": "?", "answer": "Paris"}, verifier="exact", style="whole")
    begun = time.process_time()
    for text in ("a" + "\u0315\u0300" * 200_000, "*" * 1_000_000, "." * 1_000_000, "$*" * 500_000):
        assert not task.verify(text, problem).correct
    assert time.process_time() - begun < 5


def test_exact_may_look_at_case(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": "?", "answer": "Ag"}, style="whole", ignore_case=False)
    assert task.verify("Ag", problem).correct
    assert not task.verify("AG", problem).correct


def test_number(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": "?", "answer": "$1,000"}, style="hash")
    verdict = task.verify("#### 1000.00 dollars", problem)
    assert (verdict.correct, verdict.well_formed, verdict.answer, verdict.error) == (True, True, "1000", None)
    assert task.verify("#### 1001", problem).error == "another answer than the right one"
    assert task.verify("#### 999 or 1000", problem).error == "not one number"
    assert task.verify("1000", problem).error == "no answer after ####"
    near, problem = only(tmp_path, {"prompt": "?", "answer": 3.14159}, tolerance=0.01, style="last_number")
    assert near.verify("about 3.14", problem).correct
    assert not near.verify("about 3", problem).correct
    assert near.reward("about 3.14", problem) == pytest.approx(1.1)


def test_math(tmp_path: Path) -> None:
    task, problem = only(tmp_path, {"prompt": "?", "answer": ["2k+2", r"\frac{1}{2}"]}, verifier="math")
    texts = [r"\boxed{2(k+1)}", r"\boxed{1/2}", r"\boxed{3k}", "none"]
    verdicts = task.verify_many(texts, [problem] * 4)
    assert [verdict.correct for verdict in verdicts] == [True, True, False, False]
    assert verdicts[3].error == STYLES["boxed"].missing


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"choices": ["iron", "neon"], "answer": "neon"}, "Answer: B", "Answer: A"),
        ({"choices": ["iron", "neon"], "answer": 1}, "The answer is (B).", "Answer: C"),
        ({"choices": ["iron", "neon"], "answer": "B"}, r"\boxed{B}", "neither"),
        ({"choices": ["B", "A"], "answer": "A"}, "Answer: B", "Answer: A"),
        ({"answer": "(c)", "verifier": "choice"}, "Answer: C", "Answer: D"),
    ],
)
def test_choice(tmp_path: Path, row: dict[str, Any], right: str, wrong: str) -> None:
    task, problem = only(tmp_path, {"prompt": "Which?", **row})
    assert task.verify(right, problem).correct
    assert not task.verify(wrong, problem).correct


@pytest.mark.parametrize(
    "test",
    [
        ["assert f(2) == 4", "assert f(0) == 0"],
        "assert f(2) == 4\nassert f(0) == 0",
        "def check(candidate):\n    assert candidate(2) == 4\n",
    ],
    ids=["list", "lines", "check"],
)
@pytest.mark.parametrize("prompt", ["Write f, which doubles.", "def f(x):\n    '''Double x.'''\n", CHAT])
def test_code(tmp_path: Path, test: Any, prompt: Any) -> None:
    task, problem = only(tmp_path, {"prompt": prompt, "entry_point": "f", "test": test})
    right = "Here:\n```python\ndef f(x):\n    return 2 * x\n```"
    wrong = right.replace("2 * x", "x * x * x")
    verdicts = task.verify_many([right, wrong, "no"], [problem] * 3)
    assert [verdict.correct for verdict in verdicts] == [True, False, False]
    assert verdicts[0].well_formed


def test_regex_is_searched_within_its_time(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Name a year of the war.", "answer": r"\b19(39|4[0-5])\b", "verifier": "regex"},
        {"prompt": "Slow?", "answer": ["(a+)+$", "never"], "verifier": "regex"},
    ]
    task = task_of(tmp_path, *rows, seconds=0.5, workers=1)
    year, slow = task.problems("train")
    texts = ["It was 1943.", "It was 1918.", "a" * 60 + "b", "never"]
    started = time.monotonic()
    verdicts = task.verify_many(texts, [year, year, slow, slow])
    assert time.monotonic() - started < 60
    assert [verdict.correct for verdict in verdicts] == [True, False, False, True]
    assert [verdict.error for verdict in verdicts] == [
        None, "the pattern is not in it", "the pattern took too long", None,
    ]  # fmt: skip
    assert task.verify_many(["1943"], [year])[0].answer == "1943"


def test_verifiers_side_by_side(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "answer": "bc", "verifier": "regex"},
        {"prompt": "b", "answer": 3},
        {"prompt": "c", "answer": "yes"},
        {"prompt": "d", "answer": "1/2", "verifier": "math"},
        {"prompt": "e", "answer": "A", "verifier": "choice"},
        {"prompt": "f", "entry_point": "f", "test": "assert f(1) == 1"},
    ]
    task = task_of(tmp_path, *rows)
    problems = task.problems("train")
    assert {problem.data["verifier"] for problem in problems} == set(VERIFIERS)
    right = [
        "abc",
        r"\boxed{3}",
        r"\boxed{Yes}",
        r"\boxed{0.5}",
        "Answer: A",
        "```python\ndef f(x):\n    return x\n```",
    ]
    assert [verdict.correct for verdict in task.verify_many(right, problems)] == [True] * 6
    assert [verdict.correct for verdict in task.verify_many(right[1:] + right[:1], problems)] == [False] * 6
    assert task.verify_many([], []) == []
    for text, problem in zip(right, problems, strict=True):
        assert task.verify(text, problem).correct


def test_rows_of_any_kind_come_back_from_a_table(tmp_path: Path) -> None:
    """A table would turn 3 into 3.0 beside 0.5, and give each row the keys of all others."""
    from datasets import Dataset

    from explorl.tasks.base import json_text

    task = task_of(tmp_path, {**ROWS[0], "meta": 3}, {**ROWS[1], "meta": "x"}, {**ROWS[2], "other": [1, 2.5]})
    rows = [{**row, "data": json_text(task, row["id"], row["data"])} for row in task.rows("train")]
    table = Dataset.from_list(rows)
    correctness, _ = task.reward_functions()
    columns = {name: table[name][:] for name in ("id", "data", "opened")}
    texts = [r"\boxed{3}", r"\boxed{4}", r"\boxed{6}"]
    assert correctness(prompts=table["prompt"][:], completions=texts, **columns) == [1.0, 1.0, 0.0]


# --- examples ---------------------------------------------------------------------------------------------------------


def test_examples(tmp_path: Path) -> None:
    rows = [
        {**row, "completion": f"It is \\boxed{{{row['answer']}}}." if n % 2 else None} for n, row in enumerate(ROWS)
    ]
    task = task_of(tmp_path, *rows)
    examples = list(task.examples(100))
    assert len(examples) == len(task.problems("sft")) == 20
    assert examples == list(task.examples(100))
    assert examples[:5] == list(task.examples(5))
    assert examples != list(task.examples(100, seed=1))
    by_prompt = {task.prompt(problem): problem for problem in task.problems("train")}
    assert all(task.verify(example["completion"], by_prompt[example["prompt"]]).correct for example in examples)
    assert next(task.examples(1, template="chat"))["prompt"][0]["role"] == "user"


def test_examples_of_gsm8k_and_of_messages(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "2 + 3?", "answer": "2 + 3 is 5.\n#### 5"},
        {"prompt": "6?", "answer": 6, "completion": [{"role": "assistant", "content": "#### 6"}]},
    ]
    completions = {example["completion"] for example in task_of(tmp_path, *rows, style="hash").examples(9)}
    assert completions == {"2 + 3 is 5.\n#### 5", "#### 6"}


def test_examples_that_state_no_answer_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "completion": f"#### {row['answer']}"} for row in ROWS]
    message = r"no completion of 'rows' is .* row's answer \(no \\boxed.*\); set task\.style to where they state it"
    with pytest.raises(ValueError, match=message):
        list(task_of(tmp_path, *rows).examples(3))
    assert len(list(task_of(tmp_path, *rows, style="hash").examples(3))) == 3
    assert len(list(task_of(tmp_path, rows[0], {**ROWS[1], "completion": "no"}, style="hash").examples(3))) == 2


def test_rows_to_fine_tune_on_need_no_answer(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "sft.jsonl", [{"prompt": "Hello?", "completion": "Hello!"}])
    (example,) = Jsonl(data_dir=tmp_path).examples(9, template="plain")
    assert example == {"prompt": "Hello?", "completion": "Hello!"}
    write(tmp_path / "sft.jsonl", [{"prompt": "Hello?"}])
    with pytest.raises(ValueError, match=r"sft\.jsonl, line 1: no field 'completion'"):
        Jsonl(data_dir=tmp_path).problems("sft")


def test_many_rows_are_read_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} plus 3, if {n} is a number?", "answer": n + 3} for n in range(20_000)]
    path = write(tmp_path / "rows.jsonl", rows)
    start = time.process_time()
    task = Jsonl(path=path)
    assert len(task.problems("train")) == 18_000
    assert time.process_time() - start < 20
    assert Jsonl(path=path).problems("train", limit=1)[0] is task.problems("train")[0]


def test_the_documented_styles_and_verifiers_are_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorial-task.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {"verifier", *VERIFIERS}
    assert all(f"`{style}`" in page for style in STYLES)
    assert all(f"`{template}`" in page for template in Jsonl.templates)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file, where no shell writes it out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n')
    for options in ({"data_dir": "~/rows"}, {"data_dir": Path("~/rows")}, {"path": "~/rows/train.jsonl"}):
        assert len(get_task("jsonl", **options).problems("train")) == 1
