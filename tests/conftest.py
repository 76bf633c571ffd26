"""Shared fixtures: a real, tiny policy, and no network."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all test modules are imported
settings.load_profile("ci")  # the same examples everywhere and each time; `make fuzz` draws new ones


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run side by side, one process per core."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Every trainer begins with a collection of garbage; to look at all that is imported would take longer than a step.

    Only what a module's own tests leave behind is looked at.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules complain of what is left at the end


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """No test may switch off the logs of those that come after it."""
    yield
    switched_off, logging.root.manager.disable = logging.root.manager.disable, 0
    assert not switched_off, f"logging was left switched off up to level {switched_off}"


@pytest.fixture(scope="session")
def small_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer policy with the tiny tokenizer and random, not too flat weights."""
    from tests.small_llama import written

    return written(tmp_path_factory.mktemp("small-policy"))


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where Triton kernels can run: the GPU, or the CPU under Triton's interpreter."""
    language = pytest.importorskip("triton.language")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if type(language.sum).__name__ != "InterpretedFunction":
        pytest.skip("no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU")
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6's interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int.
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    return torch.device("cpu")
