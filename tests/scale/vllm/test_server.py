"""`VllmEngine` against a server, as TRL's client speaks to one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from explorl.rollout import SamplingParams
from explorl.rollout.backends.vllm import VllmEngine, VllmError, VllmServer
from tests.scale.vllm.conftest import free_port

pytestmark = pytest.mark.scale

PROMPTS = [[5, 6, 7], [20, 9, 33, 41], [11, 12]]


def test_each_request_is_sampled_as_it_says(url: str, policy: Any) -> None:
    engine = VllmEngine(policy.model, policy.tokenizer, url)
    params = SamplingParams(
        temperature=[0.6, 1.0, 5.0],
        top_p=[1.0, 0.9, 1.0],
        bottom_p=[0.5, 0.7, 0.9],
        bottom_p_frequency=[1.0, 0.5, 1.0],
        max_tokens=[4, 9, 12],
        stop_token_ids=[],
        seed=3,
    )
    rollouts, logps = engine.generate_with_logps(PROMPTS, 2, params)
    assert [len(rollout) for rollout in rollouts] == [4, 4, 9, 9, 12, 12]
    for rollout, own in zip(rollouts, logps, strict=True):  # the server's log q is that of the model and our chain
        np.testing.assert_allclose(own, rollout.sampling_logps, atol=2e-4)
        assert float((rollout.sampling_logps - rollout.logps).max()) > 1e-3
    assert engine.sampler.context == 256
    again = engine.generate(PROMPTS, 2, params)
    assert [rollout.token_ids for rollout in again] == [rollout.token_ids for rollout in rollouts]


def test_a_wrong_request_says_what_is_wrong(url: str) -> None:
    sampler = VllmServer.at(url)
    wrong = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "extra_args": {"explorl_bottom_p": 7}}
    with pytest.raises(Exception, match="explorl_bottom_p is 7"):
        sampler.sample([[5]], [wrong])


def test_no_server_is_said_in_words() -> None:
    with pytest.raises(VllmError, match="no vLLM server answers"):
        VllmServer.at(f"http://127.0.0.1:{free_port()}")
