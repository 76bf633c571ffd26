"""Shared fixtures: a real, tiny policy, and no network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported

from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run side by side, one process per core."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """No test may switch off the logs of those that come after it."""
    yield
    switched_off, logging.root.manager.disable = logging.root.manager.disable, 0
    assert not switched_off, f"logging was left switched off up to level {switched_off}"


@pytest.fixture(scope="session")
def small_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer policy with the tiny tokenizer and random, not too flat weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from explorl.models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("small-policy")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
