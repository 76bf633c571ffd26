"""What an answer is made of, for the rollout browser: blocks of calls and outputs, and where it branches off another.

All of it comes from files: what does not fit an answer's tokens is left out, never an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from explorl.core.text import clean

Block = tuple[int, int, str, str]
"""First token, the one behind the last, "call" or "output", and what is said of it."""
LABEL = 60


def blocks(tokens: Sequence[str], calls: Any) -> list[Block]:
    """The blocks of an answer's calls, in order: the code as far as its tokens are found, and the output.

    calls: mappings with ``source``, ``status``, and the tokens ``begin`` to ``end`` that the policy did not write.
    """
    ends = list(accumulate(map(len, tokens)))
    text, done = "".join(tokens), 0
    found: list[Block] = []
    for call in calls if isinstance(calls, Sequence) else ():
        begin, end = (_count(call.get(name)) if isinstance(call, Mapping) else None for name in ("begin", "end"))
        if begin is None or end is None or not done <= begin < end <= len(tokens):
            continue
        source = str(call.get("source") or "").strip()
        behind = ends[begin - 1] if begin else 0
        at = text.rfind(source, 0, behind) if source else -1
        first = bisect_right(ends, at)
        if at >= 0 and done <= first < begin:
            found.append((first, begin, "call", "call"))
        status = clean(str(call.get("status") or ""), LABEL)
        found.append((begin, end, "output", f"output: {status}" if status not in ("", "ok") else "output"))
        done = end
    return found


def lineage(answer: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """The row of an answer and, where it has its first tokens from another one, that one's row and their number."""
    row, parent, shared = (_count(answer.get(name)) for name in ("row", "parent", "forked_at"))
    if row is None:
        return {}
    if parent is None or parent == row or not shared or shared > tokens:
        return {"row": row}
    return {"row": row, "parent": parent, "forked_at": shared}


def _count(value: Any) -> int | None:
    """A whole number, 0 or more; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (float("inf"),):
        return None
    return int(value) if value >= 0 and value == int(value) else None
