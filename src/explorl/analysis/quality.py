"""How the quality of responses changes during training (Deng et al. 2025, §3.2.2 and Figure 3d)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from explorl.evaluation.scores import REPETITIVE
from explorl.metrics import Cell, Table, format_violations, language_mixing, trigram_redundancy
from explorl.store import RunStore, StoreError

FORMAT = "reward/format"
"""The trainer's word on whether an answer has the task's form: 1 where it has."""


@dataclass(frozen=True)
class StepQuality:
    """Counts over the rollouts of one training step."""

    step: int
    responses: int
    format_violations: int
    """Responses that the trainer gave no reward for their form; or, where a mark was asked for, those without exactly
    one mark."""
    repetitive: int
    """Responses whose 3-gram redundancy is above 0.31."""
    language_mixing: int
    """Responses with a CJK character."""
    redundancy: float
    """Mean 3-gram redundancy."""


def quality_by_step(store: RunStore, *, mark: str | None = None) -> list[StepQuality]:
    r"""Counts of what is wrong with a run's rollouts, step by step.

    Malformed is what the run's own reward for the form says, so that the count is the trainer's. ``mark``, such as
    ``\boxed{``, counts marks instead, and so does ``<answer>`` in a run that has no such reward.
    """
    import pyarrow.parquet as pq

    files = sorted(store.rollouts.glob("step-*.parquet"))
    if not files:
        raise StoreError(f"{store.rollouts} has no rollouts; they are kept where training.save_rollouts is true")
    steps = []
    for path in files:
        with pq.ParquetFile(path) as file:
            there = [name for name in ("completion", FORMAT) if name in file.schema_arrow.names]
            rows = file.read(columns=there).to_pydict()
        texts = rows["completion"]
        if mark is None and FORMAT in rows:
            malformed = sum((value or 0.0) < 1 for value in rows[FORMAT])
        else:
            malformed = sum(format_violations(text, mark or "<answer>") > 0 for text in texts)
        redundancy = np.array([trigram_redundancy(text) for text in texts])
        steps.append(
            StepQuality(
                step=int(path.stem.removeprefix("step-")),
                responses=len(texts),
                format_violations=malformed,
                repetitive=int((redundancy > REPETITIVE).sum()),
                language_mixing=sum(language_mixing(text) > 0 for text in texts),
                redundancy=float(redundancy.mean()) if len(texts) else 0.0,
            )
        )
    return steps


def quality_table(steps: list[StepQuality]) -> Table:
    """One row per step."""
    rows: list[list[Cell]] = [
        [s.step, s.responses, s.format_violations, s.repetitive, s.language_mixing, s.redundancy] for s in steps
    ]
    columns = ["step", "responses", "format violations", "repetitive", "language mixing", "3-gram redundancy"]
    return Table(columns, rows, title="quality of responses by training step", number=".1%")
