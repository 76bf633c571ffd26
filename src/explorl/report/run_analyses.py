"""`explorl analyze`: run the analyses of the lens on a run or a single checkpoint, and write their findings.

analysis/
  analysis.json      the findings of each analysis in words and numbers, or why it could not run
  *.svg, *.png       its figures
  *.csv              its tables
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from explorl.analysis.built_in import ANALYSES
from explorl.analysis.lens import Analysis, Context, Findings, Unavailable, find
from explorl.analysis.lens_table import LensTable, NotRecorded, plain_values, read_run
from explorl.core.config import TaskSettings
from explorl.core.store import (
    RunStore,
    StoreError,
    cleaned,
    file_name,
    read_json,
    storage_errors,
    write_json,
    write_text,
)
from explorl.models import ModelError, Policy, load_policy
from explorl.report.figures import save
from explorl.tasks import Task, get_task

FOLDER = "analysis"
FILE = "analysis.json"
MAX_ROWS = 400
"""Rows of a table in analysis.json; the CSV file has all of them."""


@dataclass(frozen=True)
class AnalysisOutcome:
    """The result of one analysis."""

    analysis: Analysis
    result: Findings | Unavailable
    failed: bool = False
    """True if the analysis raised an error or got a bad option; False if only records were missing."""

    @property
    def summary(self) -> str:
        """The result in words, or the reason why there is none."""
        return self.result.reason if isinstance(self.result, Unavailable) else self.result.sentence


def select_analyses(only: Sequence[str] = (), *, lone: bool = False) -> list[Analysis]:
    """Return the analyses with these names or import paths; without names, all that run by default.

    `lone` selects for a single checkpoint; naming an analysis that needs a training history is then a `ValueError`.
    """
    if only:
        analyses = [find(name, ANALYSES) for name in dict.fromkeys(only)]
        need_history = [analysis.name for analysis in analyses if lone and not analysis.lone]
        if need_history:
            names, verb = ", ".join(need_history), "needs" if len(need_history) == 1 else "need"
            raise ValueError(f"{names} {verb} the steps of a training run; name a run: explorl analyze RUN")
        return analyses
    return [analysis for analysis in ANALYSES if not analysis.on_request and (analysis.lone or not lone)]


def run_analyses(table: LensTable, context: Context, analyses: Iterable[Analysis]) -> list[AnalysisOutcome]:
    """Run every analysis, even if an earlier one fails, and return their outcomes."""
    outcomes = []
    for analysis in analyses:
        try:
            outcome = AnalysisOutcome(analysis, analysis.run(table, context))
        except Exception as error:
            outcome = _failed_outcome(analysis, error)
        outcomes.append(outcome)
    return outcomes


def _failed_outcome(analysis: Analysis, error: Exception) -> AnalysisOutcome:
    """Return the outcome of an analysis that raised; with EXPLORL_DEBUG set, raise the error instead."""
    if os.environ.get("EXPLORL_DEBUG"):
        raise error
    text = " ".join(str(error).split()) or "no message"
    kind = "" if isinstance(error, ValueError | ModelError) else f"it failed: {type(error).__name__}: "
    return AnalysisOutcome(analysis, Unavailable(kind + text), failed=True)


def run_context(folder: str | Path, *, trust_remote_code: bool = False, **fields: Any) -> Context:
    """Return what analyses of a run may use besides its records: its last policy and its task, loaded on demand.

    `fields` are the other fields of the `Context`.
    The caller decides whether code that comes with the policy may run, as the run may be from an untrusted source.
    """
    store = RunStore.open(folder)

    def policy() -> Policy:
        candidates = [store.folder / "model", *reversed(store.checkpoint_folders())]
        model_folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
        if model_folder is None:
            raise NotRecorded(f"{store.folder} has no policy: neither model/ nor a checkpoint")
        return load_policy(str(model_folder), trust_remote_code=trust_remote_code)

    def task() -> Task:
        values = store.config().get("task") or {}
        if not values.get("name"):
            raise NotRecorded(f"{store.config_path} names no task")
        try:
            settings = TaskSettings.model_validate(values)
            return get_task(settings.name, **settings.options)
        except (ValueError, ImportError) as error:
            raise NotRecorded(f"cannot create the run's task: {error}") from error

    return Context(load_policy=policy, load_task=task, **fields)


def analyze_run(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Path, list[AnalysisOutcome]]:
    """Analyze a run and write the findings to ``RUN/analysis`` or ``out``; earlier findings of other analyses stay.

    Return the folder and the outcomes.
    """
    analyses = select_analyses(only)
    table = read_run(folder)
    out_folder = _create_folder(Path(out) if out else Path(folder) / FOLDER)
    context = run_context(folder, trust_remote_code=trust_remote_code, seed=seed, options=options or {}, say=say)
    return _analyze_and_write(out_folder, table, context, analyses)


def analyze_checkpoint(
    model: str,
    task: str,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    task_options: Mapping[str, Any] | None = None,
    protocol: str = "plain",
    samples: int = 8,
    limit: int | None = 64,
    split: str = "holdout",
    template: str | None = None,
    changes: Mapping[str, Any] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Path, list[AnalysisOutcome]]:
    """Sample completions from a checkpoint and run the analyses that need no training history."""
    from explorl.analysis.checkpoint_samples import checkpoint_table
    from explorl.evaluation import protocol as get_protocol

    analyses = select_analyses(only, lone=True)
    loaded_task = get_task(task, **(task_options or {}))
    out_folder = _create_folder(Path(out) if out else Path("runs") / f"analysis-{file_name(model)}-{file_name(task)}")
    policy = load_policy(model, dtype=dtype, trust_remote_code=trust_remote_code)
    sampling = get_protocol(protocol, samples=samples, **(changes or {}))
    problems = "every problem" if limit is None else f"{limit} problems"
    say(f"sampling {samples} completions for {problems} of {task}")
    table = checkpoint_table(
        policy, loaded_task, sampling, limit=limit, split=split, template=template, seed=seed, batch_size=batch_size
    )
    context = Context(seed, lambda: policy, lambda: loaded_task, options or {}, say)
    return _analyze_and_write(out_folder, table, context, analyses)


def _analyze_and_write(
    folder: Path, table: LensTable, context: Context, analyses: Sequence[Analysis]
) -> tuple[Path, list[AnalysisOutcome]]:
    for note in table.notes:
        context.say(note)
    outcomes = run_analyses(table, context, analyses)
    for key in sorted(set(context.options) - context.used_options):
        alternatives = sorted(name for name in context.used_options if name.split(".")[0] == key.split(".")[0])
        hint = f"valid options: {', '.join(alternatives)}" if alternatives else "no analysis that ran has this option"
        context.say(f"--option {key} had no effect; {hint}")
    return folder, write_outcomes(folder, table, outcomes, seed=context.seed)


# ---------------------------------------------------------------------------- writing
def write_outcomes(
    folder: Path, table: LensTable, outcomes: Sequence[AnalysisOutcome], *, seed: int
) -> list[AnalysisOutcome]:
    """Write figures, tables and analysis.json; entries of analyses that did not run now are kept.

    Return the outcomes; one whose figures could not be drawn is marked as failed.
    """
    entries = _stored_entries(folder)
    written = []
    for outcome in outcomes:
        old_files = _file_names(entries.get(outcome.analysis.name, {}))
        try:
            entry = _write_files(folder, outcome)
        except StoreError:
            raise
        except Exception as error:
            outcome = _failed_outcome(outcome.analysis, error)
            entry = outcome_entry(outcome)
        written.append(outcome)
        entries[outcome.analysis.name] = entry
        for name in old_files - _file_names(entry):
            (folder / name).unlink(missing_ok=True)
    steps = [line["step"] for line in table.lines] or table.completions.step.tolist()
    write_json(
        folder / FILE,
        cleaned(
            {
                "name": table.name,
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "seed": seed,
                "last_step": max(steps, default=0),
                "answers": len(table.completions),
                "tokens": len(table.tokens),
                "notes": list(table.notes),
                "analyses": entries,
            }
        ),
    )
    return written


def _create_folder(folder: Path) -> Path:
    """Create the folder to write to, before anything is computed; raise `StoreError` if that is impossible."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"cannot write to {folder}: it is a file; name a folder with --out")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stored_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries that an earlier call wrote; none if they cannot be read."""
    try:
        stored = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    except (StoreError, OSError):
        return {}
    entries = stored.get("analyses") if isinstance(stored, dict) else None
    if not isinstance(entries, dict):
        return {}
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def _file_names(entry: Mapping[str, Any]) -> set[str]:
    """Return the names of an entry's files.

    The entry may come from an untrusted source: names that lead out of the folder are ignored.
    """
    figures, tables = entry.get("figures"), entry.get("tables")
    parts = [*(figures if isinstance(figures, list) else []), *(tables.values() if isinstance(tables, dict) else [])]
    names = [part.get(kind) for part in parts if isinstance(part, dict) for kind in ("svg", "png", "csv")]
    return {name for name in names if isinstance(name, str) and name == Path(name).name and name != ".."}


def _write_files(folder: Path, outcome: AnalysisOutcome) -> dict[str, Any]:
    """Write the files of an outcome, and return its entry for analysis.json."""
    entry, result = outcome_entry(outcome), outcome.result
    if isinstance(result, Unavailable):
        return entry
    for chart in result.charts:
        save(chart, folder, file_name(chart.name))
    for name, table in result.tables.items():
        write_text(folder / entry["tables"][name]["csv"], table.to_csv())
    return entry


def outcome_entry(outcome: AnalysisOutcome) -> dict[str, Any]:
    """Return the outcome as plain values, as analysis.json stores it."""
    result = outcome.result
    if isinstance(result, Unavailable):
        return {"title": outcome.analysis.title, "available": False, "reason": result.reason}
    return {
        "title": outcome.analysis.title,
        "available": True,
        "summary": result.sentence,
        "figures": [
            {
                "name": chart.name, "title": chart.title, "caption": chart.caption,
                "svg": f"{file_name(chart.name)}.svg", "png": f"{file_name(chart.name)}.png",
            }
            for chart in result.charts
        ],
        "tables": {
            name: {
                "title": table.title, "csv": f"{file_name(name)}.csv", "columns": list(table.columns),
                "rows": table.texts()[:MAX_ROWS],
            }
            for name, table in result.tables.items()
        },
        "result": plain_values(result.values),
    }  # fmt: skip
