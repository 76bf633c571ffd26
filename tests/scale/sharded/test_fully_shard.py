"""FSDP2's `fully_shard` on two processes over gloo: gathered weights are sampled from as a whole model is.

accelerate leaves FSDP out on CPUs, so the model is sharded here by torch itself. Run as a module, it is one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.modeling.answer_states import is_sharded
from explorl.modeling.token_records import answer_records
from explorl.models import load_policy
from explorl.rollout import Engine, SamplingParams
from explorl.training.sharding import gathered_weights, has_sharded_weights, why_not_gathered

pytestmark = pytest.mark.scale

PROMPTS = ["1 5 6=12\n", "2 7 9=18\n", "3 8 11=22\n"]


def sampled(model: Any, tokenizer: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, seed=7, bottom_p=0.9)
    return [rollout.token_ids for rollout in Engine(model, tokenizer).generate(PROMPTS, 2, params)]


def recorded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return answer_records(model, ids, torch.ones_like(ids), 8, rows=2, packed=False).logps


def one_of_two(policy: Path, out: Path) -> None:
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    plain, whole = load_policy(str(policy), device="cpu"), load_policy(str(policy), device="cpu").model
    model: Any = plain.model
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    # before any pass, behind which FSDP2 leaves the outermost weights whole
    optimizers = [torch.optim.SGD(some.parameters(), lr=0.1) for some in (model, whole)]
    ids = torch.arange(7, 7 + 4 * 16).view(4, 16)
    outcome: dict[str, Any] = {
        "spread": has_sharded_weights(model, accelerator),
        "why": why_not_gathered(model, accelerator),
        "sharded_first": is_sharded(model),
        "apart": float((recorded(model, ids) - recorded(whole, ids)).abs().max()),
    }
    for turn in range(2):
        with gathered_weights(model, accelerator):
            outcome[f"sharded_{turn}"] = is_sharded(model)
            outcome[f"tokens_{turn}"] = sampled(model, plain.tokenizer) == sampled(whole, plain.tokenizer)
            outcome[f"records_{turn}"] = float((recorded(model, ids) - recorded(whole, ids)).abs().max())
        outcome[f"after_{turn}"] = is_sharded(model)
        losses = [some(input_ids=ids, labels=ids).loss for some in (model, whole)]
        outcome[f"loss_{turn}"] = abs(float(losses[0].detach() - losses[1].detach()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    out.with_name(f"{accelerator.process_index}.json").write_text(json.dumps(outcome))
    torch.distributed.destroy_process_group()


def test_gathered_weights(small_policy: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "tests.scale.sharded.test_fully_shard", str(small_policy), str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    root = Path(__file__).parents[3]
    ended = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.json").exists(), ended.stderr[-6000:]
        outcome = json.loads((tmp_path / f"{rank}.json").read_text())
        assert outcome["spread"]
        assert outcome["why"] == ""
        assert outcome["sharded_first"]
        assert outcome["apart"] < 1e-5
        for turn in (0, 1):
            assert not outcome[f"sharded_{turn}"]
            assert outcome[f"tokens_{turn}"]
            assert outcome[f"records_{turn}"] < 1e-5
            assert outcome[f"after_{turn}"]  # they are taken apart again, and train on
            assert outcome[f"loss_{turn}"] < 1e-5


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), Path(sys.argv[2]))
