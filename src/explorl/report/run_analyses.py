"""`explorl analyze`: runs the analyses of the lens on a run or a lone checkpoint, and writes what they find.

analysis/
  analysis.json      what each analysis found, in words and numbers, or why it could not
  *.svg, *.png       its figures
  *.csv              its tables
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from explorl.analysis.lens import Analysis, Context, Unavailable, find, typeset
from explorl.analysis.lens_table import LensTable, NotRecorded, plain, read_run
from explorl.core.config import TaskSettings
from explorl.core.store import (
    RunStore,
    StoreError,
    atomic_path,
    cleaned,
    file_name,
    read_json,
    storage_errors,
    write_json,
    write_text,
)
from explorl.models import ModelError, Policy, load_policy
from explorl.report.lens_analyses import ANALYSES
from explorl.report.lens_render import file_png, file_svg
from explorl.tasks import Task, get_task

FOLDER = "analysis"
FILE = "analysis.json"
MOST_ROWS = 400
"""Rows of a table that analysis.json has; the CSV file has all of them."""


@dataclass(frozen=True)
class AnalysisOutcome:
    """What an analysis gave."""

    analysis: Analysis
    result: Any
    failed: bool = False
    """Whether it broke, by a fault of its own or a bad option, and not for want of records."""

    @property
    def summary(self) -> str:
        """The result in words, or why there is none."""
        if isinstance(self.result, Unavailable):
            return self.result.reason
        return typeset(self.analysis.summary(self.result))


def select_analyses(only: Sequence[str] = (), *, lone: bool = False) -> list[Analysis]:
    """The analyses of these names or import paths; without any, all that run unasked."""
    if only:
        found = [find(name, ANALYSES) for name in dict.fromkeys(only)]
        history = [one.name for one in found if lone and not one.lone]
        if history:
            raise ValueError(f"{', '.join(history)} needs the steps of a training; name a run: explorl analyze RUN")
        return found
    return [one for one in ANALYSES if not one.asked and (one.lone or not lone)]


def run_analyses(table: LensTable, context: Context, analyses: Iterable[Analysis]) -> list[AnalysisOutcome]:
    """Runs every analysis; one that cannot does not keep the others from it."""
    outcomes = []
    for analysis in analyses:
        try:
            outcome = AnalysisOutcome(analysis, analysis.run(table, context))
            if not isinstance(outcome.result, Unavailable):  # what is shown must be there too
                _ = outcome.summary, analysis.tables(outcome.result), analysis.drawings(outcome.result)
        except Exception as error:
            outcome = _failure(analysis, error)
        outcomes.append(outcome)
    return outcomes


def _failure(analysis: Analysis, error: Exception) -> AnalysisOutcome:
    """What an analysis that broke gave; in debugging, the error itself."""
    if os.environ.get("EXPLORL_DEBUG"):
        raise error
    text = " ".join(str(error).split()) or "no message"
    kind = "" if isinstance(error, ValueError | ModelError) else f"it failed: {type(error).__name__}: "
    return AnalysisOutcome(analysis, Unavailable(kind + text), failed=True)


def run_context(folder: str | Path, *, trust_remote_code: bool = False, **more: Any) -> Context:
    """Return what analyses of a run may use besides its records: its last policy and its task, loaded when asked for.

    Whether code that comes with the policy runs is up to the caller: the run may be a stranger's.
    """
    store = RunStore.open(folder)

    def policy() -> Policy:
        places = [store.folder / "model", *reversed(store.checkpoint_folders())]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise NotRecorded(f"{store.folder} has no policy: neither model/ nor a checkpoint")
        return load_policy(str(there), trust_remote_code=trust_remote_code)

    def task() -> Task:
        said = store.config().get("task") or {}
        if not said.get("name"):
            raise NotRecorded(f"{store.config_path} names no task")
        try:
            settings = TaskSettings.model_validate(said)
            return get_task(settings.name, **settings.options)
        except (ValueError, ImportError) as error:
            raise NotRecorded(f"the run's task cannot be made: {error}") from error

    return Context(load_policy=policy, load_task=task, **more)


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
    """Analyses a run into ``RUN/analysis`` or ``out``; what earlier calls found of other analyses stays there."""
    analyses = select_analyses(only)
    table = read_run(folder)
    place = _folder(Path(out) if out else Path(folder) / FOLDER)
    context = run_context(folder, trust_remote_code=trust_remote_code, seed=seed, options=options or {}, say=say)
    return _finished(place, table, context, analyses)


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
    """Samples answers of a checkpoint and runs what needs no training history."""
    from explorl.analysis.checkpoint_samples import checkpoint_table
    from explorl.evaluation import protocol as named

    analyses = select_analyses(only, lone=True)
    asked = get_task(task, **(task_options or {}))
    place = _folder(Path(out) if out else Path("runs") / f"analysis-{file_name(model)}-{file_name(task)}")
    policy = load_policy(model, dtype=dtype, trust_remote_code=trust_remote_code)
    how = named(protocol, samples=samples, **(changes or {}))
    say(f"sampling {samples} answers to {'every problem' if limit is None else f'{limit} problems'} of {task}")
    table = checkpoint_table(
        policy, asked, how, limit=limit, split=split, template=template, seed=seed, batch_size=batch_size
    )
    context = Context(seed, lambda: policy, lambda: asked, options or {}, say)
    return _finished(place, table, context, analyses)


def _finished(
    place: Path, table: LensTable, context: Context, analyses: Sequence[Analysis]
) -> tuple[Path, list[AnalysisOutcome]]:
    for note in table.notes:
        context.say(note)
    outcomes = run_analyses(table, context, analyses)
    for key in sorted(set(context.options) - context.asked):
        known = sorted(name for name in context.asked if name.split(".")[0] == key.split(".")[0])
        offer = f"; there are {', '.join(known)}" if known else "; no analysis that ran has such an option"
        context.say(f"--option {key} had no effect{offer}")
    return place, write_outcomes(place, table, outcomes, seed=context.seed)


# ---------------------------------------------------------------------------- writing
def write_outcomes(
    place: Path, table: LensTable, outcomes: Sequence[AnalysisOutcome], *, seed: int
) -> list[AnalysisOutcome]:
    """Writes figures, tables and analysis.json; entries of analyses that did not run now are kept.

    Returns the outcomes; one whose figures cannot be drawn is a failed one.
    """
    entries = _held(place)
    written = []
    for outcome in outcomes:
        old = _files(entries.get(outcome.analysis.name, {}))
        try:
            entry = _written(place, outcome)
        except StoreError:
            raise
        except Exception as error:
            outcome = _failure(outcome.analysis, error)
            entry = outcome_entry(outcome)
        written.append(outcome)
        entries[outcome.analysis.name] = entry
        for name in old - _files(entry):
            (place / name).unlink(missing_ok=True)
    steps = [line["step"] for line in table.lines] or table.answers.step.tolist()
    write_json(
        place / FILE,
        cleaned(
            {
                "name": table.name,
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "seed": seed,
                "last_step": max(steps, default=0),
                "answers": len(table.answers),
                "tokens": len(table.tokens),
                "notes": list(table.notes),
                "analyses": entries,
            }
        ),
    )
    return written


def _folder(place: Path) -> Path:
    """The folder to write to, made before anything is computed: `StoreError` where it cannot be."""
    if place.exists() and not place.is_dir():
        raise StoreError(f"cannot write {place}: it is a file; name a folder with --out")
    with storage_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    return place


def _held(place: Path) -> dict[str, dict[str, Any]]:
    """The entries that an earlier call has written; none where they cannot be read."""
    try:
        held = read_json(place / FILE) if (place / FILE).is_file() else {}
    except (StoreError, OSError):
        return {}
    entries = held.get("analyses") if isinstance(held, dict) else None
    return {name: one for name, one in entries.items() if isinstance(one, dict)} if isinstance(entries, dict) else {}


def _files(entry: Mapping[str, Any]) -> set[str]:
    """The files of an entry. It may be a stranger's: a name that leaves the folder is none."""
    figures, tables = entry.get("figures"), entry.get("tables")
    parts = [*(figures if isinstance(figures, list) else []), *(tables.values() if isinstance(tables, dict) else [])]
    names = [one.get(kind) for one in parts if isinstance(one, dict) for kind in ("svg", "png", "csv")]
    return {name for name in names if isinstance(name, str) and name == Path(name).name and name != ".."}


def _written(place: Path, outcome: AnalysisOutcome) -> dict[str, Any]:
    """Writes the files of an outcome; its entry in analysis.json."""
    entry = outcome_entry(outcome)
    if not entry["available"]:
        return entry
    for drawing, figure in zip(outcome.analysis.drawings(outcome.result), entry["figures"], strict=True):
        write_text(place / figure["svg"], file_svg(drawing))
        with atomic_path(place / figure["png"]) as temporary:
            temporary.write_bytes(file_png(drawing))
    for name, table in outcome.analysis.tables(outcome.result).items():
        write_text(place / entry["tables"][name]["csv"], table.to_csv())
    return entry


def outcome_entry(outcome: AnalysisOutcome) -> dict[str, Any]:
    """An outcome as plain values."""
    entry: dict[str, Any] = {"title": outcome.analysis.title, "available": not isinstance(outcome.result, Unavailable)}
    if not entry["available"]:
        return {**entry, "reason": outcome.summary}
    drawings = outcome.analysis.drawings(outcome.result)
    return {
        **entry,
        "summary": outcome.summary,
        "figures": [
            {
                "name": one.name, "title": one.title, "caption": one.caption,
                "svg": f"{file_name(one.name)}.svg", "png": f"{file_name(one.name)}.png",
            }
            for one in drawings
        ],
        "tables": {
            name: {
                "title": table.title, "csv": f"{file_name(name)}.csv", "columns": list(table.columns),
                "rows": table.texts()[:MOST_ROWS],
            }
            for name, table in outcome.analysis.tables(outcome.result).items()
        },
        "result": _plain_result(outcome.result),
    }  # fmt: skip


def _plain_result(result: Any) -> Any:
    is_instance = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return plain(dataclasses.asdict(result)) if is_instance else None
