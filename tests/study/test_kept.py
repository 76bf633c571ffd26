"""Results of a study in one file: kept, laid out again, and added up; nothing is lost, and nothing false taken in."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from explorl.analysis.study_results import results_table, study_results
from explorl.cli.app import main
from explorl.core.store import RunStore, StoreError, atomic_files, locked
from explorl.study.archive import NOT_ARCHIVED, keep, restore
from explorl.study.arm import is_done, run_folder
from explorl.study.run_study import default_folder, locked_study, run_study, study_status, write_results
from explorl.study.spec import load_study
from explorl.study.watch import frame

ROOT = Path(__file__).parents[2]
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def file(whole_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "mini.json"
    keep(whole_study, path)
    return path


def changed(file: Path, to: Path, change: Change) -> Path:
    record = json.loads(file.read_text())
    change(record)
    to.write_text(json.dumps(record))
    return to


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, but for locks."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


def only_seed(record: dict[str, Any], *seeds: int) -> None:
    record["study"]["seeds"] = list(seeds)
    record["runs"] = [run for run in record["runs"] if run["seed"] in seeds]


def last(record: dict[str, Any]) -> Any:
    """The last evaluation of the last run."""
    return record["runs"][-1]["evaluations"]["step-000002"]


# ---------------------------------------------------------------------------- there and back
def test_a_restored_study_says_the_same(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    assert restore([file], folder) == 4
    before, after = study_results(whole_study), study_results(folder)
    for one, other in zip(before["arms"], after["arms"], strict=True):
        assert one["errors"]["by operands"] == other["errors"]["by operands"]
        wrong = sum(one["errors"]["by kind"].values())
        assert other["errors"]["by kind"] == ({NOT_ARCHIVED: wrong} if wrong else {})
        assert other["errors"]["by operation"] == {}, "the answers are not known, nor are their operations"
        assert {**one, "errors": None} == {**other, "errors": None}, "bit for bit"
    assert {**before, "arms": None, "rollouts": None} == {**after, "arms": None, "rollouts": None}
    write_results(folder)
    assert (folder / "report.html").stat().st_size > 10_000
    assert file.stat().st_size < 40_000
    keep(folder, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


def test_status_and_watch_say_the_same(whole_study: Path, file: Path, tmp_path: Path) -> None:
    restore([file], tmp_path / "mini")

    def shown(folder: Path) -> str:
        console = Console(record=True, width=300, file=io.StringIO())
        console.print(frame(folder, 120))
        text = console.export_text()
        return text[text.index("progress") :]  # without the title, which names the folder

    assert study_status(tmp_path / "mini").rows == study_status(whole_study).rows
    assert study_status(whole_study).rows[0][4] is not None
    assert shown(tmp_path / "mini") == shown(whole_study)


def test_it_goes_on_with_more_seeds(study_file: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    restore([file], folder)
    with locked_study(folder, load_study(study_file, seeds=3)) as study:
        assert study.seeds == (0, 1, 2)
    states = {(row[0], row[1]): row[2] for row in study_status(folder).rows}
    assert states["plain", 0] == states["Shaped + hot", 1] == "done"
    assert states["plain", 2] == states["broken", 0] == "waiting"


def test_where_nothing_is_left_to_run_nothing_is_prepared(
    study_file: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mini"
    restore([file], folder)
    asked: list[Any] = []
    monkeypatch.setattr("explorl.study.run_study._prepare", lambda *given: asked.append(given))
    run_study(study_file, folder=folder, only=["plain"], jobs=1, console=Console(quiet=True))
    assert not asked
    monkeypatch.setattr("explorl.study.run_study._Runner.run", lambda self: None)
    run_study(study_file, folder=folder, only=["plain"], seeds=3, jobs=1, console=Console(quiet=True))
    assert len(asked) == 1


def test_seeds_of_two_machines_are_added_up_in_any_order(whole_study: Path, file: Path, tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        machine = tmp_path / f"machine-{seed}"
        shutil.copytree(whole_study, machine)
        record = json.loads((machine / "study.json").read_text())
        (machine / "study.json").write_text(json.dumps({**record, "seeds": [seed]}))
        files.append(tmp_path / f"{seed}.json")
        keep(machine, files[-1])
    both, turned = tmp_path / "both", tmp_path / "turned"
    assert restore(files, both) == restore(files[::-1], turned) == 4
    assert study_results(both) == study_results(turned)
    assert json.loads((turned / "study.json").read_text())["seeds"] == [0, 1]
    assert restore([file], both) == 0  # the same runs once more
    assert results_table(study_results(both)).rows == results_table(study_results(whole_study)).rows


def test_a_restored_run_says_that_it_has_no_policy(file: Path, tmp_path: Path) -> None:
    restore([file], tmp_path / "mini")
    run = run_folder(tmp_path / "mini", "plain", 0)
    assert "which has no policy" in (run / "model" / "README.md").read_text()
    assert RunStore.open(run).kind == "grpo"
    assert set(pq.read_table(run / "evaluations" / "step-000002.parquet")["completion"].to_pylist()) == {None}


def test_rollouts_are_of_the_first_seed_that_has_some(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    restore([changed(file, tmp_path / "first.json", lambda record: only_seed(record, 0))], folder)
    assert study_results(folder)["rollouts"] == []
    for slug in ("plain", "shaped-hot"):
        shutil.copytree(run_folder(whole_study, slug, 1), run_folder(folder, slug, 1))
    record = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**record, "seeds": [0, 1]}))
    found = study_results(folder)["rollouts"]
    assert {(one["arm"], one["seed"]) for one in found} == {("plain", 1), ("Shaped + hot", 1)}


def test_failed_runs_are_told_of_after_the_restore(whole_study: Path, tmp_path: Path) -> None:
    folder, kept, back = tmp_path / "study", tmp_path / "kept.json", tmp_path / "back"
    shutil.copytree(whole_study, folder)
    for seed in (0, 1):
        run_folder(folder, "broken", seed).mkdir(parents=True)
        (run_folder(folder, "broken", seed) / "error.txt").write_text("Traceback\nValueError: it broke\n")
    keep(folder, kept)
    assert restore([kept], back) == 4
    assert study_results(back)["arms"][2]["failed"] == study_results(folder)["arms"][2]["failed"]
    assert results_table(study_results(back)).rows == results_table(study_results(folder)).rows
    assert [row[2] for row in study_status(back).rows] == [row[2] for row in study_status(folder).rows]
    # where another machine has finished the run, that counts, in whichever order they come
    done_there = changed(kept, tmp_path / "done.json", _broken_done)
    for name, files in (("one", [kept, done_there]), ("other", [done_there, kept])):
        assert restore(files, tmp_path / name) == 5
        assert study_status(tmp_path / name).rows[4][2] == "done"
    assert restore([done_there], back) == 1
    assert [row[2] for row in study_status(back).rows[4:]] == ["done", "failed"]


def _broken_done(record: dict[str, Any]) -> None:
    record["runs"].append({**record["runs"][0], "arm": "broken", "seed": 0})
    record["failed"] = []


def test_warm_starts_that_differ_are_told_of(whole_study: Path, tmp_path: Path) -> None:
    files = []
    for seed, weights in enumerate((b"one", b"other")):
        machine = tmp_path / f"machine-{seed}"
        shutil.copytree(whole_study, machine)
        record = json.loads((machine / "study.json").read_text())
        (machine / "study.json").write_text(json.dumps({**record, "seeds": [seed]}))
        (machine / "warm-start" / "model").mkdir(parents=True)
        (machine / "warm-start" / "model" / "model.safetensors").write_bytes(weights)
        files.append(tmp_path / f"{seed}.json")
        keep(machine, files[-1])
    said: list[str] = []
    restore(files[:1], tmp_path / "one", said.append)
    keep(tmp_path / "one", tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == files[0].read_bytes()
    assert not said
    restore(files[1:], tmp_path / "one", said.append)
    restore(files, tmp_path / "both", said.append)
    assert len(said) == 2
    assert all("different warm starts" in one and "seed-0 and " in one for one in said)
    assert all(one.endswith("seed-1") for one in said)


# ---------------------------------------------------------------------------- files that cannot be trusted
def _renamed_evaluation(name: str) -> Change:
    def change(record: dict[str, Any]) -> None:
        evaluations = record["runs"][0]["evaluations"]
        evaluations[name] = evaluations.pop("step-000001")

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "slug up": (lambda r: r["study"]["arms"][0].update(slug="../../../escaped"), r"arms.0: slug is .*'plain'"),
    "slug abs": (
        lambda r: r["study"]["arms"][0].update(slug="/nowhere/escaped"),
        r"slug is '/nowhere/escaped'.*'plain'",
    ),
    "slug twice": (lambda r: r["study"]["arms"][1].update(slug="plain"), r"slug is 'plain'.*'shaped-hot'"),
    "name twice": (lambda r: r["study"]["arms"].append(r["study"]["arms"][0]), r"duplicate arm 'plain'"),
    "same folder": (
        lambda r: r["study"]["arms"].append({**r["study"]["arms"][0], "name": "Plain"}),
        r"'plain' and 'Plain' have the same folder",
    ),
    "arm extra": (lambda r: r["study"]["arms"][0].update(more=1), r"study.arms.0.more is 1"),
    "arm escape": (lambda r: r["study"]["arms"][0].update(name="pl\x1b[31main", slug="pl-31main"), r"study.arms.0"),
    "no baseline": (lambda r: r["study"].update(baseline="nobody"), r"baseline is 'nobody'.*'plain'"),
    "seed up": (lambda r: r["runs"][0].update(seed="x/../../../../up"), r"seed is 'x/../../../../up'.*integer"),
    "seed text": (lambda r: r["runs"][0].update(seed="0"), r"seed is '0'.*integer"),
    "seed bool": (lambda r: r["runs"][0].update(seed=False), r"seed is False.*integer"),
    "seed float": (lambda r: r["runs"][0].update(seed=0.0), r"seed is 0.0.*integer"),
    "seed below": (lambda r: r["runs"][0].update(seed=-1), r"seed is -1.*greater than or equal to 0"),
    "seed strange": (
        lambda r: (r["runs"][0].update(seed=77), r["runs"][0]["config"].update(seed=77)),
        r"seed is 77.*has 0, 1",
    ),
    "seeds twice": (lambda r: r["study"].update(seeds=[0, 1, 1]), r"study.*seed 1 is listed 2 times"),
    "seeds text": (lambda r: r["study"].update(seeds="01"), r"study.seeds is '01'.*list"),
    "arm strange": (lambda r: r["runs"][0].update(arm="nobody"), r"arm is 'nobody'.*has 'plain'"),
    "run twice": (lambda r: r["runs"].append(r["runs"][0]), r"arm 'plain', seed 0.* twice"),
    "evaluation up": (_renamed_evaluation("../../../../escaped"), r"evaluations.*escaped.*like step-000002"),
    "evaluation abs": (_renamed_evaluation("/nowhere/escaped"), r"evaluations.*/nowhere/escaped.*like step-000002"),
    "evaluation config": (_renamed_evaluation("../config"), r"evaluations.*config.*like step-000002"),
    "evaluation line": (_renamed_evaluation("step-000001\n"), r"evaluations.*step-000001.*like step-000002"),
    "evaluation zeros": (_renamed_evaluation("step-0000001"), r"evaluations.*step-0000001.*like step-000002"),
    "no end": (lambda r: r["runs"][-1]["evaluations"].pop("step-000002"), r"evaluations.*step-000002"),
    "no runs": (lambda r: r.update(runs=[]), r"runs is \[\].*at least one"),
    "runs lacking": (lambda r: r.pop("runs"), r"lacks runs"),
    "runs dict": (lambda r: r.update(runs={"a": 1}), r"runs is .*list"),
    "study lacking": (lambda r: r.pop("study"), r"lacks study"),
    "study list": (lambda r: r.update(study=[]), r"study is \[\]"),
    "budget lacking": (lambda r: r["study"].pop("budget"), r"lacks study.budget"),
    "base lacking": (lambda r: r["study"]["base"].pop("task"), r"lacks study.base.task"),
    "steps text": (lambda r: r["study"]["arms"][0]["config"]["training"].update(steps="2"), r"training.steps is '2'"),
    "looks": (
        lambda r: r["study"].update(sequential={"first": 2, "keep": 1, "measures": ["pass@1"]}),
        r"sequential.first is 2, but there are 2 seeds",
    ),
    "problems lacking": (lambda r: r.pop("problems"), r"lacks problems"),
    "problems strange": (lambda r: last(r).update(problems="99"), r"seed 1.*step-000002.*problems is '99'.*'0'"),
    "problems twice": (
        lambda r: r.update(problems={name: [ids[0]] * len(ids) for name, ids in r["problems"].items()}),
        r"problems.*twice",
    ),
    "metrics lacking": (lambda r: r["runs"][-1].pop("metrics"), r"arm 'Shaped \+ hot', seed 1.* lacks metrics"),
    "metrics text": (lambda r: r["runs"][-1].update(metrics=["hi"]), r"seed 1.*metrics.0 is 'hi'"),
    "metrics step": (lambda r: r["runs"][-1]["metrics"][1].update(step="two"), r"metrics.1.step is 'two'.*integer"),
    "metrics kind": (lambda r: r["runs"][-1]["metrics"][1].update(kind="odd"), r"metrics.1.kind is 'odd'.*'train'"),
    "metrics value": (lambda r: r["runs"][-1]["metrics"][1].update(reward="x"), r"metrics.1.reward.* is 'x'"),
    "metrics nan": (lambda r: r["runs"][-1]["metrics"][1].update(reward=float("nan")), r"metrics.1.reward is nan"),
    "metrics order": (lambda r: r["runs"][-1]["metrics"].reverse(), r"metrics.*steps.*order"),
    "config lacking": (lambda r: r["runs"][-1].pop("config"), r"seed 1.* lacks config"),
    "config seed": (lambda r: r["runs"][-1]["config"].update(seed=5), r"config.seed is 5.*1"),
    "right short": (lambda r: last(r).update(right=[1, 0]), r"right has 2 .*8 problems"),
    "right above": (lambda r: last(r).update(right=[5] * 8), r"right.* 5.*of 2 samples"),
    "right below": (lambda r: last(r).update(right=[-5] * 8), r"right.0 is -5.*greater than or equal to 0"),
    "right text": (lambda r: last(r).update(right=["1"] * 8), r"right.0 is '1'.*integer"),
    "samples none": (lambda r: last(r).update(samples=0), r"samples is 0.*greater than or equal to 1"),
    "samples float": (lambda r: last(r).update(samples=2.5), r"samples is 2.5.*integer"),
    "samples many": (lambda r: last(r).update(samples=3_000_000), r"samples is 3000000.*less than or equal to 100000"),
    "summary nan": (lambda r: last(r)["summary"].update(entropy=float("inf")), r"summary.entropy is inf"),
    "summary list": (lambda r: last(r).update(summary=[1]), r"summary is \[1\].*dict"),
    "provenance text": (lambda r: r["runs"][0].update(provenance="x"), r"provenance is 'x'.*list"),
    "provenance nan": (
        lambda r: r["runs"][0]["provenance"][0].update(cores=float("nan")),
        r"provenance.0.cores is nan",
    ),
    "kind": (lambda r: r["runs"][0].update(kind="rm -rf"), r"kind is 'rm -rf'.*'grpo'"),
    "unknown key": (lambda r: r["runs"][0].update(novelty=1), r"novelty is 1"),
    "failed and done": (
        lambda r: r.update(failed=[{"arm": "plain", "seed": 0, "error": "x"}]),
        r"arm 'plain', seed 0.* twice",
    ),
    "failed seed": (lambda r: r.update(failed=[{"arm": "plain", "seed": "../x", "error": "x"}]), r"seed is '../x'"),
    "newer": (lambda r: r.update({"explorl study": 2}), r"by a newer Explorl \(format 2; this one reads 1\); update"),
    "no format": (lambda r: r.update({"explorl study": True}), r"is not a study's archive; write one with"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_with_a_fault_is_refused_whole(name: str, file: Path, tmp_path: Path) -> None:
    change, words = HOSTILE[name]
    bad = changed(file, tmp_path / "bad.json", change)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=rf"bad.json.*{words}"):
        restore([file, bad], tmp_path / "a" / "b" / "mini")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[" * 200_000, "bad.json is nested over 64 levels"),
        (b"", "bad.json is not JSON"),
        (b"[1, 2]", "bad.json is not a study's archive; write one with"),
        (b'{"explorl study": 1, "\xff": 1}', "bad.json is not JSON"),
        (None, "bad.json is not a file"),
    ],
)
def test_a_file_of_something_else_is_refused(text: bytes | None, words: str, file: Path, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "bad.json").write_bytes(text)
    with pytest.raises(StoreError, match=words):
        restore([file, tmp_path / "bad.json"], tmp_path / "mini")
    assert not (tmp_path / "mini").exists()


def test_too_many_answers_are_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorl.study.archive_file.MAX_COMPLETIONS", 100)
    with pytest.raises(StoreError, match=r"mini.json has evaluations of 192 completions; at most 100"):
        restore([file], tmp_path / "mini")


# ---------------------------------------------------------------------------- runs that are in two places
OTHER_RESULTS: dict[str, tuple[Change, str]] = {
    "right": (
        lambda r: r["runs"][0]["evaluations"]["step-000002"].update(right=[2] * 8),
        r"evaluations.step-000002.right.0 is 0 there and 2 here",
    ),
    "problems": (
        lambda r: r["problems"].update({"0": [f"countdown:1-2={i}" for i in range(8)]}),
        r"evaluations.step-000000.problems.0 is 'countdown:.*' there and 'countdown:1-2=0' here",
    ),
    "evaluations": (
        lambda r: r["runs"][0]["evaluations"].pop("step-000001"),
        r"evaluations.step-000001 is there and not here",
    ),
    "reward": (
        lambda r: r["runs"][0]["metrics"][2].update(reward=9.0),
        r"metrics.2.reward is 0.025.* there and 9.0 here",
    ),
    "entropy": (
        lambda r: r["runs"][0]["metrics"][2].update(entropy=9.0),
        r"metrics.2.entropy is .* there and 9.0 here",
    ),
    "steps": (lambda r: r["runs"][0]["metrics"].pop(0), r"metrics has 5 entries there and 4 here"),
    "config": (
        lambda r: r["runs"][0]["config"]["training"].update(learning_rate=9.0),
        r"config.training.learning_rate is 0.0001 there and 9.0 here",
    ),
}


@pytest.mark.parametrize("name", OTHER_RESULTS)
def test_another_run_of_the_same_arm_and_seed_is_refused(name: str, file: Path, tmp_path: Path) -> None:
    change, words = OTHER_RESULTS[name]
    other = changed(file, tmp_path / "other.json", change)
    folder = tmp_path / "mini"
    with pytest.raises(
        StoreError,
        match=rf"mini.json has another run of arm 'plain', seed 0, than .*other.json: {words}; .*one of them",
    ):
        restore([file, other], folder)
    assert not folder.exists()
    restore([file], folder)
    before = contents(folder)
    with pytest.raises(StoreError, match=rf"seed-0 has another run of arm 'plain', seed 0, than .*other.json: {words}"):
        restore([other], folder)
    assert contents(folder) == before


def test_a_key_that_an_older_file_lacks_is_no_difference(file: Path, tmp_path: Path) -> None:
    def older(record: dict[str, Any]) -> None:
        study = record["study"]
        for config in (
            study["base"],
            *(arm["config"] for arm in study["arms"]),
            *(r["config"] for r in record["runs"]),
        ):
            del config["evaluation"]["ends"]
        del study["sequential"]

    assert restore([file, changed(file, tmp_path / "older.json", older)], tmp_path / "mini") == 4
    assert restore([tmp_path / "older.json", file], tmp_path / "again") == 4


def test_an_unfinished_run_is_not_taken_for_the_finished_one(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    shutil.copytree(whole_study, folder)
    place = run_folder(folder, "plain", 0)
    shutil.rmtree(place / "model")
    lines = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    (place / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 2' not in line))
    before = contents(folder)
    with pytest.raises(
        StoreError,
        match=r"seed-0 is unfinished \(step 1 of 2\); remove it to restore the finished one from .*mini.json",
    ):
        restore([file], folder)
    assert contents(folder) == before
    with locked(place), pytest.raises(StoreError, match=r"another process is using .*seed-0"):
        restore([file], folder)
    shutil.rmtree(place)
    assert restore([file], folder) == 1
    assert is_done(RunStore(place))


def test_what_failed_with_more_than_an_error_stays(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    shutil.copytree(whole_study, folder)
    place = run_folder(folder, "plain", 0)
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (place / "error.txt").write_text("CUDA out of memory\n")
    (place / "log.txt").write_text("a long story\n")
    with pytest.raises(StoreError, match=r"seed-0 has failed \(step 0 of 2\); remove it to restore the finished one"):
        restore([file], folder)
    assert (place / "log.txt").exists()


# ---------------------------------------------------------------------------- studies that are not the same
OTHER_STUDIES: dict[str, tuple[Change, str]] = {
    "name": (lambda r: r["study"].update(name="maxi"), "name is 'mini' there and 'maxi' here"),
    "baseline": (
        lambda r: r["study"].update(baseline="Shaped + hot"),
        r"baseline is 'plain' there and 'Shaped \+ hot'",
    ),
    "budget": (lambda r: r["study"].update(budget={"steps": 3}), "budget: steps is 2 there and 3 here"),
    "target": (lambda r: r["study"].update(target=0.9), "target is 0.05 there and 0.9 here"),
    "rates": (lambda r: r["study"].update(solve_rate_samples=64), "solve_rate_samples is 4 there and 64 here"),
    "base": (
        lambda r: r["study"]["base"]["training"].update(learning_rate=1.0),
        "base: training.learning_rate is 0.0001 there and 1.0 here",
    ),
    "warm start": (lambda r: r["study"].update(warm_start=r["study"]["base"]), "warm_start is None there and {"),
    "looks": (
        lambda r: r["study"].update(sequential={"first": 2, "keep": 1, "measures": ["pass@1"]}, seeds=[0, 1, 2]),
        "sequential is None there and {'first': 2",
    ),
    "arm": (
        lambda r: r["study"]["arms"][1]["config"]["training"].update(learning_rate=1.0),
        r"arm 'Shaped \+ hot': training.learning_rate is 0.001 there and 1.0 here",
    ),
    "kind": (
        lambda r: [r["study"]["arms"][2].update(kind="rft")],
        r"arm 'broken': kind is 'grpo' there and 'rft' here",
    ),
}


@pytest.mark.parametrize("name", OTHER_STUDIES)
def test_another_study_is_refused(name: str, file: Path, tmp_path: Path) -> None:
    change, words = OTHER_STUDIES[name]
    other = changed(file, tmp_path / "other.json", change)
    with pytest.raises(StoreError, match=rf"mini.json holds another study than .*other.json: {words}"):
        restore([file, other], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    restore([file], tmp_path / "mini")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=rf"mini holds another study than .*other.json: {words}"):
        restore([other], tmp_path / "mini")
    assert contents(tmp_path) == before


def test_arms_of_two_names_and_one_folder_are_refused(file: Path, tmp_path: Path) -> None:
    def rename(record: dict[str, Any]) -> None:
        record["study"]["arms"][1].update(name="Shaped, hot")
        [run.update(arm="Shaped, hot") for run in record["runs"] if run["arm"] != "plain"]

    other = changed(file, tmp_path / "other.json", rename)
    with pytest.raises(
        StoreError, match=r"other.json: the arms 'Shaped \+ hot' and 'Shaped, hot' have the same folder"
    ):
        restore([file, other], tmp_path / "mini")


def test_in_a_study_with_two_looks_the_seeds_are_fixed(file: Path, tmp_path: Path) -> None:
    def looks(*seeds: int, **plan: Any) -> Change:
        def change(record: dict[str, Any]) -> None:
            record["study"].update(sequential={"first": 2, "keep": 1, "measures": ["pass@1"], **plan}, seeds=[*seeds])

        return change

    planned = changed(file, tmp_path / "planned.json", looks(3, 1, 0))
    folder = tmp_path / "mini"
    assert restore([planned], folder) == 4
    assert json.loads((folder / "study.json").read_text())["seeds"] == [3, 1, 0], "in the order of the looks"
    more = changed(file, tmp_path / "more.json", looks(3, 1, 0, 4))
    with pytest.raises(StoreError, match=r"are fixed: seeds is \[3, 1, 0\] there and \[3, 1, 0, 4\] here"):
        restore([more], folder)
    other = changed(file, tmp_path / "other.json", looks(3, 1, 0, keep=2))
    with pytest.raises(StoreError, match="sequential: keep is 1 there and 2 here"):
        restore([other], folder)


# ---------------------------------------------------------------------------- the folder
def test_a_refused_restore_changes_nothing(file: Path, tmp_path: Path) -> None:
    """Even where the first file, or the first of its runs, could have been taken."""
    folder = tmp_path / "mini"
    restore([changed(file, tmp_path / "first.json", lambda r: only_seed(r, 0))], folder)

    def later(record: dict[str, Any]) -> None:
        record["study"]["seeds"] = [0, 1, 9]
        record["runs"][0]["metrics"][2]["reward"] = 42.0
        record["runs"].insert(0, {**record["runs"][0], "seed": 9, "config": {**record["runs"][0]["config"], "seed": 9}})

    before = contents(folder)
    with pytest.raises(StoreError, match="has another run of arm 'plain', seed 0"):
        restore([changed(file, tmp_path / "later.json", later)], folder)
    assert contents(folder) == before


def test_folders_of_others_are_left_alone(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    (folder / "arms").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"mini is not empty and holds no study"):
        restore([file], folder)
    with pytest.raises(StoreError, match="holds a run, not a study"):
        restore([file], run_folder(whole_study, "plain", 0))
    with pytest.raises(StoreError, match=r"mini.json is a file; name a folder with --run, such as runs/mini"):
        restore([file], file)
    shutil.rmtree(folder)
    restore([file], folder)
    with locked(folder), pytest.raises(StoreError, match="another process is at work"):
        restore([file], folder)


def test_an_interrupted_restore_leaves_whole_runs_and_goes_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, places = atomic_files.atomic_path, 0

    def interrupted(count: int) -> bool:
        left = count

        def path(to: Path) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return real(to)

        with monkeypatch.context() as patch:
            patch.setattr(atomic_files, "atomic_path", path)
            try:
                restore([file], tmp_path / "mini")
            except KeyboardInterrupt:
                return True
        return False

    while interrupted(places):
        folders = list((tmp_path / "mini").glob("arms/*/seed-*"))
        assert all(is_done(RunStore(one)) and (one / "config.yaml").exists() for one in folders)
        restore([file], tmp_path / "mini")
        keep(tmp_path / "mini", tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == file.read_bytes()
        shutil.rmtree(tmp_path / "mini")
        places += 6
    assert places > 40


# ---------------------------------------------------------------------------- keeping
def test_keep_overwrites_only_what_it_has(whole_study: Path, file: Path, tmp_path: Path) -> None:
    some, mine = tmp_path / "some", tmp_path / "mine.json"
    shutil.copytree(whole_study, some)
    shutil.rmtree(some / "arms" / "shaped-hot" / "seed-1")
    keep(some, mine)
    keep(whole_study, mine)  # the same runs and one more
    assert mine.read_bytes() == file.read_bytes()
    with pytest.raises(
        StoreError, match=r"mine.json has runs that would be lost: Shaped \+ hot 1; .* such as .*mine-2.json"
    ):
        keep(some, mine)
    line = (run_folder(some, "plain", 0) / "metrics.jsonl").read_text().replace('"reward": 0.0', '"reward": 1.0')
    (run_folder(some, "plain", 0) / "metrics.jsonl").write_text(line)
    shutil.copytree(run_folder(whole_study, "shaped-hot", 1), run_folder(some, "shaped-hot", 1))
    with pytest.raises(StoreError, match=r"mine.json has another run of arm 'plain', seed 0, than .*: metrics.*mine-2"):
        keep(some, mine)
    other = changed(file, tmp_path / "other.json", lambda r: r["study"].update(name="maxi"))
    with pytest.raises(StoreError, match=r"other.json holds another study than .*: name is 'maxi' there.*other-2.json"):
        keep(whole_study, other)
    (tmp_path / "notes.json").write_text('{"precious": 1}')
    with pytest.raises(StoreError, match=r"notes.json exists and is not a readable archive; .* such as .*notes-2.json"):
        keep(whole_study, tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text() == '{"precious": 1}'
    assert mine.read_bytes() == file.read_bytes()
    with pytest.raises(StoreError, match=r"study.json is inside the study's folder; .* such as some.json"):
        keep(some, some / "study.json")
    with pytest.raises(StoreError, match=r"is inside the study's folder"):
        keep(some, some / "arms" / ".." / "new.json")
    with pytest.raises(StoreError, match=r"some is a folder; name a file, such as study.json"):
        keep(whole_study, some)


def test_what_cannot_be_kept_is_told(whole_study: Path, tmp_path: Path) -> None:
    def fails(words: str, change: Callable[[Path], Any]) -> None:
        folder = tmp_path / "study"
        shutil.copytree(whole_study, folder)
        change(folder)
        with pytest.raises(StoreError, match=words):
            keep(folder, tmp_path / "none.json")
        assert not (tmp_path / "none.json").exists()
        shutil.rmtree(folder)

    fails("has no finished run", lambda folder: shutil.rmtree(folder / "arms"))
    fails(r"study.json holds no mapping", lambda folder: (folder / "study.json").write_text("[]"))
    start = Path("arms/plain/seed-0/evaluations/step-000001.json")
    fails(r"step-000001.json holds \[1\], not the summary", lambda folder: (folder / start).write_text("[1]"))
    parquet = start.with_suffix(".parquet")
    fails(r"cannot read .*step-000001.parquet, .*: it is missing; restore", lambda folder: (folder / parquet).unlink())
    fails(r"cannot read .*step-000001.parquet, .*restore", lambda folder: (folder / parquet).write_text("x"))
    fails("config.yaml is missing", lambda folder: (folder / start.parents[1] / "config.yaml").unlink())


# ---------------------------------------------------------------------------- the commands
def test_the_commands(whole_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["study", *words])
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), " ".join((printed.out + printed.err).split())

    kept, folder, study = str(tmp_path / "kept.json"), str(tmp_path / "again"), tmp_path / "study"
    shutil.copytree(whole_study, study)
    run_folder(study, "broken", 0).mkdir(parents=True)
    (run_folder(study, "broken", 0) / "error.txt").write_text("it broke\n")
    shutil.rmtree(run_folder(study, "plain", 1) / "model")
    code, said = run("keep", str(study), kept)
    assert code == 0
    assert "3 of 6 runs in" in said
    assert "left out: plain 1 (stopped), broken 0 (failed), broken 1 (waiting)" in said
    code, said = run("keep", str(whole_study), str(tmp_path / "whole.json"))
    assert "4 of 6 runs in" in said
    assert "broken 0 and 1 (waiting)" in said
    code, said = run("restore", kept, "--run", folder)
    assert (code, "3 runs added to" in said, "next: explorl report" in said) == (0, True, True)
    code, said = run("restore", str(tmp_path / "whole.json"), "--run", folder)
    assert (code, "1 run added to" in said) == (0, True)
    for words, advice in (
        (("keep", folder), "takes the study's folder and a file"),
        (("keep", folder, ""), "takes the study's folder and a file"),
        (("restore", kept), "takes files and a folder"),
        (("restore", "", "--run", folder), "takes files and a folder"),
        (("keep", folder, kept, "--run", "x"), "`explorl study keep` takes no --run"),
        (("keep", folder, kept, "--seeds", "3"), "`explorl study keep` takes no --seeds"),
        (("restore", kept, "--run", folder, "--only", "plain"), "`explorl study restore` takes no --only"),
        (("status", folder, "--profile", "tiny"), "`explorl study status` takes no --profile"),
    ):
        code, said = run(*words)
        assert code == 2
        assert advice in said


def test_the_start_of_the_gpu_study_lies_outside_its_folder() -> None:
    study = load_study(ROOT / "studies" / "countdown-gpu.yaml")
    start = Path(study.base["model"]["name"])
    assert default_folder(study) not in start.parents
    header = (ROOT / "studies" / "countdown-gpu.yaml").read_text().split("name:")[0]
    assert f"scripts/countdown_gpu.py {start.parents[1]} " in header
