"""The engine inside a trainer: its memory, and what of it the caller may set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from explorl.rollout import Engine
from explorl.training.grpo.sampler import ENGINE_OPTIONS, SamplingTrainer


class Bare(SamplingTrainer):
    """As much of a trainer as `_engine_for` looks at."""

    use_vllm = False

    def __init__(self) -> None:
        self.strategies = []

    def _check_recorded(self, engine: str | None) -> None:
        pass

    def _why_not_engine(self) -> str:
        return ""

    def _engine_dtype(self) -> None:
        return None


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    bare = Bare()
    bare.model, bare.generation_config = SimpleNamespace(), GenerationConfig(max_new_tokens=8)
    bare.tools = bare.environment_factories = None
    monkeypatch.setattr(Bare, "tokenizer", None, raising=False)
    monkeypatch.setattr(Bare, "sharded", False)
    monkeypatch.setattr(Engine, "check", lambda self, longest: None)
    return bare


def test_options_reach_the_engine(trainer: Any) -> None:
    built = trainer._engine_for(None, {"batch_size": 7, "memory_budget": 1 << 20})
    assert (built.batch_size, built.memory_budget) == (7, 1 << 20)
    built = trainer._engine_for("explorl", {})
    assert (built.batch_size, built.memory_budget) == (None, None)


def test_unknown_options_are_refused(trainer: Any) -> None:
    with pytest.raises(ValueError, match=f"has 'rows'; it may contain {', '.join(ENGINE_OPTIONS)}"):
        trainer._engine_for(None, {"rows": 3})
    with pytest.raises(ValueError, match="batch_size is 0"):
        trainer._engine_for(None, {"batch_size": 0})
