"""How the quality of responses changes during training (Deng et al. 2025, §3.2.2 and Figure 3d)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from explorl.analysis.lens_table import Advice
from explorl.core.store import RunStore, StoreError, read_parquet, step_files
from explorl.metrics.quality import Quality, response_quality
from explorl.stats import Cell, Table

FORMAT = "reward/format"
"""The trainer's word on whether an answer has the task's form: 1 where it has."""
WRITTEN = "written"
"""Completions without the outputs of a tool, and without the fences around them, in runs that have one."""


@dataclass(frozen=True)
class StepQuality(Quality):
    """Counts over the rollouts of one training step."""

    step: int


def quality_by_step(store: RunStore, *, mark: str | None = None) -> list[StepQuality]:
    r"""Counts of what is wrong with a run's rollouts, step by step.

    Malformed is what the run's own reward for the form says, so that the count is the trainer's. ``mark``, such as
    ``\boxed{``, counts marks instead, and so does ``<answer>`` in a run that has no such reward.
    """
    files = step_files(store.rollouts, ".parquet")
    if not files:
        raise StoreError(f"{store.rollouts} has no rollouts; {Advice.of(store.config()).rollouts}")
    steps = []
    for step, path in files.items():
        rows = read_parquet(path, ["completion", WRITTEN, FORMAT])
        form = rows.get(FORMAT) if mark is None else None
        found = response_quality(rows.get(WRITTEN, rows["completion"]), form, mark=mark or "<answer>")
        steps.append(StepQuality(**asdict(found), step=step))
    return steps


def quality_table(steps: list[StepQuality]) -> Table:
    """One row per step."""
    rows: list[list[Cell]] = [
        [s.step, s.responses, s.format_violations, s.repetitive, s.language_mixing, s.redundancy] for s in steps
    ]
    columns = ["step", "responses", "format violations", "repetitive", "language mixing", "3-gram redundancy"]
    return Table(columns, rows, title="quality of responses by training step", number=".1%")
