"""Find the outputs of a tool and open calls in a text; see `explorl.rollout.tools`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from explorl.rollout.stops import special_ids
from explorl.rollout.tools import Delimiters, MarkdownFence, ToolSpec, find_call

LONGEST_CLOSING = 20
"""How often the text that every call ends with may be repeated at the end of a call."""


def output_spans(text: str, tool: ToolSpec) -> list[tuple[int, int]]:
    """Return the (begin, end) of each output in a completion that was written with a tool.

    They are what `output_block` would have appended after the calls. An output that is cut off at the end of the text
    counts; a call without an output, and an output block without a call, do not.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    while (call := find_call(text, tool, start)) is not None:
        start = call.end
        end = _output_end(text, call.end, tool)
        if end is not None and end > call.end:
            spans.append((call.end, end))
            start = end
    return spans


def output_mask(
    text: str, offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> Bool[np.ndarray, " tokens"]:
    """Return a mask of the tokens that a rollout would not have sampled; ``offsets`` are their positions in the text.

    A rollout stops with the token that completes its call. That token may contain white space of the output; if it
    contains more, it does not count as sampled.
    """
    begins, ends = (np.array(side, dtype=np.int64) for side in (zip(*offsets, strict=True) if offsets else ((), ())))
    mask = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        for token in np.flatnonzero((begins < end) & (ends > begin)):
            first, last = max(int(begins[token]), begin), min(int(ends[token]), end)
            mask[token] |= begins[token] >= begin or bool(text[first:last].strip())
    return mask


def open_call(text: str, tool: ToolSpec) -> str:
    """Return the end of a prompt from the opening of a call that is not closed, or "".

    A completion continues such a call. An opening within a line may mean something else, as in ``x << 2``, and only
    counts at the end of the prompt.
    """
    if isinstance(tool.fence, Delimiters):
        return tool.fence.opening if text.endswith(tool.fence.opening) else ""
    mark = LONGEST_CLOSING * tool.fence.stop
    for closing in (mark, f"\n{mark}"):
        start = 0
        while (call := find_call(text + closing, tool, start)) is not None:
            if call.end > len(text):
                line = text.rfind("\n", 0, call.begin) + 1
                return text[call.begin if text[line : call.begin].strip() else line :]
            start = call.end
    return ""


def open_call_in_prompt(prompt: Sequence[int], tokenizer: Any, tool: ToolSpec) -> str:
    """Return the open call at the end of a prompt's tokens, or "".

    Only the text after the last special token counts, as that token ends any earlier message.
    """
    special = special_ids(tokenizer)
    begin = next((i for i in range(len(prompt), 0, -1) if int(prompt[i - 1]) in special), 0)
    return open_call(str(tokenizer.decode(prompt[begin:], skip_special_tokens=True)), tool)


def _output_end(text: str, begin: int, tool: ToolSpec) -> int | None:
    """Return where the output that begins here ends, or None if there is none."""
    if isinstance(tool.fence, MarkdownFence):
        return _block_end(text, begin, tool.fence.output)
    if isinstance(tool.fence, Delimiters):
        return _inline_end(text, begin, tool.fence)
    raise ValueError(
        f"outputs of tool {tool.name!r} have a {type(tool.fence).__name__}, which cannot be found in a text; use a "
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
            f"after_output={fence.after_output!r} does not show where an output ends; give it a text such as '>>'"
        )
    if not text.startswith(fence.before_output, begin):
        return None
    inside = begin + len(fence.before_output)
    line_end = text.find("\n", inside)
    closing = text.find(fence.after_output, inside, None if line_end < 0 else line_end)
    if closing < 0:
        return None if line_end >= 0 else len(text)
    while text.startswith(fence.after_output, closing + 1):  # the output ends with a part of it
        closing += 1
    return closing + len(fence.after_output)
