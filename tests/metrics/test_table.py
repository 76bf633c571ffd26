"""The table's four faces, and writing that never leaves half a file."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from explorl import metrics
from explorl.core.store import StoreError
from explorl.core.text import clean
from explorl.stats import Interval, Table

from ..hostile import NAMES, raw

INTERVAL = Interval(0.4123456789, 0.3, 0.5)
TABLE = Table(
    ["model", "pass@8", "n", "note"],
    [
        ["base_1", INTERVAL, 60, "50% & more"],
        ["[red]rl[/red]", 0.1 + 0.2, np.int64(60), None],
        ["ü→", None, True, 'a,"b"\nc'],
    ],
    title="AIME [24]",
)  # fmt: skip


def printed(table: Table) -> str:
    out = io.StringIO()
    table.print(Console(file=out, width=120))
    return out.getvalue()


def test_prints():
    text = printed(TABLE)
    for part in ("AIME [24]", "pass@8", "0.412 [0.300, 0.500]", "[red]rl[/red]", "0.300", "50% & more", "–"):
        assert part in text
    assert "41.2% [30.0%, 50.0%]" in printed(Table(["x"], [[INTERVAL]], number=".1%"))
    mixed = printed(Table(["x", "y"], [[INTERVAL, 2.0]], number={"x": ".1%"}))
    assert "41.2%" in mixed
    assert "2.000" in mixed


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_too_wide_for_the_terminal_goes_on_below_with_its_names_again(width):
    """Neither a name nor a number is cut or broken."""
    names = ["gpt-oss-20b-risk-sensitive", "MaxRL", "risk-sensitive GRPO"]
    columns = ["arm", "pass@1", "pass@8", "Δ pass@1 (points)", "Δ pass@8 (points)", "p (pass@1)"]
    table = Table(columns, [[name, INTERVAL, INTERVAL, INTERVAL, 0.25, 1] for name in names], title="study")
    out = io.StringIO()
    table.print(Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    blocks = out.getvalue().count("┏")
    assert blocks > 1
    for name in names:
        assert out.getvalue().count(f"│ {name} ") == blocks
    assert out.getvalue().count("0.412 [0.300, 0.500]") == 9
    assert out.getvalue().count("study") == 1


def test_a_table_of_one_wide_column_is_folded_and_not_cut():
    name = "a" * 100
    out = io.StringIO()
    Table(["model", "pass@1"], [[name, 0.5]]).print(Console(file=out, width=60))
    assert out.getvalue().count("a") == 101, "pass@1 has one too"
    assert "0.500" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 60


def test_prints_to_the_terminal(capsys):
    Table(["x"], [[1]]).print()
    assert "x" in capsys.readouterr().out


def test_json_round_trip():
    assert Table.from_json(TABLE.to_json()) == TABLE
    data = json.loads(TABLE.to_json())
    assert data["columns"] == ["model", "pass@8", "n", "note"]
    assert data["rows"][0]["pass@8"] == {"mean": 0.4123456789, "low": 0.3, "high": 0.5, "confidence": 0.95}
    assert data["rows"][1] == {"model": "[red]rl[/red]", "pass@8": 0.1 + 0.2, "n": 60, "note": None}
    assert json.loads(Table(["x"], [[math.nan], [math.inf]]).to_json())["rows"] == [{"x": None}, {"x": None}]


def test_csv_round_trip():
    lines = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert lines[0] == ["model", "pass@8", "pass@8 low", "pass@8 high", "n", "note"]
    assert lines[1] == ["base_1", "0.4123456789", "0.3", "0.5", "60", "50% & more"]
    assert lines[2] == ["[red]rl[/red]", repr(0.1 + 0.2), "", "", "60", ""]
    assert lines[3] == ["ü→", "", "", "", "True", 'a,"b"\nc']


def test_markdown():
    table = Table(["model", "a|b"], [["x_1 [y](z)", INTERVAL], ["<b>", None]], number=".1%")
    assert table.to_markdown().splitlines() == [
        "| model | a\\|b |",
        "| --- | ---: |",
        "| x\\_1 \\[y\\](z) | 41.2% [30.0%, 50.0%] |",
        "| \\<b> | – |",
    ]


def test_latex():
    lines = TABLE.to_latex().splitlines()
    assert lines[0] == "% AIME [24]"
    assert lines[1] == r"\begin{tabular}{lrrl}"
    assert lines[3] == r"model & pass@8 & n & note \\"
    assert lines[5] == r"base\_1 & 0.412 [0.300, 0.500] & 60 & 50\% \& more \\"
    assert lines[7] == r'ü→ & – & True & a,"b" c \\'
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]


def test_latex_escapes_every_special_letter():
    escaped = r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}"
    assert Table(["x"], [["\\&%$#_{}~^<>|"]]).to_latex().splitlines()[4] == escaped + r" \\"
    assert r"41.2\% [30.0\%, 50.0\%]" in Table(["x"], [[INTERVAL]], number=".1%").to_latex()
    assert Table(["x"], [], title="two\nlines").to_latex().startswith("% two lines\n\\begin")


def test_write_by_ending(tmp_path):
    written = {"json": TABLE.to_json(), "csv": TABLE.to_csv(), "tex": TABLE.to_latex(), "md": TABLE.to_markdown()}
    for name, text in ((f"t.{ending}", text) for ending, text in written.items()):
        path = TABLE.write(str(tmp_path / name))
        assert path.read_bytes().decode() == text
    assert sorted(os.listdir(tmp_path)) == ["t.csv", "t.json", "t.md", "t.tex"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    with pytest.raises(ValueError, match=r"t\.xlsx"):
        TABLE.write(tmp_path / "t.xlsx")


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, where):
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(*_):
        assert path.read_text() == "old"
        raise OSError("disk full")

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(StoreError, match=r"cannot write .*t\.json: disk full"):
        TABLE.write(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["t.json"]


def test_cells_of_numpy_and_torch_become_plain():
    table = Table(["a", "b", "c"], [[np.float64(0.5), torch.tensor(2), np.bool_(True)]])
    assert [type(cell) for cell in table.rows[0]] == [float, int, bool]


@pytest.mark.parametrize(
    ("columns", "rows", "named"),
    [(["a", "a"], [], "'a'"), (["a"], [[1], [1, 2]], "row 1 has 2"), (["a"], [[[1]]], r"\[1\]")],
)
def test_errors_name_the_bad_value(columns, rows, named):
    with pytest.raises(ValueError, match=named):
        Table(columns, rows)


def test_every_public_name_is_there_and_torch_waits():
    assert dir(metrics) == metrics.__all__
    assert all(getattr(metrics, name) is not None for name in metrics.__all__)
    with pytest.raises(AttributeError, match="pass_at_j"):
        metrics.pass_at_j  # noqa: B018
    code = "import sys, explorl.metrics as m; m.pass_at_k(4, 1, 4); assert not {'torch', 'rich'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_hostile_texts_in_every_format(tmp_path):
    rows = [[name, 0.5] for name in NAMES]
    table = Table(["arm", "[/b]|\x1b$\ud800"], rows, title="\x1b[2J[red]\ud800")
    cleaned = [clean(name) for name in NAMES]
    for ending in ("json", "csv", "tex", "md"):
        text = table.write(tmp_path / f"table.{ending}").read_text(encoding="utf-8")
        assert not raw(text)
    assert [row[0] for row in Table.from_json((tmp_path / "table.json").read_text()).rows] == cleaned
    with open(tmp_path / "table.csv", newline="", encoding="utf-8") as file:
        assert [row[0] for row in csv.reader(file)][1:] == [f"'{name}" if name[0] in "=-" else name for name in cleaned]
    for line in (tmp_path / "table.md").read_text().splitlines():
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3
    file = io.StringIO()
    table.print(Console(file=file, width=300))
    assert not raw(file.getvalue())
    for name in cleaned:
        assert name.strip() in file.getvalue()


def test_a_latex_row_begins_with_no_argument_of_the_command_before():
    table = Table(["[arm]"], [["[/b]"], ["*x*"], ["plain"]])
    lines = table.to_latex().splitlines()
    assert [line for line in lines if line.startswith(("[", "*"))] == []
    assert r"{}[/b] \\" in lines
    assert r"plain \\" in lines


def test_shares_are_percent_and_their_differences_points_row_by_row():
    rows = [
        ["pass@1", Interval(0.25, 0.2, 0.3), 0.04],
        ["tokens", 12.5, 0.5],
        ["change", Interval(-0.031, -0.05, 0), 1.0],
    ]
    table = Table(["measure", "value", "p"], rows, number={"p": ".3f"}, row_numbers=[".1%", None, "+.1p"])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.to_markdown().splitlines()[2:]]
    assert lines == [
        ["pass@1", "25.0% [20.0%, 30.0%]", "0.040"],
        ["tokens", "12.500", "0.500"],
        ["change", "−3.1 [−5.0, 0.0]", "1.000"],
    ]
    assert json.loads(table.to_json())["rows"][2]["value"]["mean"] == -0.031
    with pytest.raises(ValueError, match="1 formats for 3 rows"):
        Table(["measure", "value", "p"], rows, row_numbers=[".1%"])


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("-1+1", "'-1+1"),
        ("- plain", "'- plain"),
        ("@SUM(A1)", "'@SUM(A1)"),
        (" =1+1", "' =1+1"),
        ("\t=1+1", "'\t=1+1"),
        ("\n=1+1", "'\n=1+1"),
        ("＝1+1", "'＝1+1"),
        ("-5.1", "-5.1"),
        ("+3", "+3"),
        ("-5.1%", "-5.1%"),
        ("-1e-7", "-1e-7"),
        (-5.1, "-5.1"),
        (-3, "-3"),
        ("a=b", "a=b"),
        ("GRPO − 1", "GRPO − 1"),
        (None, ""),
    ],
)
def test_no_cell_of_a_csv_file_is_a_formula(cell, written):
    table = Table(["arm", "share"], [[cell, Interval(-0.5, -0.6, -0.4)]])
    header, row = csv.reader(io.StringIO(table.to_csv()))
    assert row == [written, "-0.5", "-0.6", "-0.4"]
    header, _ = csv.reader(io.StringIO(Table(["=arm"], [[1]]).to_csv()))
    assert header == ["'=arm"]


@pytest.mark.parametrize(
    "name",
    [
        "[x](javascript:alert(1))", "![x](http://a.b/c.png)", "<img src=x onerror=alert(1)>", "<!-- x -->", "`code`",
        "**bold**", "_x_", "~~gone~~", "$x^2$", "&lt;b&gt;", "http://example.org", "www.example.org", "a|b", "{{ 7 }}",
        "[x][y]", "a\nb",
    ],
)  # fmt: skip
def test_a_name_is_no_markup_in_markdown(name):
    cell = Table([name], [[name]]).to_markdown().splitlines()[2].removeprefix("| ").removesuffix(" |")
    assert not re.search(r"(?<!\\)[`*_<\[{~$&|]|://|www\.|\n", cell)
    assert re.sub(r"\\(.)", r"\1", cell) == " ".join(name.split())
