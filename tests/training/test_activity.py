"""A run says once, and why, what never had an effect: strategies that changed nothing, rewards that never differed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from trl import GRPOTrainer

from explorl.strategies import Batch, Strategy
from explorl.training.grpo import activity
from explorl.training.grpo.trainer import ExplorationTrainer


def warned(trainer: Any) -> list[str]:
    """What a training warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def same(completions: list[str], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


def unscored(completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


@pytest.mark.parametrize(("reward", "reason"), [(same, "equal rewards"), (unscored, "no completion was scored")])
def test_rewards_that_never_differ(make_trainer: Callable[..., Any], reward: Any, reason: str) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": ["egsw", "ppl_shaping"]})
    trainer.reward_funcs = [reward]
    (message,) = [text for text in warned(trainer) if "reward" in text or "scored" in text]
    assert reason in message
    assert "3 generation batches" in message


def test_it_is_said_once_as_soon_as_it_is_clear(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "CLEAR", 2)
    trainer = make_trainer(ExplorationTrainer, max_steps=5, num_iterations=1)
    trainer.reward_funcs = [same]
    (message,) = [text for text in warned(trainer) if "equal rewards" in text]
    assert "2 generation batches" in message
    later = make_trainer(ExplorationTrainer, max_steps=5)
    assert [text for text in warned(later) if "equal rewards" in text] == []


def test_a_strategy_that_found_no_place_to_branch(make_trainer: Callable[..., Any]) -> None:
    """A completion without a blank line has no place at which to branch."""
    strategy = {"entropy_branching": {"at": ["step"]}}
    trainer = make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": [strategy]})
    (message,) = [text for text in warned(trainer) if "entropy_branching" in text]
    assert "no position to branch in 3 generation batches" in message
    assert "step" in message


def test_a_strategy_that_decided_against_every_branch(make_trainer: Callable[..., Any]) -> None:
    strategy = {"entropy_branching": {"at": ["text:1", "text:2", "text:3", "text:4"], "base": 1e-9, "weight": 0.0}}
    trainer = make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": [strategy]})
    (message,) = [text for text in warned(trainer) if "entropy_branching" in text]
    assert "never branched" in message


@dataclass(frozen=True)
class Idle(Strategy):
    """Multiplies the loss of the tokens above a threshold that none reaches."""

    name = "idle"
    threshold: float = 1e9

    def weights(self, batch: Batch) -> Any:
        return 1.0 + (batch.entropy > self.threshold).float()

    def penalty(self, batch: Batch, keep: Any) -> Any:
        return batch.logps * 0 if self.threshold else batch.logps


def test_a_strategy_that_changed_nothing(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": [Idle(), "egsw"]})
    (message,) = [text for text in warned(trainer) if "changed nothing" in text]
    assert message.startswith("idle changed nothing in 3 generation batches")
    busy = make_trainer(ExplorationTrainer, max_steps=3, options={"strategies": [Idle(threshold=0.0)]})
    assert [text for text in warned(busy) if "changed nothing" in text] == []


def test_a_penalty_alone_is_a_change(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, max_steps=2, options={"strategies": ["entropy_bonus"]})
    assert [text for text in warned(trainer) if "changed nothing" in text] == []


def test_a_reference_that_was_never_reset(make_trainer: Callable[..., Any]) -> None:
    strategy = {"reference_reset": {"every": 100}}
    trainer = make_trainer(ExplorationTrainer, max_steps=2, beta=0.1, options={"strategies": [strategy]})
    assert [text for text in warned(trainer) if text.startswith("reference_reset changed nothing")]
    often = make_trainer(
        ExplorationTrainer, max_steps=2, beta=0.1, options={"strategies": [{"reference_reset": {"every": 1}}]}
    )
    assert [text for text in warned(often) if "changed nothing" in text] == []


def test_a_run_that_is_as_it_should_be_says_nothing(make_trainer: Callable[..., Any]) -> None:
    stock = warned(make_trainer(GRPOTrainer, max_steps=2))
    strategies = ["egsw", "ppl_shaping", "forking_tokens", {"pass_threshold": {"threshold": 0.5}}]
    assert warned(make_trainer(ExplorationTrainer, max_steps=2, options={"strategies": strategies[:3]})) == stock
