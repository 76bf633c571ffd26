"""A small policy with heads as wide as vLLM's CPU attention wants them, in transformers and in vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from explorl.models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("policy")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
