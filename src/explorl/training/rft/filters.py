"""Rules that every sampled response must pass, correct or not, before selection.

A filter takes responses and returns those that it keeps, in order; it may shorten a response. The first four are those
of Deng et al. 2025, §4.4.1.
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
    r"""Keep responses with a complete, non-empty answer in the task's answer mark, such as ``\boxed{…}``."""
    return [sample for sample in samples if sample.answer_end is not None]


def has_digit(samples: Sequence[Sample]) -> list[Sample]:
    """Keep responses with at least one digit."""
    return [sample for sample in samples if _DIGIT.search(sample.text)]


def cut_after_answer(samples: Sequence[Sample]) -> list[Sample]:
    """Cut each response after its first answer, which is then the answer that counts; drop none."""
    return [sample.cut or sample for sample in samples]


def max_redundancy(samples: Sequence[Sample], *, limit: float = 0.31) -> list[Sample]:
    """Keep responses whose 3-gram redundancy, 1 − distinct/total, is at most ``limit``."""
    if not isinstance(limit, int | float) or not 0 <= limit <= 1:
        raise ValueError(f"limit of max_redundancy is {limit!r}; use a share from 0 to 1, such as 0.31")
    return [sample for sample in samples if trigram_redundancy(sample.text) <= limit]


def max_length(samples: Sequence[Sample], *, tokens: int) -> list[Sample]:
    """Keep responses of at most ``tokens`` tokens."""
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens of max_length is {tokens!r}; use 1 or more, such as 1024")
    return [sample for sample in samples if sample.tokens <= tokens]


def finished(samples: Sequence[Sample]) -> list[Sample]:
    """Keep responses that ended before the length limit, or were cut after their answer."""
    return [sample for sample in samples if sample.finished]


def dedupe(samples: Sequence[Sample]) -> list[Sample]:
    """Keep the first of several responses to a problem that differ only in white space or Unicode form."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for sample in samples:
        key = sample.problem, normalise_text(sample.text)
        if key not in seen:
            seen.add(key)
            kept.append(sample)
    return kept


def no_special_tokens(samples: Sequence[Sample], *, tokens: Sequence[str]) -> list[Sample]:
    """Keep responses whose text has no special token, which tokenising it for SFT would turn into a real one.

    Sampled special tokens are not part of a response's text, so the policy has spelled out any that is there.
    """
    if not tokens:
        return list(samples)
    pattern = re.compile("|".join(map(re.escape, tokens)))
    return [sample for sample in samples if not pattern.search(sample.text)]


def normalise_text(text: str) -> str:
    """Return the text in Unicode form NFKC with single spaces between words."""
    return " ".join(normalized(text, "NFKC").split())


FILTERS: dict[str, Callable[..., Sequence[Sample]]] = {
    function.__name__: function
    for function in (has_answer, has_digit, cut_after_answer, max_redundancy, max_length, finished, dedupe)
}
"""Filters by name."""
NEED_MARK = ("has_answer", "cut_after_answer")
"""Filters that need the task's answer mark."""


@dataclass(frozen=True)
class FilterResult:
    """What one filter dropped and changed."""

    name: str
    before: int
    dropped: tuple[Sample, ...]
    """The dropped responses as the filter received them."""
    changed: int
    """Responses that it returned shortened or otherwise changed."""

    @property
    def dropped_correct(self) -> int:
        """Number of dropped responses that were correct."""
        return sum(sample.correct for sample in self.dropped)


def apply_filters(
    filters: Sequence[tuple[str, Filter]], samples: Sequence[Sample]
) -> tuple[list[Sample], list[FilterResult]]:
    """Return the responses that pass all filters, in order, and what each filter dropped."""
    remaining, results = list(samples), []
    for name, keep in filters:
        before = by_key(remaining)
        with errors_named("filter", name):
            returned = keep(list(remaining))
        remaining = _check_filtered(name, returned, before)
        after = by_key(remaining)
        dropped = tuple(sample for key, sample in before.items() if key not in after)
        changed = sum(sample != before[key] for key, sample in after.items())
        results.append(FilterResult(name, len(before), dropped, changed))
    return remaining, results


@contextmanager
def errors_named(kind: str, name: str) -> Iterator[None]:
    """Turn an error inside a user's function into a `ValueError` that names the function and the line."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ValueError) and Path(frame.filename).parent == Path(__file__).parent:
            raise  # an error message of ours
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise ValueError(f"the {kind} {name!r} failed: {type(error).__name__}: {error} ({place})") from error


def _check_filtered(name: str, returned: object, before: dict[tuple[str, int], Sample]) -> list[Sample]:
    """Check that a filter returned some of the samples that it received, each at most once."""
    samples = list(returned) if isinstance(returned, Sequence) and not isinstance(returned, str) else None
    if samples is None or not all(isinstance(sample, Sample) for sample in samples):
        raise ValueError(f"the filter {name!r} returned {returned!r:.80}; return a list of the samples to keep")
    invalid = next((s for s in samples if not isinstance(s.text, str) or s.correct not in (True, False)), None)
    if invalid is not None:
        raise ValueError(
            f"the filter {name!r} returned {invalid!r:.160}; text must be a string, and correct True or False"
        )
    keys = [sample.key for sample in samples]
    if len(set(keys)) < len(keys) or not before.keys() >= set(keys):
        raise ValueError(
            f"the filter {name!r} returned a sample twice, or one that it did not receive; return each at most once"
        )
    return [s if isinstance(s.correct, bool) else replace(s, correct=bool(s.correct)) for s in samples]
