"""What vLLM draws for us, against transformers: support, log-probabilities, frequencies, records."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from explorl.rollout import BottomPLogitsProcessor, Engine, SamplingParams
from explorl.rollout.backends.vllm import VllmEngine, VllmError, check_processor
from explorl.rollout.backends.vllm_requests import build_chains, request_options

pytestmark = pytest.mark.scale

PROMPTS = [[5, 6, 7], [20, 9, 33, 41], [11, 12]]


@pytest.fixture(scope="module")
def engine(policy: Any, llm: Any) -> VllmEngine:
    return VllmEngine(policy.model, policy.tokenizer, llm)


def everything(engine: VllmEngine, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """vLLM's own outputs with the log-probability of every token of the vocabulary."""
    from vllm import SamplingParams as VllmParams

    requests = engine.requests(prompts, 1, params)
    options = request_options(requests, params, build_chains(requests, params))
    vllm_params = [VllmParams(**{**option, "logprobs": -1}) for option in options]
    outputs = engine.sampler.llm.generate([{"prompt_token_ids": ids} for ids in prompts], vllm_params, use_tqdm=False)  # type: ignore[attr-defined]
    return [output.outputs[0] for output in outputs]


@torch.no_grad()
def logits_of(policy: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    return policy.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 5.0])
def test_bottom_p_of_each_row_keeps_what_transformers_keeps(
    engine: VllmEngine, policy: Any, temperature: float
) -> None:
    kinds = [{"bottom_p": 0.9}, {"bottom_p": 0.5, "top_p": 0.9}, {"bottom_p": 0.7, "top_k": 30, "min_p": 0.02}]
    rows = {name: [kind.get(name, off) for kind in kinds] for name, off in
            {"bottom_p": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}.items()}  # fmt: skip
    params = SamplingParams(temperature=temperature, max_tokens=12, stop_token_ids=[], seed=1, **rows)
    cut = apart = 0.0
    for prompt, kind, output in zip(PROMPTS, kinds, everything(engine, PROMPTS, params), strict=True):
        tokens = list(output.token_ids)
        logits = logits_of(policy, prompt, tokens)
        processor = BottomPLogitsProcessor(temperature=temperature, **kind)
        wanted = torch.log_softmax(processor(torch.zeros(len(tokens), 1).long(), logits), -1)
        for step, row in zip(output.logprobs, wanted, strict=True):
            logprobs = {token: entry.logprob for token, entry in step.items() if math.isfinite(entry.logprob)}
            assert sorted(logprobs) == row.isfinite().nonzero()[:, 0].tolist()
            cut += len(row) - len(logprobs)
            apart = max(apart, *(abs(logprobs[token] - float(row[token])) for token in logprobs))
    assert cut > 30  # it did act
    assert apart < 1e-4


def test_each_row_has_its_own_temperature(engine: VllmEngine, policy: Any) -> None:
    warm = [0.5, 0.005, 3.0]
    params = SamplingParams(temperature=warm, max_tokens=8, stop_token_ids=[], seed=2)
    for prompt, tau, output in zip(PROMPTS, warm, everything(engine, PROMPTS, params), strict=True):
        wanted = torch.log_softmax(logits_of(policy, prompt, list(output.token_ids)) / tau, -1)
        actual = [[step[token].logprob for token in range(wanted.shape[1])] for step in output.logprobs]
        np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-5)  # logits have six digits


def test_temperatures_by_position(engine: VllmEngine, policy: Any) -> None:
    curves = [(2.0, 1.0, 0.5), (0.7,), (1.0, 4.0)]
    params = SamplingParams(
        temperature_by_position=curves, top_p=0.9, bottom_p=0.9, max_tokens=6, stop_token_ids=[], seed=2
    )
    for prompt, curve, output in zip(PROMPTS, curves, everything(engine, PROMPTS, params), strict=True):
        tokens = list(output.token_ids)
        for position, (row, step) in enumerate(zip(logits_of(policy, prompt, tokens), output.logprobs, strict=True)):
            tau = curve[min(position, len(curve) - 1)]
            processor = BottomPLogitsProcessor(0.9, top_p=0.9, temperature=tau)
            wanted = torch.log_softmax(processor(torch.zeros(1, 1).long(), row[None]), -1)[0]
            actual = torch.tensor([step[token].logprob for token in range(len(row))])
            assert torch.equal(actual.isfinite(), wanted.isfinite())
            keep = wanted.isfinite()
            np.testing.assert_allclose(actual[keep], wanted[keep], atol=1e-4)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_records_are_those_of_our_engine(engine: VllmEngine, policy: Any, per: str) -> None:
    """log π, log q, entropy and branching of the very tokens that vLLM drew: forced through our engine one by one."""
    params = SamplingParams(
        temperature=[0.7, 1.0, 1.6],
        top_p=[1.0, 0.95, 0.9],
        bottom_p=[0.8, 1.0, 0.7],
        bottom_p_frequency=[0.5, 1.0, 0.4],
        bottom_p_per=per,  # type: ignore[arg-type]
        repetition_penalty=[1.0, 1.3, 1.2],
        max_tokens=10,
        stop_token_ids=[],
        seed=3,
    )
    rollouts = engine.generate(PROMPTS, 4, params)
    ours = Engine(policy.model, policy.tokenizer)
    assert [len(own) for own in rollouts] == [10] * 12
    for rollout in rollouts:
        prompt = PROMPTS[rollout.prompt_index]
        own = {name: getattr(params, name)[rollout.prompt_index] for name in
               ("temperature", "top_p", "bottom_p", "bottom_p_frequency", "repetition_penalty")}  # fmt: skip
        if per == "sequence" and own["bottom_p_frequency"] < 1:
            continue  # the side of the coin is not our engine's
        for position, token in enumerate(rollout.token_ids):
            step = SamplingParams(**own, max_tokens=1, stop_token_ids=[], seed=0)
            before = [*prompt, *rollout.token_ids[:position]]
            sampled = _drawn_as(ours, before, token, step)
            if sampled is None:
                continue
            assert float(rollout.logps[position]) == pytest.approx(float(sampled.logps[0]), abs=1e-4)
            assert float(rollout.sampling_logps[position]) == pytest.approx(float(sampled.sampling_logps[0]), abs=1e-4)
            assert float(rollout.entropy[position]) == pytest.approx(float(sampled.entropy[0]), abs=1e-4)
            assert int(rollout.branching[position]) == int(sampled.branching[0])


def _drawn_as(engine: Engine, prompt: list[int], token: int, params: SamplingParams) -> Any:
    """A draw of this token by our engine, among 64; None where there is none."""
    return next((rollout for rollout in engine.generate([prompt], 64, params) if rollout.token_ids == [token]), None)


def test_tokens_come_as_often_as_they_should(engine: VllmEngine, policy: Any) -> None:
    """χ² of 4,096 first tokens, by the mixture that bottom-p by chance makes."""
    n, prompt = 4096, PROMPTS[0]
    kind = {"temperature": 1.2, "top_p": 0.9, "bottom_p": 0.6}
    rollouts = engine.generate(
        [prompt], n, SamplingParams(**kind, bottom_p_frequency=0.5, max_tokens=1, stop_token_ids=[], seed=4)
    )
    counts = Counter(rollout.token_ids[0] for rollout in rollouts)
    logits = logits_of(policy, prompt, [0])
    with_it = torch.softmax(BottomPLogitsProcessor(**kind)(torch.zeros(1, 1).long(), logits), -1)
    without = torch.softmax(BottomPLogitsProcessor(**{**kind, "bottom_p": 1.0})(torch.zeros(1, 1).long(), logits), -1)
    expected = n * (0.5 * with_it + 0.5 * without)[0].double().numpy()
    assert set(counts) <= set(np.flatnonzero(expected > 0).tolist())
    likely = expected >= 5
    observed = np.array([counts.get(token, 0) for token in range(len(expected))])
    bins = [*zip(observed[likely], expected[likely], strict=True), (observed[~likely].sum(), expected[~likely].sum())]
    chi2 = sum((o - e) ** 2 / e for o, e in bins if e > 0)
    freedom = sum(e > 0 for _, e in bins) - 1
    assert freedom > 5
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside_it(engine: VllmEngine) -> None:
    params = SamplingParams(temperature=1.3, bottom_p=0.8, bottom_p_frequency=0.5, max_tokens=8, seed=7)
    first = [rollout.token_ids for rollout in engine.generate(PROMPTS, 2, params)]
    engine.generate(PROMPTS, 3, SamplingParams(max_tokens=3))
    assert [rollout.token_ids for rollout in engine.generate(PROMPTS, 2, params)] == first
    assert [rollout.token_ids for rollout in engine.generate(PROMPTS[:1], 2, params)] == first[:2]
    other = [rollout.token_ids for rollout in engine.generate(PROMPTS, 2, SamplingParams(max_tokens=8, seed=8))]
    assert other != first


def test_greedy_takes_the_likeliest_whatever_the_cuts_say(engine: VllmEngine, policy: Any) -> None:
    params = SamplingParams(temperature=[0.0, 1.0, 0.0], bottom_p=0.5, max_tokens=6, seed=1)
    ours = Engine(policy.model, policy.tokenizer).generate(PROMPTS, 1, params)
    rollouts = engine.generate(PROMPTS, 1, params)
    for row in (0, 2):
        assert rollouts[row].token_ids == ours[row].token_ids
        np.testing.assert_allclose(rollouts[row].logps, ours[row].logps, atol=1e-4)
        assert rollouts[row].sampling_logps.tolist() == [0.0] * len(rollouts[row])


def test_stop_tokens(engine: VllmEngine, policy: Any) -> None:
    free = engine.generate(PROMPTS, 2, SamplingParams(stop_token_ids=(), max_tokens=9, seed=5))
    ends = [one.token_ids[4] for one in free]
    stopped = engine.generate(PROMPTS, 2, SamplingParams(stop_token_ids=[[end] for end in ends], max_tokens=9, seed=5))
    for one, full, end in zip(stopped, free, ends, strict=True):
        assert one.token_ids == full.token_ids[: full.token_ids.index(end) + 1]
        assert one.finish_reason == "stop"


def test_stop_strings(engine: VllmEngine) -> None:
    free = engine.generate(PROMPTS, 2, SamplingParams(stop_token_ids=(), max_tokens=40, seed=5))
    string = free[0].text[5:7]
    stopped = engine.generate(PROMPTS, 2, SamplingParams(stop_token_ids=(), stop=[string], max_tokens=40, seed=5))
    assert stopped[0].finish_reason == "stop"
    for one in stopped:
        assert (one.finish_reason == "stop") == (one.stop == string) == one.text.endswith(string)
        assert one.text.count(string) <= 1


def test_what_vllm_cannot_do_is_refused_before_anything_runs(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="min_p_mass is 0"):
        engine.generate(PROMPTS, 1, SamplingParams(min_p_mass=0.02))
    with pytest.raises(ValueError, match="context is 256"):
        engine.generate([[5] * 256], 1)


def test_requests_of_others_are_left_alone_and_wrong_ones_refused(engine: VllmEngine) -> None:
    from vllm import SamplingParams as VllmParams
    from vllm.exceptions import VLLMValidationError

    llm = engine.sampler.llm  # type: ignore[attr-defined]
    prompt = [{"prompt_token_ids": PROMPTS[0]}]
    plain = VllmParams(max_tokens=8, seed=3, logprobs=0, extra_args={"somebody": 1})
    ours = VllmParams(max_tokens=8, seed=4, logprobs=0, extra_args={"explorl_bottom_p": 0.5})
    alone = llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0]
    beside = llm.generate(prompt * 2, [ours, plain], use_tqdm=False)[1].outputs[0]
    assert list(alone.token_ids) == list(beside.token_ids)
    for wrong, word in [
        (VllmParams(top_p=0.9, extra_args={"explorl_bottom_p": 0.5}), "explorl_top_p"),
        (VllmParams(extra_args={"explorl_bottom_p": 7}), "explorl_bottom_p is 7"),
    ]:
        with pytest.raises(VLLMValidationError, match=word):
            llm.generate(prompt, wrong, use_tqdm=False)


def test_a_vllm_without_the_processor_is_noticed(engine: VllmEngine) -> None:
    class Deaf:
        context = None

        def sample(self, prompts: Any, options: Any) -> Any:
            plain = [{name: value for name, value in option.items() if name != "extra_args"} for option in options]
            return engine.sampler.sample(prompts, plain)

    with pytest.raises(VllmError, match="install explorl where vLLM runs"):
        check_processor(Deaf(), 5)


def test_both_interfaces_of_vllm_take_the_processor() -> None:
    from vllm.v1.sample.logits_processor import LogitsProcessor as First
    from vllm.v1.sample.logits_processor import _load_logitsprocs_plugins
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as Second
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_plugins

    first, second = _load_logitsprocs_plugins(), _load_v2_logitsprocs_plugins()
    assert (
        [processor.__name__ for processor in first]
        == [processor.__name__ for processor in second]
        == ["ExplorlLogitsProcessor"]
    )
    assert issubclass(first[0], First)
    assert issubclass(first[0], Second)
    assert not getattr(first[0], "__abstractmethods__", ())
