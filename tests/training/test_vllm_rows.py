"""Rows that vLLM samples as strategies say, over processes: with a stand-in for TRL's side of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from explorl import ExplorationTrainer
from explorl import strategies as xs
from explorl.rollout.backends.vllm_requests import VllmCompletion
from explorl.training.grpo import vllm_rows
from explorl.training.grpo.refusals import check_arguments, check_sampling


class Server:
    """Answers each request with its prompt's first token and its temperature."""

    base_url, model = "http://here", "policy"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def _get(self, url: str) -> Any:
        return {"data": [{"max_model_len": 77}]}

    def _post(self, url: str, json: dict[str, Any]) -> Any:
        assert url == "http://here/v1/completions"
        self.asked.append(json)
        logprobs = {"token_logprobs": [-json["temperature"]]}
        return {"choices": [{"token_ids": [json["prompt"][0]], "logprobs": logprobs, "finish_reason": "length"}]}


def on_process(monkeypatch: pytest.MonkeyPatch, index: int, others: list[Any], answer: Any) -> SimpleNamespace:
    """One of two processes: the other's rows, and what the main process has to tell."""

    def gather(rows: list[Any]) -> list[Any]:
        return rows + others if index == 0 else others + rows

    def broadcast(values: list[Any], from_process: int) -> None:
        assert from_process == 0
        if index:
            values[:] = [answer]

    monkeypatch.setattr(vllm_rows, "gather_object", gather)
    monkeypatch.setattr(vllm_rows, "broadcast_object_list", broadcast)
    accelerator = SimpleNamespace(is_main_process=index == 0, process_index=index)
    client = {"vllm_client": Server()} if index == 0 else {}
    return SimpleNamespace(mode="server", accelerator=accelerator, **client)


OPTIONS = [{"temperature": 0.5, "extra_args": {"explorl_bottom_p": 0.9}, "detokenize": False}, {"temperature": 1.5}]


def test_the_main_process_asks_the_server_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [([8], {"temperature": 0.25}), ([9], {"temperature": 0.75, "min_p": 0.1})]
    generation = on_process(monkeypatch, 0, other, None)
    sampler = vllm_rows.TrlVllmSampler(generation)
    assert sampler.sample([[5, 6], [7]], OPTIONS) == [
        VllmCompletion([5], [-0.5], "length"),
        VllmCompletion([7], [-1.5], "length"),
    ]
    requests = {tuple(request["prompt"]): request for request in generation.vllm_client.asked}
    assert requests[5, 6]["vllm_xargs"] == {"explorl_bottom_p": 0.9}
    assert requests[7,]["vllm_xargs"] is None
    assert requests[9,]["min_p"] == 0.1
    assert not {"extra_args", "detokenize"} & requests[5, 6].keys()
    assert len(requests) == 4
    assert sampler.context == 77


def test_another_process_takes_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    everybodys = [([row], [-1.0], "stop") for row in range(4)]
    sampler = vllm_rows.TrlVllmSampler(on_process(monkeypatch, 1, [([1], {})] * 2, everybodys))
    assert sampler.sample([[5], [6]], OPTIONS) == [
        VllmCompletion([2], [-1.0], "stop"),
        VllmCompletion([3], [-1.0], "stop"),
    ]


def test_a_colocated_vllm_that_sleeps_is_woken_and_given_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    llm = SimpleNamespace(wake_up=lambda tags: events.append(tags), sleep=lambda level: events.append(level))
    generation = SimpleNamespace(
        mode="colocate", enable_sleep_mode=True, _llm_weights_sleeping=True, tensor_parallel_size=1, llm=llm,
        sync_weights=lambda: events.append("weights"),
    )  # fmt: skip
    monkeypatch.setattr(
        vllm_rows.ColocatedVllm, "sample", lambda self, prompts, options: events.append("draw") or list(prompts)
    )
    assert vllm_rows.TrlVllmSampler(generation).sample([[5], [6]], OPTIONS) == [[5], [6]]
    assert events == ["weights", ["kv_cache"], "draw", 2]
    assert generation._llm_weights_sleeping


def trainer(**options: Any) -> SimpleNamespace:
    args = SimpleNamespace(
        vllm_structured_outputs_regex=options.pop("regex", None),
        generation_kwargs=options.pop("generation_kwargs", None),
    )
    base = {"use_vllm": True, "tools": [], "environment_factories": None, "sees_images": False, "args": args}
    numbers = {"temperature": 0.9, "top_p": 0.95, "top_k": -1, "min_p": None, "repetition_penalty": 1.0}
    return SimpleNamespace(**{**base, **numbers, "max_completion_length": 30, "eos_token_ids": [2], **options})


@pytest.mark.parametrize(
    ("options", "strategy", "words"),
    [
        ({"tools": [print]}, xs.BottomP(0.9), ("bottom_p sets how each row", "remove the tools")),
        ({"sees_images": True}, xs.BottomP(0.9), ("bottom_p", "images")),
        ({"regex": "a+"}, xs.BottomP(0.9), ("vllm_structured_outputs_regex",)),
        ({"generation_kwargs": {"seed": 1}}, xs.BottomP(0.9), ("'seed' in generation_kwargs", "repetition_penalty")),
    ],
)
def test_what_vllm_cannot_sample_so_is_refused(options: Any, strategy: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=words[0]) as error:
        check_sampling(trainer(strategies=[strategy], **options), None, {}, None, "")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (xs.EntropyBranching(), "entropy_branching lets completions branch"),
        (xs.LowProbabilityRegularization(), "needs the probabilities of other tokens"),
    ],
)
def test_a_strategy_that_vllm_cannot_serve_is_refused_before_it_is_loaded(
    strategy: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("it is loaded"))
    args = GRPOConfig("out", use_vllm=True, use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match=words) as error:
        ExplorationTrainer("nowhere", len, args, strategies=[xs.EntropyAdvantage(), strategy])
    assert "engine='explorl'" in str(error.value)
    check_arguments(args, [xs.BottomP(0.9), xs.EntropyAdvantage()], None)


def test_options_are_what_trl_would_sample_with() -> None:
    own = {"temperature": 1.1, "stop": ["</a>"], "stop_token_ids": [7], "min_p": None}
    check_sampling(trainer(generation_kwargs=own, strategies=[xs.BottomP(0.9)]), None, {}, None, "")
    assert vllm_rows.trl_sampling_options(trainer(generation_kwargs=own)) == {
        "temperature": 1.1, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 30,
        "stop_token_ids": [2, 7], "stop": ["</a>"],
    }  # fmt: skip
