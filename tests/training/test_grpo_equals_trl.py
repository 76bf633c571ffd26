"""With no strategies the trainer is TRL's: same loss, same gradients, same weights after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from explorl.training.grpo.loss import LOSSES
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.test_invariance import answers, reward


def loss_and_gradients(trainer: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer.model.zero_grad()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def random_inputs(*, beta: float, reused: bool, tools: bool) -> dict[str, Any]:
    """A micro-batch with ragged prompts and completions, made up but valid."""
    generator = torch.Generator().manual_seed(0)
    rows, prompt, completion = 6, 7, 9
    lengths = torch.randint(1, completion + 1, (rows, 1), generator=generator)
    starts = torch.randint(0, prompt - 1, (rows, 1), generator=generator)
    mask = (torch.arange(completion) < lengths).long()

    def noise() -> torch.Tensor:
        return torch.randn(rows, completion, generator=generator)

    inputs = {
        "prompt_ids": torch.randint(7, 100, (rows, prompt), generator=generator),
        "prompt_mask": (torch.arange(prompt) >= starts).long(),
        "completion_ids": torch.randint(7, 100, (rows, completion), generator=generator),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=generator),
        "num_items_in_batch": torch.tensor(61.0),
    }
    if reused:
        inputs["old_per_token_logps"] = -5 + 0.5 * noise()
    if beta:
        inputs["ref_per_token_logps"] = -5 + 0.5 * noise()
    if tools:
        inputs["tool_mask"] = (noise() > -0.5).long()
    return inputs


EXTRAS: list[dict[str, Any]] = [
    {"epsilon": 0.1, "epsilon_high": 0.3},
    {"delta": 1.5},
    {"importance_sampling_level": "sequence"},
    {"use_bias_correction_kl": False},
    {"entropy_coef": 0.05},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.05},
    {"off_policy_mask_threshold": 0.05},
]
CASES = [
    *((beta, {}) for beta in (0.0, 0.1)),
    *((0.1, extra) for extra in EXTRAS[:3]),
    *(pytest.param(0.1, extra, marks=pytest.mark.slow) for extra in EXTRAS[3:]),
]


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize(
    ("beta", "extra"),
    CASES,
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_loss_and_every_gradient(make_trainer: Callable[..., Any], loss_type: str, beta: float, extra: Any) -> None:
    """Of the packed pass, and of the padded one with nothing extra; that in float32, the others in float64, where the
    sums of large terms that luspo makes are exact enough to compare on any processor."""
    stock = make_trainer(GRPOTrainer, loss_type=loss_type, beta=beta, **extra)
    several = [
        make_trainer(ExplorationTrainer, loss_type=loss_type, beta=beta, options={"packed": packed}, **extra)
        for packed in ((True,) if extra else (False, True))
    ]
    for trainer in (stock, *several) if extra else ():
        trainer.model.double()
    for reused in (False, True):
        for tools in (False, True):
            inputs = random_inputs(beta=beta, reused=reused, tools=tools)
            if loss_type == "vespo" and reused:  # far from r = 1 its weight has a hundred times the rounding of log r
                inputs["old_per_token_logps"] = -4.6 + 0.05 * (inputs["old_per_token_logps"] + 5)
            expected, expected_gradients = loss_and_gradients(stock, dict(inputs))
            for ours in several:
                loss, gradients = loss_and_gradients(ours, dict(inputs))
                torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
                assert gradients.keys() == expected_gradients.keys()
                for name, gradient in gradients.items():
                    error = (gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()
                    assert error < 1e-5, name
    for ours in several:
        assert stock._metrics["train"].keys() == ours._metrics["train"].keys()
        for name, values in ours._metrics["train"].items():
            assert values == pytest.approx(stock._metrics["train"][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize(("loss_type", "beta"), [("dapo", 0.0), ("grpo", 0.04)])
def test_training_gives_the_same_weights(make_trainer: Callable[..., Any], loss_type: str, beta: float) -> None:
    weights = []
    for cls, options in ((GRPOTrainer, {}), (ExplorationTrainer, {"engine": "generate", "packed": False})):
        # SGD: Adam divides by the gradient, and where that is rounding alone, the order of the sum is all there is
        trainer = make_trainer(
            cls, loss_type=loss_type, beta=beta, num_iterations=2, max_steps=4, optim="sgd", learning_rate=0.1,
            options=options,
        )  # fmt: skip
        trainer.train()
        weights.append(dict(trainer.model.state_dict()))
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_an_unknown_loss_type_is_refused(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="loss_type is 'gspo'; use one of grpo, bnpo"):
        make_trainer(ExplorationTrainer, loss_type="gspo")


WAYS: dict[str, dict[str, Any]] = {
    "one-step": {"gradient_accumulation_steps": 6},
    "reused": {"gradient_accumulation_steps": 6, "num_iterations": 2},
    "several-steps": {"gradient_accumulation_steps": 2, "steps_per_generation": 6},
    "several-batches": {"gradient_accumulation_steps": 6, "steps_per_generation": 2},
    "sequence": {"gradient_accumulation_steps": 6, "num_iterations": 2, "importance_sampling_level": "sequence"},
    "truncated": {"gradient_accumulation_steps": 6, "num_iterations": 2, "mask_truncated_completions": True},
    "cispo": {"gradient_accumulation_steps": 6, "num_iterations": 2, "loss_type": "cispo"},
    "vespo": {"gradient_accumulation_steps": 6, "num_iterations": 2, "loss_type": "vespo"},
}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_logged_is_what_trl_logs(make_trainer: Callable[..., Any], way: str) -> None:
    """TRL averages over micro-batches of as many rows each, and ours have as many tokens each."""
    logs = []
    for cls, options in ((GRPOTrainer, {}), (ExplorationTrainer, {"packed": True})):
        trainer = make_trainer(
            cls, beta=0.1, learning_rate=0.5, epsilon=0.02, num_generations=8, max_steps=4, optim="sgd",
            options={"rollout_func": answers, **options}, **WAYS[way],
        )  # fmt: skip
        trainer.reward_funcs = [reward]
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "kl" in entry])
    stock, ours = logs
    assert len(stock) == 4
    assert max(entry["kl"] for entry in stock) > 1e-3
    for expected, actual in zip(stock, ours, strict=True):
        assert actual.keys() == expected.keys()
        for name in expected.keys() - {"step_time"}:
            assert actual[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
