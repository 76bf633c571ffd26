"""The tutorial on tasks runs as it is printed, from an empty folder, but for fewer steps, problems and samples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial-task.md"
SMALL = "prompts_per_step: 4, generations: 4, micro_batch: 16, checkpoint_every: 2"


def blocks(language: str) -> list[str]:
    """The code blocks of a language in the tutorial."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def reduced(text: str, *changes: tuple[str, str]) -> str:
    for printed, used in changes:
        assert text.count(printed) == 1, printed
        text = text.replace(printed, used)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder, with the files that the tutorial says to save."""
    folder = tmp_path_factory.mktemp("reader")
    rows, near, _ = blocks("python")
    sums, study = blocks("yaml")
    (folder / "make_rows.py").write_text(rows, encoding="utf-8")
    (folder / "sums.yaml").write_text(
        reduced(sums, ("training: {steps: 30}", f"training: {{steps: 2, {SMALL}}}")), encoding="utf-8"
    )
    (folder / "my_pkg").mkdir()
    (folder / "my_pkg" / "__init__.py").touch()
    (folder / "my_pkg" / "near.py").write_text(near, encoding="utf-8")
    changes = [("  preset: tiny\n", f"  preset: tiny\n  training: {{{SMALL}}}\n"), ("seeds: 3", "seeds: 1")]
    changes += [("problems: 100, samples: 8", "problems: 4, samples: 2"), ("steps: 30", "steps: 2")]
    (folder / "near.yaml").write_text(reduced(study, *changes), encoding="utf-8")
    (folder / "bin").mkdir()
    (folder / "bin" / "explorl").write_text("from explorl.cli.app import main\n\nmain()\n", encoding="utf-8")
    run(folder, "make_rows.py")
    return folder


def run(folder: Path, *words: str) -> str:
    """A command in the folder; `explorl` is a script that lies elsewhere, as an installed one does."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(block: str) -> list[list[str]]:
    return [line.split() for line in block.splitlines()]


def explorl(folder: Path, command: Sequence[str], *more: str) -> str:
    assert command[0] == "explorl"
    return run(folder, str(folder / "bin" / "explorl"), *command[1:], *more)


def test_the_tutorial_is_short() -> None:
    assert len(blocks("python")[1].splitlines()) < 50


def test_the_case_by_hand(folder: Path) -> None:
    (folder / "by_hand.py").write_text(blocks("python")[2], encoding="utf-8")
    run(folder, "by_hand.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_in_a_file_train_and_are_scored(folder: Path) -> None:
    train, evaluate = commands(blocks("bash")[0])
    assert len((folder / "sums" / "train.jsonl").read_text().splitlines()) == 400
    explorl(folder, train)
    lines = [json.loads(line) for line in (folder / "runs" / "sums" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("kind") == "train"] == [1, 2]
    explorl(folder, evaluate, "--limit", "8", "--samples", "4", "--max-tokens", "40")
    summary = json.loads((folder / "runs" / "evaluations" / "tiny-sums-plain" / "summary.json").read_text())
    assert (summary["problems"], summary["samples"], summary["task"]) == (8, 4, "sums")
    assert summary["scores"]["pass@4"]["mean"] > 0  # the policy does read these prompts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_class_by_its_import_path_trains_and_is_scored(folder: Path) -> None:
    train, evaluate = commands(blocks("bash")[1])
    small = [word for setting in SMALL.split(", ") for word in ("--set", f"training.{setting.replace(': ', '=')}")]
    explorl(folder, train, *small, "--set", "training.steps=2")
    assert "name: my_pkg.near:Near" in (folder / "runs" / "near" / "config.yaml").read_text()
    assert "within: 5" in (folder / "runs" / "near" / "config.yaml").read_text()
    explorl(folder, ["explorl", "train", "--resume", "runs/near"])
    explorl(folder, evaluate, "--limit", "4", "--samples", "2", "--max-tokens", "40")
    assert (folder / "runs" / "evaluations" / "near-near-plain" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_of_two_arms_ends_in_a_page(folder: Path) -> None:
    ((*study,),) = commands(blocks("bash")[2])
    explorl(folder, study)
    results = json.loads((folder / "runs" / "near-arms" / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == ["GRPO", "risk-sensitive"]
    assert "<html" in (folder / "runs" / "near-arms" / "report.html").read_text(encoding="utf-8")


def test_the_entry_point_is_that_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorl.tasks import registry

    points = tomllib.loads(blocks("toml")[0])["project"]["entry-points"][registry.KIND.group]
    monkeypatch.syspath_prepend(folder)
    for module in ("my_pkg", "my_pkg.near"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert registry.get_task(points["near"], within=3).within == 3  # type: ignore[attr-defined]
