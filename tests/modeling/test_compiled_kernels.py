"""Every kernel compiles for the GPUs that people have, and fits into their memory; nothing runs, no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compiled_kernels import SHARED

pytest.importorskip("triton")
KERNELS = {
    "_decode_kernel", "_join_kernel", "_products_kernel", "_gated_kernel", "_sample_kernel", "_records_kernel",
    "_rms_norm_kernel", "_add_rms_norm_kernel", "_add_rms_norm_backward_kernel", "_gate_kernel",
    "_gate_backward_kernel", "_rotary_kernel", "_spread_kernel", "_spread_backward_kernel",
}  # fmt: skip


def compiled(capability: int, cache: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.modeling.compiled_kernels", str(capability), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_compile(tmp_path: Path) -> None:
    check(compiled(90, tmp_path), 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_all_kernels_compile(capability: int, tmp_path: Path) -> None:
    check(compiled(capability, tmp_path, "--all"), capability)


def check(found: list[dict[str, Any]], capability: int) -> None:
    assert {one["kernel"] for one in found} == KERNELS
    assert [one for one in found if "error" in one] == []
    assert [one for one in found if one["shared"] > SHARED[capability] * 1024] == []
