"""Temperatures by position in training: the loss looks at each token at the temperature that it was drawn at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from explorl.strategies import Batch, ElementWiseTemperature, Sampling, Strategy
from explorl.training.grpo.trainer import ExplorationTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CURVE = {"annealed_temperature": {"highest": 1.8, "lowest": 0.3, "decay": 7.0, "warmup": 1}}


def tau(position: int) -> float:
    """Of `CURVE`."""
    return 1.0 if position < 1 else max(1 + 1.8 - 2.718281828459045 ** (position / 7), 0.3)


@dataclass(frozen=True)
class Looks(Strategy):
    """Keeps what it is shown."""

    def advantages(self, batch: Batch) -> None:
        self.memory["batch"] = batch


def by_hand(trainer: Any, batch: dict[str, Any], temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of each completion token from the model's own padded pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].size(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logps = (logits[:, -width - 1 : -1].double() / temperatures[:, :, None]).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(2, batch["completion_ids"][:, :, None])[:, :, 0], entropy


@pytest.mark.parametrize("packed", [None, False])
def test_the_first_pass_sees_what_was_recorded(make_trainer: Callable[..., Any], packed: bool | None) -> None:
    options = {"strategies": [CURVE, Looks()], "packed": packed}
    trainer = make_trainer(ExplorationTrainer, options=options, pad_to_multiple_of=8, temperature=0.9)
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []
    ours = trainer.logprobs.of

    def looked(batch: Any, **kwargs: Any) -> Any:
        outputs = ours(batch, **kwargs)
        if torch.is_grad_enabled():
            width = batch["completion_ids"].size(1)
            temperatures = torch.tensor([[tau(t) for t in range(width)]], dtype=torch.float64)
            temperatures = temperatures.expand(len(batch["completion_ids"]), -1)
            counted = batch["completion_mask"] > 0
            logps, entropy = by_hand(trainer, batch, temperatures)
            torch.testing.assert_close(outputs[0].double()[counted], logps[counted], atol=2e-5, rtol=0)
            torch.testing.assert_close(outputs[1].double()[counted], entropy[counted], atol=2e-5, rtol=0)
            passes.append((outputs[0].detach()[counted], batch["completion_ids"][counted]))
        return outputs

    trainer.logprobs.of = looked
    trainer.train()
    assert passes
    batch = trainer.strategies[1].memory["batch"]
    recorded = batch.logps[batch.mask > 0]
    last = torch.cat([logps for logps, _ in passes[-2:]])  # two micro-batches are the last generation batch
    torch.testing.assert_close(last.sort().values, recorded.sort().values, atol=1e-4, rtol=0)
    # The temperature of a row is the mean over its tokens.
    lengths = batch.mask.sum(1).int().tolist()
    expected = [sum(tau(t) for t in range(length)) / length for length in lengths]
    torch.testing.assert_close(batch.temperature, torch.tensor(expected))


def test_the_loss_may_look_at_temperature_one(make_trainer: Callable[..., Any]) -> None:
    spec = {"annealed_temperature": {**CURVE["annealed_temperature"], "training_temperature": "one"}}
    trainer = make_trainer(ExplorationTrainer, options={"strategies": [spec, Looks()]}, max_steps=1)
    options: dict[str, Any] = {}
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: options.setdefault("output", score(inputs))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(before)
    output, batch = options["output"], trainer.strategies[1].memory["batch"]
    counted, width = output["completion_mask"] > 0, output["completion_ids"].size(1)
    own, _ = by_hand(trainer, output, torch.ones(len(counted), width, dtype=torch.float64))
    torch.testing.assert_close(batch.logps.double()[counted], own[counted], atol=1e-4, rtol=0)
    sampled = torch.tensor([[tau(t) for t in range(width)]], dtype=torch.float64).expand(len(counted), -1)
    expected, _ = by_hand(trainer, output, sampled)
    torch.testing.assert_close(batch.sampling_logps.double()[counted], expected[counted], atol=1e-4, rtol=0)
    assert (own - expected)[counted].abs().max() > 0.01


def test_of_two_temperatures_the_later_strategy_wins(make_trainer: Callable[..., Any]) -> None:
    rates = {"a": 1.0}
    warm = ElementWiseTemperature(easy=0.5, hard=0.5, solve_rates=rates)
    for strategies, expected in (([warm, CURVE], None), ([CURVE, warm], 0.5)):
        options = {"strategies": [*strategies, Looks()]}
        trainer = make_trainer(ExplorationTrainer, options=options, max_steps=1)
        trainer.train()
        temperature = trainer.strategies[2].memory["batch"].temperature
        assert bool((temperature == 0.5).all()) == (expected is not None)


def test_a_run_with_the_lens_looks_at_each_token_at_its_temperature(make_trainer: Callable[..., Any]) -> None:
    from explorl.training.grpo.observers import statistics

    options = {"strategies": [CURVE], "observers": statistics()}
    trainer = make_trainer(ExplorationTrainer, options=options, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["strategy/annealed_temperature/temperature_mean"] > 0.3


@pytest.mark.parametrize("engine", ["generate"])
def test_without_the_engine_it_is_refused(make_trainer: Callable[..., Any], engine: str) -> None:
    refusal = r"annealed_temperature sets how each row is sampled, which model.*; use engine=None, or remove it"
    with pytest.raises(ValueError, match=refusal):
        make_trainer(ExplorationTrainer, options={"strategies": [CURVE], "engine": engine})


@dataclass(frozen=True)
class Wrong(Strategy):
    name = "wrong"
    given: Any = None

    def sampling(self, prompts: Any, step: int) -> Sampling:
        return {"temperature_by_position": self.given}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0] * 8, "wrong.sampling returns a single number as a row's 'temperature_by_position'"),
        (1.0, "wrong.sampling returns a single number as a row's"),
        ([[1.0]], "wrong.sampling returns 1 values of 'temperature_by_position' for 8 rows"),
        ([[0.0]] * 8, r"temperature_by_position of row 0 contains 0\.0"),
        ([[]] * 8, r"temperature_by_position of row 0 is \[\]"),
    ],
)
def test_temperatures_that_cannot_be(make_trainer: Callable[..., Any], value: Any, message: str) -> None:
    trainer = make_trainer(ExplorationTrainer, options={"strategies": [Wrong(value)]}, max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.train()


# --- the mass of the min-p set -------------------------------------------------------------------------------------


def test_the_proxy_is_the_policy_without_its_tail(make_trainer: Callable[..., Any]) -> None:
    strategies = [{"lp_reg": {"min_p": 0.3, "fraction": 1.0}}, Looks()]
    trainer = make_trainer(ExplorationTrainer, options={"strategies": strategies}, max_steps=1, pad_to_multiple_of=8)
    options: dict[str, Any] = {}
    score = trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: options.setdefault("output", score(inputs))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(before)
    output, batch = options["output"], trainer.strategies[1].memory["batch"]
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    width = output["completion_ids"].size(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    probs = logits[:, -width - 1 : -1].double().softmax(-1)
    keep = probs >= 0.3 * probs.amax(-1, keepdim=True)
    inside = keep.gather(2, output["completion_ids"][:, :, None])[:, :, 0]
    expected = torch.where(inside, (probs * keep).sum(-1), 0.0)
    counted = output["completion_mask"] > 0
    torch.testing.assert_close(batch.min_p_mass.double()[counted], expected[counted], atol=1e-4, rtol=0)
    assert inside[counted].any()
    assert not inside[counted].all()


def test_without_the_engine_there_is_no_mass(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"lp_reg needs the probabilities of other tokens, .* engine='explorl'"):
        make_trainer(ExplorationTrainer, options={"strategies": ["lp_reg"], "engine": "generate"})

    @dataclass(frozen=True)
    class Other(Strategy):
        name = "other"
        needs_min_p_mass = 0.5

    with pytest.raises(ValueError, match=r"shares of the most likely token: \{'lp_reg': 0.02, 'other': 0.5\}"):
        make_trainer(ExplorationTrainer, options={"strategies": ["lp_reg", Other()]})
