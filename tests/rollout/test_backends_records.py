"""Records of tokens that somebody else has drawn: the very ones that our engine makes while it draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.models import load_policy
from explorl.rollout import Engine, Rollouts, SamplingParams
from explorl.rollout.backends import vllm
from explorl.rollout.backends.token_stats import StatsPass, compute_token_stats
from explorl.rollout.backends.vllm import VllmEngine, VllmError
from explorl.rollout.backends.vllm_requests import VllmCompletion, build_chains

PROMPTS = [[5, 6, 7], [20, 9, 33, 41], [11]]


@pytest.fixture(scope="module")
def policy(small_policy: Path) -> Any:
    return load_policy(str(small_policy), device="cpu")


KINDS = {
    "plain": {"temperature": [0.5, 1.0, 2.0]},
    "cuts": {"temperature": 1.3, "top_k": [0, 20, 9], "top_p": 0.9, "min_p": 0.01, "bottom_p": [0.9, 0.6, 1.0]},
    "coin per token": {"bottom_p": [0.6, 0.8, 1.0], "bottom_p_frequency": [0.5, 0.2, 1.0]},
    "coin per sequence": {"bottom_p": 0.6, "bottom_p_frequency": 0.5, "bottom_p_per": "sequence"},
    "penalty": {"repetition_penalty": [1.0, 1.5, 0.8], "temperature": 0.8},
    "by position": {"temperature_by_position": [(2.0, 1.0, 0.5), (0.7,), (1.0, 3.0)], "top_p": 0.9},
    "greedy": {"temperature": [0.0, 1.0, 0.0], "bottom_p": 0.5},
}


@pytest.mark.parametrize("rows", [None, 4], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_records_of_a_pass_are_those_of_the_engine(policy: Any, kind: str, rows: int | None) -> None:
    params = SamplingParams(**KINDS[kind], max_tokens=[12, 5, 9], seed=3)  # type: ignore[arg-type]
    engine = Engine(policy.model, policy.tokenizer)
    wanted = engine.generate(PROMPTS, 3, params)
    requests = engine.requests(PROMPTS, 3, params)
    chains = build_chains(requests, params)
    found = compute_token_stats(StatsPass(policy.model, rows), requests, chains, [one.token_ids for one in wanted])
    for row, one in enumerate(wanted):
        size = len(one)
        for name in ("logps", "sampling_logps", "entropy"):
            torch.testing.assert_close(getattr(found, name)[row, :size], getattr(one, name), atol=2e-5, rtol=1e-4)
        assert found.branching[row, :size].tolist() == one.branching.tolist()
        assert not found.logps[row, size:].any()
    assert bool(found.coin_logps.any()) == (kind == "coin per token")
    assert not policy.model.training


class Replay:
    """Draws what our engine has drawn."""

    context = 100

    def __init__(self, rollouts: Rollouts | None = None, more: list[int] | None = None, reason: str = "") -> None:
        self.rollouts, self.more, self.reason, self.options = rollouts, more or [], reason, list[Any]()

    def sample(self, prompts: Any, options: Any) -> list[VllmCompletion]:
        self.options = list(options)
        if "only" in str(options[0].get("extra_args")):
            only = [one["extra_args"]["explorl_only"] for one in options]
            return [VllmCompletion([token], [0.0], "length") for token in only]
        assert self.rollouts is not None
        return [
            VllmCompletion([*one.token_ids, *self.more], [0.0] * 99, self.reason or str(one.finish_reason))
            for one in self.rollouts
        ]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "need_vllm", lambda: None)


def test_an_engine_on_another_sampler_returns_rollouts_as_ours(policy: Any, there: None) -> None:
    params = SamplingParams(bottom_p=0.8, stop=["1", "7"], max_tokens=40, seed=5)
    wanted = Engine(policy.model, policy.tokenizer).generate(PROMPTS, 4, params)
    replay = Replay(wanted, more=[6, 6])  # it may notice a stop string late
    done: list[int] = []
    found = VllmEngine(policy.model, policy.tokenizer, replay).generate(
        PROMPTS, 4, params, on_finish=lambda one: done.append(one.request)
    )
    assert done == list(range(12))
    assert {one.finish_reason for one in wanted} >= {"stop"}
    for one, two in zip(found, wanted, strict=True):
        if two.stop is None:
            continue
        assert (one.token_ids, one.text, one.stop, one.finish_reason) == (two.token_ids, two.text, two.stop, "stop")
        assert (one.request, one.prompt_index, one.sample_index) == (two.request, two.prompt_index, two.sample_index)
    asked = replay.options[0]
    assert asked["extra_args"] == {"explorl_bottom_p": 0.8}
    assert (asked["top_p"], asked["top_k"], asked["min_p"], asked["ignore_eos"]) == (1.0, 0, 0.0, True)
    assert len({one["seed"] for one in replay.options}) == 12


def test_a_length_limit_is_no_stop(policy: Any, there: None) -> None:
    params = SamplingParams(max_tokens=6, stop_token_ids=[], seed=1)
    wanted = Engine(policy.model, policy.tokenizer).generate(PROMPTS, 1, params)
    found = VllmEngine(policy.model, policy.tokenizer, Replay(wanted)).generate(PROMPTS, 1, params)
    assert [one.finish_reason for one in found] == ["length"] * 3
    assert found.padded().truncated.all()


def test_what_goes_wrong_is_said_in_words(policy: Any, there: None) -> None:
    params = SamplingParams(max_tokens=2, seed=1)
    wanted = Engine(policy.model, policy.tokenizer).generate(PROMPTS, 1, params)
    broken = VllmEngine(policy.model, policy.tokenizer, Replay(wanted, reason="abort"))
    with pytest.raises(VllmError, match="vLLM ended 3 of 3 requests with 'abort'"):
        broken.generate(PROMPTS, 1, params)

    class Deaf(Replay):
        def sample(self, prompts: Any, options: Any) -> list[VllmCompletion]:
            return [VllmCompletion([3], [0.0], "length") for _ in prompts]

    deaf = VllmEngine(policy.model, policy.tokenizer, Deaf())
    assert len(deaf.generate(PROMPTS, 1, SamplingParams(max_tokens=1))) == 3  # nothing that it would not do
    with pytest.raises(VllmError, match="does not know Explorl's logits processor"):
        deaf.generate(PROMPTS, 1, SamplingParams(max_tokens=1, top_p=0.9))
    for given, words in [
        ({"min_p_mass": 0.1}, "engine='explorl'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            deaf.generate(PROMPTS, 1, SamplingParams(**given))  # type: ignore[arg-type]


def test_without_vllm_it_says_what_to_install(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VllmError, match=r"pip install explorl\[vllm\]"):
        VllmEngine(policy.model, policy.tokenizer, "http://localhost:1")
