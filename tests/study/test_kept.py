"""Results of a study in one file: kept, laid out again, and added up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from explorl.analysis.study_results import study_results
from explorl.cli import main
from explorl.store import RunStore, StoreError
from explorl.study.arm import run_folder
from explorl.study.file import load_study
from explorl.study.kept import UNKNOWN, keep, restore
from explorl.study.run import locked_study, study_status, write_results


@pytest.fixture(scope="module")
def file(whole_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "mini.json"
    assert keep(whole_study, path) == 4
    return path


def near(one: Any, other: Any) -> bool:
    """Whether two values of results.json are the same, numbers to five digits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float):
        return other is not None and abs(one - other) <= 1e-5 * max(1e-3, abs(one))
    return bool(one == other)


def test_a_restored_study_says_the_same(whole_study: Path, file: Path, tmp_path: Path) -> None:
    assert restore([file], tmp_path / "mini") == 4
    before, after = study_results(whole_study), study_results(tmp_path / "mini")
    for one, other in zip(before["arms"], after["arms"], strict=True):
        if one["name"] == "broken":
            continue  # of what failed, nothing is kept
        for key in ("name", "seeds", "measures", "differences", "curves", "pass_at_k", "gain", "unsolvable", "verdict"):
            assert near(one[key], other[key]), (one["name"], key)
        assert one["errors"]["by operands"] == other["errors"]["by operands"]
        wrong = sum(one["errors"]["by kind"].values())
        assert other["errors"]["by kind"] == ({UNKNOWN: wrong} if wrong else {})
    for key in ("verdict", "overlaps", "start", "minimum_detectable_effect", "provenance", "config", "date"):
        assert near(before[key], after[key]), key
    page = tmp_path / "mini" / "report.html"
    write_results(tmp_path / "mini")
    assert page.stat().st_size > 10_000
    assert file.stat().st_size < 40_000


def test_it_goes_on_with_more_seeds(study_file: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    restore([file], folder)
    with locked_study(folder, load_study(study_file, seeds=3)) as study:
        assert study.seeds == (0, 1, 2)
    states = {(row[0], row[1]): row[2] for row in study_status(folder).rows}
    assert states["plain", 0] == states["Shaped + hot", 1] == "done"
    assert states["plain", 2] == states["broken", 0] == "waiting"


def test_seeds_of_two_machines_are_added_up(whole_study: Path, file: Path, tmp_path: Path) -> None:
    files = []
    for seed in (0, 1):
        machine = tmp_path / f"machine-{seed}"
        shutil.copytree(whole_study, machine)
        record = json.loads((machine / "study.json").read_text())
        (machine / "study.json").write_text(json.dumps({**record, "seeds": [seed]}))
        files.append(tmp_path / f"{seed}.json")
        assert keep(machine, files[-1]) == 2
    folder = tmp_path / "both"
    assert restore(files, folder) == 4
    assert restore([file], folder) == 0  # the same runs once more
    assert near(
        [arm["measures"] for arm in study_results(folder)["arms"][:2]],
        [arm["measures"] for arm in study_results(whole_study)["arms"][:2]],
    )


def changed(file: Path, to: Path, change: Any) -> Path:
    record = json.loads(file.read_text())
    change(record)
    to.write_text(json.dumps(record))
    return to


def test_what_does_not_fit_is_refused_and_changes_nothing(whole_study: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    restore([file], folder)
    names = sorted(str(path) for path in folder.rglob("*"))
    other = changed(file, tmp_path / "other.json", lambda record: record["study"].update(baseline="Shaped + hot"))
    with pytest.raises(StoreError, match=r"other.json is of another study than .*: baseline is not the same"):
        restore([other], folder)
    arm = changed(file, tmp_path / "arm.json", lambda record: record["study"]["arms"][1]["config"].update(seed=9))
    with pytest.raises(StoreError, match=r"arm.json has another arm 'Shaped \+ hot' than"):
        restore([arm], folder)
    run = changed(file, tmp_path / "run.json", lambda record: record["runs"][0]["metrics"][0].update(reward=9.0))
    with pytest.raises(StoreError, match=r"seed-0 holds another run of arm 'plain', seed 0, than .*run.json"):
        restore([run], folder)
    (tmp_path / "strange.json").write_text("[1, 2]")
    with pytest.raises(StoreError, match=r"strange.json is not a study's results; write such a file with"):
        restore([tmp_path / "strange.json"], folder)
    with pytest.raises(StoreError, match=r"seed-0 holds a grpo, not a study|holds a run"):
        restore([file], run_folder(whole_study, "plain", 0))
    assert sorted(str(path) for path in folder.rglob("*")) == names
    with pytest.raises(StoreError, match="has no run that is done"):
        keep(_empty(whole_study, tmp_path), tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def _empty(whole_study: Path, tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    shutil.copy(whole_study / "study.json", tmp_path / "empty")
    return tmp_path / "empty"


def test_a_restored_run_says_that_it_has_no_policy(file: Path, tmp_path: Path) -> None:
    restore([file], tmp_path / "mini")
    run = run_folder(tmp_path / "mini", "plain", 0)
    assert "its policy was not kept" in (run / "model" / "README.md").read_text()
    assert RunStore.open(run).kind == "grpo"


def test_the_commands(whole_study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(words))
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), " ".join((printed.out + printed.err).split())

    kept, folder = str(tmp_path / "kept.json"), str(tmp_path / "again")
    code, said = run("study", "keep", str(whole_study), kept)
    assert (code, "4 runs in" in said) == (0, True)
    code, said = run("study", "restore", kept, "--run", folder)
    assert (code, "4 runs added to" in said, "next: explorl report" in said) == (0, True, True)
    assert run("report", folder)[0] == 0
    for words, advice in (
        (("keep", folder), "takes the study's folder and a file"),
        (("restore", kept), "takes files and a folder"),
    ):
        code, said = run("study", *words)
        assert code == 2
        assert advice in said
