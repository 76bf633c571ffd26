"""TRL's colocated vLLM with strategies that say how each row is sampled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from datasets import Dataset
from trl import GRPOConfig

from explorl import ExplorationTrainer
from explorl import strategies as xs

pytestmark = pytest.mark.scale

PROMPTS = ["1 + 2 =", "7 - 3 =", "4 * 2 =", "9 / 3 ="]


class Seen(ExplorationTrainer):
    """Keeps what each generation batch was sampled with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[dict[str, Any]] = []
        sampler: Any = self.sampler
        sample, record = sampler.sample, sampler.record

        def recorded(sampled: Any, rollouts: Any, plan: Any) -> None:
            record(sampled, rollouts, plan)
            self.seen.append({"rollouts": rollouts, "temperature": plan.sampling_temperature})

        def sampled_by_vllm(*given: Any) -> Any:
            completions = sample(*given)
            if completions is not None:
                self.seen[-1]["logps"] = completions[1]
            return completions

        sampler.sample, sampler.record = sampled_by_vllm, recorded


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes minutes, and TRL has no option against it."""
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True, dtype="float32"))


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(character.isdigit() for character in text)) for text in completions]


def config(out: Path, **options: Any) -> GRPOConfig:
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 3,
        "learning_rate": 3e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 1,
        "use_vllm": True,
    }
    return GRPOConfig(str(out), **{**usual, **options})


def trained(folder: Path, out: Path, strategies: list[Any], **options: Any) -> Seen:
    args = config(out, vllm_mode="colocate", vllm_max_model_length=64, vllm_gpu_memory_utilization=0.3, **options)
    data = Dataset.from_dict({"prompt": PROMPTS * 4})
    trainer = Seen(str(folder), reward, args, data, strategies=strategies)
    trainer.train()
    return trainer


def test_bottom_p_element_wise_temperature_and_egsw_train_with_vllm(policy_folder: Path, tmp_path: Path) -> None:
    rates = dict.fromkeys(PROMPTS[:2], 1.0) | dict.fromkeys(PROMPTS[2:], 0.0)
    strategies = [
        xs.BottomP(0.8, frequency=0.5),
        xs.ElementWiseTemperature(easy=0.7, hard=1.4, solve_rates=rates),
        xs.EntropyGuidedWeighting(alpha=0.3),
    ]
    trainer = trained(policy_folder, tmp_path, strategies)
    assert len(trainer.seen) == 3
    for batch in trainer.seen:
        rollouts, logps = batch["rollouts"], batch["logps"]
        assert set(batch["temperature"]) <= {0.7, 1.4}
        # vLLM has the weights of this very step: its log q is that of the training model
        for rollout, own in zip(rollouts, logps, strict=True):
            np.testing.assert_allclose(own, rollout.sampling_logps, atol=1e-3)
            assert rollout.entropy.isfinite().all()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    logged = trainer.state.log_history[0]
    assert logged["strategy/bottom_p/p"] == 0.8
    assert any(name.startswith("sampling/importance_sampling_ratio") for name in logged)
    before = torch.nn.utils.parameters_to_vector(
        type(trainer.model).from_pretrained(policy_folder).parameters()  # type: ignore[arg-type]
    )
    after = torch.nn.utils.parameters_to_vector(trainer.model.parameters())
    assert float((after - before).detach().abs().max()) > 1e-3


def test_temperatures_by_position_and_a_correction_of_our_own(policy_folder: Path, tmp_path: Path) -> None:
    strategies = [xs.AnnealedTemperature(), xs.BottomP(0.8, per="sequence", frequency=0.5), xs.ImportanceCorrection()]
    trainer = trained(policy_folder, tmp_path, strategies, vllm_importance_sampling_correction=False)
    assert len(trainer.seen) == 3
    for batch in trainer.seen:
        assert len(batch["temperature"][0]) > 1  # one for each position
        for rollout, own in zip(batch["rollouts"], batch["logps"], strict=True):
            np.testing.assert_allclose(own, rollout.sampling_logps, atol=1e-3)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.isfinite(losses).all()


def test_what_vllm_cannot_do_is_refused_when_the_trainer_is_made(policy_folder: Path, tmp_path: Path) -> None:
    for strategy in (xs.EntropyBranching(), xs.LowProbabilityRegularization()):
        with pytest.raises(ValueError, match="engine='explorl'"):
            trained(policy_folder, tmp_path, [strategy])
