"""How the task ``jsonl`` tells whether a stated answer is right: by one of the verifiers that a row may name.

exact     the same text; case, white space, and marks on both sides of it do not count
number    the same number
math      the same to math-verify
regex     the pattern is found in it
choice    the letter of the right option, read from the whole completion
code      its tests pass, read from the whole completion
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
from explorl.tasks.math.judge import shared_judge
from explorl.tasks.math.normalize import MAX_LENGTH, normalize

VERIFIERS = ("exact", "number", "math", "choice", "code", "regex")

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_MARKS = (*((mark, mark) for mark in ("**", "*", "```", "`", '"', "'", "$$", "$")), ("“", "”"), ("‘", "’"))
_LAYERS = 4
"""Most marks around an answer, within one another."""
_ANOTHER = "another answer than the right one"


class CheckedAnswer(NamedTuple):
    """Whether a stated answer is right; the answer in a normal form; and what is wrong with it."""

    correct: bool
    answer: str | None
    error: str | None = None


def strip_marks(text: str, *, ignore_case: bool = True, marks: Sequence[tuple[str, str]] = _MARKS) -> str:
    """Return a text without what `exact` ignores: case, spaces, marks on both sides of it, and a full stop."""
    whole = bare = " ".join(normalized(text, "NFC").split())
    has_stop = True
    for _ in range(_LAYERS):
        for opening, closing in marks:
            if bare.startswith(opening) and bare.endswith(closing) and len(bare) > len(opening + closing):
                bare = bare[len(opening) : -len(closing)].strip()
        if match := _WRAPPED.fullmatch(bare):
            bare = match[1].strip()
        if has_stop and bare.endswith("."):
            bare, has_stop = bare[:-1].rstrip(), False
    bare = bare or whole
    return bare.casefold() if ignore_case else bare


def check_exact(said: str, right: Sequence[str], *, ignore_case: bool) -> CheckedAnswer:
    """Return whether a text is one of the right ones.

    Underscores and an emphasis that is only closed are ignored around the answer, not around a right text, to which
    they may belong: ``__init__``, ``A*``.
    """
    answer = strip_marks(said, ignore_case=ignore_case)
    forms = {
        answer,
        strip_marks(said.removesuffix("**"), ignore_case=ignore_case, marks=(*_MARKS, ("__", "__"), ("_", "_"))),
    }
    correct = not forms.isdisjoint(strip_marks(text, ignore_case=ignore_case) for text in right)
    return CheckedAnswer(correct, answer, None if correct else _ANOTHER)


def check_number(said: str, right: Sequence[str], *, tolerance: float, question: str = "") -> CheckedAnswer:
    """Return whether a text states one of the right numbers; ``question`` may name the unit that is asked for."""
    answer = parse_number(said)
    if answer is None:
        return CheckedAnswer(False, None, "not one number")
    golds = [gold for text in right if (gold := parse_number(text)) is not None]
    if asks_for_unit(question, answer.unit):
        golds = [gold._replace(unit=gold.unit or answer.unit) for gold in golds]
    correct = any(same_number(answer, gold, tolerance) for gold in golds)
    return CheckedAnswer(correct, format_number(answer), None if correct else _ANOTHER)


def check_math(
    said: Sequence[str],
    right: Sequence[Sequence[str]],
    prompts: Sequence[str],
    *,
    workers: int | None,
    seconds: float,
) -> list[CheckedAnswer]:
    """Return for each text whether it is one of its right answers, and no mere repetition of its prompt."""
    cases = [((gold, text), prompt) for text, golds, prompt in zip(said, right, prompts, strict=True) for gold in golds]
    pairs, asked = [pair for pair, _ in cases], [prompt for _, prompt in cases]
    judgements = iter(shared_judge(workers, seconds).judge_many(pairs, asked))
    results = []
    for text, golds in zip(said, right, strict=True):
        each = [next(judgements) for _ in golds]
        correct = any(judgement.same for judgement in each)
        answer = normalize(text) if len(text) <= MAX_LENGTH else ""
        results.append(CheckedAnswer(correct, answer or None, None if correct else each[0].error or _ANOTHER))
    return results


def check_patterns(
    said: Sequence[str], patterns: Sequence[Sequence[str]], *, workers: int | None, seconds: float
) -> list[CheckedAnswer]:
    """Whether one of its patterns is found in each text."""
    messages = [{"patterns": list(some), "text": text} for text, some in zip(said, patterns, strict=True)]
    replies = _matchers(workers, seconds).call_many(messages, [message["patterns"] for message in messages])
    results = []
    for text, reply in zip(said, replies, strict=True):
        error = f"the pattern {reply.error}" if reply.error else "the pattern is not in it"
        results.append(
            CheckedAnswer(reply.value is True, " ".join(text.split()), None if reply.value is True else error)
        )
    return results


@lru_cache
def _matchers(workers: int | None, seconds: float) -> IsolatedFunction:
    """One pool per process for all that ask with the same numbers; ended when Python ends."""
    matcher = IsolatedFunction(
        "explorl.tasks.jsonl.pattern_worker:matches", workers=workers, limits=IsolationLimits(seconds=seconds)
    )
    atexit.register(matcher.close)
    return matcher
