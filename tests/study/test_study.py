"""Studies run in real processes: killed and started again, with an arm that fails, and folders that are not theirs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from explorl.core.config import ConfigError
from explorl.core.store import RunStore, StoreError, is_locked, locked
from explorl.core.terminal import Pace
from explorl.models import ModelError
from explorl.study.arm import (
    budget_check,
    is_done,
    is_prepared,
    main,
    prepare,
    run_arm,
    run_folder,
    trained_steps,
)
from explorl.study.run_study import (
    StudyOutcome,
    StudyRun,
    environment,
    locked_study,
    run_study,
    study_status,
    time_left,
    write_results,
)
from explorl.study.spec import load_study

TEN_STEPS = {"steps": 10, "iterations": 1}

RUN = """
import sys
from rich.console import Console
from explorl.study.run_study import run_study
run_study(sys.argv[1], folder=sys.argv[2], seeds=1, jobs=1, console=Console())
"""


@pytest.fixture(scope="module")
def killed_study(study_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, StudyOutcome, str]:
    """A study with one seed, killed in the middle of its first run and started again."""
    folder = tmp_path_factory.mktemp("killed") / "study"
    runner = subprocess.Popen([sys.executable, "-c", RUN, str(study_file), str(folder)], stdout=subprocess.DEVNULL)
    first = RunStore(run_folder(folder, "plain", 0))
    _wait(lambda: trained_steps(first) >= 1 or runner.poll() is not None)
    os.kill(runner.pid, signal.SIGKILL)
    assert runner.wait() == -signal.SIGKILL
    _wait(lambda: not is_locked(first.folder))
    reached = trained_steps(first)
    states = {row[0]: row[2] for row in study_status(folder).rows}
    assert states["Shaped + hot"] == "waiting"
    assert states["plain"] in ("stopped", "done")
    console = Console(record=True, width=200, file=io.StringIO())
    outcome = run_study(study_file, folder=folder, seeds=1, jobs=2, console=console)
    return folder, reached, outcome, console.export_text()


def _wait(condition: Any, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
def test_killing_the_study_kills_its_runs_and_starting_again_ends_with_the_same(
    killed_study: tuple[Path, int, StudyOutcome, str], whole_study: Path, study_file: Path, tmp_path: Path
) -> None:
    _, reached, outcome, _ = killed_study
    assert reached >= 1
    same = tmp_path / "study"
    with locked_study(same, load_study(study_file, seeds=1)):
        for slug in ("plain", "shaped-hot"):
            shutil.copytree(run_folder(whole_study, slug, 0), run_folder(same, slug, 0))
    expected = write_results(same)
    assert _comparable(outcome.results) == _comparable(expected)
    assert outcome.results["arms"][0]["measures"]["pass@1"]["mean"] is not None


def _comparable(results: dict[str, Any]) -> dict[str, Any]:
    """Without times, which differ, and the arm that was tried in one of the studies only."""
    results = json.loads(json.dumps(results))
    arms = [arm for arm in results["arms"] if arm["name"] != "broken"]
    for arm in arms:
        for part in ("measures", "differences"):
            (arm[part] or {}).pop("seconds", None)
    threads = {**results["provenance"], "threads": None}
    return {**results, "arms": arms, "provenance": threads, "date": None}


@pytest.mark.slow
def test_a_failed_arm_is_told_and_stops_no_other(killed_study: tuple[Path, int, StudyOutcome, str]) -> None:
    folder, _, outcome, printed = killed_study
    assert outcome.failed == ["broken, seed 0"]
    place = run_folder(folder, "broken", 0)
    error = (place / "error.txt").read_text()
    assert "this strategy fails in a run, [not] when it is checked" in error.splitlines()[-1]
    assert "Traceback" in (place / "log.txt").read_text()
    by_name = {arm["name"]: arm for arm in outcome.results["arms"]}
    assert by_name["broken"]["failed"] == {"0": error.strip()}
    assert by_name["broken"]["seeds"] == []
    assert by_name["broken"]["verdict"] == "nothing to compare yet; 1 failed"
    assert by_name["plain"]["seeds"] == by_name["Shaped + hot"]["seeds"] == [0]
    assert "broken, seed 0: failed: " in printed
    assert "One seed" in printed


@pytest.mark.slow
def test_status_says_where_each_run_is(killed_study: tuple[Path, int, StudyOutcome, str]) -> None:
    folder, _, outcome, _ = killed_study
    table = study_status(folder)
    assert table.columns == ("arm", "seed", "state", "step", "pass@1", "pass@2", "seconds")
    rows = {row[0]: row for row in table.rows}
    assert rows["plain"][2:4] == ("done", 2)
    measures = outcome.results["arms"][0]["measures"]
    assert rows["plain"][4:6] == pytest.approx([measures[key]["mean"] for key in ("pass@1", "pass@2")])
    assert rows["broken"][2:6] == ("failed", 0, None, None)
    with locked(run_folder(folder, "broken", 0)):
        assert {row[0]: row[2] for row in study_status(folder).rows}["broken"] == "running"
    assert [row["arm"] for row in json.loads(outcome.table.to_json())["rows"]] == ["plain", "Shaped + hot", "broken"]


@pytest.mark.slow
def test_every_file_of_a_finished_study_is_whole(killed_study: tuple[Path, int, StudyOutcome, str]) -> None:
    folder, _, outcome, _ = killed_study
    assert json.loads((folder / "results.json").read_text()) == outcome.results
    for path in folder.rglob("*"):
        assert not path.name.endswith(".tmp")
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
    assert "<html" in (folder / "report.html").read_text()
    assert (folder / "table.tex").read_text().startswith("% A very small study")
    assert (folder / "table.md").read_text().startswith("| arm | pass@1 |")
    store = RunStore(run_folder(folder, "plain", 0))
    assert [r["step"] for r in store.metrics() if r["kind"] == "train"] == [1, 2]
    assert sorted(p.stem for p in (store.folder / "evaluations").glob("*.json")) == [f"step-{i:06d}" for i in (0, 1, 2)]
    assert not store.checkpoints.exists(), "a finished run needs no checkpoint"


@pytest.mark.slow
def test_what_is_done_is_not_run_again(killed_study: tuple[Path, int, StudyOutcome, str], study_file: Path) -> None:
    folder, _, outcome, _ = killed_study
    before = {path: path.stat().st_mtime_ns for path in folder.glob("arms/*/seed-0/metrics.jsonl")}
    again = run_study(study_file, folder=folder, seeds=1, only=["plain"], console=Console(quiet=True))
    assert again.failed == []
    assert again.results == outcome.results
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_folder_of_another_study_is_refused(whole_study: Path, study_file: Path, tmp_path: Path) -> None:
    text = study_file.read_text()

    def run(changed: str, folder: Path = whole_study, **options: Any) -> None:
        path = tmp_path / "other.yaml"
        path.write_text(changed)
        run_study(path, folder=folder, console=Console(quiet=True), **options)

    with pytest.raises(StoreError, match="holds another study: name is 'mini' there and 'maxi' here"):
        run(text.replace("name: mini", "name: maxi"))
    with pytest.raises(StoreError, match=r"budget: steps is 2 there and 3 here"):
        run(text.replace("steps: 2", "steps: 3"))
    with pytest.raises(StoreError, match=r"arm 'Shaped \+ hot': rollout.temperature is 1.5 there and 2.0 here"):
        run(text.replace("temperature: 1.5", "temperature: 2.0"))
    with pytest.raises(StoreError, match=r"it has the arm 'Shaped \+ hot'; .* or the arm's runs in .*shaped-hot"):
        run("".join(line for line in text.splitlines(keepends=True) if "Shaped + hot" not in line))
    with pytest.raises(StoreError, match="holds a run, not a study"):
        run(text, run_folder(whole_study, "plain", 0))
    with pytest.raises(StoreError, match=r"is not empty and holds no study \(other.yaml\)"):
        run(text, tmp_path)
    with pytest.raises(ConfigError, match="has no arm 'plan'; did you mean 'plain'"):
        run(text, only=["plan"])
    with pytest.raises(ConfigError, match="jobs is 0"):
        run(text, jobs=0)
    with pytest.raises(ModelError, match="no model folder at /nowhere"):
        run(text.replace("preset: tiny", "preset: tiny\n  model: {name: /nowhere}"))
    with locked(whole_study), pytest.raises(StoreError, match="another process is at work"):
        run(text)


def test_more_seeds_may_follow(whole_study: Path, study_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(whole_study, folder)
    with locked_study(folder, load_study(study_file, seeds=[1, 5])) as study:
        assert study.seeds == (0, 1, 5), "those that were there stay"


def test_a_study_from_before_a_key_goes_on(whole_study: Path, study_file: Path, tmp_path: Path) -> None:
    """Its study.json and its runs lack a key that has since been added, whose default is what they did."""
    folder = tmp_path / "study"
    shutil.copytree(whole_study, folder)
    record = json.loads((folder / "study.json").read_text())
    for config in (record["base"], *(arm["config"] for arm in record["arms"])):
        del config["evaluation"]["ends"]
    (folder / "study.json").write_text(json.dumps(record))
    place = run_folder(folder, "plain", 0)
    held = RunStore(place).config()
    del held["evaluation"]["ends"]
    RunStore(place).write_config(held)
    (place / "evaluations" / "step-000002.json").unlink()
    with locked_study(folder, load_study(study_file)):
        run_arm(folder, "plain", 0)
    assert (place / "evaluations" / "step-000002.json").exists()
    held["evaluation"]["samples"] = 3
    RunStore(place).write_config(held)
    with pytest.raises(StoreError, match=r"another configuration \(evaluation.samples is 3 there and 2 in the study\)"):
        run_arm(folder, "plain", 0)


def test_an_arm_is_evaluated_at_its_end_even_where_no_evaluation_is_due(whole_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(whole_study, folder)
    place = run_folder(folder, "plain", 0)
    before = pq.read_table(place / "evaluations" / "step-000002.parquet")
    for path in place.glob("evaluations/step-000002.*"):
        path.unlink()
    assert not is_done(RunStore(place))
    run_arm(folder, "plain", 0)
    assert is_done(RunStore(place))
    assert pq.read_table(place / "evaluations" / "step-000002.parquet").equals(before)
    steps = [r["step"] for r in RunStore(place).metrics() if r["kind"] == "evaluation"]
    assert steps == [0, 1, 2], "and told once"


def test_a_run_of_another_configuration_is_left_alone(whole_study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(whole_study, folder)
    place = run_folder(folder, "plain", 0)
    text = (place / "config.yaml").read_text()
    (place / "config.yaml").write_text(text.replace("seed: 0", "seed: 9"))
    assert main([str(folder), "--arm", "plain", "--seed", "0"]) == 1
    assert "holds a run with another configuration" in (place / "error.txt").read_text()


def test_a_warm_start_that_fails_says_how_to_do_without(tmp_path: Path) -> None:
    """Rows without completions are found when the warm start is made."""
    rows = [json.dumps({"prompt": f"{number}+4=", "answer": number + 4}) for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "warm.yaml").write_text(
        "name: warm\narms: {a: {}}\nbaseline: a\nbudget: {steps: 1}\nwarm_start: {sft: {from_scratch: false}}\n"
        f"base: {{preset: tiny, task: {{name: jsonl, path: '{tmp_path / 'rows.jsonl'}'}}}}\n"
    )
    with pytest.raises(StoreError, match=r"none has a completion.*from tiny as it is.*--set warm_start=null"):
        run_study(tmp_path / "warm.yaml", folder=tmp_path / "study", seeds=1, console=Console(quiet=True))


def test_the_warm_start_and_the_solve_rates_are_made_once_and_shared(study_file: Path, tmp_path: Path) -> None:
    text = study_file.read_text().replace("steps: 2", "steps: 1").replace("train_problems: 32", "train_problems: 8")
    text = text.replace('["study_broken:Broken"]', "[{curriculum: {mode: easy_first, solve_rates: start}}]")
    warm = "warm_start: {sft: {from_scratch: false, examples: 8, epochs: 1, batch_size: 8, score: false}}\n"
    (tmp_path / "warm.yaml").write_text(text + warm)
    folder = tmp_path / "study"
    with locked_study(folder, load_study(tmp_path / "warm.yaml")) as study:
        assert not is_prepared(folder, study)
        prepare(folder)
        assert is_prepared(folder, study)
        rates = json.loads((folder / "solve-rates.json").read_text())
        assert len(rates) == 8
        assert {rate * 4 % 1 for rate in rates.values()} == {0}, "four samples of each problem"
        made = (folder / "warm-start" / "model" / "model.safetensors").stat().st_mtime_ns
        prepare(folder)
        assert (folder / "warm-start" / "model" / "model.safetensors").stat().st_mtime_ns == made
        run_arm(folder, "broken", 1)
    store = RunStore.open(run_folder(folder, "broken", 1))
    assert is_done(store)
    assert store.config()["model"]["name"] == str((folder / "warm-start" / "model").resolve())
    seen = set(pq.read_table(store.rollouts / "step-000001.parquet").to_pydict()["prompt"])
    easiest = sorted(rates, key=lambda prompt: -rates[prompt])[:4]
    assert seen == set(easiest), "the prompts are those of the task, so their rates are found"


def test_a_budget_of_tokens_or_minutes_is_spent_at_its_step(tmp_path: Path) -> None:
    """Steps of 100 tokens and 30 seconds; the step that has just ended is not logged yet."""
    store = RunStore.create(tmp_path / "run", {})
    tokens, minutes = budget_check(store, {"tokens": 400}), budget_check(store, {"minutes": 1.5})
    stopped = {"tokens": 0, "minutes": 0}
    for step in range(1, 7):
        for name, stop in (("tokens", tokens), ("minutes", minutes)):
            if stop(step) and not stopped[name]:
                stopped[name] = step
        store.append_metrics({"step": step, "kind": "train", "num_tokens": 100 * step, "step_time": 30.0})
    assert stopped == {"tokens": 4, "minutes": 3}


def test_the_time_left_is_told_by_steps_of_the_same_kind(study_file: Path, tmp_path: Path) -> None:
    """Not by the start-up that comes before them, and not before three steps have been timed."""
    study = load_study(study_file)
    study = replace(study, arms=tuple(replace(arm, config={**arm.config, "training": TEN_STEPS}) for arm in study.arms))
    first, second, third = (StudyRun(tmp_path, study.arms[0], seed) for seed in range(3))
    running = [first, second]
    for run in running:
        run.start_clock(0.0)
        run.folder.mkdir(parents=True)
    for step, now in ((1, 60.0), (2, 62.0), (3, 64.0), (4, 66.0)):
        assert time_left(running, [], [third], 2) is None, "the first step also has the start-up in it"
        for run in running:
            run.store.append_metrics({"kind": "train", "step": step})
            run.update_pace(now)
    assert time_left(running, [], [], 2) == pytest.approx(6 * 2.0)
    assert time_left(running, [], [third], 2) == pytest.approx(6 * 2.0 + 60 + 9 * 2.0)
    assert time_left([first], [second], [third], 2) == pytest.approx(60 + 9 * 2.0), "one slot is free at once"

    other = StudyRun(tmp_path, replace(study.arms[1], kind="rft"), 0)
    assert time_left(running, [], [other], 2) is None, "steps of another kind tell nothing"


def test_a_run_that_goes_back_to_its_checkpoint_counts_from_there() -> None:
    pace = Pace(43)
    for steps, now in ((43, 0.0), (40, 10.0), (41, 20.0), (42, 22.0), (43, 24.0)):
        pace.see(steps, now)
        assert pace.seconds is None
    pace.see(44, 26.0)
    assert (pace.first, pace.seconds) == (20.0, 2.0)


def test_threads_and_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    assert [environment(3, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "7", "4"]
    assert environment(3, 0)["OMP_NUM_THREADS"] == "2"
    assert environment(16, 0)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment(1, 0)["CUDA_VISIBLE_DEVICES"] == ""
