"""Where in a text the outputs of a tool stand, and where a call is open; see `explorl.rollout.tools`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from explorl.rollout.stops import special_ids
from explorl.rollout.tools import Delimiters, MarkdownFence, ToolSpec, find_call

LONGEST_CLOSING = 20
"""Times that the text which every call ends with may follow upon itself at the end of one."""


def output_spans(text: str, tool: ToolSpec) -> list[tuple[int, int]]:
    """(begin, end) of the outputs in a completion that was written with a tool, behind the call that each belongs to.

    They are what `output_block` would have appended there. One that is cut off at the end of the text counts too; a
    call without an output, and a block that says "output" without a call, do not.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while (found := find_call(text, tool, start)) is not None:
        start = found.end
        end = _output_end(text, found.end, tool)
        if end is not None and end > found.end:
            spans.append((found.end, end))
            start = end
    return spans


def output_mask(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Bool[np.ndarray, " tokens"]:
    """True on the tokens that a rollout would not have sampled; ``offsets``: where each stands in the text.

    As in a rollout, where a row ends with the token that completes its call: the token may say white space of the
    output, but where it says more it is not sampled.
    """
    begins, ends = (np.array(side, dtype=np.int64) for side in (zip(*offsets, strict=True) if offsets else ((), ())))
    mask = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        for token in np.flatnonzero((begins < end) & (ends > begin)):
            first, last = max(int(begins[token]), begin), min(int(ends[token]), end)
            mask[token] |= begins[token] >= begin or bool(text[first:last].strip())
    return mask


def open_call(text: str, tool: ToolSpec) -> str:
    """The end of a prompt in which a call is open, from its opening on; empty where none is.

    What a model writes after it goes on with the call. An opening within a line may mean something else, as in
    ``x << 2``: it counts where nothing stands behind it.
    """
    if isinstance(tool.fence, Delimiters):
        return tool.fence.opening if text.endswith(tool.fence.opening) else ""
    mark = LONGEST_CLOSING * tool.fence.stop
    for closing in (mark, f"\n{mark}"):
        start = 0
        while (found := find_call(text + closing, tool, start)) is not None:
            if found.end > len(text):
                line = text.rfind("\n", 0, found.begin) + 1
                return text[found.begin if text[line : found.begin].strip() else line :]
            start = found.end
    return ""


def open_call_in_prompt(prompt: Sequence[int], tokenizer: Any, tool: ToolSpec) -> str:
    """The call that a prompt's tokens have opened.

    Special tokens end what others have said: nothing that they leave open is the answer's.
    """
    special = special_ids(tokenizer)
    begin = next((place for place in range(len(prompt), 0, -1) if int(prompt[place - 1]) in special), 0)
    return open_call(str(tokenizer.decode(prompt[begin:], skip_special_tokens=True)), tool)


def _output_end(text: str, begin: int, tool: ToolSpec) -> int | None:
    """Where the output ends that begins here; None where there is none."""
    if isinstance(tool.fence, MarkdownFence):
        return _block_end(text, begin, tool.fence.output)
    if isinstance(tool.fence, Delimiters):
        return _inline_end(text, begin, tool.fence)
    raise ValueError(
        f"tool {tool.name!r} writes outputs with a {type(tool.fence).__name__}, which nobody can find in a text; use a "
        "MarkdownFence or Delimiters"
    )


def _block_end(text: str, begin: int, name: str) -> int | None:
    opening = re.compile(rf"[ \t]*\r?\n?[ \t]*(`{{3,}}){re.escape(name)}[ \t]*\r?\n").match(text, begin)
    if opening is None:
        return None
    closing = re.compile(rf"^[ \t]*{opening[1]}`*[ \t]*\r?(?:\n|\Z)", re.MULTILINE).search(text, opening.end())
    return len(text) if closing is None else closing.end()


def _inline_end(text: str, begin: int, fence: Delimiters) -> int | None:
    if not fence.after_output.strip():
        raise ValueError(
            f"after_output={fence.after_output!r}: where an output ends cannot be seen; give it a text, like '>>'"
        )
    if not text.startswith(fence.before_output, begin):
        return None
    inside = begin + len(fence.before_output)
    line_end = text.find("\n", inside)
    closing = text.find(fence.after_output, inside, None if line_end < 0 else line_end)
    if closing < 0:
        return None if line_end >= 0 else len(text)
    while text.startswith(fence.after_output, closing + 1):  # the output ends with the first half of it
        closing += 1
    return closing + len(fence.after_output)
