"""A process that compares answers by math-verify: a JSON object a line in, one a line out.

`math_judge` starts it by its path and kills it when it takes too long. It imports nothing of Explorl, so it holds no
torch, starts in a second, and would not notice if the package were elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, BinaryIO


def same(gold: str, answer: str, shift: int = 0) -> bool:
    """Whether two answers in LaTeX say the same. ``shift``: both are multiplied by that power of ten first.

    math-verify rounds to six decimals and takes differences below 1e-15 for none, so it cannot tell 1e-27 from 1e-20.
    """
    from math_verify import verify

    # No time limit of math-verify's own: it is an alarm, which neither threads nor one long C call will hear.
    golds, answers = ([_shifted(item, shift) for item in _parsed(text)] for text in (gold, answer))
    return bool(verify(golds, answers, timeout_seconds=None))


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # The box as a whole or nothing: a number somewhere in a sentence is not the answer.
    return parse(
        f"\\boxed{{{latex}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        extraction_mode="first_match",
        parsing_timeout=None,
    )


def _shifted(item: Any, shift: int) -> Any:
    import sympy

    if shift and isinstance(item, sympy.Eq):
        item = item.rhs
    return item * sympy.Integer(10) ** shift if shift and isinstance(item, sympy.Expr) else item


def serve(pairs: BinaryIO, replies: BinaryIO, limit: float) -> None:
    """Answer pairs until there are no more. Begins with ``{"ready": true}``, or with what is missing."""
    try:
        same("1+x", "x+1")  # builds the parser, which takes longer than most pairs
    except ImportError as error:
        _write(replies, {"missing": str(error)})
        return
    _write(replies, {"ready": True})
    for line in pairs:
        # Ends this process by the kernel's hand, should nobody be left to do it.
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            equal = same(**json.loads(line))
        except Exception:  # whatever sympy could not do, they were not shown to be the same
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, {"same": equal})


def _write(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def main(limit: float, memory: int) -> None:  # pragma: no cover (another process)
    """Serve on the standard streams, within ``memory`` bytes."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    serve(sys.stdin.buffer, replies, limit)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
