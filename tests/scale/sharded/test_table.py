"""The column ZeRO-3, FSDP2 of docs/support.md, row by row, against the real trainer on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.docs.support_matrix import REFUSALS

from tests.scale.strategies import one_of_each, unlike

pytestmark = pytest.mark.scale
pytest.importorskip("deepspeed")

WORDS = "changes the reference, which is not possible if FSDP shards it"


@pytest.mark.parametrize("backend", ["zero3", "fsdp2"])
def test_the_column_of_sharded_weights(backend: str, small_policy: Path, tmp_path: Path) -> None:
    """What the table calls "partly", both ways: ZeRO-3 moves a reference, FSDP2 has to refuse it unless β is 0."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "tests.scale.sharded.table", str(small_policy), str(tmp_path), backend]
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    paths = [tmp_path / f"{backend}-{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in paths), ended.stderr[-6000:]
    done, other = (json.loads(path.read_text()) for path in paths)
    assert other == done
    reasons = {strategy.name: REFUSALS["ZeRO-3, FSDP2"](strategy) for strategy in one_of_each(["1"])}
    partly = {name: reason for name, reason in reasons.items() if reason is not None}
    assert list(partly) == ["reference_reset"]
    expected = {f"{name} 0.0": None for name in reasons} | {
        "element_wise_temperature 0.05": None,
        "reference_reset 0.05": None if backend == "zero3" else partly["reference_reset"],
    }
    assert done.keys() == expected.keys()
    assert not unlike(expected, done, {partly["reference_reset"]: WORDS})
