"""Studies whose arms, errors and titles are what strangers write: every command shows them, and none obeys them."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tools.docs.results import BEGIN, END, write

from explorl.cli import app as cli
from explorl.cli import output
from explorl.core.store import cleaned
from explorl.core.text import clean
from explorl.study import arm as arm_process
from explorl.study.run_study import (
    StudyRun,
    _print_plan,
    _progress,
    _Runner,
    _write_exit_error,
    locked_study,
    write_results,
)
from explorl.study.spec import load_study

from ..hostile import HOSTILE, NAMES, raw

KINDS = ("closing tag of rich", "write the clipboard", "lone surrogate", "mathematics without end", "emoji of rich",
         "script", "pipe", "formula", "null", "backslashes")  # fmt: skip
SHOWN = [HOSTILE[kind] for kind in KINDS]


@pytest.fixture(scope="module")
def hostile_study(whole_study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study, as from elsewhere: its names were never cleaned, and an arm has failed with a hostile error."""
    folder = tmp_path_factory.mktemp("hostile") / "study[/b]"
    shutil.copytree(whole_study, folder)
    study = json.loads((folder / "study.json").read_text())
    (plain, shaped), title = study["arms"][:2], "\x1b]0;title\x07[/b]\ud800"
    arms = [{**(plain, shaped)[place % 2], "name": name} for place, name in enumerate(SHOWN)]
    failed = {**plain, "name": "failed", "slug": "failed"}
    study |= {"arms": [*arms, failed], "baseline": SHOWN[0], "title": title, "description": "\x1b[2J"}
    (folder / "study.json").write_text(json.dumps(study))
    (folder / "arms/failed/seed-0").mkdir(parents=True)
    (folder / "arms/failed/seed-0/error.txt").write_text("\x1b[2J[/b]<script>alert(1)</script>\n")
    return folder


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=out, width=400))
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    assert not exit_.value.code
    return out.getvalue()


def test_report_status_and_watch(hostile_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(hostile_study)
    printed = told(monkeypatch, "report", place)
    assert "study[/b]" in printed
    for arguments in (("study", "status", place), ("watch", place, "--once")):
        printed = told(monkeypatch, *arguments)
        assert not raw(printed)
        for text in (*SHOWN, "]0;title", "[/b]"):
            assert clean(text) in printed
    for name in ("report.html", "table.csv", "table.md", "table.tex"):
        text = (hostile_study / name).read_text(encoding="utf-8")
        assert not raw(text)
        assert "<script>alert" not in text or name != "report.html"
    results = json.loads((hostile_study / "results.json").read_text())
    assert [arm["name"] for arm in results["arms"]] == [*SHOWN, "failed"]


def test_the_plan_and_the_end_of_a_run(hostile_study: Path, tmp_path: Path, study_file: Path) -> None:
    text = study_file.read_text().replace(
        "Shaped + hot:", json.dumps(HOSTILE["closing tag of rich"] + "\x1b]52;c;") + ":"
    )
    path = tmp_path / "s.yaml"
    path.write_text(text.replace("A very small study", '"\\x1b[2J[/b] :smile:"'))
    out = io.StringIO()
    console = Console(file=out, width=400)
    with locked_study(tmp_path / "in[/b]", load_study(path)) as study:
        _print_plan(study, tmp_path / "in[/b]", console)
        run = StudyRun(tmp_path / "in[/b]", study.arms[1], 0)
        run.folder.mkdir(parents=True)
        (run.folder / "error.txt").write_text("\x1b[2J[/i]")

        class Ended:
            returncode, stdin = 1, None

        run.process = Ended()  # type: ignore[assignment]
        _Runner([], 1, console, [run])._end(run, _progress(console))
    assert "␛[2J[/b] :smile:: 3 arms" in out.getvalue()
    assert "in[/b]" in out.getvalue()
    assert "[/b]␛]52;c;, seed 0: failed: ␛[2J[/i]" in out.getvalue()
    assert not raw(out.getvalue())


def test_the_bars_of_runs() -> None:
    out = io.StringIO()
    with _progress(Console(file=out, force_terminal=True, width=200, color_system=None)) as progress:
        progress.add_task("[/b] [red]x", total=1, note="")
    assert "[/b] [red]x" in out.getvalue()


def test_what_a_process_leaves_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("\n".join(NAMES))

    monkeypatch.setattr(arm_process, "run_arm", fail)
    assert arm_process.main([str(tmp_path), "--arm", "a"]) == 1
    left = (tmp_path / "arms/a/seed-0/error.txt").read_text(encoding="utf-8")
    assert cleaned(NAMES[-1]) in left
    assert not raw(left)
    assert not raw(capsys.readouterr().err)
    (tmp_path / "log.txt").write_bytes(b"\x1b[2J\xff[/b]\n")
    _write_exit_error(tmp_path, 1)
    assert (tmp_path / "error.txt").read_text() == "␛[2J\ufffd[/b]\nthe process ended with exit code 1\n"


def test_a_page_of_results_shows_names_and_obeys_none(hostile_study: Path, tmp_path: Path) -> None:
    write_results(hostile_study)
    path = hostile_study / "results.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    names = ["<script>alert(1)</script>", END, "[x](javascript:1)", "*x*"]
    for arm, name in zip(results["arms"], names, strict=False):
        arm["name"] = name
    results |= {"baseline": names[0], "commit": "`rm -rf`", "date": "<b>"}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    path.write_text(json.dumps(results))
    for _ in range(2):
        write(hostile_study, page)
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{BEGIN}\n")
        assert text.endswith(f"{END}\nafter\n")
        assert text.count("after") == 1
        assert not re.search(r"(?<!\\)<(?:script|b>)|(?<!\\)\[x|`rm", text)
