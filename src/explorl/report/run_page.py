"""The page of runs without a study file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from explorl.analysis.run_results import run_results
from explorl.core.store import StoreError, kind_of
from explorl.report.lens_rollouts import with_impacts
from explorl.report.lens_sections import lens_results
from explorl.report.study_page import write_report


def write_run_report(
    folders: Sequence[str | Path], out: str | Path | None = None, *, names: Sequence[str] | None = None
) -> Path:
    """Write the page of these runs and return its path: by default ``report.html`` in the run's folder.

    Raise `StoreError` if a folder holds a study or an evaluation. ``names`` label the runs; by default, their folders
    do.
    """
    for folder in folders:
        if (kind := kind_of(folder)) in ("study", "evaluation"):
            command = f"explorl {'report' if kind == 'study' else 'compare'} {folder}"
            raise StoreError(f"{folder} holds {'a study' if kind == 'study' else 'an evaluation'}, not a run; "
                             f"`{command}` shows it")  # fmt: skip
    results = run_results(folders, names=names)
    if len(folders) == 1:
        rollouts = with_impacts(results.get("rollouts") or [], folders[0])
        results = {**results, "lens": lens_results(folders[0]), "rollouts": rollouts}
    path = Path(out) if out is not None else Path(folders[0] if len(folders) == 1 else "runs") / "report.html"
    write_report(path, results)
    return path
