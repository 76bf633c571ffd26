"""Stop tokens per request, and the values that parameters may have."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.requests import prepare
from explorl.rollout.sampling import Active, rng
from explorl.rollout.sampling.sample import sample_step
from explorl.rollout.scheduler import STATE_REALS
from explorl.rollout.state import KEY, LIMIT, RUNNING, STATUS, STEP, STOP_SET, TOP_K, SlotState

from .models import EOS, prompts

INF = float("inf")


def test_with_values_that_change_nothing_the_same_bits(llama: Any) -> None:
    for extra in ({}, {"top_p": 0.9, "temperature": 0.7, "bottom_p": 0.9}):
        plain = SamplingParams(max_tokens=10, seed=3, **extra)
        same = SamplingParams(max_tokens=10, seed=3, stop_token_ids=[None, [EOS]] * 5, **extra)
        for one, other in zip(
            Engine(llama).generate(prompts(), 2, plain), Engine(llama).generate(prompts(), 2, same), strict=True
        ):
            assert one.token_ids == other.token_ids
            for name in ("logps", "sampling_logps", "entropy", "branching"):
                assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("batch_size", [2, 64])
def test_each_request_has_its_own(llama: Any, batch_size: int) -> None:
    """Requests run together draw what each draws in a call where all have its values."""
    ids = prompts((6, 6, 9))
    own: dict[str, list[Any]] = {
        "stop_token_ids": [[], [9], None, [5, 6, 7, 8, 10, 11, 12, 13, 14, 15], [20], []],
        "max_tokens": [9, 14, 9, 14, 9, 14],
    }
    together = Engine(llama, batch_size=batch_size).generate(ids, 2, SamplingParams(seed=8, **own))
    for i, rollout in enumerate(together):
        alone = {name: values[i] for name, values in own.items()}
        want = Engine(llama).generate(ids, 2, SamplingParams(seed=8, **alone))[i]
        assert rollout.token_ids == want.token_ids
        assert rollout.finish_reason == want.finish_reason
        torch.testing.assert_close(rollout.sampling_logps, want.sampling_logps)


def test_an_engine_that_is_used_again_forgets_them(llama: Any) -> None:
    engine, plain = Engine(llama), SamplingParams(max_tokens=8, seed=5)
    before = engine.generate(prompts(), 1, plain)
    engine.generate(prompts(), 1, SamplingParams(stop_token_ids=[[i] for i in range(5)], min_p_mass=0.1, max_tokens=8))
    after = engine.generate(prompts(), 1, plain)
    assert [r.token_ids for r in after] == [r.token_ids for r in before]
    assert after[0].min_p_mass is None


# Kernel against torch


def make_state(params: SamplingParams, rows: int, vocab: int, device: Any = "cpu") -> SlotState:
    values = params.rows(rows, 1)
    state = SlotState(rows, 3, vocab, torch.device(device))
    state.ints[KEY] = torch.from_numpy(rng.request_keys(params.seed or 0, range(rows)))
    state.ints[TOP_K] = torch.from_numpy(values["top_k"])
    state.ints[LIMIT], state.ints[STATUS] = 1, RUNNING
    state.reals.copy_(torch.from_numpy(np.stack([values[name] for name in STATE_REALS])))
    return state


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": [1.0, 0.0, 0.6]},
        pytest.param({"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_the_kernel_does_the_same(more: dict[str, Any], dtype: torch.dtype, kernel_device: torch.device) -> None:
    from explorl.rollout.sampling.kernel import sample_step_kernel

    vocab, rows = 300, 3
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(kernel_device, dtype)
    x[0, :5], x[2, 7] = x[0].max() + 1, -INF  # ties at the top
    params = SamplingParams(seed=3, **more)
    active = Active.of(params, params.rows(rows, 1))
    states = []
    for step in (sample_step, sample_step_kernel):
        state = make_state(params, rows, vocab, kernel_device)
        state.set_stops([[1], list(range(150)), [7, 8]])
        state.ints[STOP_SET], state.ints[LIMIT], state.ints[STEP] = torch.arange(rows), 3, 1
        state.allocate(active)
        if active.repetition:
            state.mark_seen(torch.arange(rows, device=kernel_device), [[row, 150, 8] for row in range(rows)])
        step(x, state, active)
        states.append(state)
    want, got = states
    assert torch.equal(got.ints, want.ints)
    assert torch.equal(got.out_ints, want.out_ints)
    torch.testing.assert_close(got.out_reals, want.out_reals, atol=2e-5, rtol=2e-5)


# Parameters


def test_parameters_can_be_hashed_stored_and_read_back() -> None:
    params = SamplingParams(stop_token_ids=[np.array([3, 4]), None], temperature=[1.0, 0.5], stop="a")
    assert hash(params)
    assert params.stop_token_ids == ((3, 4), None)
    assert SamplingParams(**json.loads(json.dumps(asdict(params)))) == params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": "abc"}, "stop_token_ids is 'abc'; use token ids such as"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids contains 1.5"),
        ({"stop_token_ids": [True]}, "stop_token_ids contains True"),
        ({"stop_token_ids": [1, [2]]}, "stop_token_ids mixes 1 with lists"),
        ({"stop_token_ids": 7}, r"stop_token_ids is 7; use token ids such as \[13, 198\]"),
        ({"stop": [["a"], "b"]}, r"stop mixes \['a'\] with texts"),
        ({"stop": ["a", 3]}, "stop contains 3; use texts such as"),
        ({"stop": ["a", None]}, "stop contains None; use texts such as"),
        ({"stop": "\udcff"}, "stop contains .*sampled"),
        ({"stop": [["a"], [""]]}, "empty string"),
        ({"stop": [[["a"]], ["b"]]}, "stop mixes"),
        ({"stop": 3}, "stop is 3; use texts such as"),
        ({"seed": 1.5}, "seed is 1.5; use an integer such as 1, or None"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": True}, "seed is True"),
        ({"prefix": None}, "prefix is None; use one text for all prompts, such as '<think>'"),
        ({"prefix": ["a"]}, "prefix is .*; use one text for all prompts"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop_token_ids": [[1], [2], [500]]}, "stop token 500 of request 4 is outside the vocabulary"),
        ({"stop_token_ids": [[1]] * 5}, "stop_token_ids has 5 values"),
        ({"top_p": [0.5, 0.9]}, "top_p has 2 values; use one value, one for each of the 3 prompts, or .* 6 requests"),
    ],
)
def test_what_does_not_fit_the_model_or_the_requests(llama: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(llama).generate(prompts((3, 4, 5)), 2, SamplingParams(max_tokens=2, **values))


def test_requests_with_the_same_stop_tokens_share_a_set() -> None:
    params = SamplingParams(stop_token_ids=[None, (1, 2), None, ()])
    requests = prepare([[5]] * 4, 1, params, tokenizer=None, vocab=10, context=None, eos=[9], seed=0)
    assert requests.stop_sets == ((9,), (1, 2), ())
    assert requests.rows["stop_set"].tolist() == [0, 1, 0, 2]
