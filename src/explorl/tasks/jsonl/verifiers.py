"""The verifiers of the task ``jsonl``: each tells whether a stated answer is right.

exact     the same text; case, white space, and surrounding quotes and emphasis are ignored
number    the same number
math      the same according to math-verify
regex     the pattern is found in it
choice    the letter of the right option, read from the whole completion
code      the program in the completion passes its tests
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from explorl.core.text import normalized
from explorl.sandbox.isolated_call import IsolatedFunction, IsolationLimits
from explorl.tasks.jsonl.numbers import asks_for_unit, format_number, parse_number, same_number
from explorl.tasks.math.answer_text import MAX_LENGTH, normalize
from explorl.tasks.math.judge import shared_judge

VERIFIERS = ("exact", "number", "math", "choice", "code", "regex")

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MARKS = (*((mark, mark) for mark in ("**", "*", "```", "`", '"', "'", "$$", "$")), ("“", "”"), ("‘", "’"))
_LAYERS = 4
"""How many nested marks around an answer are removed."""
_WRONG_ANSWER = "another answer than the right one"


class CheckedAnswer(NamedTuple):
    """True if a stated answer is right; its normal form; and an error if it is wrong."""

    correct: bool
    answer: str | None
    error: str | None = None


def strip_marks(text: str, *, ignore_case: bool = True, marks: Sequence[tuple[str, str]] = _MARKS) -> str:
    """Return a text without what `exact` ignores: case, spaces, surrounding marks and a full stop."""
    collapsed = bare = " ".join(normalized(text, "NFC").split())
    has_stop = True
    for _ in range(_LAYERS):
        for opening, closing in marks:
            if bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening + closing):
                bare = bare[len(opening) : -len(closing)].strip()
        if match := _WRAPPED.fullmatch(bare):
            bare = match[1].strip()
        if has_stop and bare.endswith("."):
            bare, has_stop = bare[:-1].rstrip(), False
    bare = bare or collapsed
    return bare.casefold() if ignore_case else bare


def check_exact(text: str, right: Sequence[str], *, ignore_case: bool) -> CheckedAnswer:
    """Return whether a text is one of the right ones.

    Underscores and an emphasis that is only closed are ignored around the answer but not around a right text, which
    they may be part of: ``__init__``, ``A*``.
    """
    answer = strip_marks(text, ignore_case=ignore_case)
    forms = {
        answer,
        strip_marks(text.removesuffix("**"), ignore_case=ignore_case, marks=(*_MARKS, ("__", "__"), ("_", "_"))),
    }
    correct = not forms.isdisjoint(strip_marks(gold, ignore_case=ignore_case) for gold in right)
    return CheckedAnswer(correct, answer, None if correct else _WRONG_ANSWER)


def check_number(text: str, right: Sequence[str], *, tolerance: float, question: str = "") -> CheckedAnswer:
    """Return whether a text states one of the right numbers; ``question`` may ask for a unit, like "how many dozen"."""
    answer = parse_number(text)
    if answer is None:
        return CheckedAnswer(False, None, "not one number")
    golds = [gold for right_text in right if (gold := parse_number(right_text)) is not None]
    if asks_for_unit(question, answer.unit):
        golds = [gold._replace(unit=gold.unit or answer.unit) for gold in golds]
    correct = any(same_number(answer, gold, tolerance) for gold in golds)
    return CheckedAnswer(correct, format_number(answer), None if correct else _WRONG_ANSWER)


def check_math(
    texts: Sequence[str],
    right: Sequence[Sequence[str]],
    prompts: Sequence[str],
    *,
    workers: int | None,
    seconds: float,
) -> list[CheckedAnswer]:
    """Return for each text whether it equals one of its right answers and does not just repeat its prompt."""
    cases = [
        ((gold, text), prompt) for text, golds, prompt in zip(texts, right, prompts, strict=True) for gold in golds
    ]
    judgements = iter(
        shared_judge(workers, seconds).judge_many([pair for pair, _ in cases], [prompt for _, prompt in cases])
    )
    results = []
    for text, golds in zip(texts, right, strict=True):
        per_gold = [next(judgements) for _ in golds]
        correct = any(judgement.same for judgement in per_gold)
        answer = normalize(text) if len(text) <= MAX_LENGTH else ""
        results.append(CheckedAnswer(correct, answer or None, None if correct else per_gold[0].error or _WRONG_ANSWER))
    return results


def check_patterns(
    texts: Sequence[str], patterns: Sequence[Sequence[str]], *, workers: int | None, seconds: float
) -> list[CheckedAnswer]:
    """Return for each text whether one of its patterns is found in it."""
    messages = [
        {"patterns": list(text_patterns), "text": text} for text, text_patterns in zip(texts, patterns, strict=True)
    ]
    replies = _matchers(workers, seconds).call_many(messages, [message["patterns"] for message in messages])
    results = []
    for text, reply in zip(texts, replies, strict=True):
        error = f"the pattern {reply.error}" if reply.error else "the pattern is not in it"
        results.append(
            CheckedAnswer(reply.value is True, " ".join(text.split()), None if reply.value is True else error)
        )
    return results


@lru_cache
def _matchers(workers: int | None, seconds: float) -> IsolatedFunction:
    """Return this process's pool of workers with these limits; it is closed when Python exits."""
    matcher = IsolatedFunction(
        "explorl.tasks.jsonl.pattern_worker:matches", workers=workers, limits=IsolationLimits(seconds=seconds)
    )
    atexit.register(matcher.close)
    return matcher
