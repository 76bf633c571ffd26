"""A sampled response, and a pool of them as the columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

Columns = dict[str, list[Any]]
CUT = "cut_"
"""Begins the columns that hold what a response is like up to its first answer."""


@dataclass(frozen=True)
class Sample:
    """One response to a problem, with its verdict and the means of what the engine recorded over its own tokens."""

    problem: str
    """Id of the problem."""
    sample: int
    """Which of the problem's responses it is."""
    text: str
    correct: bool
    answer: str | None = None
    """The answer in the task's normal form; None where it states none."""
    tokens: int = 0
    entropy: float | None = None
    """Mean token entropy in nats; None where it was not recorded."""
    branching: float | None = None
    """Mean branching factor; None where it was not recorded."""
    finished: bool = True
    """Whether it ended by itself, not at the length limit."""
    answer_end: int | None = None
    """Where its first whole answer ends, in characters; None where it has none."""
    cut: Sample | None = None
    """The same response, ended at its first answer and judged anew; None where nothing follows that answer."""

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from all others of a pool."""
        return self.problem, self.sample


_OWN = tuple(field.name for field in fields(Sample) if field.name != "cut")
_OF_CUT = ("answer_end", "correct", "answer", "tokens", "entropy", "branching")
"""What must be kept of a cut response; its text begins the whole one's."""


def to_columns(samples: Sequence[Sample]) -> Columns:
    """A pool as columns."""
    columns: Columns = {name: [getattr(sample, name) for sample in samples] for name in _OWN}
    for name in _OF_CUT:
        columns[CUT + name] = [None if sample.cut is None else getattr(sample.cut, name) for sample in samples]
    return columns


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """The pool that `to_columns` wrote; other columns are left out."""
    found = []
    for row in range(len(columns["problem"])):
        sample = Sample(**{name: columns[name][row] for name in _OWN})
        end = columns[f"{CUT}answer_end"][row]
        if end is not None:
            kept = {name: columns[CUT + name][row] for name in _OF_CUT}
            sample = replace(sample, cut=replace(sample, text=sample.text[:end], finished=True, **kept))
        found.append(sample)
    return found


def by_key(samples: Iterable[Sample]) -> dict[tuple[str, int], Sample]:
    """The samples under their keys."""
    return {sample.key: sample for sample in samples}
