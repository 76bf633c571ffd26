r"""Find the first answer in a response by the task's answer mark, such as ``<answer>``, ``\boxed{`` or ``####``.

These functions never raise, and take a few passes over the text at most.
"""

from __future__ import annotations

import re

from explorl.tasks import Prompt, Task
from explorl.tasks.answer_span import BOXED, box_spans, requested_mark
from explorl.tasks.math.task import Math

_TAG = re.compile(r"<([A-Za-z][\w-]*)>")


def answer_mark(task: Task, prompt: Prompt) -> str | None:
    """Return what an answer begins with: the task's ``answer_mark``, or the mark in its prompt; None without one."""
    declared = getattr(task, "answer_mark", None)
    if declared:
        return str(declared)
    text = prompt if isinstance(prompt, str) else "\n".join(str(message.get("content") or "") for message in prompt)
    return requested_mark(text) or (BOXED if isinstance(task, Math) else None)


def first_answer_end(text: str, mark: str) -> int | None:
    r"""Return where the first complete answer ends, or None.

    An answer in a tag ends with the closing tag, a ``\boxed{`` with its brace, and any other with its line. Blank
    answers do not count.
    """
    if mark.rstrip("{ ") == r"\boxed":
        return next((_after(text, span) for span in box_spans(text) if span and text[slice(*span)].strip()), None)
    tag = _TAG.fullmatch(mark.strip())
    closing = f"</{tag[1]}>" if tag else "\n"
    start = text.find(mark)
    while start >= 0:
        end = text.find(closing, start + len(mark))
        if tag and end < 0:
            return None
        end = len(text) if end < 0 else end
        start = text.rfind(mark, start, end)  # if several are open, the last
        if text[start + len(mark) : end].strip():
            return end + len(closing) if tag else end
        start = text.find(mark, end)
    return None


def _after(text: str, span: tuple[int, int]) -> int:
    """Return the end of a box, including its closing brace if it has one."""
    return span[1] + 1 if text[span[1] : span[1] + 1] == "}" else span[1]
