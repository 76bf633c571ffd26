"""Where the weights of a model are, and what follows for who samples and how log-probabilities are computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from explorl.core.config import ConfigError
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_setup import accumulation_steps
from explorl.training.sft.run import rows_of_process
from explorl.training.sharding import (
    clear_moments,
    has_sharded_weights,
    ignored_sharding,
    spread_devices,
    why_not_gathered,
)


def accelerator(**plugins: Any) -> Any:
    """As accelerate's, with these plugins and nothing else."""
    return SimpleNamespace(state=SimpleNamespace(**plugins), device=torch.device("cpu"))


@pytest.mark.parametrize(("stage", "spread"), [(0, False), (1, False), (2, False), (3, True)])
def test_only_the_third_stage_takes_weights_apart(stage: int, spread: bool) -> None:
    fake = accelerator(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    assert has_sharded_weights(nn.Linear(2, 2), fake) == spread
    assert why_not_gathered(nn.Linear(2, 2), fake) == ""


@pytest.mark.parametrize(("version", "word"), [(1, "FSDP1"), (2, "")])
def test_fsdp(version: int, word: str) -> None:
    fake = accelerator(fsdp_plugin=SimpleNamespace(fsdp_version=version))
    assert has_sharded_weights(nn.Linear(2, 2), fake)
    assert word in why_not_gathered(nn.Linear(2, 2), fake)
    assert bool(why_not_gathered(nn.Linear(2, 2), fake)) == bool(word)


def test_a_model_on_several_devices(make_trainer: Callable[..., Any]) -> None:
    """One that `device_map="auto"` has split is sampled and trained by TRL, and it is said once."""
    made = make_trainer(ExplorationTrainer).model
    assert spread_devices(made) == []
    for placed, expected in (
        ({"": 0}, []),
        ({"": "cpu"}, []),
        ({"a": 0, "b": "cuda:0"}, []),
        ({"a": 0, "b": 1}, ["cuda:0", "cuda:1"]),
        ({"a": 0, "b": "cpu"}, ["cpu", "cuda:0"]),
        ({"a": 0, "b": "disk"}, ["cuda:0", "meta"]),
    ):
        made.hf_device_map = placed
        assert spread_devices(made) == expected, placed


def test_offloaded_weights() -> None:
    from accelerate import cpu_offload

    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert spread_devices(model) == ["meta"]


def test_a_split_model_is_left_to_trl(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sampler", "logprobs"):
        monkeypatch.setattr(f"explorl.training.grpo.{module}.spread_devices", lambda model: ["cuda:0", "cuda:1"])
    with pytest.warns(UserWarning, match=r"spread over cuda:0, cuda:1 \(device_map\)") as caught:
        trainer = make_trainer(ExplorationTrainer)
    assert len([one for one in caught if "device_map" in str(one.message)]) == 1
    assert trainer.sampler.engine is None
    assert trainer.logprobs.packed is False
    with pytest.raises(ValueError, match="cannot sample here: its weights are spread over"):
        make_trainer(ExplorationTrainer, options={"engine": "explorl"})


@pytest.mark.parametrize(
    ("name", "message"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")]
)
def test_sharding_that_accelerate_leaves_out(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does on CPUs, where every process then holds everything."""
    nothing = SimpleNamespace(fsdp=None, deepspeed=None)
    assert ignored_sharding(nothing, accelerator()) == ""
    monkeypatch.setenv(name, "true")
    assert ignored_sharding(nothing, accelerator()) == message
    plugins = {"FSDP": "fsdp_plugin", "DeepSpeed": "deepspeed_plugin"}
    wrapped = accelerator(**{plugins[message]: SimpleNamespace(fsdp_version=2, zero_stage=2)})
    assert ignored_sharding(nothing, wrapped) == ""


def test_it_is_said(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.warns(UserWarning, match="FSDP is configured, but accelerate ignores it on a cpu device"):
        make_trainer(ExplorationTrainer)


def test_emptied() -> None:
    """Through wrappers, as accelerate and DeepSpeed put them around an optimizer."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert optimizer.state
    clear_moments(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer)))
    assert not optimizer.state
    with pytest.raises(TypeError, match="SimpleNamespace is not a torch"):
        clear_moments(SimpleNamespace())


def test_rows_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has as many rows however many processes there are."""
    assert accumulation_steps(32, 4, "training.micro_batch") == 8
    assert rows_of_process(32) == 32
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert accumulation_steps(32, 4, "training.micro_batch") == 2
    assert rows_of_process(32) == 8
    with pytest.raises(ConfigError, match=r"training\.micro_batch is 16, and 4 processes share 32 rows a step; use 8"):
        accumulation_steps(32, 16, "training.micro_batch")
    with pytest.raises(ConfigError, match="use as many processes as divide 30"):
        accumulation_steps(30, 2, "training.micro_batch")
    with pytest.raises(ConfigError, match=r"sft\.batch_size is 30.*use 32"):
        rows_of_process(30)
