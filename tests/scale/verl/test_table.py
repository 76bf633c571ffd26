"""The column verl of docs/support.md, row by row: the trainer's words, and a step of verl's own driver and workers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol")
pytestmark = pytest.mark.scale

from tools.docs.support_matrix import REFUSALS, examples  # noqa: E402


def test_the_column_verl(tmp_path: Path) -> None:
    script = Path(__file__).parent / "run_table.py"
    completed = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=dict(os.environ), capture_output=True, text=True, timeout=800
    )
    assert completed.returncode == 0, completed.stdout[-6000:] + completed.stderr[-6000:]
    refusals, steps = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("said", "steps"))
    reasons = {strategy.name: REFUSALS["verl"](strategy) for strategy in examples()}
    assert list(refusals) == list(reasons)
    for name, reason in reasons.items():
        if reason is None:
            assert refusals[name] == ""
            assert math.isfinite(steps[name]["actor/grad_norm"]), name
        else:
            assert name in refusals[name]
            assert reason in refusals[name]
            assert name not in steps
    assert len(steps) > 20
