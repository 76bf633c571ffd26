"""scripts/countdown_results.py: what it keeps of a folder, what it prints, and that the page says the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from explorl.core.store import write_json, write_parquet

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "results" / "countdown-135m").glob("*.json"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("countdown_results", ROOT / "scripts" / "countdown_results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["countdown_results"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two models with pass@k of 1/2 and 3/4 on two problems, two samples each."""
    folder = tmp_path / "out"
    (folder / "sft").mkdir(parents=True)
    write_json(folder / "sft" / "log.json", [{"step": 1, "loss": 0.5}])
    stage = {"stage": "sft", "style": "guided", "steps": 1, "seconds": 2.0, "seconds_in_all": 3.0}
    (folder / "results.jsonl").write_text(json.dumps(stage) + "\n" + json.dumps({"stage": "eval"}) + "\n")
    (folder / "GRPO-0").mkdir()
    record = {"kind": "train", "step": 1, "reward": 0.25, "entropy": 0.5, "step_time": 1.0, "loss": 0.1}
    (folder / "GRPO-0" / "metrics.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({"kind": "eval"}) + "\n")
    for model, correct in (("sft", [True, False, True, False]), ("GRPO-0", [True, True, False, True])):
        for protocol in ("mecklenburg", "plain"):
            summary = {"samples": 2, "truncated": 0.0, "mean_tokens": 9.0, "entropy": 0.125}
            write_json(folder / "evaluations" / f"{model}-test-{protocol}.json", summary)
            wrong = ["it gives 7, not 8" if not right else None for right in correct]
            rows: dict[str, list[Any]] = {
                "problem": ["countdown:1-2=3"] * 2 + ["countdown:1-2-5=8"] * 2,
                "completion": ["<answer>1+2</answer>"] * 4,
                "correct": list(correct),
                "error": wrong,
            }
            write_parquet(folder / "evaluations" / f"{model}-test-{protocol}.parquet", rows)
    return folder


def test_kept_and_shown(script: ModuleType, out: Path, tmp_path: Path, capsys: Any) -> None:
    script.main(["keep", str(out), str(tmp_path / "lease.json"), "--commit", "abc"])
    lease = json.loads((tmp_path / "lease.json").read_text())
    assert lease["runs"] == {"GRPO-0": [{"step": 1.0, "reward": 0.25, "entropy": 0.5, "step_time": 1.0}]}
    assert {evaluation["model"]: evaluation["right"] for evaluation in lease["evaluations"]} == {
        "sft": [1, 1],
        "GRPO-0": [2, 1],
    }
    script.main(["show", str(tmp_path / "lease.json"), "--picture", str(tmp_path / "seen")])
    printed = capsys.readouterr().out
    assert "| sft | 50.0 % [50.0, 50.0] | – | – | 9 |" in printed
    assert "| GRPO-0 (2 samples) | 75.0 % [50.0, 100.0] (+25.0 [+0.0, +50.0]) |" in printed
    assert "by operands: 2 100.0% of 2, 3 50.0% of 2" in printed
    assert "wrong: it gives another number 1" in printed
    assert "| sft guided | 1 | 2 | 3 |" in printed
    assert (tmp_path / "seen.svg").stat().st_size > 1000


def test_the_page_says_what_the_files_say(script: ModuleType, capsys: Any) -> None:
    script.main(["show", *map(str, FILES)])
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "results" / "countdown-135m.md").read_text().replace("**", "")
    readme = (ROOT / "README.md").read_text()
    row = next(line for line in printed.splitlines() if line.startswith("| GRPO-fast-0 |"))
    best, synthetic, validation = row.split(" | ")[1:4]
    assert f"| {best} | {synthetic} | {validation} |" in page
    assert best in " ".join(readme.split())
    assert next(line for line in printed.splitlines() if line.startswith("| sft |")).split(" | ")[1] in page
