"""What compares two answers by math-verify, in an isolated process (`explorl.sandbox.isolated_call`).

It imports nothing of Explorl but its own kind, so it holds no torch and starts in a second.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from explorl.tasks.math import tree as math_tree


def prepare(_: Any) -> None:
    """Build the parser and fill its caches and sympy's, which no pair can fill for the next."""
    import math_verify  # noqa: F401 (says what is missing, if it is)

    for library in ("math_verify", "latex2sympy2_extended"):  # both tell of every answer that they cannot read
        logging.getLogger(library).setLevel(logging.CRITICAL)
    answers = math_tree.EXAMPLES
    for index, answer in enumerate(answers):
        with suppress(Exception):  # what fails here fails again where it matters
            same_answer(answer, answers[(7 * index + 3) % len(answers)])


def prepare_trusted(gold: str) -> list[Any] | None:
    """The right answer, parsed; None if that did not come to an end."""
    return _parsed(gold) or None


def compare(message: dict[str, Any], golds: list[Any] | None) -> bool:
    """Whether the answer of a message says the same as the right one, which may have been parsed already."""
    return same_answer(str(message["gold"]), str(message["answer"]), golds)


def same_answer(gold: str, answer: str, golds: list[Any] | None = None) -> bool:
    """Whether two answers, as `math_form.texts` writes them, say the same.

    Raises ValueError, with the reason, where the answer is not one that may be compared.
    """
    from math_verify import verify

    golds, answers = _parsed(gold) if golds is None else golds, _parsed(answer)
    if (reason := math_tree.refusal_reason(golds, answers)) is not None:
        raise ValueError(reason)
    # No time limit of math-verify's own: it is an alarm, which neither threads nor one long C call will hear.
    return bool(verify(golds, answers, timeout_seconds=None))


def _parsed(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    tree = math_tree.build(latex)
    if tree is not None:
        return [tree]
    # The box as a whole or nothing: a number somewhere in a sentence is not the answer.
    return parse(
        f"\\boxed{{{latex}}}",
        [LatexExtractionConfig(boxed_match_priority=0)],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
