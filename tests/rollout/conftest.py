"""Models and a tokenizer for the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from explorl.rollout import plan

from .models import shared


@pytest.fixture(scope="session")
def llama() -> Any:
    return shared("llama")


@pytest.fixture(params=["joined", "apart", "pages"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a short prompt's keys and values are: with those of every row, once for all rows, or in pages."""
    if request.param == "apart":
        monkeypatch.setattr(plan, "SHORT_PROMPT", 0)
    if request.param == "pages":
        monkeypatch.setattr(plan, "SPANS", ())
        monkeypatch.setitem(plan.PAGE, "cpu", 4)
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from explorl.models import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def policy(tokenizer: Any) -> Any:
    """A small model that writes the tiny tokenizer's characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model
