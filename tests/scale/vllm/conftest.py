"""A small policy with heads as wide as vLLM's CPU attention wants them: in transformers, in vLLM, and on a server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small_llama import written

    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("policy")
    return written(folder, **shape, max_position_embeddings=1024, initializer_range=0.15)


@pytest.fixture(scope="session")
def policy(policy_folder: Path) -> Any:
    from explorl.models import load_policy

    return load_policy(str(policy_folder), device="cpu")


@pytest.fixture(scope="session")
def llm(policy_folder: Path) -> Any:
    pytest.importorskip("vllm")
    from vllm import LLM

    from explorl.rollout.backends.vllm import keep_weights_in_place

    keep_weights_in_place()
    return LLM(
        str(policy_folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        max_logprobs=-1,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def url(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The line of docs/vllm.md, with gloo in place of NCCL."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    # vllm-cpu has no `vllm` command, since that asks for the version of a package called vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy_folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--distributed-executor-backend", "uni"]  # the engine's process is the worker: one less to start
    command += ["--weight-transfer-config", '{"backend": "gloo"}']
    command += ["--worker-extension-cls", "tests.scale.vllm.gloo_weights.Worker"]
    own = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else there is no `uni`
    root = Path(__file__).parents[3]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=own, cwd=root, start_new_session=True)
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
