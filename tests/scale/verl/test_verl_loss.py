"""Explorl's names in verl's registries, on verl's own functions; no Ray."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("verl.protocol")
pytestmark = pytest.mark.scale

from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo import core_algos  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import FSDPActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

from explorl.integrations.verl import plugin  # noqa: E402
from explorl.integrations.verl.policy_loss import ExplorlLoss  # noqa: E402
from explorl.strategies import ClipHigher, KLCov, Strategy  # noqa: E402
from explorl.training.grpo.shaping import shape  # noqa: E402

LENGTHS, PROMPT = (3, 5, 2, 4), 2


def actor(loss_mode: str = "vanilla", **more: Any) -> Any:
    config = {"ppo_micro_batch_size_per_gpu": 4, "rollout_n": 2, "use_kl_loss": True, "kl_loss_coef": 0.1, **more}
    return FSDPActorConfig(strategy="fsdp2", policy_loss=PolicyLossConfig(loss_mode=loss_mode), **config)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(seed: int = 0) -> tuple[dict[str, torch.Tensor], TensorDict]:
    """A model's output and a micro-batch as verl's workers have them."""
    generator = torch.Generator().manual_seed(seed)

    def values(scale: float = 1.0) -> list[torch.Tensor]:
        return [scale * torch.randn(length, generator=generator) for length in LENGTHS]

    old = values()
    fields = {
        "prompts": nested([torch.zeros(PROMPT, dtype=torch.long)] * 4),
        "responses": nested([torch.zeros(length, dtype=torch.long) for length in LENGTHS]),
        "response_mask": nested([torch.ones(length, dtype=torch.long) for length in LENGTHS]),
        "old_log_probs": nested(old),
        "ref_log_prob": nested([row + 0.1 for row in old]),
        "advantages": nested(values()),
    }
    data = TensorDict(fields, batch_size=4)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(LENGTHS), global_batch_size=4)
    new = [torch.cat([torch.zeros(PROMPT - 1), row + 0.7 * noise, torch.zeros(1)])
           for row, noise in zip(old, values(), strict=True)]  # fmt: skip
    return {"log_probs": nested(new)}, data


def test_without_strategies_the_loss_is_verls_own() -> None:
    output, data = micro_batch()
    theirs, _ = ppo_loss(actor(), output, data)
    ours, _ = ppo_loss(actor("explorl"), output, data)
    wrapped, _ = ExplorlLoss(actor("explorl"), [])(model_output=output, data=data)
    assert ours.item() == theirs.item() == wrapped.item()


def carrying_batch(strategies: list[Strategy], data: TensorDict) -> TensorDict:
    """The micro-batch with what the strategies say of it."""
    from explorl.integrations.verl.conversion import batch_of_columns, correctness_rule, loss_columns, reward_parts
    from explorl.integrations.verl.settings import VerlSettings

    padded = data.select("response_mask", "old_log_probs", "ref_log_prob", "advantages").to_padded_tensor()
    columns = dict(padded.items()) | {"entropy": torch.rand(4, max(LENGTHS))}
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    batch = batch_of_columns(
        columns, group=torch.tensor([0, 0, 1, 1]), rewards=rewards, parts=reward_parts(["score"], rewards, [{}] * 4),
        correct=correctness_rule(VerlSettings(), [{}] * 4), truncated=torch.zeros(4, dtype=torch.bool),
        temperature=torch.ones(4), step=0, prompts=["a", "a", "b", "b"],
    )  # fmt: skip
    for name, value in loss_columns(shape(strategies, batch), batch, penalties=True).items():
        data[name] = value if value.dim() == 1 else nested([row[:n] for row, n in zip(value, LENGTHS, strict=True)])
    tu.assign_non_tensor(data, explorl_step=0)
    return data


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.1, 0.5)])
def test_the_same_bounds_for_all_tokens_are_verls_clip(bounds: tuple[float, float]) -> None:
    low, high = bounds
    output, data = micro_batch()
    theirs, their_metrics = ppo_loss(actor(clip_ratio_low=low, clip_ratio_high=high), output, data)
    strategies: list[Strategy] = [ClipHigher(low=low, high=high)]
    carried = carrying_batch(strategies, data)
    ours, our_metrics = ExplorlLoss(actor("explorl"), strategies)(model_output=output, data=carried)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-7)
    for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
        assert our_metrics[name].values == pytest.approx(their_metrics[name].values, abs=1e-6)


class Halves(Strategy):
    """Half the weight on everything, the KL term as well."""

    name, weighs_kl = "halves", True

    def weights(self, batch: Any) -> Any:
        return 0.5 * (batch.mask > 0).float()


def test_weights_are_heard_in_both_terms() -> None:
    output, data = micro_batch()
    theirs, _ = ppo_loss(actor(), output, data)
    ours, _ = ExplorlLoss(actor("explorl"), [Halves()])(model_output=output, data=carrying_batch([Halves()], data))
    assert ours.item() == pytest.approx(0.5 * theirs.item(), abs=1e-6)


def test_a_penalty_has_its_gradient() -> None:
    output, data = micro_batch()
    strategies: list[Strategy] = [KLCov(fraction=0.2, coef=3.0)]
    values = output["log_probs"].values().detach().requires_grad_()
    flowing = {"log_probs": torch.nested.nested_tensor_from_jagged(values, output["log_probs"].offsets())}
    data = carrying_batch(strategies, data)
    config = actor("explorl", use_kl_loss=False)
    loss, _ = ExplorlLoss(config, strategies)(model_output=flowing, data=data)
    loss.backward()
    chosen = data["explorl/kept/0/chosen"].to_padded_tensor(0.0) > 0
    assert int(chosen.sum()) == max(1, math.floor(0.2 * sum(LENGTHS)))
    padded = data.select("old_log_probs", "advantages").to_padded_tensor()
    starts = output["log_probs"].offsets()
    for row, length in enumerate(LENGTHS):
        first = int(starts[row]) + PROMPT - 1
        logps, gradient = values.detach()[first : first + length], values.grad[first : first + length]
        ratio = (logps - padded["old_log_probs"][row, :length]).exp()
        expected = -padded["advantages"][row, :length] * ratio
        expected = expected + 3.0 * chosen[row, :length] * (ratio.log().sign())
        torch.testing.assert_close(gradient, expected / sum(LENGTHS), rtol=1e-4, atol=1e-6)


def test_columns_that_did_not_arrive_are_an_error() -> None:
    output, data = micro_batch()
    with pytest.raises(RuntimeError, match="halves: the strategies' columns of these rows did not reach"):
        ExplorlLoss(actor("explorl"), [Halves()])(model_output=output, data=data)


def test_a_mini_batch_without_a_token_in_the_loss_is_no_nan() -> None:
    output, data = micro_batch()
    data["response_mask"] = nested([torch.zeros(length, dtype=torch.long) for length in LENGTHS])
    tu.assign_non_tensor(data, batch_num_tokens=0)
    loss, _ = ExplorlLoss(actor("vanilla"), [])(model_output=output, data=data)
    assert loss.item() == 0


def test_the_estimator_is_trls() -> None:
    estimator = core_algos.get_adv_estimator_fn("explorl_grpo")
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [0.5, 0.5]]), torch.ones(4, 2)
    advantages, _ = estimator(token_level_rewards=rewards, response_mask=mask, index=["a", "b", "a", "b"], config={})
    half = 0.5 * 0.5**0.5
    expected = torch.tensor([0.25, -0.5, -0.25, 0.5]) / torch.tensor([half, 2 * half, half, 2 * half]).add(1e-4)
    torch.testing.assert_close(advantages, expected.unsqueeze(1).expand(4, 2))


def test_a_broken_plug_in_is_loud_for_those_who_name_it_and_silent_for_others() -> None:
    failure = ImportError("no module named x")
    for config in ({"explorl": {"strategies": []}}, {"trainer": {"v1": {"trainer_mode": "explorl"}}}):
        with pytest.raises(RuntimeError, match=r"could not be loaded: ImportError: no module named x"):
            plugin.guard(config, failure)
    plugin.guard({"trainer": {"v1": {"trainer_mode": "sync"}}}, failure)


def test_verls_own_check_ends_with_ours() -> None:
    from verl.trainer import main_ppo

    config = OmegaConf.create(
        {"trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}}, "explorl": {"strategies": ["ppl_shaping"]}}
    )
    with pytest.raises(ValueError, match="trainer_mode=explorl"):
        main_ppo.validate_config(config=config, use_reference_policy=False, use_critic=False)


def test_the_plug_in_needs_nothing_that_verl_does_not_bring() -> None:
    """It is installed without Explorl's own dependencies, jaxtyping apart."""
    script = """
import sys

class Absent:
    names = {"trl", "gguf", "math_verify", "matplotlib", "typer", "reasoning_gym"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is absent")

sys.meta_path.insert(0, Absent())
import verl
from explorl.integrations.verl import plugin, support
import explorl.training.grpo.batch
assert plugin.FAILURE is None, plugin.FAILURE
assert support()
"""
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr[-3000:]
