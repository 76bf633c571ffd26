"""`explorl analyze` on what strangers bring: their runs, their files, their analyses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from explorl.analysis.charts import Chart, typeset
from explorl.analysis.lens import Analysis, Context, Findings, Unavailable
from explorl.analysis.lens_table import build_table
from explorl.cli import app as cli
from explorl.core.store import RunStore, StoreError, write_json
from explorl.report.run_analyses import analyze_run, run_analyses, select_analyses

from .planted_runs import rollouts


@pytest.fixture
def run(tmp_path: Path) -> RunStore:
    """A run of four steps."""
    store = RunStore.create(tmp_path / "run", {"seed": 0})
    write_json(store.kind_path, {"kind": "grpo"})
    for step in range(1, 5):
        store.append_metrics({"kind": "train", "step": step, "reward": 0.1 * step})
    for step, columns in rollouts(np.random.default_rng(0), steps=4, answers=2, length=20).items():
        store.write_rollouts(step, columns)
    return store


def torn(axes: Any, palette: Any) -> None:
    raise ZeroDivisionError("no paper")


@dataclass(frozen=True)
class Odd:
    values: Any


def odd(table: Any, context: Any) -> Findings:
    return Findings("done", values={"where": Path("there"), "odd": Odd({1.5, 2.5})})


TORN = Analysis("torn", "Torn", lambda table, context: Findings("done", charts=[Chart("t", "T", "c", [torn])]))
ODD = Analysis("odd", "Odd", odd)


def test_a_figure_that_cannot_be_drawn_takes_nothing_with_it(run: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPLORL_DEBUG", raising=False)
    place, outcomes = analyze_run(run.folder, only=[f"{__name__}:TORN", f"{__name__}:ODD"])
    assert [one.failed for one in outcomes] == [True, False]
    held = json.loads((place / "analysis.json").read_text())["analyses"]
    assert "ZeroDivisionError: no paper" in held["torn"]["reason"]
    assert held["odd"]["result"] == {"where": "there", "odd": {"values": [1.5, 2.5]}}


@pytest.mark.parametrize(
    "entries",
    [
        {"odd": {"figures": [{"svg": "../config.yaml", "png": "../run.json"}], "tables": {"a": {"csv": ".."}}}},
        {"odd": {"figures": "none", "tables": ["a"]}},
        {"odd": {"figures": ["a"], "tables": {"a": 3}}},
        {"odd": "text"},
        ["odd"],
    ],
)
def test_a_strangers_analysis_names_no_file_elsewhere(run: RunStore, entries: Any) -> None:
    write_json(run.folder / "analysis" / "analysis.json", {"analyses": entries})
    place, outcomes = analyze_run(run.folder, only=[f"{__name__}:ODD"])
    assert not outcomes[0].failed
    assert run.config_path.is_file()
    assert run.kind_path.is_file()
    assert json.loads((place / "analysis.json").read_text())["analyses"]["odd"]["available"]


def test_where_to_write_is_known_before_anything_is_computed(run: RunStore, tmp_path: Path) -> None:
    (run.folder / "analysis").write_text("")
    with pytest.raises(StoreError, match="it is a file"):
        analyze_run(run.folder, only=[f"{__name__}:LATE"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        analyze_run(run.folder, only=[f"{__name__}:LATE"], out=tmp_path / "file" / "below")


LATE = Analysis("late", "Late", lambda table, context: pytest.fail("computed"))


def test_a_module_that_does_not_load_is_named(run: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway_written.py").write_text("def lengths(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"analysis 'halfway_written:MINE': .*SyntaxError"):
        analyze_run(run.folder, only=["halfway_written:MINE"])


def test_an_rft_run_is_told_apart(run: RunStore, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.kind_path, {"kind": "rft"})
    with pytest.raises(SystemExit) as exit:
        cli.main(["analyze", str(run.folder)])
    assert exit.value.code == 2
    assert "is of kind rft" in " ".join(capsys.readouterr().err.split())


def test_a_token_that_looks_like_a_number_stays_as_it_is() -> None:
    assert typeset("rises by -1: '-5', \"-6'\", “-7”") == "rises by −1: '-5', \"-6'\", “-7”"


def test_infinite_options_are_told_in_words() -> None:
    with pytest.raises(ValueError, match=r"impact\.samples is inf; use a value like 8"):
        Context(options={"impact.samples": float("inf")}).option("impact", "samples", 8)


def test_what_the_lens_would_have_recorded_is_told_to_come_from_it() -> None:
    table = build_table("run", {1: {"prompt": ["p"], "completion": ["a"], "tokens": [["a"]], "logp": [[-1.0]]}})
    (updates,) = run_analyses(table, Context(), select_analyses(["updates"]))
    assert "training.lens" in updates.summary


def test_without_signs_what_needs_none_is_done() -> None:
    columns = rollouts(np.random.default_rng(0), steps=20, answers=4)
    for one in columns.values():
        del one["advantage"], one["reward/correctness"]
    table = build_table("run", columns)
    names = ["signs", "fastest", "words", "updates"]
    found = {one.analysis.name: one for one in run_analyses(table, Context(), select_analyses(names))}
    for name in ("words", "updates"):
        assert not isinstance(found[name].result, Unavailable), found[name].summary
    for name in ("signs", "fastest"):
        assert "neither an advantage nor correctness" in found[name].summary
