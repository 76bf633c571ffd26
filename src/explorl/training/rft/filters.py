"""Rules that every sampled response must pass, right or wrong, before any is selected.

A filter takes responses and gives those that it keeps, in their order; it may give one back shortened. The first four
are those of Deng et al. 2025, §4.4.1.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from explorl.core.plugins import Function, mark
from explorl.core.text import normalized
from explorl.metrics.quality import trigram_redundancy
from explorl.training.rft.samples import Sample, by_key

Filter = Callable[[Sequence[Sample]], Sequence[Sample]]
_DIGIT = re.compile(r"\d")


def rft_filter(function: Function) -> Function:
    """Mark a function as a filter, so that a configuration may name it by its import path."""
    return mark(function, "filter")


def has_answer(samples: Sequence[Sample]) -> list[Sample]:
    r"""Keeps responses that state an answer in the task's own mark, such as ``\boxed{…}``, whole and not empty."""
    return [sample for sample in samples if sample.answer_end is not None]


def has_digit(samples: Sequence[Sample]) -> list[Sample]:
    """Keeps responses with at least one digit: for mathematics, those that are about it."""
    return [sample for sample in samples if _DIGIT.search(sample.text)]


def cut_after_answer(samples: Sequence[Sample]) -> list[Sample]:
    """Ends each response at its first answer, which is then the one that is judged; drops none."""
    return [sample.cut or sample for sample in samples]


def max_redundancy(samples: Sequence[Sample], *, limit: float = 0.31) -> list[Sample]:
    """Keeps responses whose 3-gram redundancy, 1 − distinct/total, is at most ``limit``."""
    if not isinstance(limit, int | float) or not 0 <= limit <= 1:
        raise ValueError(f"limit of max_redundancy is {limit!r}; use a share from 0 to 1, such as 0.31")
    return [sample for sample in samples if trigram_redundancy(sample.text) <= limit]


def max_length(samples: Sequence[Sample], *, tokens: int) -> list[Sample]:
    """Keeps responses of at most so many tokens."""
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens of max_length is {tokens!r}; use 1 or more, such as 1024")
    return [sample for sample in samples if sample.tokens <= tokens]


def finished(samples: Sequence[Sample]) -> list[Sample]:
    """Keeps responses that ended by themselves, or were cut after their answer; drops those at the length limit."""
    return [sample for sample in samples if sample.finished]


def dedupe(samples: Sequence[Sample]) -> list[Sample]:
    """Keeps the first of the responses to one problem that differ in white space or Unicode form at most."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for sample in samples:
        same = sample.problem, normalised(sample.text)
        if same not in seen:
            seen.add(same)
            kept.append(sample)
    return kept


def no_special_tokens(samples: Sequence[Sample], *, tokens: Sequence[str]) -> list[Sample]:
    """Keeps responses that do not write a special token out, as which it would be learnt: an end in the middle, say.

    The special tokens that a model samples are not in its text, so that those in a text are imitations.
    """
    if not tokens:
        return list(samples)
    found = re.compile("|".join(map(re.escape, tokens)))
    return [sample for sample in samples if not found.search(sample.text)]


def normalised(text: str) -> str:
    """A text in Unicode's form NFKC, with one blank for any white space between words and none around them."""
    return " ".join(normalized(text, "NFKC").split())


FILTERS: dict[str, Callable[..., Sequence[Sample]]] = {
    one.__name__: one for one in (has_answer, has_digit, cut_after_answer, max_redundancy, max_length, finished, dedupe)
}
"""Filters by name."""
NEED_MARK = ("has_answer", "cut_after_answer")
"""Filters that look for the task's answer mark."""


@dataclass(frozen=True)
class Pass:
    """What one filter did."""

    name: str
    before: int
    dropped: tuple[Sample, ...]
    """As they came in."""
    changed: int
    """How many it gave back shortened, or otherwise other than they were."""

    @property
    def dropped_correct(self) -> int:
        """How many of the dropped were right."""
        return sum(sample.correct for sample in self.dropped)


def apply(filters: Sequence[tuple[str, Filter]], samples: Sequence[Sample]) -> tuple[list[Sample], list[Pass]]:
    """The responses that pass all filters, in their order, and what each filter dropped."""
    kept, passes = list(samples), []
    for name, keep in filters:
        before = by_key(kept)
        with said_in_words("filter", name):
            given = keep(list(kept))
        kept = _kept(name, given, before)
        left = by_key(kept)
        dropped = tuple(sample for key, sample in before.items() if key not in left)
        changed = sum(sample != before[key] for key, sample in left.items())
        passes.append(Pass(name, len(before), dropped, changed))
    return kept, passes


@contextmanager
def said_in_words(kind: str, name: str) -> Iterator[None]:
    """An error in somebody else's function becomes one that names it, and the line."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError) and Path(frame.filename).parent == Path(__file__).parent:
            raise  # in our own words
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise ValueError(f"the {kind} {name!r} failed: {type(error).__name__}: {error} ({place})") from error


def _kept(name: str, given: object, before: dict[tuple[str, int], Sample]) -> list[Sample]:
    """What a filter gave, if it is some of what it got: a filter may be somebody else's."""
    kept = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if kept is None or not all(isinstance(sample, Sample) for sample in kept):
        raise ValueError(f"the filter {name!r} gave {given!r:.80}; give a list of the samples that it keeps")
    odd = next((one for one in kept if not isinstance(one.text, str) or one.correct not in (True, False)), None)
    if odd is not None:
        raise ValueError(f"the filter {name!r} gave {odd!r:.160}; give each a text, and True or False as correct")
    keys = [sample.key for sample in kept]
    if len(set(keys)) < len(keys) or not before.keys() >= set(keys):
        raise ValueError(f"the filter {name!r} gave a sample twice, or one that it had not got; give each once")
    return [one if isinstance(one.correct, bool) else replace(one, correct=bool(one.correct)) for one in kept]
