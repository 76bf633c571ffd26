"""Prompts that are solved every time give way to others, in runs of a tiny policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from explorl.training.grpo.prompt_source import row_key
from explorl.training.grpo.solved import STATE
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.conftest import PROMPTS
from tests.training.test_every_strategy import logs, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EASY = PROMPTS[:4]
"""Always solved; of the others one answer in two is right."""
Make = Callable[..., Any]


class Easy:
    __name__ = "easy"

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, prompts: list[str], **columns: Any) -> list[float]:
        self.calls.append(prompts[::4])
        return [float(prompt in EASY or row % 2) for row, prompt in enumerate(prompts)]


@pytest.fixture
def train(make_trainer: Make, tmp_path: Path) -> Make:
    """Three epochs over eight prompts, two a step, in their order."""

    def trained(skip: Any = True, *, resume: int | None = None, prompts: Any = 8, **changes: Any) -> Any:
        reward = Easy()
        options = {
            "reward_funcs": reward,
            "skip_solved": skip,
            "correct": "easy",
            "train_dataset": Dataset.from_dict({"prompt": PROMPTS[:prompts]}),
            **changes.pop("options", {}),
        }
        settings = {"max_steps": 12, "shuffle_dataset": False, "max_completion_length": 4, "report_to": "none"}
        trainer = make_trainer(lambda **kwargs: ExplorationTrainer(**{**kwargs, **options}), **{**settings, **changes})
        trainer.train(resume_from_checkpoint=None if resume is None else str(tmp_path / f"out/checkpoint-{resume}"))
        trainer.calls = reward.calls
        return trainer

    return trained


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[f"skip_solved/{name}"] for entry in logs(trainer).values()]


def test_solved_prompts_give_way_to_others_after_two_visits(train: Make) -> None:
    trainer = train({"visits": 2, "floor": 1e-9}, save_strategy="steps", save_steps=12)
    order = [PROMPTS[index : index + 2] for index in (0, 2, 4, 6)] * 3
    assert trainer.calls[:8] == order[:8]
    assert logged(trainer, "skipped") == [0] * 8 + [2, 2, 0, 0]
    assert logged(trainer, "solved") == [0] * 4 + [0, 2, 4, 4] + [4] * 4
    for call in trainer.calls[8:]:
        assert not set(call) & set(EASY)
        assert len(set(call)) == 2
    assert trainer.calls[10:] == order[10:]
    held = json.loads((Path(trainer.args.output_dir) / "checkpoint-12" / STATE).read_text())
    assert held == {row_key({"prompt": prompt}): 2 for prompt in EASY}


def test_the_floor_of_one_skips_nothing(train: Make) -> None:
    trainer, plain = train({"visits": 1, "floor": 1.0}, max_steps=6), train(None, max_steps=6)
    assert trainer.calls == plain.calls
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(trainer).items())


def test_where_all_prompts_are_solved_they_are_asked_all_the_same(train: Make) -> None:
    trainer = train({"visits": 1, "floor": 1e-9}, prompts=4, max_steps=4)
    assert trainer.calls == [PROMPTS[:2], PROMPTS[2:4]] * 2
    assert logged(trainer, "skipped") == [0] * 4


def test_a_resumed_run_skips_what_the_straight_run_skips(train: Make) -> None:
    """Two updates on each batch, and a checkpoint in the middle of one; with dynamic sampling beside it."""
    changes = {"num_iterations": 2, "max_steps": 15, "save_strategy": "steps", "save_steps": 9}
    changes |= {"options": {"dynamic_sampling": {"max_rounds": 1}}}
    skip = {"visits": 1, "floor": 0.5}
    whole = train(skip, **dict(changes))
    assert sum(logged_some(whole, "skip_solved/skipped")) > 2
    resumed = train(skip, resume=9, **dict(changes))
    assert resumed.calls == whole.calls[-len(resumed.calls) :]
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())


def logged_some(trainer: Any, name: str) -> list[float]:
    """At the steps with a new batch."""
    return [entry[name] for entry in logs(trainer).values() if name in entry]


def test_groups_that_dynamic_sampling_exchanges_were_visited(train: Make) -> None:
    """An easy prompt is never trained on, and is known to be solved for it; fresh prompts are not solved ones."""
    trainer = train({"visits": 1, "floor": 1e-9}, max_steps=4, options={"dynamic_sampling": {"max_rounds": 5}})
    assert logged(trainer, "solved")[-1] > 0
    solved: set[str] = set()
    for call in trainer.calls:
        assert not set(call) & solved
        solved |= set(call) & set(EASY)
    assert logged_some(trainer, "dynamic_sampling/without_variance") == [0] * 4


def test_what_is_correct_is_asked_for(train: Make) -> None:
    with pytest.warns(UserWarning, match="completions count as correct if the reward function 'easy'"):
        train(max_steps=1, options={"correct": None})
