"""The terminal dashboard, one frame at a time."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from explorl.core.store import StoreError
from explorl.study.watch import BLOCKS, braille, sparkline, watch


def shown(folder: Path) -> str:
    file = io.StringIO()
    watch(folder, once=True, console=Console(file=file, width=110))
    return file.getvalue()


def test_a_study_is_shown_with_every_arm(whole_study: Path) -> None:
    text = shown(whole_study)
    for word in (
        "A very small study",
        "plain",
        "Shaped + hot",
        "broken",
        "4/4",
        "0/4",
        "accuracy",
        "entropy",
        "pass@1",
        "pass@2",
    ):
        assert word in text
    assert "%" in text
    assert any("\u2801" <= letter <= "\u28ff" for letter in text), "there is a plot"


def test_a_run_is_shown_too(whole_study: Path, tmp_path: Path) -> None:
    text = shown(whole_study / "arms" / "plain" / "seed-0")
    assert "2/2" in text
    with pytest.raises(StoreError, match="neither a study nor a run"):
        shown(tmp_path)


def test_a_study_that_has_not_begun(whole_study: Path, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text((whole_study / "study.json").read_text())
    assert "no training step yet" in shown(tmp_path)


def test_a_run_of_one_step_has_a_step_and_no_curve(whole_study: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_study / "arms" / "plain" / "seed-0", run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(next(line for line in lines if json.loads(line)["kind"] == "train"))
    assert "no training step yet" not in shown(run)
    assert "one training step so far" in shown(run)


@pytest.mark.parametrize("width", [80, 120])
def test_names_are_not_cut(width: int, whole_study: Path, tmp_path: Path) -> None:
    """Where there is little room, it is the curves that go."""
    folder = tmp_path / "study"
    shutil.copytree(whole_study, folder)
    record = json.loads((folder / "study.json").read_text())
    names = ["gpt-oss-20b-plain", "gpt-oss-20b-egsw", "gpt-oss-20b-fails"]
    for arm, name in zip(record["arms"], names, strict=True):
        arm["name"] = name
    (folder / "study.json").write_text(json.dumps(record))
    file = io.StringIO()
    watch(folder, once=True, console=Console(file=file, width=width))
    for name in names:
        assert f" {name} " in file.getvalue()
    assert "…" not in file.getvalue()
    assert (BLOCKS[-1] in file.getvalue()) == (width == 120)


def test_sparkline_by_hand() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3], 5) == "▁▁"
    assert sparkline([], 5) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 40))
def test_a_sparkline_fits_its_room(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BLOCKS)


def test_a_rising_line_goes_from_bottom_left_to_top_right() -> None:
    rows = braille({"a": ([0, 10], [0.0, 1.0])}, 20, 4).plain.splitlines()
    assert rows[0].startswith(" 1.000")
    assert rows[3].startswith(" 0.000")
    assert rows[0][-1] != "\u2800"
    assert rows[3][8] != "\u2800"
    assert rows[0][8] == rows[3][-1] == "\u2800"
    assert braille({"a": ([1, 2], [0.3, 0.3])}, 10, 3).plain.splitlines()[1].count("\u2800") == 0
