"""Strategies that change rewards before they are normalised, and strategies that look at what answers say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from explorl.core.config import ConfigError, load_config
from explorl.strategies import Batch, OutcomeExploration, Strategy
from explorl.tasks import Task
from explorl.tasks.base import Problem, Verdict
from explorl.training.grpo.rewards import answers_of
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.trainer import ExplorationTrainer

from .small_runs import digits
from .test_shaping import make_batch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PRICE = 0.05
"""Of a token."""


@dataclass(frozen=True)
class Tokens(Strategy):
    """Each token costs."""

    name = "tokens"
    price: float = PRICE

    def rewards(self, batch: Batch) -> Tensor:
        return batch.rewards - self.price * batch.mask.sum(1)


@dataclass(frozen=True)
class Squared(Tokens):
    """And few digits count for little."""

    name = "squared"

    def rewards(self, batch: Batch) -> Tensor:
        return batch.rewards**2 - self.price * batch.mask.sum(1)


@dataclass(frozen=True)
class Doubled(Strategy):
    name = "doubled"

    def rewards(self, batch: Batch) -> Tensor:
        return 2 * batch.rewards


@dataclass(frozen=True)
class ToolTranscript(Strategy):
    """Gives back whatever it is told."""

    value: Any = None
    name = "said"

    def rewards(self, batch: Batch) -> Any:
        return self.value


def task_reward(completions: list[str], **columns: Any) -> list[float | None]:
    """`digits`; None for some answers."""
    return [
        None if sum(map(ord, text)) % 5 == 0 else value
        for text, value in zip(completions, digits(completions), strict=True)
    ]


def dear_reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """What `Squared` makes of it."""
    scored = zip(task_reward(completions), completion_ids, strict=True)
    return [None if value is None else value**2 - PRICE * len(ids) for value, ids in scored]


# --- rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_changed_rewards_become_the_advantages_of_trl(make_trainer: Callable[..., Any], scale: str) -> None:
    @dataclass(frozen=True)
    class Looks(Strategy):
        def advantages(self, batch: Batch) -> None:
            self.memory["advantages"] = (batch.advantages * batch.mask).sum(1) / batch.mask.sum(1)

    options = {"engine": "generate", "packed": False, "strategies": [Looks(), Squared()]}
    trainers = []
    for kind, reward, extra in (
        (GRPOTrainer, dear_reward, {}),
        (ExplorationTrainer, task_reward, options),
        (GRPOTrainer, task_reward, {}),
    ):
        trainers.append(make_trainer(kind, options=extra, scale_rewards=scale, max_steps=1))
        trainers[-1].reward_funcs = [reward]
        trainers[-1].train()
    dear, ours, plain = trainers
    expected = torch.tensor(list(dear._logs["advantages"]))
    assert (expected == 0).any(), "an answer that nobody scored"
    torch.testing.assert_close(ours.strategies[0].memory["advantages"], expected, rtol=1e-5, atol=1e-6)
    unlike = torch.tensor(list(plain._logs["advantages"]))
    assert (unlike - expected).abs().max() > 1e-3
    # The log shows the task's own reward.
    logs = [trainer.state.log_history[0] for trainer in trainers]
    assert logs[1]["reward"] == logs[2]["reward"] != pytest.approx(logs[0]["reward"])
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-4, abs=1e-6)
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=1e-4)
    assert logs[1]["grad_norm"] != pytest.approx(logs[2]["grad_norm"], rel=1e-4)
    assert logs[1]["strategy/squared/reward_change"] > PRICE
    assert 0 < logs[1]["strategy/squared/reward_rows"] <= 8


def test_several_change_the_reward_in_order() -> None:
    recorded = []

    def centred(rewards: Tensor) -> Tensor:
        recorded.append(rewards)
        return rewards - rewards.mean()

    batch = make_batch(rewards=torch.tensor([1.0, 0.5]))  # of three tokens and two
    for strategies, expected in (
        ([Tokens(0.1), Doubled()], [1.4, 0.6]),
        ([Doubled(), ToolTranscript(), Tokens(0.1)], [1.7, 0.8]),  # None changes nothing
    ):
        shaped = shape(strategies, batch, centred)
        torch.testing.assert_close(recorded[-1], torch.tensor(expected))
        half = (expected[0] - expected[1]) / 2
        torch.testing.assert_close(shaped.advantages, torch.tensor([[half] * 3, [-half, -half, 0.0]]))
    assert shaped.metrics["strategy/doubled/reward_change"] == pytest.approx(0.75)
    assert shaped.metrics["strategy/doubled/reward_rows"] == 2
    assert not any(name.startswith("strategy/said/reward") for name in shaped.metrics)


def test_nobody_who_changes_rewards_changes_nothing() -> None:
    def never(rewards: Tensor) -> Tensor:
        raise AssertionError("advantages were computed anew")

    batch = make_batch()
    for strategies in ([], [ToolTranscript()]):
        assert torch.equal(shape(strategies, batch, never).advantages.nan_to_num(7), batch.advantages.nan_to_num(7))


def test_later_hooks_see_the_changed_reward_and_the_tasks_correctness() -> None:
    @dataclass(frozen=True)
    class Looks(Strategy):
        def advantages(self, batch: Batch) -> None:
            self.memory.update(rewards=batch.rewards.tolist(), correct=batch.correct.tolist())

    looks = Looks()
    shape([looks, Doubled()], make_batch(rewards=torch.tensor([1.0, math.nan])), lambda rewards: rewards.nan_to_num())
    assert looks.memory["rewards"] == pytest.approx([2.0, math.nan], nan_ok=True)
    assert looks.memory["correct"] == [True, False]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], r"said\.rewards is list; return a tensor of shape \(2,\), one value per row"),
        (torch.ones(2, 3), r"said\.rewards has shape \(2, 3\); return one value per row, shape \(2,\)"),
        (torch.ones(3), r"has shape \(3,\)"),
        (
            torch.tensor([1.0, math.nan]),
            r"said\.rewards is nan on 1 of 2 rows at step 3; return finite numbers",
        ),
        (torch.tensor([math.inf, 1.0]), r"is inf on 1 of 2 rows"),
    ],
)
def test_rewards_that_cannot_be(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        shape([ToolTranscript(value)], make_batch(), lambda rewards: rewards)


def test_rewards_of_any_number_type_are_taken() -> None:
    batch = make_batch()
    assert shape([ToolTranscript(torch.tensor([3, 1]))], batch, lambda rewards: rewards).advantages[0, 0] == 3
    learnt = torch.tensor([3.0, 1.0], requires_grad=True)
    assert not shape([ToolTranscript(learnt)], batch, lambda rewards: rewards).advantages.requires_grad


def test_rewards_that_trl_normalises_one_by_one_are_refused(make_trainer: Callable[..., Any]) -> None:
    aggregation = {"multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(ValueError, match=r"tokens changes the total reward, and multi_objective_aggregation='norm"):
        make_trainer(ExplorationTrainer, options={"strategies": [Tokens()]}, **aggregation)
    make_trainer(ExplorationTrainer, options={"strategies": ["egsw"]}, **aggregation)


def test_a_cache_above_the_length_limit_is_refused_at_once(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="overlong_penalty: cache is 11; it must be at most max_completion_length"):
        make_trainer(ExplorationTrainer, options={"strategies": [{"overlong_penalty": {"cache": 11}}]})
    with pytest.raises(ConfigError, match="cache is 999; it must be at most max_completion_length, which is 32"):
        load_config(values={"strategies": [{"overlong_penalty": {"cache": 999}}], "rollout": {"max_tokens": 32}})


# --- answers ------------------------------------------------------------------------------------------------------


def test_who_asks_for_answers_must_have_them(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"outcome_exploration needs the answer of each completion; .* ExplorationTr"):
        make_trainer(ExplorationTrainer, options={"strategies": ["outcome_exploration"]})
    with pytest.raises(TypeError, match="answers is '42'; give a function"):
        make_trainer(ExplorationTrainer, options={"answers": "42"})


def test_a_users_function_tells_what_answers_say(make_trainer: Callable[..., Any]) -> None:
    calls, recorded = [], []

    def last_digit(prompts: list[str], completions: list[str], **columns: Any) -> list[str | None]:
        calls.append((prompts, columns.keys()))
        return [next((c for c in reversed(text) if c.isdigit()), None) for text in completions]

    @dataclass(frozen=True)
    class Looks(OutcomeExploration):
        def advantages(self, batch: Batch) -> Tensor:
            recorded.append((batch.answers, batch.prompts, batch.max_length))
            return super().advantages(batch)

    trainer = make_trainer(ExplorationTrainer, options={"strategies": [Looks()], "answers": last_digit})
    trainer.train()
    assert len(calls) == len(recorded) == 2  # one for each batch
    for (prompts, columns), (answers, batch_prompts, longest) in zip(calls, recorded, strict=True):
        assert prompts == batch_prompts
        assert columns >= {"completion_ids"}
        assert len(answers) == 8
        assert all(answer is None or answer.isdigit() for answer in answers)
        assert longest == 10


def test_nobody_is_asked_where_nobody_wants_to_know(make_trainer: Callable[..., Any]) -> None:
    def never(**columns: Any) -> list[str | None]:
        raise AssertionError("asked")

    make_trainer(ExplorationTrainer, options={"strategies": ["egsw"], "answers": never}, max_steps=1).train()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["1"], "answers returned 1 for 2 completions; return one per completion"),
        ("12", "answers returned str; return a list of 2: a text or None per completion"),
        (None, "answers returned NoneType"),
        (["1", 2], "answers returned 2 for completion 1; return a text such as '42', or None"),
    ],
)
def test_answers_that_cannot_be(answers: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        answers_of(lambda **columns: answers, {"completions": ["a", "b"]})


class Mute(Task):
    """Says right or wrong and no more."""

    has_answers = False

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        return [Problem("one", {})]

    def prompt(self, problem: Problem, template: str | None = None) -> str:
        return "?"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return Verdict(True)


def test_a_task_without_answers_is_an_error_of_the_config() -> None:
    values: dict[str, Any] = {"task": {"name": f"{__name__}:Mute"}, "strategies": ["outcome_exploration"]}
    with pytest.raises(ConfigError, match=r"outcome_exploration compares answers, and task .* has none"):
        load_config(values=values)
    load_config(values={**values, "strategies": ["egsw"]})
    load_config(values={**values, "task": {"name": "countdown"}})
