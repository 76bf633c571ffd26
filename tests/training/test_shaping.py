"""From a list of strategies to what the loss multiplies with, and on to the loss: by hand and in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from explorl.strategies import Batch, ClipHigher, EntropyGuidedWeighting, KLCov, Strategy
from explorl.training.grpo.loss import LOSSES
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.trainer import ExplorationTrainer

MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def make_batch(**changes: Any) -> Batch:
    """Two sequences, of three tokens and of two; beyond its end the second has NaN."""
    padding = torch.where(MASK > 0, 0.0, torch.nan)
    fields: dict[str, Any] = {
        "logps": -1.0 + padding,
        "old_logps": -1.0 + padding,
        "ref_logps": None,
        "sampling_logps": None,
        "entropy": 0.5 + padding,
        "branching": None,
        "mask": MASK,
        "advantages": torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]]) + padding,
        "rewards": torch.tensor([1.0, 0.0]),
        "correct": torch.tensor([True, False]),
        "correctness": torch.tensor([1.0, 0.0]),
        "group": torch.tensor([0, 0]),
        "truncated": torch.tensor([False, True]),
        "temperature": torch.ones(2),
        "step": 3,
    }
    return Batch(**{**fields, **changes})


@dataclass(frozen=True)
class Add(Strategy):
    name = "add"
    amount: float = 1.0

    def advantages(self, batch: Batch) -> Tensor:
        return batch.advantages + self.amount


@dataclass(frozen=True)
class Times(Strategy):
    name = "times"
    amount: float = 2.0

    def advantages(self, batch: Batch) -> Tensor:
        return batch.advantages * self.amount


@dataclass(frozen=True)
class Weigh(Strategy):
    name = "weigh"
    factors: Any = 1.0

    def weights(self, batch: Batch) -> Tensor:
        return torch.tensor(self.factors) * batch.mask


@dataclass(frozen=True)
class WeighAll(Weigh):
    name = "weigh_all"
    weighs_kl = True


@dataclass(frozen=True)
class Select(Strategy):
    name = "select"
    kept: Any = 1.0

    def select(self, batch: Batch) -> Tensor:
        return torch.tensor(self.kept)


@dataclass(frozen=True)
class Clip(Strategy):
    name = "clip"
    bounds: Any = (0.1, 0.2)

    def clip(self, batch: Batch) -> Any:
        return self.bounds


@dataclass(frozen=True)
class Spy(Strategy):
    """Keeps what it is shown, and changes nothing."""

    name = "spy"
    seen: list[Batch] = field(default_factory=list, init=False)

    def keep(self, batch: Batch) -> Mapping[str, Tensor]:
        self.seen.append(batch)
        return {"advantages": batch.advantages, "mask": batch.mask}

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        return {"step": batch.step}


def equal(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-6, atol=1e-6)


# --- shape --------------------------------------------------------------------------------------------------------


def test_no_strategies_change_nothing() -> None:
    batch = make_batch()
    shaped = shape([], batch)
    assert shaped.advantages is batch.advantages
    equal(shaped.loss_mask, MASK)
    equal(shaped.weights, torch.ones(2, 3))
    equal(shaped.kl_weights, torch.ones(2, 3))
    assert shaped.clip is None
    assert shaped.kept == {}
    assert shaped.metrics == {}


def test_advantages_are_changed_in_the_order_of_the_list() -> None:
    equal(shape([Add(1.0), Times(2.0)], make_batch()).advantages, [[4, 4, 4], [-2, -2, 0]])
    equal(shape([Times(2.0), Add(1.0)], make_batch()).advantages, [[3, 3, 3], [-3, -3, 0]])


def test_all_advantages_are_changed_before_anything_else_is_asked() -> None:
    spy = Spy()
    shape([spy, Add(1.0), Times(2.0)], make_batch())
    (batch,) = spy.seen
    equal(batch.advantages, [[4, 4, 4], [-2, -2, 0]])
    equal(batch.mask, MASK)


def test_the_batch_itself_is_left_alone() -> None:
    batch = make_batch()
    before = batch.advantages.clone()
    shape([Add(1.0), Select([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]]), Weigh(3.0)], batch)
    torch.testing.assert_close(batch.advantages, before, equal_nan=True)
    equal(batch.mask, MASK)


def test_weights_multiply_and_only_some_reach_the_kl_term() -> None:
    first, second = Weigh([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), WeighAll([[0.5, 0.5, 2.0], [1.0, 0.0, 1.0]])
    for strategies in ([first, second], [second, first]):
        shaped = shape(strategies, make_batch())
        equal(shaped.weights * MASK, [[0.5, 1.0, 6.0], [4.0, 0.0, 0.0]])
        equal(shaped.kl_weights * MASK, [[0.5, 0.5, 2.0], [1.0, 0.0, 0.0]])
    equal(shape([first], make_batch()).kl_weights, torch.ones(2, 3))


def test_masks_multiply_with_each_other_and_with_the_batchs_own() -> None:
    first, second = [[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    shaped = shape([Select(first), Select(second)], make_batch())
    equal(shaped.loss_mask, [[0, 1, 0], [1, 0, 0]])
    equal(shaped.weights, torch.ones(2, 3))


def test_the_last_clip_counts() -> None:
    per_token = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    shaped = shape([Clip((0.2, 0.28)), Clip((per_token, math.inf)), Add(0.0)], make_batch())
    assert shaped.clip is not None
    equal(shaped.clip[0], per_token)
    equal(shaped.clip[1], torch.full((2, 3), math.inf))
    shaped = shape([Clip((per_token, math.inf)), Clip((0.2, 0.28))], make_batch())
    assert shaped.clip is not None
    equal(shaped.clip[0], torch.full((2, 3), 0.2))
    equal(shaped.clip[1], torch.full((2, 3), 0.28))


def test_what_is_kept_has_the_place_of_its_strategy_in_its_name() -> None:
    shaped = shape([Spy(), Times(2.0), Spy()], make_batch())
    assert list(shaped.kept) == ["0/advantages", "0/mask", "2/advantages", "2/mask"]
    equal(shaped.kept["2/advantages"], [[2, 2, 2], [-4, -4, 0]])


def test_metrics_say_what_each_strategy_changed() -> None:
    """Five tokens count. What they lose elsewhere, padding included, is nobody's change."""
    strategies = [
        Times(2.0),  # changes by 1, 1, 1, 2, 2
        Weigh([[1.0, 1.0, 4.0], [0.0, 1.0, 9.0]]),  # by 0, 0, 3, 1, 0
        Select([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]),  # takes two tokens out
        Spy(),
    ]
    assert shape(strategies, make_batch()).metrics == pytest.approx(
        {
            "strategy/times/advantage_change": 7 / 5,
            "strategy/times/advantage_tokens": 5,
            "strategy/weigh/weight_change": 4 / 5,
            "strategy/weigh/weight_tokens": 2,
            "strategy/select/masked_change": 2 / 5,
            "strategy/select/masked_tokens": 2,
            "strategy/spy/step": 3,
        }
    )


def test_each_change_is_measured_from_what_the_one_before_left() -> None:
    metrics = shape([Add(1.0), Times(2.0)], make_batch()).metrics
    assert metrics["strategy/add/advantage_change"] == pytest.approx(1.0)
    assert metrics["strategy/times/advantage_change"] == pytest.approx((2 + 2 + 2 + 1 + 1) / 5)


def test_a_batch_without_tokens_is_no_accident() -> None:
    shaped = shape([Times(2.0), Weigh(3.0), EntropyGuidedWeighting(), KLCov()], make_batch(mask=torch.zeros(2, 3)))
    assert shaped.metrics["strategy/times/advantage_change"] == 0
    assert torch.isfinite(shaped.advantages).all()


def test_no_gradient_passes() -> None:
    logps = torch.full((2, 3), -1.0, requires_grad=True)
    shaped = shape([Add(1.0), EntropyGuidedWeighting()], make_batch(logps=logps, old_logps=logps * 2, entropy=-logps))
    assert not shaped.weights.requires_grad
    assert not shaped.advantages.requires_grad


# --- what the trainer shows to strategies --------------------------------------------------------------------------

ANSWERS = {"1 5 6=12\n": [[20, 21, 22], [30, 31]], "2 6 8=16\n": [[40], [50, 51, 52, 53]]}
"""The second token of the last answer is a tool's; answers of an even number of tokens end by themselves."""


def fixed_answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    tokenizer = trainer.processing_class
    completions = [[*ids] for text in dict.fromkeys(prompts) for ids in ANSWERS[text]]
    for ids in completions:
        ids[-1] = tokenizer.eos_token_id if len(ids) % 2 == 0 else ids[-1]
    own = [[int(ids[0] != 50 or index != 1) for index in range(len(ids))] for ids in completions]
    prompt_ids = tokenizer(prompts)["input_ids"]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": own}


Show = Callable[..., tuple[Any, dict[str, Any], Batch]]


@pytest.fixture
def show(make_trainer: Callable[..., Any]) -> Show:
    """A generation batch of four rows, as TRL gets it and as a strategy sees it."""

    def make(reward: Callable[..., Any], **options: Any) -> tuple[Any, dict[str, Any], Batch]:
        trainer = make_trainer(
            ExplorationTrainer,
            num_generations=2,
            per_device_train_batch_size=2,
            temperature=0.7,
            options={"strategies": [Spy()], **options},
        )
        trainer.reward_funcs[0] = reward
        trainer.model.train()
        output = trainer._generate_and_score_completions([{"prompt": text} for text in ANSWERS for _ in range(2)])
        (batch,) = trainer.strategies[0].seen
        return trainer, output, batch

    return make


def check_recorded(trainer: Any, output: dict[str, Any], batch: Batch) -> None:
    """What was recorded of the policy is what a plain forward says, of each sequence by itself."""
    for row, text in enumerate(batch.prompts):
        prompt = trainer.processing_class(text)["input_ids"]
        answer = output["completion_ids"][row][output["completion_mask"][row] > 0]
        with torch.no_grad():
            logits = trainer.model(torch.cat([torch.tensor(prompt), answer]).unsqueeze(0)).logits
        logits = logits[0, len(prompt) - 1 : -1].double()
        tempered, full = torch.log_softmax(logits / 0.7, dim=-1), torch.log_softmax(logits, dim=-1)
        mass = full.exp().sort(dim=-1, descending=True).values.cumsum(-1)
        assert batch.branching is not None
        for actual, expected in (
            (batch.logps, tempered.gather(1, answer.unsqueeze(1)).squeeze(1)),
            (batch.old_logps, tempered.gather(1, answer.unsqueeze(1)).squeeze(1)),
            (batch.entropy, -(full.exp() * full).sum(-1)),
            (batch.branching, (mass < 0.95).sum(-1).double() + 1),
        ):
            torch.testing.assert_close(actual[row, : len(answer)].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_strategies_see_the_whole_batch(show: Show) -> None:
    trainer, output, batch = show(lambda completions, **columns: [1.0, 0.0, 0.5, 0.5], rollout_func=fixed_answers)
    equal(batch.mask, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1]])
    equal(batch.rewards, [1.0, 0.0, 0.5, 0.5])
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.truncated.tolist() == [True, False, True, False]
    assert batch.prompts == [text for text in ANSWERS for _ in range(2)]
    assert batch.step == 0
    equal(batch.temperature, torch.full((4,), 0.7))
    deviation = math.sqrt(0.5) + 1e-4  # of the rewards 1 and 0
    equal(batch.advantages[:2], [[0.5 / deviation] * 3 + [0], [-0.5 / deviation] * 2 + [0, 0]])
    equal(batch.advantages[2:], torch.zeros(2, 4))
    check_recorded(trainer, output, batch)


def test_what_was_recorded_while_sampling_is_what_a_forward_says(show: Show) -> None:
    trainer, output, batch = show(lambda completions, **columns: [1.0, 0.0, 0.5, 0.5])
    equal(batch.mask, output["completion_mask"])
    check_recorded(trainer, output, batch)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_an_answer_that_could_not_be_scored_has_no_reward(show: Show) -> None:
    """Strategies leave it out (NaN); as a reward of 0 it would be punished as wrong."""
    _, _, batch = show(lambda completions, **columns: [1.0, None, 0.5, 0.5], rollout_func=fixed_answers)
    assert batch.rewards.isnan().tolist() == [False, True, False, False]


# --- loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crafted:
    """A micro-batch with everything that strategies can say, made up; and the same in NumPy."""

    inputs: dict[str, Any]

    def __getitem__(self, key: str) -> np.ndarray:
        return self.inputs[key].double().numpy()


def crafted() -> Crafted:
    generator = torch.Generator().manual_seed(1)
    rows, prompt, width = 4, 5, 7

    def noise() -> Tensor:
        return torch.randn(rows, width, generator=generator)

    mask = (torch.arange(width) < torch.tensor([[7], [4], [1], [6]])).long()
    loss_mask = mask * (torch.arange(rows) != 3).unsqueeze(1)  # a strategy has taken the last row out
    old = -4 + noise()
    return Crafted(
        {
            "prompt_ids": torch.randint(7, 100, (rows, prompt), generator=generator),
            "prompt_mask": (torch.arange(prompt) >= torch.tensor([[0], [2], [4], [1]])).long(),
            "completion_ids": torch.randint(7, 100, (rows, width), generator=generator),
            "completion_mask": mask,
            "advantages": noise() * mask,
            "loss_mask": loss_mask.float(),
            "token_weights": noise().abs() * mask,
            "kl_weights": noise().abs() * mask,
            "clip_low": 0.5 * noise().abs(),
            "clip_high": torch.where(noise() > 0, 0.5 * noise().abs(), torch.inf),
            "old_per_token_logps": old,
            "ref_per_token_logps": -4 + noise(),
            "recorded_entropy": noise().abs(),
            "row_rewards": torch.zeros(rows),
            "row_correct": torch.zeros(rows, dtype=torch.bool),
            "row_correctness": torch.zeros(rows),
            "row_group": torch.zeros(rows, dtype=torch.long),
            "row_truncated": torch.zeros(rows, dtype=torch.bool),
            "kept/1/chosen": (noise() > 0).float() * mask,
            "num_items_in_batch": torch.tensor(31.0),
        }
    )


def plain_logps(model: Any, inputs: dict[str, Any], temperature: float | Tensor) -> Tensor:
    """log π of the completion tokens at a temperature, one or each row's own, by transformers alone."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    temperature = torch.as_tensor(temperature).reshape(-1, 1, 1)
    logits = model(ids, attention_mask=attention).logits[:, -width - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def policy_terms(
    kind: str, x: Any, ratio: Any, clipped: Any, ceiling: Any, advantages: Any, log_ratio: Any, mask: Any
) -> tuple[Any, Any]:
    """The policy's part of the token losses, and its derivative with respect to x = log π."""
    if kind == "cispo":
        weight = np.minimum(ratio, ceiling)
        return -weight * advantages * x, -weight * advantages
    if kind == "sapo":
        tau = np.where(advantages > 0, 1.0, 1.05)
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantages, -4 * gate * (1 - gate) * ratio * advantages
    if kind == "vespo":
        log_w = np.clip((np.clip(log_ratio, -20, 20) * mask).sum(1, keepdims=True), np.log(1e-8), 20)
        k, lam = np.where(advantages >= 0, 2.0, 3.0), np.where(advantages >= 0, 3.0, 2.0)
        phi = np.exp(lam + k * log_w - lam * np.exp(log_w))
        return -phi * advantages * x, -phi * advantages
    policy = -np.minimum(ratio * advantages, clipped * advantages)
    return policy, np.where(ratio * advantages <= clipped * advantages, -ratio * advantages, 0.0)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    ("beta", "corrected"), [(0.0, False), (0.3, False), (0.3, True)], ids=["no kl", "kl", "kl times r"]
)
@pytest.mark.parametrize("temperatures", [None, [0.7, 1.0, 2.0, 0.3]], ids=["one temperature", "one per row"])
@pytest.mark.filterwarnings("ignore:the clip of")
def test_loss_and_gradient_with_everything_that_strategies_say(
    make_trainer: Callable[..., Any], loss_type: str, beta: float, corrected: bool, temperatures: list[float] | None
) -> None:
    """loss_t = policy_t·weight + β·k3·kl_weight + coef·|log r| on the chosen, then TRL's mean.

    TRL's `use_bias_correction_kl`, on by default, multiplies k3 by r.
    """
    trainer = make_trainer(
        ExplorationTrainer,
        loss_type=loss_type,
        beta=beta,
        use_bias_correction_kl=corrected,
        temperature=0.7,
        num_iterations=2,
        options={"strategies": [ClipHigher(), KLCov(coef=0.8)]},
    )
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    batch = crafted()
    if temperatures is not None:
        batch.inputs["row_temperature"] = torch.tensor(temperatures)
    logps = plain_logps(trainer.model, batch.inputs, batch.inputs.get("row_temperature", 0.7))
    x = logps.detach().double().numpy()

    ratio, advantages = np.exp(x - batch["old_per_token_logps"]), batch["advantages"]
    clipped = np.clip(ratio, 1 - batch["clip_low"], 1 + batch["clip_high"])
    ahead, drift = batch["ref_per_token_logps"] - x, x - batch["old_per_token_logps"]
    mask = batch["loss_mask"]
    policy, policy_slope = policy_terms(loss_type, x, ratio, clipped, 1 + batch["clip_high"], advantages, drift, mask)
    kl = np.exp(ahead) - ahead - 1
    token = policy * batch["token_weights"] + beta * (kl * ratio if corrected else kl) * batch["kl_weights"]
    token += 0.8 * np.abs(drift) * batch["kept/1/chosen"]
    # the derivative with respect to x = log π
    kl = (kl + 1 - np.exp(ahead)) * ratio if corrected else 1 - np.exp(ahead)
    slope = policy_slope * batch["token_weights"] + beta * kl * batch["kl_weights"]
    slope += 0.8 * np.sign(drift) * batch["kept/1/chosen"]

    over_sequences = mask / np.maximum(mask.sum(1, keepdims=True), 1) / len(mask) / 2
    share = {  # of each token in the mean; the 2 is the accumulation
        "grpo": over_sequences,
        "sapo": over_sequences,
        "bnpo": mask / mask.sum() / 2,
        "dr_grpo": mask / (len(mask) * 10) / 2,
        "luspo": mask / len(mask) / 2,
    }.get(loss_type, mask / 31)  # the generation batch is one accumulation window
    assert (clipped != ratio)[mask > 0].any()
    assert (clipped == ratio)[mask > 0].any()

    loss = trainer._compute_loss(trainer.model, batch.inputs)
    assert loss.item() == pytest.approx(float((token * share).sum()), rel=1e-5)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    (logps * torch.tensor(slope * share).float()).sum().backward()  # the chain rule, from log π on
    for name, parameter in trainer.model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name


def test_clip_metrics_count_what_the_given_bounds_clip(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(ExplorationTrainer, num_iterations=2, options={"strategies": [ClipHigher()]})
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    batch = crafted()
    with torch.no_grad():
        x = plain_logps(trainer.model, batch.inputs, 1.0).double().numpy()
        batch.inputs["made_at"] = torch.tensor(-1)  # the policy has moved since
        trainer._compute_loss(trainer.model, batch.inputs)
    ratio, advantages, mask = np.exp(x - batch["old_per_token_logps"]), batch["advantages"], batch["completion_mask"]
    low = (ratio < 1 - batch["clip_low"]) & (advantages < 0)
    high = (ratio > 1 + batch["clip_high"]) & (advantages > 0)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert logged["clip_ratio/low_mean"] == pytest.approx((low * mask).sum() / mask.sum())
    assert logged["clip_ratio/high_mean"] == pytest.approx((high * mask).sum() / mask.sum())
    assert logged["clip_ratio/region_mean"] == pytest.approx(((low | high) * mask).sum() / mask.sum())
    assert logged["clip_ratio/low_mean"] > 0
    assert logged["clip_ratio/high_mean"] > 0
