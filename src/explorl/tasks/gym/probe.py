"""Test whether a scorer of reasoning-gym can be exploited, by scoring trivial answers to a few problems.

A policy finds an answer that always wins long before it learns to solve a problem. So *canned* answers, which need no
thought (nothing, ``0``, ``nan``, the question itself, the answer to another problem, …), are scored. Those that win on
problems that they do not answer are reported as `ProbeFinding`.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

from explorl.sandbox.codec import decode
from explorl.tasks.gym.worker import create_dataset, encode_config, score_answer

Entry = Mapping[str, Any]
ScoreFunction = Callable[[str, Entry], float]
"""Returns the score of an answer to a problem, from 0 to 1."""

ITEMS = 16
"""Number of problems in a sample."""
MIN_PROBLEMS = 3
"""Minimum size of a sample, and number of problems after which a canned answer that lost them all is given up."""
SECONDS = 2.0
"""Processor time of this thread after which a quick probe stops drawing problems; most data sets take far less."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MAX_NAME = 40
CONSTANTS = {
    text: text
    for text in (
        *("", "0", "1", "2", "-1", "42", "0.5", "1/2", "100", "nan", "NaN", "inf", "-inf", "1e999", "0x0", "None"),
        *("null", "True", "False", "yes", "no", "a", "A", "x", "C", "?", "()", "[]", "[[]]", "[0]", "[NaN]", "{}"),
        *('""', "6+6+6+6", "1*2*3*4", "(1+2+3)*4", "0=0", "0 days", "00:00", "0 1 2 3", "A B C", "infeasible"),
        *("The answer is 42.", "I do not know"),
    )
} | {"a long text": "the answer follows from what is given " * 200}
"""Answers that are the same for every problem, by name."""


@dataclass(frozen=True)
class ProbeFinding:
    """A canned answer, its number of wins, and the number of problems that it was tried on and does not answer."""

    answer: str
    wins: int
    items: int

    @property
    def share(self) -> float:
        return self.wins / self.items

    def __str__(self) -> str:
        return f"{self.answer} wins on {self.wins} of {self.items} problems that it does not answer"


def find_weakness(name: str, config: Mapping[str, Any], threshold: float) -> ProbeFinding | None:
    """Return the finding for which a data set with these options is rejected, or None. Takes about a second; cached."""
    return _weakness(name, encode_config(name, config), threshold)


@lru_cache(maxsize=1024)
def _weakness(name: str, config: str, threshold: float) -> ProbeFinding | None:
    return worst_finding(probe_dataset(name, decode(json.loads(config)), threshold))


def probe_dataset(
    name: str, config: Mapping[str, Any], threshold: float = 1.0, *, thorough: bool = False
) -> list[ProbeFinding]:
    """Return `probe` of a data set. Unless ``thorough``, slow data sets are tested on fewer problems."""
    dataset = create_dataset(name, config, seed=0, size=ITEMS)
    with _quiet(sys.modules[type(dataset).__module__]):
        entries = sample_entries(dataset.__getitem__, seconds=math.inf if thorough else SECONDS)
        return probe(
            lambda answer, entry: score_answer(dataset, answer, entry)[0], entries, threshold, thorough=thorough
        )


@contextmanager
def _quiet(module: ModuleType) -> Iterator[None]:
    """Silence ``print`` in a module, because some scorers print comments, but not what other threads print."""
    original = vars(module).get("print", print)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vars(module)["print"] = lambda *_, **__: None
        try:
            yield
        finally:
            vars(module)["print"] = original


def sample_entries(draw: Callable[[int], Entry], *, most: int = ITEMS, seconds: float = math.inf) -> list[Entry]:
    """Return the first ``most`` problems, or fewer if drawing them takes longer than ``seconds``."""
    start = time.thread_time()
    entries: list[Entry] = []
    while len(entries) < most and (len(entries) < MIN_PROBLEMS or time.thread_time() - start < seconds):
        entries.append(draw(len(entries)))
    return entries


def probe(
    score: ScoreFunction, entries: Sequence[Entry], threshold: float, *, thorough: bool = False
) -> list[ProbeFinding]:
    """Return a finding for each canned answer that wins at least once, the best first.

    Unless ``thorough``, a canned answer that loses the first few problems is given up.
    """
    findings = []
    for name, answers in canned_answers(entries).items():
        wins = items = 0
        for answer, entry in zip(answers, entries, strict=True):
            if answer is None or is_same_answer(answer, entry["answer"]):
                continue
            items += 1
            wins += score(answer, entry) >= threshold
            if items == MIN_PROBLEMS and not wins and not thorough:
                break
        if wins:
            findings.append(ProbeFinding(name, wins, items))
    return sorted(findings, key=lambda finding: -finding.share)


def worst_finding(findings: Sequence[ProbeFinding]) -> ProbeFinding | None:
    """Return the finding for which a data set is rejected: an answer that wins on most problems, or None."""
    return next((finding for finding in findings if finding.share > 0.5 and finding.items >= MIN_PROBLEMS), None)


def canned_answers(entries: Sequence[Entry]) -> dict[str, list[str | None]]:
    """Return the canned answers to each problem by name; None if a problem does not have that answer."""
    golds = [entry["answer"] if isinstance(entry["answer"], str) else None for entry in entries]
    distinct = list(dict.fromkeys(gold for gold in golds if gold is not None))
    answers: dict[str, list[str | None]] = {
        (repr(text) if name == text else name): [text] * len(entries) for name, text in CONSTANTS.items()
    }
    answers["the question"] = [entry["question"] for entry in entries]
    answers["the last line of the question"] = [entry["question"].strip().rpartition("\n")[2] for entry in entries]
    answers["the answer to the next problem"] = golds[1:] + golds[:1]
    answers["all answers of the sample"] = [" ".join(distinct)[:9_000]] * len(entries)
    for common in sorted(distinct, key=golds.count)[-2:]:
        answers.setdefault(repr(common[:_MAX_NAME]), [common] * len(entries))
    for number in ("0", "nan", "NaN", "inf"):
        name = f"the answer with {number} for each number"
        answers[name] = [_NUMBER.sub(number, gold) if gold and _NUMBER.search(gold) else None for gold in golds]
    for key in dict.fromkeys(key for entry in entries for key in entry["metadata"]):
        if "answer" not in str(key) and "solution" not in str(key):
            answers[f"a text of the question ({key})"] = [_quoted(entry, key) for entry in entries]
    answers["the target and zero times the numbers"] = [_target(entry["metadata"]) for entry in entries]
    answers["the integral itself"] = [_integral(entry["metadata"]) for entry in entries]
    return {name: texts for name, texts in answers.items() if any(text is not None for text in texts)}


def _quoted(entry: Entry, key: object) -> str | None:
    """Return a text of the metadata that also occurs in the question, or None."""
    value = entry["metadata"].get(key)
    if isinstance(value, list | tuple):
        value = max((text for text in value if isinstance(text, str)), key=len, default=None)
    return value if isinstance(value, str) and value and value in entry["question"] else None


def _target(metadata: Mapping[str, Any]) -> str | None:
    """Return the target as ``24e0``, which a search for whole numbers misses, plus zero times the numbers, or None."""
    target, numbers = metadata.get("target"), metadata.get("numbers")
    if not isinstance(target, int) or not isinstance(numbers, list | tuple):
        return None
    return f"{target}e0 + 0e0*({'+'.join(map(str, numbers))})"


def _integral(metadata: Mapping[str, Any]) -> str | None:
    if not {"integrand", "variable"} <= metadata.keys():
        return None
    return f"Integral({metadata['integrand']}, {metadata['variable']})"


def is_same_answer(answer: str, gold: Any) -> bool:
    """Return whether an answer is the right one, up to case, white space and the notation of a number."""
    if not isinstance(gold, str):
        return False
    if _normalize(answer) == _normalize(gold):
        return True
    value = _value(answer)
    return value is not None and value == _value(gold)


def _normalize(text: str) -> str:
    try:
        return json.dumps(json.loads(text)).casefold()
    except (ValueError, RecursionError):
        return " ".join(text.split()).casefold()


def _value(text: str) -> Fraction | complex | None:
    text = text.strip().replace(",", "")[:100]
    for convert in (Fraction, lambda text: Fraction(int(text, 0)), lambda text: complex(text.replace("i", "j"))):
        try:
            return convert(text)
        except (ValueError, ZeroDivisionError, OverflowError):
            pass
    return None
