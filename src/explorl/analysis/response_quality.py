"""Quality of responses over the steps of a training run (Deng et al. 2025, §3.2.2 and Figure 3d)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from explorl.analysis.lens_table import Advice
from explorl.core.store import RunStore, StoreError, read_parquet, step_files
from explorl.metrics.quality import Quality, response_quality
from explorl.stats import Cell, Table

FORMAT = "reward/format"
"""The trainer's reward for the format of a completion: 1 if it is right."""
WRITTEN = "written"
"""Completions without tool outputs and the fences around them, in runs with tools."""


@dataclass(frozen=True)
class StepQuality(Quality):
    """Counts over the rollouts of one training step."""

    step: int


def quality_by_step(store: RunStore, *, mark: str | None = None) -> list[StepQuality]:
    r"""Count defects in a run's rollouts, step by step.

    A rollout is malformed if the run's own format reward says so, so that the count agrees with the trainer's. With
    ``mark``, such as ``\boxed{``, occurrences of the mark decide, as does ``<answer>`` in a run without that reward.
    """
    files = step_files(store.rollouts, ".parquet")
    if not files:
        raise StoreError(f"{store.rollouts} has no rollouts; {Advice.of(store.config()).rollouts}")
    steps = []
    for step, path in files.items():
        rows = read_parquet(path, ["completion", WRITTEN, FORMAT])
        form = rows.get(FORMAT) if mark is None else None
        quality = response_quality(rows.get(WRITTEN, rows["completion"]), form, mark=mark or "<answer>")
        steps.append(StepQuality(**asdict(quality), step=step))
    return steps


def quality_table(steps: list[StepQuality]) -> Table:
    """Return a table with one row per step."""
    rows: list[list[Cell]] = [
        [s.step, s.responses, s.format_violations, s.repetitive, s.language_mixing, s.redundancy] for s in steps
    ]
    columns = ["step", "responses", "format violations", "repetitive", "language mixing", "3-gram redundancy"]
    return Table(columns, rows, title="quality of responses by training step", number=".1%")
