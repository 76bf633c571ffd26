"""The verifier: FORMULAS by hand, against an oracle, and against whatever a policy may write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorl.tasks.answer_span import TAGS
from explorl.tasks.countdown.task import verify
from explorl.tasks.expression import numbers, parse

from .expressions import expression_texts, oracle

NUMS = [32, 4, 57, 19]
GOOD = "<think>32 / 4 = 8</think><answer>(32 / 4) * (57 / 19)</answer>"


def answered(text: str) -> str:
    return f"<think>hm</think><answer>{text}</answer>"


def test_the_papers_example() -> None:
    verdict = verify(GOOD, NUMS, 24)
    assert verdict.correct
    assert verdict.well_formed
    assert verdict.error is None
    assert verdict.answer == verify(answered("57 / 19 * 32 / 4"), NUMS, 24).answer


@pytest.mark.parametrize(
    ("answer", "nums", "target", "correct"),
    [
        ("3+7", [3, 7, 12], 10, True),
        ("7+3", [3, 7, 12], 10, True),
        ("12", [3, 7, 12], 12, True),
        ("3*7+12", [3, 7, 12], 33, True),
        ("3 × 7 + 12", [3, 7, 12], 33, True),
        ("3·7+12", [3, 7, 12], 33, True),
        ("3x7+12", [3, 7, 12], 33, True),
        ("12 ÷ 3", [3, 7, 12], 4, True),
        ("12 − 7", [3, 7, 12], 5, True),
        (" \n(3 * 7)\n+ 12\t", [3, 7, 12], 33, True),
        ("8/(3-8/3)", [3, 3, 8, 8], 24, True),
        ("1/3+1/3+1/3", [1, 1, 1, 3, 3, 3], 1, True),
        ("7+7", [7, 7, 3], 14, True),
        # numbers
        ("3+3", [3, 7, 12], 6, False),
        ("7+7+7", [7, 7, 3], 21, False),
        ("3+8", [3, 7, 12], 11, False),
        ("10", [3, 7, 12], 10, False),
        ("37", [3, 7], 37, False),
        ("3+07", [3, 7], 10, False),
        # values
        ("3+7", [3, 7, 12], 11, False),
        ("7/3", [3, 7, 12], 2, False),
        ("(7+12)/3*3", [3, 3, 7, 12], 19, True),
        ("100000001/100000000", [100000001, 100000000], 1, False),
        ("1/(7-7)", [1, 7, 7], 1, False),
        ("1/0", [1, 0], 1, False),
        # the stated result
        ("3*7+12 = 33", [3, 7, 12], 33, True),
        ("3*7+12=33 ", [3, 7, 12], 33, True),
        ("3*7+12=34", [3, 7, 12], 33, False),
        ("3*7+12=34", [3, 7, 12], 34, False),
        ("3*7+12=", [3, 7, 12], 33, False),
        ("3*7+12=033", [3, 7, 12], 33, False),
        ("3*7+12=33.0", [3, 7, 12], 33, False),
        ("3*7+12=21+12", [3, 7, 12], 33, False),
        ("3*7+12=33=33", [3, 7, 12], 33, False),
        ("3*7+12==33", [3, 7, 12], 33, False),
        ("33=3*7+12", [3, 7, 12], 33, True),
        (" 33 = 3*7+12 ", [3, 7, 12], 33, True),
        ("24 = 2*3*4", [2, 3, 4], 24, True),
        ("24 = 24*1", [24, 1], 24, True),
        ("24 = 24", [24, 1], 24, True),
        ("24 = 2*3*4", [2, 3, 4, 24], 24, True),
        ("25 = 2*3*4", [2, 3, 4], 24, False),
        ("24 = 2*3*5", [2, 3, 5], 24, False),
        ("24 = 25", [24, 25], 24, False),
        ("24 = 1", [24, 1], 24, False),
        ("24 =", [24, 1], 24, False),
        ("24 = 2*3*4 = 24", [2, 3, 4], 24, False),
        ("24 = 4*6 = 2*3*4", [2, 3, 4], 24, False),
        ("2*3*4 = 4*6", [2, 3, 4], 24, False),
        ("2*3 = 6*4 = 24", [2, 3, 4], 24, False),
        ("24 == 2*3*4", [2, 3, 4], 24, False),
        ("x = 2*3*4", [2, 3, 4], 24, False),
        ("=33", [3, 7, 12], 33, False),
        ("3*7+12=٣٣", [3, 7, 12], 33, False),
        # other ways of writing
        ("3 ∗ 7 + 12", [3, 7, 12], 33, True),
        ("3 ⋅ 7 + 12", [3, 7, 12], 33, True),
        (r"3 \times 7 + 12", [3, 7, 12], 33, True),
        (r"3 \cdot 7 + 12", [3, 7, 12], 33, True),
        (r"12 \div 3", [3, 7, 12], 4, True),
        ("[12 − 7] ∗ {3}", [3, 7, 12], 15, True),
        ("{[(12 - 7)] * 3}", [3, 7, 12], 15, True),
        (r"\left(12 - 7\right) \times 3", [3, 7, 12], 15, True),
        (r"\frac{12}{3} + 7", [3, 7, 12], 11, True),
        (r"\frac{8}{3 - \frac{8}{3}}", [3, 3, 8, 8], 24, True),
        ("$3*7+12$", [3, 7, 12], 33, True),
        ("$$ 3*7+12 $$", [3, 7, 12], 33, True),
        (r"\(3 \times 7 + 12\)", [3, 7, 12], 33, True),
        (r"\[3 \times 7 + 12\]", [3, 7, 12], 33, True),
        ("$3*7+12 = 33$", [3, 7, 12], 33, True),
        ("$3*7+12$ = 33", [3, 7, 12], 33, True),
        ("$3*7+12$ = $33$", [3, 7, 12], 33, True),
        (r"33 = \(3*7+12\).", [3, 7, 12], 33, True),
        ("$33 = 3*7+12.$", [3, 7, 12], 33, True),
        ("3*7+12.", [3, 7, 12], 33, True),
        ("3*7+12 = 33.", [3, 7, 12], 33, True),
        ("$3*7+12$.", [3, 7, 12], 33, True),
        ("12.", [3, 7, 12], 12, True),
        # and their limits
        (r"\frac{12}{3} + 3", [3, 7, 12], 7, False),
        (r"\frac{12}{3}", [3, 7, 12], 3, False),
        (r"7\frac{12}{3}", [3, 7, 12], 28, False),
        (r"\frac{12}{7-7}", [12, 7, 7], 1, False),
        (r"3^{7}", [3, 7], 2187, False),
        ("(12-7]*3", [3, 7, 12], 15, False),
        ("$3*7+12", [3, 7, 12], 33, False),
        ("3*7+12$", [3, 7, 12], 33, False),
        ("$3$*$7$+12", [3, 7, 12], 33, False),
        (r"\(3*7+12\]", [3, 7, 12], 33, False),
        ("$$3*7+12$", [3, 7, 12], 33, False),
        ("3*7+12..", [3, 7, 12], 33, False),
        ("3*7+12!", [3, 7, 12], 33, False),
        ("3*7+12 = 33.0.", [3, 7, 12], 33, False),
        ("12.0", [3, 7, 12], 12, False),
        ("3.*4", [3, 4], 12, False),
        (".", [1], 1, False),
        ("$", [1], 1, False),
        ("$$", [1], 1, False),
        ("$$$$", [1], 1, False),
        (r"\text{3*7+12}", [3, 7, 12], 33, False),
        ("3*7+12, 1", [3, 7, 12], 33, False),
        ("3*7+12 or 3*12-3", [3, 7, 12], 33, False),
        ("**3*7+12**", [3, 7, 12], 33, False),
        # tricks
        ("-3+36", [3, 36], 33, False),
        ("+36-3", [3, 36], 33, False),
        ("36--3", [3, 36], 39, False),
        ("2**3", [2, 3], 8, False),
        ("4//2", [4, 2], 2, False),
        ("2(3)", [2, 3], 6, False),
        ("3 4", [3, 4], 34, False),
        ("3, 4", [3, 4], 7, False),
        ("３+４", [3, 4], 7, False),
        ("٣+٤", [3, 4], 7, False),
        ("__import__('os').getpid()", [1], 1, False),
        ("", [1], 1, False),
        ("the answer is 1", [1], 1, False),
    ],
)  # fmt: skip
def test_correctness_by_hand(answer: str, nums: list[int], target: int, correct: bool) -> None:
    verdict = verify(answered(answer), nums, target)
    assert verdict.correct is correct
    assert verdict.well_formed
    assert (verdict.error is None) is correct


@pytest.mark.parametrize(
    ("completion", "correct"),
    [
        ("<answer>3+7</answer>", True),
        ("<answer>1</answer> no <answer>3+7</answer>", True),
        ("<answer>3+7</answer> no <answer>1</answer>", False),
        ("<answer>3+7</answer> or <answer>1", True),
        ("<answer>3+7</answer></answer>", True),
        ("<answer>1<answer>3+7</answer>", True),
        ("<answer>3+7<answer>1</answer></answer>", False),
        ("<think><answer>3+7</answer></think>", True),
        ("<answer>3+7", False),
        ("3+7</answer>", False),
        ("</answer>3+7<answer>", False),
        ("3+7", False),
        ("<Answer>3+7</Answer>", False),
        ("< answer>3+7</answer>", False),
        ("", False),
    ],
)
def test_exactly_the_last_answer_is_graded(completion: str, correct: bool) -> None:
    assert verify(completion, [3, 7, 12], 10).correct is correct


@pytest.mark.parametrize(
    ("completion", "closed", "opened"),
    [
        (GOOD, True, False),
        (GOOD.removeprefix("<think>"), False, True),
        (f"  \n{GOOD}\n ", True, False),
        ("<think>a</think> \n <answer>b</answer>", True, False),
        ("<think></think><answer></answer>", True, False),
        ("</think><answer></answer>", False, True),
        (" a</think> <answer>b</answer> ", False, True),
        ("<think>a</think>so<answer>b</answer>", False, False),
        ("So <think>a</think><answer>b</answer>", False, False),
        ("<think>a</think><answer>b</answer>.", False, False),
        ("<think>a</think>", False, False),
        ("<answer>b</answer>", False, False),
        ("<answer>b</answer><think>a</think>", False, False),
        ("<think>a<answer>b</answer></think>", False, False),
        ("<think>a<answer>b</think></answer>", False, False),
        ("<think>a</think><answer>b", False, False),
        ("<think>a<answer>b</answer>", False, False),
        ("<think>a</think></think><answer>b</answer>", False, False),
        ("a</think></think><answer>b</answer>", False, False),
        ("<think><think>a</think><answer>b</answer>", False, False),
        ("<think>a</think><think>a</think><answer>b</answer>", False, False),
        ("<think>a<answer></think><answer>b</answer>", False, False),
        ("<think>a</answer></think><answer>b</answer>", False, False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False, False),
        ("<think>a</think><answer>b<think></answer>", False, False),
        ("<think>a</think><answer>b</think></answer>", False, False),
        ("<think>a</think><answer>b</answer></answer>", False, False),
        ("<think>a</think><answer></answer", False, False),
        ("<THINK>a</THINK><answer>b</answer>", False, False),
        ("<think>a</think></answer>", False, False),
        ("", False, False),
        ("<think>", False, False),
    ],
)
def test_format_by_hand(completion: str, closed: bool, opened: bool) -> None:
    assert verify(completion, [1], 1).well_formed is closed
    assert verify(completion, [1], 1, opened=True).well_formed is opened


@given(st.lists(st.sampled_from([*TAGS, " ", "a", "\n"]), max_size=9), st.booleans())
def test_format_agrees_with_its_definition(parts: list[str], opened: bool) -> None:
    whole = ["<think>", *parts] if opened else parts
    tags = [part for part in whole if part in TAGS]
    outside = [part for index, part in enumerate(whole) if part == "a" and not is_inside(whole, index)]
    expected = tags == list(TAGS) and not outside
    assert verify("".join(parts), [1], 1, opened=opened).well_formed is expected


def is_inside(parts: list[str], index: int) -> bool:
    before = [part for part in parts[:index] if part in TAGS]
    return bool(before) and before[-1] in ("<think>", "<answer>")


@given(expression_texts(max_numbers=5), st.lists(st.integers(0, 120), max_size=2), st.booleans(), st.integers(-1, 1))
def test_agrees_with_an_oracle(text: str, spare: list[int], drop: bool, offset: int) -> None:
    used = numbers(parse(text))
    nums = (used[1:] if drop else used) + spare
    enough = not Counter(used) - Counter(nums)
    try:
        value = oracle(text)
    except ZeroDivisionError:
        assert not verify(answered(text), nums, 1).correct
        return
    target = int(value) + offset
    assert verify(answered(text), nums, target).correct is (enough and value == Fraction(target))
    assert verify(answered(f"{text} = {target}"), nums, target).correct is (enough and value == target)
    assert not verify(answered(f"{text} = {target + 1}"), nums, target).correct


@given(st.text(), st.booleans())
def test_no_text_raises_and_junk_is_not_correct(text: str, opened: bool) -> None:
    for completion in (text, answered(text), f"<answer>{text}", f"{text}</answer>"):
        verdict = verify(completion, [3, 7, 12], 33, opened=opened)
        assert not verdict.correct
        json.dumps([verdict.answer, verdict.error]).encode()
        (verdict.error or "").encode()  # no lone surrogate of the text got into it


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    assert not verify(data, [3, 7, 12], 33).correct
    assert verify(data + b"<answer>3*7+12</answer>", [3, 7, 12], 33).correct


def test_bytes_read_like_text() -> None:
    assert verify(GOOD.encode(), NUMS, 24) == verify(GOOD, NUMS, 24)
    assert verify(b"<think>\xff</think><answer>3 \xc3\x97 4</answer>", [3, 4], 12).correct
    assert verify(b"<think>\xff</think><answer>3*4</answer>", [3, 4], 12).well_formed


@given(st.integers(0, len(GOOD) - 1), st.characters(codec="utf-8"))
def test_a_changed_character_of_the_answer_is_noticed(index: int, char: str) -> None:
    changed = GOOD[:index] + char + GOOD[index + 1 :]
    verdict = verify(changed, NUMS, 24)
    start, end = GOOD.index("<answer>"), len(GOOD)
    if index < start or char == GOOD[index]:
        assert verdict.correct
    elif verdict.correct:  # another sign for the same, or space for space
        assert GOOD[index] + char in ("*×", "*x", "*·", "*⋅", "*∗", "/÷") or (GOOD[index].isspace() and char.isspace())
    assert end == len(changed)


MEGABYTE = 1_000_000
HOSTILE = {
    "brackets": "(" * MEGABYTE,
    "brackets in the answer": answered("(" * MEGABYTE),
    "opening tags": "<answer>" * 100_000,
    "closing tags": "</answer>" * 100_000,
    "pairs": "<answer></answer>" * 60_000,
    "think tags": "<think>" * 100_000 + "</think>" * 100_000,
    "nested": "<answer>" * 60_000 + "1" + "</answer>" * 60_000,
    "well-formed around tags": "<think>" + "<answer>" * 100_000 + "</think><answer></answer>",
    "almost tags": "<answer" * 140_000,
    "letters of the tag": "answer>" * 140_000 + "</answer>",
    "a's": "a" * MEGABYTE,
    "spaces": " " * MEGABYTE,
    "spaces in the answer": answered(" " * MEGABYTE + "1"),
    "digits": answered("9" * 5_000),
    "a megabyte of digits": answered("9" * MEGABYTE),
    "sum": answered("1+" * 500_000 + "1"),
    "product": answered("*".join(["999999999"] * 25)),
    "left angles in the answer": answered("<+" * 500_000),
    "almost tags in the answer": answered("</answe" * 140_000),
    "equals": answered("=" * MEGABYTE),
    "stated": answered("1=" + "1" * MEGABYTE),
    "nulls": "\0" * MEGABYTE,
    "surrogates": "\ud800" * MEGABYTE,
    "emoji": "😀" * MEGABYTE,
    "ten megabytes": "<answer" * 1_500_000,
    "broken bytes": b"\xff" * 5 * MEGABYTE,
    "half broken bytes": b"<answer>\xff" * 300_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("opened", [False, True])
def test_hostile_text_is_judged_at_once(name: str, opened: bool) -> None:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        verdict = verify(HOSTILE[name], [3, 7, 12], 33, opened=opened)
        seconds.append(time.process_time() - start)
        assert not verdict.correct
    assert min(seconds) < 0.05, "it takes 1 to 5 ms of the processor"


def test_long_completions() -> None:
    thought = "a" * MEGABYTE
    assert verify(f"<think>{thought}</think><answer>3*7+12</answer>", [3, 7, 12], 33).well_formed
    too_long = verify(f"<think>{thought * 2}</think><answer>3*7+12</answer>", [3, 7, 12], 33)
    assert too_long.correct
    assert not too_long.well_formed


def test_what_is_cut_off_is_not_forgotten() -> None:
    end = GOOD.replace("8<", "a" * ((1 << 20) - len(GOOD) + 1) + "<")
    assert len(end) == 1 << 20
    assert verify(end, NUMS, 24).well_formed
    assert not verify("junk" + end, NUMS, 24).well_formed
    assert verify("junk" + end, NUMS, 24).correct


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        ("no", "no <answer>…</answer>"),
        ("<answer>3 7</answer>", "not an expression: expected an operator or ')' at character 3, not '7'"),
        ("<answer>3+8</answer>", "8 is not given, or not that often"),
        ("<answer>3/(7-7)</answer>", "7 is not given, or not that often"),
        ("<answer>3+7</answer>", "it gives 10, not 33"),
        ("<answer>7/3</answer>", "it gives 7/3, not 33"),
        ("<answer>3*7+12=32</answer>", "it states another result than 33"),
    ],
)
def test_errors_say_what_is_wrong(completion: str, error: str) -> None:
    assert verify(completion, [3, 7, 12], 33).error == error


def test_wrong_answers_have_a_normal_form_too_and_junk_has_none() -> None:
    assert verify("<answer>7+3</answer>", [3, 7, 12], 33).answer == "3+7"
    assert verify("<answer>3/(7-7)</answer>", [3, 7, 7], 33).error == "it divides by zero"
    assert verify("<answer>seven</answer>", [3, 7, 12], 33).answer is None


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, explorl.tasks.countdown.task; "
        "print({'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
