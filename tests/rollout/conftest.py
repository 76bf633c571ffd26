"""Models and a tokenizer for the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from explorl.rollout import memory_plan

from .models import shared


@pytest.fixture(scope="session")
def llama() -> Any:
    return shared("llama")


@pytest.fixture(params=["spans", "pages"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where keys and values are."""
    if request.param == "pages":
        monkeypatch.setattr(memory_plan, "SPANS", ())
        monkeypatch.setitem(memory_plan.PAGE, "cpu", 4)
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from explorl.models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def policy() -> Any:
    """A small model that writes the tiny tokenizer's characters."""
    from tests.small_llama import small_llama

    model = small_llama(seed=3, max_position_embeddings=256, initializer_range=0.02).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model
