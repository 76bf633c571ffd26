"""The engine inside a trainer: its memory, and what of it the caller may set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from explorl.training.grpo.refusals import ENGINE_OPTIONS
from explorl.training.grpo.trainer import ExplorationTrainer


@pytest.mark.parametrize("engine", [None, "explorl"])
def test_options_reach_the_engine(make_trainer: Callable[..., Any], engine: str | None) -> None:
    options = {"batch_size": 7, "memory_budget": 1 << 20}
    engines = [
        make_trainer(ExplorationTrainer, options={"engine": engine, "engine_options": given}).sampler.engine
        for given in (options, {})
    ]
    assert [(found.batch_size, found.memory_budget) for found in engines] == [(7, 1 << 20), (None, None)]


def test_unknown_options_are_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=f"has 'rows'; it may contain {', '.join(ENGINE_OPTIONS)}"):
        make_trainer(ExplorationTrainer, options={"engine_options": {"rows": 3}})
    with pytest.raises(ValueError, match="batch_size is 0"):
        make_trainer(ExplorationTrainer, options={"engine_options": {"batch_size": 0}})
