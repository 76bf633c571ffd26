"""A study with two looks from its file to its page, on runs that were planted instead of trained."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from tools.docs.results import results_section

from explorl.analysis.study_results import results_table, study_results
from explorl.analysis.verdicts import arm_verdict
from explorl.core.config import ConfigError
from explorl.core.store import StoreError, write_json, write_parquet
from explorl.report.study_page import _note
from explorl.study import run_study as study_run
from explorl.study.arm import run_folder
from explorl.study.plan import effect_text, size_text
from explorl.study.run_study import StudyRun, _Runner, locked_study, run_study, study_status
from explorl.study.spec import Study, load_study
from explorl.study.watch import _study_progress

FILE: dict[str, Any] = {
    "name": "planted",
    "base": {"preset": "tiny"},
    "arms": {
        "plain": {},
        "good": {"strategies": ["ppl_shaping"]},
        "dull": {"strategies": ["egsw"]},
        "dead": {"strategies": ["clip_cov"]},
    },
    "baseline": "plain",
    "seeds": 5,
    "sequential": {"first": 2, "keep": 1, "measures": ["pass@1", "entropy"]},
    "evaluation": {"problems": 40, "samples": 4},
    "budget": {"steps": 3},
}
RATES = {"plain": 0.4, "good": 0.75, "dull": 0.42, "dead": 0.38, "late": 0.4}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "planted.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def plant(run: StudyRun) -> None:
    """A finished run of an arm whose share of right answers is known."""
    rng = np.random.default_rng([run.seed, len(run.arm.name)])
    problems = [f"countdown:{i}-2-3=6" for i in range(40) for _ in range(4)]
    right = rng.random(len(problems)) < RATES[run.arm.name]
    place, step = run.folder, "step-000003"
    (place / "model").mkdir(parents=True)
    (place / "config.yaml").write_text("seed: 0\n")
    write_json(place / "evaluations" / f"{step}.json", {"entropy": 0.5 + float(rng.normal(0, 0.01)), "branching": 1.1})
    columns = {"problem": problems, "completion": ["x"] * 160, "correct": right.tolist(), "error": [None] * 160}
    write_parquet(place / "evaluations" / f"{step}.parquet", columns)
    (place / "metrics.jsonl").write_text(json.dumps({"step": 3, "kind": "train", "entropy": 0.5}) + "\n")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Plants the runs that would be trained, and remembers them, stage by stage; the report is left out."""
    stages: list[list[str]] = []

    def run(self: _Runner) -> None:
        stages.append([one.label for one in self.waiting])
        for one in self.waiting:
            plant(one)

    monkeypatch.setattr(study_run._Runner, "run", run)
    monkeypatch.setattr(study_run, "write_results", study_results)
    return stages


def said(call: Callable[[Console], Any]) -> tuple[Any, str]:
    console = Console(record=True, width=400, file=io.StringIO())
    return call(console), console.export_text()


def test_arms_that_show_nothing_stop_after_the_first_look(tmp_path: Path, trained: list[list[str]]) -> None:
    path, folder = written(tmp_path), tmp_path / "study"
    outcome, text = said(lambda console: run_study(path, folder=folder, console=console))
    assert trained == [
        [f"{name}, seed {seed}" for seed in (0, 1) for name in FILE["arms"]],
        [f"{name}, seed {seed}" for seed in (2, 3, 4) for name in ("plain", "good")],
    ]
    assert outcome.failed == []
    assert "after the interim look continue: good" in text
    assert "after the interim look stop for futility: dull, dead" in text
    results = outcome.results
    assert results["sequential"]["arms"] == {
        "good": {"decision": "goes on", "look": 2},
        "dull": {"decision": "futility", "look": 1},
        "dead": {"decision": "futility", "look": 1},
    }
    assert {arm["name"]: len(arm["seeds"]) for arm in results["arms"]} == {"plain": 5, "good": 5, "dull": 2, "dead": 2}
    by_name = {arm["name"]: arm["differences"] for arm in results["arms"]}
    assert by_name["good"]["pass@1"]["p_corrected"] < 0.05
    assert by_name["dull"]["pass@1"]["p_corrected"] == 1.0
    again, text = said(lambda console: run_study(path, folder=folder, console=console))
    assert trained[2:] == [], "nothing is left to run"
    assert again.results["sequential"]["arms"] == results["sequential"]["arms"]
    assert "as measured in the finished runs" in text


def test_the_first_look_waits_for_every_arm(tmp_path: Path, trained: list[list[str]]) -> None:
    path, folder = written(tmp_path), tmp_path / "study"
    only = ["plain", "good"]
    outcome, text = said(lambda console: run_study(path, folder=folder, only=only, console=console))
    assert trained == [[f"{name}, seed {seed}" for seed in (0, 1) for name in only]]
    assert "the interim look waits for the first 2 seeds of dull, dead" in text
    told = outcome.results["sequential"]
    assert (told["waiting"], told["arms"]["good"]) == (["dull", "dead"], {"decision": "waits", "look": 1})
    assert told["arms"]["dead"] == {"decision": "waits", "look": 0}
    family = {arm["name"]: arm["differences"] for arm in outcome.results["arms"]}["good"]["pass@1"]
    assert family["p_corrected"] == pytest.approx(min(1, 6 * family["p"])), "arms that wait count"


def test_an_arm_that_fails_holds_up_no_other(tmp_path: Path, trained: list[list[str]]) -> None:
    path, folder = written(tmp_path), tmp_path / "study"
    run_study(path, folder=folder, only=["plain", "good", "dull"], console=Console(quiet=True))
    for seed in (0, 1):
        run_folder(folder, "dead", seed).mkdir(parents=True)
        (run_folder(folder, "dead", seed) / "error.txt").write_text("RuntimeError: nan\n")
    told = study_results(folder)["sequential"]
    assert {name: one["decision"] for name, one in told["arms"].items()} == {
        "good": "goes on", "dull": "futility", "dead": "failed",
    }  # fmt: skip


def test_nothing_is_decided_without_the_baseline(tmp_path: Path, trained: list[list[str]]) -> None:
    path, folder = written(tmp_path), tmp_path / "study"
    run_study(path, folder=folder, only=["good", "dull", "dead"], console=Console(quiet=True))
    for seed in (0, 1):
        run_folder(folder, "plain", seed).mkdir(parents=True)
        (run_folder(folder, "plain", seed) / "error.txt").write_text("RuntimeError: nan\n")
    told = study_results(folder)["sequential"]
    assert told["waiting"] == ["plain"]
    assert {one["decision"] for one in told["arms"].values()} == {"waits"}


def test_a_look_counts_when_all_of_its_seeds_are_there(tmp_path: Path, trained: list[list[str]]) -> None:
    path, folder = written(tmp_path), tmp_path / "study"
    run_study(path, folder=folder, console=Console(quiet=True))
    whole = {arm["name"]: arm for arm in study_results(folder)["arms"]}["good"]["differences"]["pass@1"]
    (run_folder(folder, "good", 4) / "model").rmdir()
    part = {arm["name"]: arm for arm in study_results(folder)["arms"]}["good"]["differences"]["pass@1"]
    assert (whole["look"], part["look"]) == (2, 1)
    assert part["p"] > whole["p"]
    assert part["high"] - part["low"] > whole["high"] - whole["low"]


def test_runs_that_no_look_has_asked_for_are_not_waited_for(tmp_path: Path, trained: list[list[str]]) -> None:
    folder = tmp_path / "study"
    run_study(written(tmp_path), folder=folder, only=["plain"], console=Console(quiet=True))
    states = {(row[0], row[1]): row[2] for row in study_status(folder).rows}
    assert [states["plain", seed] for seed in (0, 1, 2)] == ["done", "done", "later"]
    assert [states["good", seed] for seed in (1, 2)] == ["waiting", "later"]
    assert {arm.name: arm.progress for arm in _study_progress(folder)[1]}["plain"] == "6/6"


def test_an_arms_words_name_what_the_correction_is_over(tmp_path: Path, trained: list[list[str]]) -> None:
    folder = tmp_path / "study"
    run_study(written(tmp_path), folder=folder, console=Console(quiet=True))
    verdicts = {arm["name"]: arm["verdict"] for arm in study_results(folder)["arms"]}
    assert verdicts["good"].startswith("+3")
    assert "entropy" not in verdicts["good"], "which is in no points"
    unsure = {"mean": 0.02, "low": 0.01, "high": 0.03, "p_corrected": 0.2}
    told = arm_verdict({"pass@1": unsure}, ["pass@1"], arms=3, seeds=5, failed=0, comparisons=6)
    assert told.endswith("(p = 0.20 after correction over 6 comparisons)")


def test_the_table_and_the_page_say_seeds_and_looks(tmp_path: Path, trained: list[list[str]]) -> None:
    outcome, _ = said(lambda console: run_study(written(tmp_path), folder=tmp_path / "s", console=console))
    table = results_table(outcome.results)
    assert table.columns == (
        "arm", "pass@1", "Δ pass@1 (points)", "Δ entropy", "p (pass@1)", "p (entropy)", "entropy (nats)", "seeds",
        "last look",
    )  # fmt: skip
    assert [row[-2:] for row in table.rows] == [("5", "–"), ("5", "2"), ("2", "1, futility"), ("2", "1, futility")]
    section = results_section(outcome.results)
    assert "Every arm has 2 seeds at the first interim look; then the 1 most promising" in section
    assert "corrected over 6 comparisons (Holm; all arms × pass@1, entropy)" in section
    assert "Significant after correction over 6 comparisons: good in pass@1 (p = " in section
    assert "Smallest effects of one arm that this design detects with 80 % power: " in section
    assert "Every arm has 2 seeds" in _note(outcome.results)
    nothing = json.loads(json.dumps(outcome.results))
    for arm in nothing["arms"]:
        for one in (arm["differences"] or {}).values():
            one["p_corrected"] = 1.0
    assert "None of 6 comparisons is significant after correction." in results_section(nothing)


def test_a_plan_says_what_the_design_can_find(tmp_path: Path) -> None:
    study = load_study(written(tmp_path))
    assert size_text(study) == "4 arms × 2 seeds, then 1 arm and plain × 3 more, 3 steps each"
    words = effect_text(study, tmp_path / "nothing")
    assert "points of pass@1 at a spread of 2." in words
    assert "the correction over 6 comparisons (3 arms × 2 measures); the spread between seeds is as the study" in words
    plain = load_study(written(tmp_path, sequential=None))
    assert size_text(plain) == "4 arms × 5 seeds, 3 steps each"
    assert "Minimum detectable effect: 3.4 points" in effect_text(plain, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"first": 5, "keep": 1}, "sequential.first is 5, but .* has 5 seeds.* such as 3 of 8"),
        ({"first": 1, "keep": 1}, "sequential.first is 1"),
        ({"first": 2, "keep": 0}, "sequential.keep is 0"),
        ({"first": 2}, "lacks the key sequential.keep"),
        ({"first": 2, "keep": 1, "meazures": ["pass@1"]}, "unknown key sequential.meazures .*did you mean 'measures'"),
        ({"first": 2, "keep": 1, "measures": []}, "sequential.measures"),
        (
            {"first": 2, "keep": 1, "measures": ["pass@8"]},
            "has 'pass@8' .*; with 4 samples use pass@1, pass@2, pass@4,",
        ),
        ({"first": 2, "keep": 1, "measures": ["area", "area"]}, "duplicate measure"),
    ],
)
def test_a_plan_that_cannot_be_is_one_clear_error(plan: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_study(written(tmp_path, sequential=plan))


def held(tmp_path: Path, arms: Mapping[str, Any] | None = None, **changes: Any) -> Study:
    """The study of a file with these changes, after it has taken the folder."""
    path = written(tmp_path, **({"arms": arms} if arms else {}), **changes)
    with locked_study(tmp_path / "study", load_study(path)) as study:
        return study


def test_arms_may_come_later_and_those_without_a_run_may_change(tmp_path: Path, trained: list[list[str]]) -> None:
    folder = tmp_path / "study"
    run_study(written(tmp_path), folder=folder, only=["plain", "good"], console=Console(quiet=True))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("arms/*/*/*")}
    arms = {**FILE["arms"], "dull": {"strategies": [{"egsw": {"alpha": 0.8}}]}, "late": {}}
    path = written(tmp_path, arms={name: arm for name, arm in arms.items() if name != "dead"})
    _, text = said(lambda console: run_study(path, folder=folder, only=["late"], console=console))
    assert "new in this study: late; finished runs are kept" in text
    assert "no longer in this study: dead, which never ran" in text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {arm.name for arm in Study.read(folder).arms} == {"plain", "good", "dull", "late"}


def test_what_would_make_runs_incomparable_is_refused(tmp_path: Path, trained: list[list[str]]) -> None:
    run_study(written(tmp_path), folder=tmp_path / "study", only=["plain", "good"], console=Console(quiet=True))
    changed = {**FILE["arms"], "good": {"strategies": [{"ppl_shaping": {"alpha": 0.5}}]}}
    with pytest.raises(StoreError, match=r"arm 'good': strategies is .* or the arm's runs in .*/arms/good"):
        held(tmp_path, changed)
    with pytest.raises(StoreError, match=r"it has the arm 'good'; .* or the arm's runs in .*/arms/good"):
        held(tmp_path, {name: arm for name, arm in FILE["arms"].items() if name != "good"})
    with pytest.raises(StoreError, match="an interim look are fixed: seeds is"):
        held(tmp_path, seeds=6)
    with pytest.raises(StoreError, match=r"sequential: keep is 1 there and 2 here"):
        held(tmp_path, sequential={**FILE["sequential"], "keep": 2})
    with pytest.raises(StoreError, match="sequential is"):
        held(tmp_path, sequential=None)


def test_a_study_from_before_the_key_is_read(tmp_path: Path) -> None:
    held(tmp_path, sequential=None)
    record = json.loads((tmp_path / "study" / "study.json").read_text())
    del record["sequential"]
    write_json(tmp_path / "study" / "study.json", record)
    assert held(tmp_path, sequential=None).sequential is None
    assert study_results(tmp_path / "study")["sequential"] is None
