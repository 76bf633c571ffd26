"""The structure of a completion for the rollout browser: blocks of tool calls and outputs, and its parent.

All of it comes from files: what does not fit the completion's tokens is left out and never raises an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from explorl.core.text import clean

Block = tuple[int, int, str, str]
"""First token, end (exclusive), "call" or "output", and its label."""
MAX_LABEL = 60


def blocks(tokens: Sequence[str], calls: Any) -> list[Block]:
    """Return the blocks of a completion's tool calls in order: each call's code, if its tokens are found, and output.

    calls: mappings with ``source``, ``status``, and the range ``begin`` to ``end`` of tokens that the policy did not
        sample.
    """
    ends = list(accumulate(map(len, tokens)))
    text, last_end = "".join(tokens), 0
    result: list[Block] = []
    for call in calls if isinstance(calls, Sequence) else ():
        begin, end = (_count(call.get(name)) if isinstance(call, Mapping) else None for name in ("begin", "end"))
        if begin is None or end is None or not last_end <= begin < end <= len(tokens):
            continue
        source = str(call.get("source") or "").strip()
        text_end = ends[begin - 1] if begin else 0
        offset = text.rfind(source, 0, text_end) if source else -1
        first = bisect_right(ends, offset)
        if offset >= 0 and last_end <= first < begin:
            result.append((first, begin, "call", "call"))
        status = clean(str(call.get("status") or ""), MAX_LABEL)
        result.append((begin, end, "output", f"output: {status}" if status not in ("", "ok") else "output"))
        last_end = end
    return result


def lineage(completion: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """Return a completion's row and, if it branches off another, that one's row and the number of shared tokens."""
    row, parent, shared = (_count(completion.get(name)) for name in ("row", "parent", "forked_at"))
    if row is None:
        return {}
    if parent is None or parent == row or not shared or shared > tokens:
        return {"row": row}
    return {"row": row, "parent": parent, "forked_at": shared}


def _count(value: Any) -> int | None:
    """Return the value if it is a whole number of at least 0, and None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (float("inf"),):
        return None
    return int(value) if value >= 0 and value == int(value) else None
