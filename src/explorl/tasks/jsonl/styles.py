r"""Where a completion states its answer: the `style` of the task ``jsonl``.

=============  ============================================================
boxed          in its last ``\boxed{…}``
tags           in its last ``<answer>…</answer>``
hash           after its last ``####``, in that line
last_line      in its last line that is not blank
last_number    the last number in it
whole          all of it
=============  ============================================================

If a completion has ``</think>``, only the text after the last one is read. No text raises an error, and the time is a
few passes over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from explorl.tasks.answer_span import last_answer, last_boxed, last_hash, read_completion
from explorl.tasks.jsonl.numbers import last_number


class Style(NamedTuple):
    """The sentence that asks for a style, and the error of a completion without it."""

    request: str
    missing: str


_STEPS = "Please reason step by step, and"
STYLES: Mapping[str, Style] = {
    "boxed": Style(f"{_STEPS} put your final answer within \\boxed{{}}.", "no \\boxed{…} with an answer in it"),
    "tags": Style(f"{_STEPS} put your final answer within <answer> </answer> tags.", "no <answer>…</answer>"),
    "hash": Style(
        f'{_STEPS} give your final answer in a last line of its own, like "#### 42".', "no answer after ####"
    ),
    "last_line": Style(f"{_STEPS} give your final answer, and nothing else, in the last line.", "no text"),
    "last_number": Style(f"{_STEPS} end with your final answer, a number.", "no number"),
    "whole": Style("Give the answer, and nothing else.", "no text"),
}


class StatedAnswer(NamedTuple):
    """The answer that a completion states, or None; and whether it states exactly one."""

    answer: str | None
    well_formed: bool


def extract_answer(completion: str | bytes, style: str, *, opened: bool = False) -> StatedAnswer:
    """Return the answer of a completion. ``opened``: the prompt opened ``<think>``, so the completion must close it."""
    text, is_whole = read_completion(completion)
    _, closing_tag, visible = text.rpartition("</think>")
    answer, count = _answer_and_count(visible, style)
    if answer is None or not answer.strip():
        return StatedAnswer(None, False)
    return StatedAnswer(answer.strip(), is_whole and count == 1 and bool(closing_tag or not opened))


def _answer_and_count(text: str, style: str) -> tuple[str | None, int]:
    if style == "boxed":
        return last_boxed(text)
    if style == "tags":
        return last_answer(text), text.count("<answer>")
    if style == "hash":
        return last_hash(text)
    if style == "last_number":
        return last_number(text), 1
    return (text if style == "whole" else text.rstrip().rpartition("\n")[2]), 1
