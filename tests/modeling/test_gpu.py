"""What becomes of kernels on GPUs other than the one that they were measured on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from explorl.modeling import gpu, logit_blocks
from explorl.modeling.llama_pass import TrainingKernelOps, llama_pass
from explorl.rollout import Engine, SamplingParams, UnsupportedModel
from tests.rollout.models import build, prompts

language = pytest.importorskip("triton.language")
interpreted = pytest.mark.skipif(
    type(language.sum).__name__ != "InterpretedFunction", reason="kernels run on a CPU under TRITON_INTERPRET=1"
)
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    for known in (gpu.kernel_fault, gpu._warn):
        known.cache_clear()
    yield
    for known in (gpu.kernel_fault, gpu._warn):
        known.cache_clear()


def broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def rms_norm(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("explorl.modeling.triton_fused.rms_norm", rms_norm)
    monkeypatch.setattr(torch, "linspace", lambda *shape, device, **more: torch.ones(96))
    monkeypatch.setattr(gpu, "on", lambda device: torch.no_grad())


@interpreted
def test_a_kernel_that_runs_has_no_fault() -> None:
    assert gpu.kernel_fault(torch.device("cpu")) == ""


@interpreted
def test_a_kernel_with_wrong_numbers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorl.modeling.triton_fused.rms_norm", lambda x, *_: x)
    assert "wrong numbers" in gpu.kernel_fault(torch.device("cpu"))


def test_no_kernels_without_a_gpu() -> None:
    assert not gpu.kernels_run(torch.device("cpu"))


def test_a_host_that_cannot_compile_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken(monkeypatch, RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore"))
    with caplog.at_level(logging.WARNING):
        assert not gpu.kernels_run(CUDA)
        assert not gpu.kernels_run(CUDA)
        assert not logit_blocks.has_kernel(CUDA, torch.bfloat16)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "RuntimeError: Failed to find C compiler" in message
    assert "apt install gcc python3-dev" in message


def test_memory_that_is_full_says_nothing_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        gpu.kernels_run(CUDA)


def test_training_has_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    for runs in (True, False):
        monkeypatch.setattr("explorl.modeling.llama_pass.kernels_run", lambda device, runs=runs: runs)
        found = llama_pass(model)
        assert found is not None
        assert isinstance(found.ops, TrainingKernelOps) is runs


@pytest.fixture
def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose multiprocessors have too little memory for a kernel, as Triton says it."""
    from triton.runtime.errors import OutOfResources

    def attention(*_: Any, **__: Any) -> Any:
        raise OutOfResources(151_620, 101_376, "shared memory")

    monkeypatch.setattr("explorl.rollout.memory.triton_attention.decode_attention", attention)
    monkeypatch.setattr("explorl.rollout.engine.kernels_run", lambda device: True)


@interpreted
def test_the_engine_goes_on_without_kernels_that_do_not_run(
    without_room: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = build("llama"), prompts((5, 9))
    params = SamplingParams(max_tokens=6, seed=0)
    want = Engine(model, use_kernels=False).generate(ids, 2, params)
    with caplog.at_level(logging.WARNING):
        engine = Engine(model)
        got = [engine.generate(ids, 2, params) for _ in range(2)]
    assert engine._runner is not None
    assert not engine._runner.use_kernels
    for rollouts in got:
        assert [one.token_ids for one in rollouts] == [one.token_ids for one in want]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "without Triton kernels" in message
    assert "out of resource: shared memory, Required: 151620, Hardware limit: 101376" in message


@interpreted
def test_kernels_that_are_insisted_on_are_refused_in_words(without_room: None) -> None:
    with pytest.raises(UnsupportedModel, match="out of resource: shared memory"):
        Engine(build("llama"), use_kernels=True).generate(prompts((5,)), 1, SamplingParams(max_tokens=2))
