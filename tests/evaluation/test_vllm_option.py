"""`explorl eval --engine`, as far as it goes without vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from explorl.cli.app import main
from explorl.evaluation import evaluate, protocol
from explorl.evaluation.harness import run_evaluation
from explorl.models import Policy

EVAL = ["eval", "--model", "tiny", "--task", "countdown"]


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else find(name, *more))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--engine", "sglang"], "--engine is 'sglang'; use explorl or vllm"),
        (["--engine", "vllm"], "pip install explorl[vllm]"),
    ],
)
def test_another_engine_is_refused_in_words(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*EVAL, *given, "--out", str(tmp_path)])
    assert end.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_tools_and_unknown_engines_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("explorl.evaluation.harness.need_vllm", lambda: None)
    how = protocol("plain", samples=1)
    with pytest.raises(ValueError, match="engine is 'vllm', which cannot call tool 'python'; use 'explorl'"):
        run_evaluation(["tiny"], ["countdown"], how, tmp_path, engine="vllm", tools="python")
    unknown: Any = "sglang"
    with pytest.raises(ValueError, match="engine is 'sglang'; use 'explorl' or 'vllm'"):
        run_evaluation(["tiny"], ["countdown"], how, tmp_path, engine=unknown)


def test_evaluate_says_that_vllm_is_missing(small_policy: Path) -> None:
    from explorl.models import load_policy
    from explorl.tasks import get_task

    task = get_task("countdown", source="generated")
    policy: Policy = load_policy(str(small_policy), device="cpu")
    policy.model.config.max_position_embeddings = 2048
    with pytest.raises(ValueError, match="vLLM is not installed"):
        evaluate(policy, task, task.problems("holdout")[:1], protocol("plain", samples=1), engine="vllm")
