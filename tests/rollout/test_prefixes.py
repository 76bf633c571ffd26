"""Prompts that are kept for later calls, and when they must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.runner import Runner

from .models import build, prompts
from .test_engine import check_records, same_tokens

PARAMS = SamplingParams(max_tokens=6, seed=2, stop_token_ids=())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the prompts that were computed."""
    lengths: list[int] = []
    original = Runner.prefill

    def counting(self: Runner, at: Any, ids: Any) -> None:
        lengths.extend(len(prompt) for prompt in ids)
        original(self, at, ids)

    monkeypatch.setattr(Runner, "prefill", counting)
    return lengths


@pytest.mark.usefixtures("place")
def test_prompts_serve_later_calls(llama: Any, computed: list[int]) -> None:
    ids = prompts((9, 14, 6))
    engine = Engine(llama, keep_prefixes=True)
    first = engine.generate(ids, 2, PARAMS)
    computed.clear()
    assert same_tokens(engine.generate(ids, 2, PARAMS), first)
    assert computed == []
    session = engine.open([ids[1]], 3, PARAMS)
    session.run()
    session.extend(0, [5, 6], max_tokens=10)
    session.run()
    session.close()
    assert computed == []
    engine.generate([ids[2], prompts((14,), seed=9)[0], ids[1]], 1, PARAMS)
    assert computed == [14]
    plain = Engine(llama)
    plain.generate(ids, 1, PARAMS)
    computed.clear()
    plain.generate(ids, 1, PARAMS)
    assert sorted(computed) == [6, 9, 14]


def step(kind: Any, **how: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-4, **how)
        model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
        optimizer.step()
        model.zero_grad()

    return change


def behind_torchs_back(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] += 0.25


def permuted(model: Any) -> None:
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data.copy_(weight.data.flip(0))


def moved(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 1.001


def loaded(model: Any) -> None:
    model.load_state_dict({name: value + 0.01 for name, value in model.state_dict().items()})


CHANGES: dict[str, Callable[[Any], None]] = {
    "sgd": step(torch.optim.SGD),
    "adamw": step(torch.optim.AdamW),
    "foreach": step(torch.optim.AdamW, foreach=True),
    "fused": step(torch.optim.AdamW, fused=True),
    "data": behind_torchs_back,
    "permuted": permuted,
    "moved": moved,
    "loaded": loaded,
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_prompt_outlives_the_weights_that_computed_it(name: str, computed: list[int]) -> None:
    model, ids = build("llama"), prompts((9, 6))
    engine = Engine(model, keep_prefixes=True)
    engine.generate(ids, 1, PARAMS)
    CHANGES[name](model)
    computed.clear()
    rollouts = engine.generate(ids, 1, PARAMS)
    assert sorted(n for n in computed if n in (6, 9)) == [6, 9]
    check_records(model, rollouts)


def test_no_prompt_outlives_its_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        build("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    engine = Engine(model, keep_prefixes=True)
    engine.generate(prompts((9, 6)), 1, PARAMS)
    with model.disable_adapter():
        check_records(model, engine.generate(prompts((9, 6)), 1, PARAMS))
    check_records(model, engine.generate(prompts((9, 6)), 1, PARAMS))
    model.merge_adapter()
    check_records(model, engine.generate(prompts((9, 6)), 1, PARAMS))
