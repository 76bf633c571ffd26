"""The lists of make scale have the versions that everything else is tested with, but for what their packages forbid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER = {
    "common": set(),
    "sharded": set(),
    "verl": {"antlr4-python3-runtime"},  # hydra's
    "vllm": {"huggingface-hub", "numpy", "transformers"},
}


def pins(path: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


@pytest.mark.parametrize("name", OTHER)
def test_versions_are_those_of_the_constraints(name: str) -> None:
    usual, own = pins(ROOT / "constraints.txt"), pins(ROOT / "scale" / f"{name}-requirements.txt")
    assert own
    assert {package for package, version in own.items() if usual.get(package, version) != version} == OTHER[name]


@pytest.mark.parametrize("name", ["sharded", "verl", "vllm"])
def test_nothing_is_named_twice(name: str) -> None:
    assert not pins(ROOT / "scale" / f"{name}-requirements.txt").keys() & pins(ROOT / "scale/common-requirements.txt")
