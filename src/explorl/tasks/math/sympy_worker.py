"""Compare two answers by math-verify, in an isolated process (`explorl.sandbox.isolated_call`).

This module imports only `tree` of Explorl, so the process has no torch and starts in a second.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from explorl.tasks.math import tree


def prepare(_: Any) -> None:
    """Build the parser and fill its caches and sympy's: each pair is compared in a fork, whose caches are lost."""
    import math_verify  # noqa: F401 (raises ImportError, which names it, if it is missing)

    for library in ("math_verify", "latex2sympy2_extended"):  # both log every answer that they cannot parse
        logging.getLogger(library).setLevel(logging.CRITICAL)
    answers = tree.EXAMPLES
    for index, answer in enumerate(answers):
        with suppress(Exception):  # an error that matters will occur again in a comparison
            same_answer(answer, answers[(7 * index + 3) % len(answers)])


def prepare_trusted(gold: str) -> list[Any] | None:
    """Parse the right answer; return None if it cannot be parsed."""
    return _parsed(gold) or None


def compare(message: dict[str, Any], golds: list[Any] | None) -> bool:
    """Return whether a message's answer equals the right one; ``golds`` is the parsed right answer, if there is one."""
    return same_answer(str(message["gold"]), str(message["answer"]), golds)


def same_answer(gold: str, answer: str, golds: list[Any] | None = None) -> bool:
    """Return whether two answers, written by `form.worker_texts`, are equal.

    Raises ValueError, with the reason, if the answer must not be compared.
    """
    from math_verify import verify

    golds, answers = _parsed(gold) if golds is None else golds, _parsed(answer)
    if (reason := tree.refusal_reason(golds, answers)) is not None:
        raise ValueError(reason)
    # math-verify's own time limit is an alarm, which works neither in threads nor during a long C call.
    is_same = bool(verify(golds, answers, timeout_seconds=None))
    return is_same or any(tree.agree(gold, answer) for gold in golds for answer in answers)


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    built = tree.build(latex)
    if built is not None:
        return [built]
    # Parse the whole box or nothing: a number somewhere in a sentence is not the answer.
    return parse(
        f"\\boxed{{{latex}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
