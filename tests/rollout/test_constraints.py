"""Bias, banned and allowed tokens, top-k records and stop tokens, one value per request."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, Rollouts, SamplingParams
from explorl.rollout.sampling import Active, rng
from explorl.rollout.sampling.constraints import bias_tables, stop_sets
from explorl.rollout.sampling.sample import sample_step
from explorl.rollout.scheduler import STATE_REALS
from explorl.rollout.state import BIAS_SET, KEY, LIMIT, RUNNING, STATUS, STEP, STOP_SET, TOP_K, SlotState

from .models import EOS, VOCAB, prompts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF = float("inf")


def forced(model: Any, rollouts: Rollouts, i: int) -> np.ndarray:
    """Logits of each token of a completion, from one forward pass."""
    prompt, completion = rollouts.prompt_ids[rollouts[i].prompt_index], rollouts[i].token_ids
    with torch.no_grad():
        return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double().numpy()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# What is drawn and what is recorded


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_q_knows_the_bias_and_log_pi_does_not(llama: Any, temperature: float) -> None:
    bias, banned, allowed = {7: 3.0, 9: -2.5, 30: 1.0}, [11, 12, 13], list(range(3, 60))
    params = SamplingParams(
        temperature=temperature, logit_bias=bias, banned_tokens=banned, allowed_tokens=allowed, max_tokens=12, seed=2
    )
    rollouts = Engine(llama).generate(prompts(), 2, params)
    for i, rollout in enumerate(rollouts):
        x = forced(llama, rollouts, i)
        edited = x.copy()
        for token, amount in bias.items():
            edited[:, token] += amount
        gone = sorted(set(range(VOCAB)) - set(allowed) | set(banned))
        edited[:, gone] = -INF
        at = np.arange(len(rollout)), np.array(rollout.token_ids)
        assert not set(rollout.token_ids) & set(gone)
        np.testing.assert_allclose(rollout.sampling_logps, log_softmax(edited / temperature)[at], atol=1e-4)
        np.testing.assert_allclose(rollout.logps, log_softmax(x / temperature)[at], atol=1e-4)
        policy = log_softmax(x)
        np.testing.assert_allclose(rollout.entropy, -(np.exp(policy) * policy).sum(-1), atol=1e-4)


def test_the_bias_comes_before_the_penalty_and_before_the_greedy_choice(llama: Any) -> None:
    """As `generate` does with sequence_bias: repeated tokens have their biased logits penalised."""
    from transformers import GenerationConfig

    ids, bias = prompts((9,))[0], dict.fromkeys(range(5, 40), 1.5)
    params = SamplingParams(temperature=0, logit_bias=bias, repetition_penalty=1.7, max_tokens=16, stop_token_ids=())
    config = GenerationConfig(
        max_new_tokens=16,
        do_sample=False,
        repetition_penalty=1.7,
        sequence_bias={(token,): amount for token, amount in bias.items()},
        pad_token_id=0,
        eos_token_id=VOCAB + 5,
    )
    want = llama.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :].tolist()
    found = Engine(llama).generate([ids], 1, params)
    assert found[0].token_ids == want
    plain = Engine(llama).generate([ids], 1, SamplingParams(temperature=0, max_tokens=16, stop_token_ids=()))
    assert plain[0].token_ids != want


def test_a_token_that_is_forced_and_one_that_is_banned(llama: Any) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=())
    free = Engine(llama).generate(prompts((5,)), 1, greedy)[0].token_ids
    only = Engine(llama).generate(prompts((5,)), 1, SamplingParams(allowed_tokens=[41], max_tokens=6))
    assert only[0].token_ids == [41] * 6
    assert float(only[0].sampling_logps.abs().max()) == 0.0
    banned = Engine(llama).generate(
        prompts((5,)), 1, SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(), banned_tokens=free[:1])
    )
    assert free[0] not in banned[0].token_ids


def test_allowed_tokens_that_the_model_gives_no_probability() -> None:
    x = torch.full((2, 9), -INF)
    x[:, 0] = 0.0
    state = make_state(SamplingParams(allowed_tokens=[4, 5], seed=1), 2, 9)
    sample_step(x, state, Active(bias=True))
    assert set(state.out_ints[0, :, 0].tolist()) <= {4, 5}
    assert state.ints[STATUS].tolist() == [RUNNING + 2] * 2  # the length limit, not an error


def test_with_values_that_change_nothing_the_same_bits(llama: Any) -> None:
    for extra in ({}, {"top_p": 0.9, "temperature": 0.7, "bottom_p": 0.9}):
        plain = SamplingParams(max_tokens=10, seed=3, **extra)
        same = SamplingParams(
            max_tokens=10, seed=3, banned_tokens=[], logprobs=4, stop_token_ids=[None, [EOS]] * 5, **extra
        )
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
        "logit_bias": [{5: 2.0}, {}, {8: -1.0}, {5: 2.0}, {}, {60: 4.0}],
        "banned_tokens": [None, [3, 4, 5], [], [90], None, None],
        "allowed_tokens": [None, list(range(50)), None, None, [20, 21, 22], None],
        "stop_token_ids": [[], [9], None, [5, 6, 7, 8, 10, 11, 12, 13, 14, 15], [20], []],
        "logprobs": [0, 3, 1, 0, 5, 2],
        "max_tokens": [9, 14, 9, 14, 9, 14],
    }
    together = Engine(llama, batch_size=batch_size).generate(ids, 2, SamplingParams(seed=8, **own))
    for i, rollout in enumerate(together):
        alone = {name: values[i] for name, values in own.items()}
        want = Engine(llama).generate(ids, 2, SamplingParams(seed=8, **alone))[i]
        assert rollout.token_ids == want.token_ids
        assert rollout.finish_reason == want.finish_reason
        torch.testing.assert_close(rollout.sampling_logps, want.sampling_logps)
        assert (rollout.top_ids is None) == (own["logprobs"][i] == 0)
        if rollout.top_ids is not None and want.top_ids is not None:
            assert rollout.top_ids.shape == (len(rollout), own["logprobs"][i])
            assert torch.equal(rollout.top_ids, want.top_ids)


def test_values_per_prompt(llama: Any) -> None:
    ids = prompts((4, 5))
    params = SamplingParams(allowed_tokens=[[30], [31]], max_tokens=3, seed=1)
    assert [r.token_ids for r in Engine(llama).generate(ids, 2, params)] == [[30] * 3, [30] * 3, [31] * 3, [31] * 3]


@pytest.mark.parametrize("temperature", [1.0, [0.7, 0.0]])
def test_the_likeliest_tokens_are_recorded(llama: Any, temperature: Any) -> None:
    """Of the policy at the row's temperature, whatever is banned or cut."""
    params = SamplingParams(
        temperature=temperature, top_p=0.8, banned_tokens=[50], logprobs=6, max_tokens=[5, 11, 7, 9], seed=4
    )
    rollouts = Engine(llama, batch_size=3).generate(prompts((3, 8)), 2, params)
    for i, rollout in enumerate(rollouts):
        tau = np.broadcast_to(temperature, 2)[i // 2] or 1.0
        logp = log_softmax(forced(llama, rollouts, i) / tau)
        order = np.argsort(-logp, axis=-1, kind="stable")[:, :6]
        assert rollout.top_ids is not None
        assert rollout.top_logps is not None
        assert rollout.top_ids.tolist() == order.tolist()
        np.testing.assert_allclose(rollout.top_logps, np.take_along_axis(logp, order, -1), atol=1e-4)
        drawn = torch.tensor(rollout.token_ids)[:, None] == rollout.top_ids
        torch.testing.assert_close(rollout.top_logps[drawn], rollout.logps[drawn.any(-1)], atol=0, rtol=0)


def test_an_engine_that_is_used_again_forgets_them(llama: Any) -> None:
    engine, plain = Engine(llama), SamplingParams(max_tokens=8, seed=5)
    before = engine.generate(prompts(), 1, plain)
    engine.generate(prompts(), 1, SamplingParams(logit_bias=[{i: 9.0} for i in range(5)], logprobs=3, max_tokens=8))
    engine.generate(prompts(), 1, SamplingParams(stop_token_ids=[[i] for i in range(5)], logprobs=2, max_tokens=8))
    after = engine.generate(prompts(), 1, plain)
    assert [r.token_ids for r in after] == [r.token_ids for r in before]
    assert after[0].top_ids is None


# Kernel against torch


def make_state(params: SamplingParams, rows: int, vocab: int, device: Any = "cpu") -> SlotState:
    values = params.rows(rows, 1)
    state = SlotState(rows, 3, vocab, torch.device(device))
    state.ints[KEY] = torch.from_numpy(rng.request_keys(params.seed or 0, range(rows)))
    state.ints[TOP_K] = torch.from_numpy(values["top_k"])
    state.ints[LIMIT], state.ints[STATUS] = 1, RUNNING
    state.reals.copy_(torch.from_numpy(np.stack([values[name] for name in STATE_REALS])))
    if params.constrained:

        def each(name: str) -> list[Any]:
            value = getattr(params, name)
            per_row = isinstance(value, tuple) and not isinstance(value[0], int)
            return list(value) if per_row else [value] * rows

        table, which = bias_tables(each("logit_bias"), each("banned_tokens"), each("allowed_tokens"), vocab)
        state.set_bias(torch.from_numpy(table))
        state.ints[BIAS_SET] = torch.from_numpy(which)
    state.allocate_tops(int(values["logprobs"].max()))
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
    params = SamplingParams(
        logit_bias=[{7: 3.0, 0: -1.0}, {}, {7: 1.0}],
        banned_tokens=[[4, 9], None, None],
        allowed_tokens=[None, list(range(100, 200)), [7, 8]],
        logprobs=6,
        seed=3,
        **more,
    )
    active = Active.of(params, params.rows(rows, 1))
    states = []
    for step in (sample_step, sample_step_kernel):
        state = make_state(params, rows, vocab, kernel_device)
        state.set_stops([[1], list(range(150)), [7, 8]])
        state.ints[STOP_SET], state.ints[LIMIT], state.ints[STEP] = torch.arange(rows), 3, 1
        if active.repetition:
            state.mark_seen(torch.arange(rows, device=kernel_device), [[row, 150, 8] for row in range(rows)])
        step(x, state, Active(**{**vars(active), "stop_sets": True}))
        states.append(state)
    want, got = states
    assert torch.equal(got.ints, want.ints)
    assert torch.equal(got.out_ints, want.out_ints)
    torch.testing.assert_close(got.out_reals, want.out_reals, atol=2e-5, rtol=2e-5)
    assert got.top_ids is not None
    assert torch.equal(got.top_ids, want.top_ids)
    assert got.top_ids[0, 1, :5].tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(got.top_logps, want.top_logps, atol=2e-5, rtol=2e-5)


# Parameters


def test_parameters_can_be_hashed_stored_and_read_back() -> None:
    params = SamplingParams(
        logit_bias=[{5: 1.0, 2: -3}, {}], banned_tokens=np.array([3, 4]), allowed_tokens=[None, range(3)], logprobs=2
    )
    assert hash(params)
    assert params.banned_tokens == (3, 4)
    stored = json.loads(json.dumps(asdict(params)))
    assert SamplingParams(**stored) == params
    assert SamplingParams(**json.loads(json.dumps(asdict(SamplingParams(logit_bias={7: 2.0}))))).logit_bias == {7: 2.0}
    for name in ("logit_bias", "banned_tokens", "allowed_tokens", "logprobs"):  # as in folders from before they existed
        assert getattr(SamplingParams(), name) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"logit_bias": {5: INF}}, r"logit_bias of token 5 is inf; use a number .* such as −2.0 \(banned_tokens"),
        ({"logit_bias": {5: float("nan")}}, "token 5 is nan"),
        ({"logit_bias": {5: True}}, "token 5 is True"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias contains 'a'; use token ids such as 13"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias contains -1"),
        ({"logit_bias": [5, 6]}, r"logit_bias is \[5, 6\]; use a mapping such as"),
        ({"logit_bias": 5}, "logit_bias is 5; use a mapping"),
        ({"banned_tokens": "abc"}, "banned_tokens is 'abc'; use token ids such as"),
        ({"banned_tokens": [1.5]}, "banned_tokens contains 1.5"),
        ({"banned_tokens": [True]}, "banned_tokens contains True"),
        ({"banned_tokens": [1, [2]]}, "banned_tokens mixes 1 with lists"),
        ({"banned_tokens": 7}, r"banned_tokens is 7; use token ids such as \[13, 198\]"),
        ({"allowed_tokens": []}, r"allowed_tokens is empty; allow at least one token such as \[13\]"),
        ({"logprobs": -1}, "logprobs is -1; use an integer ≥ 0 such as 5"),
        ({"logprobs": 1.5}, "logprobs is 1.5"),
        ({"stop": [["a"], "b"]}, r"stop mixes \['a'\] with texts"),
        ({"stop": ["a", 3]}, "stop contains 3; use texts such as"),
        ({"stop": ["a", None]}, "stop contains None; use texts such as"),
        ({"stop": "\udcff"}, "stop contains .*sampled"),
        ({"stop": [["a"], [""]]}, "empty string"),
        ({"stop": [[["a"]], ["b"]]}, "stop mixes"),
        ({"stop": 3}, "stop is 3; use texts such as"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3"),
        ({"seed": 1.5}, "seed is 1.5; use an integer such as 1, or None"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"seed": True}, "seed is True"),
        ({"prefix": None}, "prefix is None; use a text such as '<think>'"),
        ({"prefix": [1, 2]}, "prefix contains 1; use a text such as '<think>'"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"logit_bias": {VOCAB: 1.0}},
            f"logit_bias of request 0 contains token {VOCAB}, .* use ids from 0 to {VOCAB - 1}",
        ),
        ({"banned_tokens": [[1], [500], [2]]}, "banned_tokens of request 2 contains token 500"),
        ({"allowed_tokens": [500]}, "allowed_tokens of request 0 contains token 500"),
        ({"allowed_tokens": [[1], [], None]}, "allowed_tokens of request 2 is empty; allow at least one"),
        (
            {"allowed_tokens": [5, 6], "banned_tokens": [6, 5]},
            "banned_tokens has all of its allowed_tokens",
        ),
        ({"banned_tokens": range(VOCAB)}, "request 0 .*banned_tokens has all tokens of the model"),
        ({"stop_token_ids": [[1], [2], [500]]}, "stop token 500 of request 4 is outside the vocabulary"),
        ({"logprobs": 500}, f"logprobs is 500, but the model has {VOCAB} tokens"),
        (
            {"logit_bias": [{}, {}]},
            "logit_bias has 2 values; use one value, one for each of the 3 prompts, or .* 6 requests",
        ),
        ({"banned_tokens": [[1], [2]]}, "banned_tokens has 2 values"),
        ({"stop_token_ids": [[1]] * 5}, "stop_token_ids has 5 values"),
        ({"logprobs": [1, 2]}, "logprobs has 2 values"),
        ({"prefix": ["a"]}, "prefix has 1 values; give one, or one for each of the 3 prompts"),
    ],
)
def test_what_does_not_fit_the_model_or_the_requests(llama: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(llama).generate(prompts((3, 4, 5)), 2, SamplingParams(max_tokens=2, **values))


def test_requests_with_the_same_values_share_a_row() -> None:
    table, which = bias_tables([None, None, None, None], [(3,), (4,), (3,), None], [None] * 4, 6)
    assert which.tolist() == [0, 1, 0, 2]
    np.testing.assert_array_equal(table, [[0, 0, 0, -INF, 0, 0], [0, 0, 0, 0, -INF, 0], [0] * 6])
    sets, which = stop_sets([None, (1, 2), None, ()], (9,), 10)
    assert sets == ((9,), (1, 2), ())
    assert which.tolist() == [0, 1, 0, 2]


def test_rows_that_join_a_session_share_rows_with_those_before(llama: Any) -> None:
    kinds = [
        {"banned_tokens": [5, 6]},
        {"logit_bias": {7: 2.0}},
        {"logit_bias": [{}, {7: 2.0}]},
        {"logit_bias": {7: 3.0}},
    ]
    each = [SamplingParams(max_tokens=4, seed=1, **kinds[i % 4]) for i in range(12)]
    with Engine(llama).open(prompts((3, 4)), 1, each[0]) as session:
        for params in each[1:]:
            session.step(1)
            session.add(prompts((3, 4)), 1, params)
        session.run()
        assert session._tables.bias is not None
        assert len(session._tables.bias) == 4
        found = [rollout.token_ids for rollout in session.finished()]
    alone = [Engine(llama).generate(prompts((3, 4)), 1, params) for params in each]
    assert found == [rollout.token_ids for rollouts in alone for rollout in rollouts]
    heating = SamplingParams(max_tokens=2, temperature_by_position=[[1.0, 0.5], [2.0]])
    with Engine(llama).open(prompts((3, 4)), 1, heating) as session:
        session.add(prompts((3, 4)), 1, heating)
        assert session._tables.curves == [(1.0, 0.5), (2.0,)]


def test_a_prefix_per_prompt(policy: Any, tokenizer: Any) -> None:
    engine, params = Engine(policy, tokenizer), SamplingParams(max_tokens=3, prefix=["<think>", ""])
    rollouts = engine.generate(["1 + 2", "1 + 2"], 1, params)
    first, second = (tokenizer(text)["input_ids"] for text in ("1 + 2<think>", "1 + 2"))
    assert rollouts.prompt_ids == [first, second]
