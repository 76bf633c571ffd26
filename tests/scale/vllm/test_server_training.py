"""Training against a vLLM server, TRL's ``vllm_mode="server"``: requests, rows, records and weights go over the wire.

TRL hands weights over by NCCL, for which there has to be a GPU. Here they go by gloo (`tests.scale.vllm.gloo_weights`);
all else is TRL's client and a real server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from explorl import strategies as xs
from tests.scale.vllm import gloo_weights
from tests.scale.vllm.conftest import free_port
from tests.scale.vllm.test_training import PROMPTS, Seen, config, reward

pytestmark = pytest.mark.scale

DATA = Dataset.from_dict({"prompt": PROMPTS * 4})


def row_setting() -> list[Any]:
    rates = dict.fromkeys(PROMPTS[:2], 1.0) | dict.fromkeys(PROMPTS[2:], 0.0)
    return [
        xs.BottomP(0.8, frequency=0.5),
        xs.ElementWiseTemperature(easy=0.7, hard=1.4, solve_rates=rates),
        xs.EntropyGuidedWeighting(alpha=0.3),
    ]


def over_the_wire(url: str, out: Path, group_port: int | None = None, **options: Any) -> GRPOConfig:
    port = group_port or free_port()
    return config(out, vllm_mode="server", vllm_server_base_url=url, vllm_group_port=port, **options)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch, url: str, policy: Any) -> Iterator[None]:
    """In place of NCCL; the server has its first weights back at the end."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    for (module, name), own in gloo_weights.in_place_of_nccl().items():
        monkeypatch.setattr(module, name, own)
    yield
    client = gloo_weights.Client(base_url=url, group_port=free_port())
    client.init_communicator()
    client.update_model_params(policy.model)
    client.reset_prefix_cache()


def test_trl_itself_has_no_way_for_weights_without_a_gpu(url: str, policy_folder: Path, tmp_path: Path) -> None:
    """Its own trainer: should this no longer be so, what stands in for NCCL here can go."""
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        GRPOTrainer(str(policy_folder), reward, over_the_wire(url, tmp_path), DATA)


def test_bottom_p_element_wise_temperature_and_egsw_train_with_a_server(
    gloo: None, url: str, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[tuple[str, Any]] = []
    post = gloo_weights.Client._post

    def kept(self: Any, address: str, **request: Any) -> Any:
        posted.append((address.removeprefix(url), request.get("json")))
        return post(self, address, **request)

    monkeypatch.setattr(gloo_weights.Client, "_post", kept)
    strategies = row_setting()
    trainer = Seen(str(policy_folder), reward, over_the_wire(url, tmp_path), DATA, strategies=strategies)
    trainer.train()
    requests = [request for route, request in posted if route == "/v1/completions" and request["max_tokens"] > 1]
    assert len(requests) == 3 * 8
    assert {request["vllm_xargs"]["explorl_bottom_p"] for request in requests} == {0.8}
    assert {request["vllm_xargs"]["explorl_bottom_p_frequency"] for request in requests} == {0.5}
    warm = [request["temperature"] for request in requests]
    assert sorted(warm) == sorted(value for batch in trainer.seen for value in batch["temperature"])
    assert set(warm) == {0.7, 1.4}
    assert [route for route, _ in posted].count("/update_weights") == 3  # before each generation batch
    for batch in trainer.seen:  # the server has the weights of this very step
        for rollout, own in zip(batch["rollouts"], batch["logps"], strict=True):
            np.testing.assert_allclose(own, rollout.sampling_logps, atol=1e-3)
            assert rollout.entropy.isfinite().all()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    start = type(trainer.model).from_pretrained(policy_folder)
    moved = [(a - b).abs().max() for a, b in zip(trainer.model.parameters(), start.parameters(), strict=True)]
    assert float(torch.stack(moved).detach().max()) > 1e-3


def test_without_such_strategies_all_of_sampling_is_trls(
    gloo: None, url: str, policy_folder: Path, tmp_path: Path
) -> None:
    """Step for step what TRL's own trainer logs, when chance is fixed."""
    logged = []
    for trainer_class in (GRPOTrainer, Seen):
        args = over_the_wire(url, tmp_path, generation_kwargs={"seed": 3})
        trainer = trainer_class(str(policy_folder), reward, args, DATA)
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        logged.append([[entry[name] for name in ("loss", "reward", "entropy", "grad_norm")] for entry in steps])
    assert len(logged[0]) == 3
    assert min(step[-1] for step in logged[0]) > 1e-3
    np.testing.assert_allclose(logged[1], logged[0], rtol=1e-4, atol=1e-5)


def one_of_two(url: str, folder: str, out: Path, group_port: int) -> None:
    """A process of a training by two, which share the server; run as a module."""
    for (module, name), own in gloo_weights.in_place_of_nccl().items():
        setattr(module, name, own)
    args = over_the_wire(url, out, group_port, per_device_train_batch_size=4)
    trainer = Seen(folder, reward, args, DATA, strategies=row_setting())
    trainer.train()
    rows = [
        {"temperature": warm, "apart": float(np.abs(np.array(own) - rollout.sampling_logps.numpy()).max())}
        for batch in trainer.seen
        for rollout, warm, own in zip(batch["rollouts"], batch["temperature"], batch["logps"], strict=True)
    ]
    weights = [float(parameter.detach().double().sum()) for parameter in trainer.model.parameters()]
    sampled = [rollout.token_ids for batch in trainer.seen for rollout in batch["rollouts"]]
    path = out / f"{trainer.accelerator.process_index}.json"
    path.write_text(json.dumps({"rows": rows, "weights": weights, "drawn": sampled}))
    torch.distributed.destroy_process_group()


def test_two_processes_train_with_one_server(gloo: None, url: str, policy_folder: Path, tmp_path: Path) -> None:
    """The first asks for both, and each has the rows that it asked for."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.scale.vllm.test_server_training", url, str(policy_folder), str(tmp_path), str(free_port())]
    own = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, env=own, cwd=root, capture_output=True, text=True, check=False, timeout=400)
    assert ended.returncode == 0, ended.stderr[-6000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert results[0]["weights"] == pytest.approx(results[1]["weights"], abs=1e-6)
    assert results[0]["drawn"] != results[1]["drawn"]
    for result in results:
        assert len(result["rows"]) == 3 * 4
        assert max(row["apart"] for row in result["rows"]) < 1e-3
    assert {row["temperature"] for result in results for row in result["rows"]} == {0.7, 1.4}


if __name__ == "__main__":
    one_of_two(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
