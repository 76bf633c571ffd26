"""`explorl eval --engine vllm`: the numbers of a protocol are those of our engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.scale


def evaluated(folder: Path, out: Path, engine: str, *more: str) -> tuple[dict[str, Any], Any]:
    command = [sys.executable, "-m", "explorl", "eval", "--model", f"small={folder}", "--task", "countdown"]
    command += ["--option", "source=generated"]
    command += ["--limit", "6", "--max-tokens", "24", "--engine", engine, "--out", str(out / engine), *more]
    done = subprocess.run([*command, "--json", str(out / f"{engine}.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = pq.read_table(next((out / engine).rglob("*.parquet"))).sort_by(
        [("problem", "ascending"), ("sample", "ascending")]
    )
    return json.loads((out / f"{engine}.json").read_text()), rows.to_pydict()


def test_greedy_answers_and_scores_are_those_of_our_engine(policy_folder: Path, tmp_path: Path) -> None:
    greedy = ["--temperature", "0", "--samples", "2"]
    (ours, our_rows), (theirs, rows) = (
        evaluated(policy_folder, tmp_path, engine, *greedy) for engine in ("explorl", "vllm")
    )
    assert rows["completion"] == our_rows["completion"]
    assert rows["tokens"] == our_rows["tokens"]
    for name in ("entropy", "branching"):
        assert rows[name] == pytest.approx(our_rows[name], abs=1e-4)
    assert theirs["scores"].keys() == ours["scores"].keys()
    assert theirs["engine"] == "vllm"
    assert "engine" not in ours
