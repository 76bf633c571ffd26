"""The table of what runs where is what the trainer does; what needs vLLM, DeepSpeed or verl is seen by make scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tools.docs.support_matrix import REFUSALS, examples

from explorl.strategies import REGISTRY
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.tool_policy import calculator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def refused(make_trainer: Callable[..., Any], strategy: Any, engine: str) -> str:
    """What the trainer says against a strategy; empty where it is built."""
    options: dict[str, Any] = {"strategies": [strategy], "engine": engine, "correct": "digits"}
    options["answers"] = lambda completions, **_: list(completions)
    if strategy.needs_interpreter:
        options["interpreter"] = calculator()
    try:
        make_trainer(ExplorationTrainer, options=options)
    except ValueError as error:
        return str(error)
    return ""


def test_every_strategy_is_in_the_table() -> None:
    assert [strategy.name for strategy in examples()] == list(REGISTRY)


@pytest.mark.parametrize("engine", ["generate", pytest.param("explorl", marks=pytest.mark.slow)])
def test_the_trainer_refuses_what_the_table_says(make_trainer: Callable[..., Any], engine: str) -> None:
    expected = {strategy.name: REFUSALS[engine](strategy) is not None for strategy in examples()}
    done = {
        strategy.name: bool(refused(make_trainer, strategy, engine))
        for strategy in examples()
        if strategy.name != "curriculum"
    }
    assert done == {name: refusal for name, refusal in expected.items() if name in done}
    assert any(done.values()) is (engine == "generate")
