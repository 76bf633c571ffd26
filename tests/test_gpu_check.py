"""scripts/gpu_check.py without a GPU: it passes, says what it leaves out, and fails where something is wrong."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from explorl.strategies import REGISTRY

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_there_is_a_check_for_every_strategy(script: ModuleType) -> None:
    names = [name for name, _, _ in script.checks(script.Here(torch.device("cpu"), quick=False))]
    assert len(set(names)) == len(names)
    assert {f"step: {name}" for name in REGISTRY} <= set(names)
    assert set(script.SETTINGS) <= set(REGISTRY)


def test_a_sound_pass_and_a_wrong_one(script: ModuleType, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--device", "cpu", "--only", "packed against padded"]
    assert script.main([*arguments[:3], "pass: packed"]) == 0
    assert re.search(r"^✓ pass: packed against padded [0-9.]+ s \(largest", capsys.readouterr().out, re.MULTILINE)
    sound = script.packed_logps

    def wrong(*args: Any, **kwargs: Any) -> Any:
        logps, entropy = sound(*args, **kwargs)
        return logps * 1.05, entropy

    monkeypatch.setattr(script, "packed_logps", wrong)
    assert script.main([*arguments[:3], "pass: packed"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^✗ pass: packed against padded [0-9.]+ s \(AssertionError: ", printed, re.MULTILINE)
    assert "0 of 1 checks passed" in printed


def test_wrong_log_probabilities_are_seen(script: ModuleType, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PROMPTS", script.PROMPTS[:4])
    assert script.main(["--device", "cpu", "--only", "engine: log"]) == 0
    sound = script.prompt_token_ids
    monkeypatch.setattr(script, "prompt_token_ids", lambda *args: [*sound(*args)[:-1], 5])
    assert script.main(["--device", "cpu", "--only", "engine: log"]) == 1
    assert "apart" in capsys.readouterr().out


def test_what_is_left_out_and_what_is_not_there(script: ModuleType, capsys: Any) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            script.main(["--device", "cuda"])
        assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err
    assert script.main(["--device", "cpu", "--only", "nothing"]) == 1
    assert "no check has 'nothing' in its name" in capsys.readouterr().err


def test_a_strategy_of_tools_has_one(script: ModuleType) -> None:
    assert script.main(["--device", "cpu", "--only", "step: tool_progression"]) == 0


def test_a_count_off_by_one_is_seen(script: ModuleType) -> None:
    logits = torch.tensor([[0.5, 0.3, 0.16, 0.04], [0.96, 0.02, 0.01, 0.01]]).log()
    assert script._reaches(logits, torch.tensor([3, 1]), 0.95)
    for counts in ([2, 1], [4, 1], [3, 2]):
        assert not script._reaches(logits, torch.tensor(counts), 0.95)
    tied = torch.tensor([[0.95 - 1e-8, 0.03, 0.02 + 1e-8]], dtype=torch.float64).log()
    assert script._reaches(tied, torch.tensor([1]), 0.95)
    assert script._reaches(tied, torch.tensor([2]), 0.95)


@pytest.mark.slow
def test_all_of_it_quickly(script: ModuleType, capsys: Any) -> None:
    assert script.main(["--device", "cpu", "--quick"]) == 0
    assert "✗" not in capsys.readouterr().out
