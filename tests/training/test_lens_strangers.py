"""Observers that strangers write, and batches that they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from explorl.training.grpo.inspection_schedule import Lens, ObserverError, StepView
from explorl.training.grpo.observers import FastestDrop, statistics
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.test_lens import made_up

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Vandal:
    """Overwrites whatever it is shown."""

    def see(self, step: StepView) -> dict[str, float]:
        for view in (step, step.sampled):
            for field in fields(view) if view is not None else ():
                value = getattr(view, field.name)
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for part in step.reward_parts.values():
            part.zero_()
        return {"bad": float("inf")}


def test_an_observer_that_overwrites_what_it_sees_changes_no_weight(make_trainer: Callable[..., Any]) -> None:
    weights = []
    for observers in ([], [*statistics(), Vandal()]):
        trainer = make_trainer(
            ExplorationTrainer,
            max_steps=3,
            options={"observers": observers, "lens": Lens(every=1, rate=0.5), "strategies": ["ppl_shaping"]},
        )
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Forgetful:
    """Remembers a NumPy array, which a checkpoint cannot give back."""

    def see(self, step: StepView) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.arange(3)}


def test_what_an_observer_remembers_can_be_read_again(make_trainer: Callable[..., Any], tmp_path: Any) -> None:
    trainer = make_trainer(ExplorationTrainer, options={"observers": [Forgetful()]})
    with pytest.raises(ObserverError, match=r"the observer Forgetful .*return tensors and plain values"):
        trainer.inspector.write(tmp_path)
    assert not list(tmp_path.glob("lens.pt"))


def test_a_group_of_equal_rewards_is_neither_positive_nor_negative() -> None:
    """(1.1 − mean of 1.1) / 1e-4 is 7e-5 in float32: that is rounding."""
    advantage = torch.tensor([1.0, -1.0, 7.4e-5, -7.4e-5, -7.4e-5, torch.nan])
    view = made_up(advantage=advantage)
    assert view.sign.tolist() == [1, -1, 0, 0, 0, 0]
    metrics = {name: value for observer in statistics() for name, value in observer.see(view).items()}
    for row, name in ((0, "entropy_positive"), (1, "entropy_negative")):
        own = view.entropy[row][view.mask[row] > 0]
        assert metrics[name] == pytest.approx(own.double().mean().item())
    drop = FastestDrop(least=1.0)
    drop.see(view)
    counted = view.mask.sum(1)
    assert drop._sums[5:].sum(1).tolist() == [counted[0], counted[1]]
