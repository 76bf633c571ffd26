"""Sampled responses, and pools of them as columns of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from explorl.evaluation.completions import Columns

CUT = "cut_"
"""Prefix of the columns that describe a response cut after its first answer."""


@dataclass(frozen=True)
class Sample:
    """One response to a problem, with its verdict and means of its token statistics."""

    problem: str
    """Id of the problem."""
    sample: int
    """Index among the problem's responses."""
    text: str
    correct: bool
    answer: str | None = None
    """The answer in the task's normal form; None without one."""
    tokens: int = 0
    entropy: float | None = None
    """Mean token entropy in nats; None if not recorded."""
    branching: float | None = None
    """Mean branching factor; None if not recorded."""
    finished: bool = True
    """True if it ended before the length limit."""
    answer_end: int | None = None
    """Where its first complete answer ends, in characters; None without one."""
    cut: Sample | None = None
    """The same response, cut after its first answer and verified again; None if nothing follows that answer."""

    @property
    def key(self) -> tuple[str, int]:
        """Unique key within a pool."""
        return self.problem, self.sample


_COLUMNS = {"completion": "text"} | {
    name: name for name in ("problem", "sample", "correct", "answer", "tokens", "entropy", "branching", "answer_end")
}
"""The field of a sample that each column of the pool holds."""
_CUT_FIELDS = ("correct", "answer", "tokens", "entropy", "branching")
"""Stored fields of a cut response; its text is the whole one's up to ``answer_end``."""


def to_columns(samples: Sequence[Sample]) -> Columns:
    """Convert a pool to columns."""
    columns: Columns = {name: [getattr(sample, field) for sample in samples] for name, field in _COLUMNS.items()}
    columns["finish_reason"] = ["stop" if sample.finished else "length" for sample in samples]
    for name in _CUT_FIELDS:
        columns[CUT + name] = [None if sample.cut is None else getattr(sample.cut, name) for sample in samples]
    return columns


def from_columns(columns: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """Convert columns of `to_columns` back to a pool; other columns are ignored."""
    samples = []
    for row, finish_reason in enumerate(columns["finish_reason"]):
        values = {field: columns[name][row] for name, field in _COLUMNS.items()}
        sample = Sample(**values, finished=finish_reason != "length")
        cut = {name: columns[CUT + name][row] for name in _CUT_FIELDS}
        if cut["correct"] is not None:
            sample = replace(sample, cut=replace(sample, text=sample.text[: sample.answer_end], finished=True, **cut))
        samples.append(sample)
    return samples


def by_key(samples: Iterable[Sample]) -> dict[tuple[str, int], Sample]:
    """Index the samples by their keys."""
    return {sample.key: sample for sample in samples}
