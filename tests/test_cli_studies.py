"""`explorl study` finds the papers' studies by name, from any folder, and files by their path."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from explorl.cli.app import main
from explorl.stats import Table
from explorl.study.spec import find_study, load_study, study_names


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder far from the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def study(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    with pytest.raises(SystemExit) as exit_:
        main(["study", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err.splitlines()


def test_the_papers_studies_have_names() -> None:
    assert study_names() == ["deng", "effects", "egsw", "frontier", "mecklenburg", "rft", "tools"]
    assert all(find_study(name).is_file() for name in study_names())


def test_a_study_by_name_is_its_file(elsewhere: Path) -> None:
    (elsewhere / "copy.yaml").write_text(find_study("egsw").read_text(encoding="utf-8"), encoding="utf-8")
    assert load_study("copy.yaml", profile="tiny", seeds=2) == load_study("egsw", profile="tiny", seeds=2)


def test_a_plan_runs_nothing(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = study("deng", "--profile", "tiny", "--plan", capsys=capsys)
    assert code == 0
    assert "14 arms × 3 seeds, 45 steps each, in runs/deng-tiny" in out
    assert "GRPO, the baseline" in out
    assert "PPL + position" in out
    code, out, _ = study("deng", "--profile", "tiny", "--plan", "--only", "PPL", "--seeds", "1", capsys=capsys)
    assert "1 arm × 1 seed, 45 steps each" in out
    assert not list(elsewhere.iterdir())


def test_the_command_runs_the_named_study(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(ValueError):
        pass

    def reached(folder: Path, study: object) -> None:
        raise Reached(f"{folder} {study.name} {study.profile} {len(study.seeds)}")  # type: ignore[attr-defined]

    monkeypatch.setattr("explorl.study.run_study.locked_study", reached)
    code, _, err = study("deng", "--profile", "tiny", "--seeds", "2", capsys=capsys)
    assert (code, err) == (2, ["explorl: runs/deng-tiny deng tiny 2"])


@pytest.mark.parametrize(
    ("failed", "seeds", "next_"),
    [
        (True, [3, 4, 5], "next, to retry the failed runs: explorl study rft --run here --seeds 3-5 --only random"),
        (False, [3, 4, 5], "next, for narrower intervals: explorl study rft --run here --seeds 5"),
        (False, [0, 1, 2, 3, 4], "next, for narrower intervals: explorl study rft --run here --seeds 10"),
        (False, [0], "next, to see how much training runs differ: explorl study rft --run here "
         "--seeds 5"),
    ],
)  # fmt: skip
def test_what_comes_next(
    failed: bool, seeds: list[int], next_: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is tried again with its seeds and arms; two seeds would widen the intervals of one."""
    results = {"verdict": "", "sequential": None, "arms": [{"seeds": seeds}]}
    outcome = SimpleNamespace(results=results, folder=Path("here"), table=Table([], []), failed=failed)
    monkeypatch.setattr("explorl.study.run_study.run_study", lambda *_, **__: outcome)
    code, out, _ = study("rft", "--run", "here", "--seeds", "3-5", "--only", "random", capsys=capsys)
    assert (code, out.splitlines()[-1]) == (int(failed), next_)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("dengg",),
            ("'dengg'", "mean 'deng'?", "effects, egsw, frontier, mecklenburg", "path to a study file"),
        ),
        (("zzz", "--profile", "tiny"), ("'zzz'", "deng, effects, egsw, frontier, mecklenburg", "path to a study file")),
        (("",), ("''", "deng, effects")),
        (("studies/deng.yaml",), ("studies/deng.yaml", "no such file", "`explorl study deng`")),
        (("mine.yaml",), ("mine.yaml", "no such file")),
        (("some/where",), ("some/where", "no such file")),
        (("folder",), ("folder is a folder", "deng")),
        (("deng",), ("deng has profiles", "--profile: tiny or gpu")),
        (("deng", "--profile", "tinny"), ("'tinny'", "did you mean 'tiny'?")),
        (("effects", "--profile", "tiny"), ("effects has no profiles", "remove it")),
        (("x" * 5000,), ("unknown study",)),
    ],
)
def test_what_is_no_study_is_told_in_two_lines(
    arguments: tuple[str, ...], words: tuple[str, ...], elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "folder").mkdir()
    code, _, err = study(*arguments, capsys=capsys)
    assert code == 2
    assert 1 <= len(err) <= 2, err
    for word in words:
        assert word in "\n".join(err)


def test_a_name_does_not_depend_on_the_folder(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "deng").mkdir()
    (elsewhere / "egsw").write_text("notes, not a study")
    assert study("deng", "--profile", "tiny", "--plan", capsys=capsys)[0] == 0
    assert study("egsw", "--profile", "tiny", "--plan", capsys=capsys)[0] == 0
    assert "must hold keys" in study("./egsw", "--plan", capsys=capsys)[2][0]
