"""Small random policies with the tiny tokenizer's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from explorl.models import tiny_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def small_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """With weights that are not too flat; ``changes`` are of `SHAPE`."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{**SHAPE, **changes},
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def written(folder: Path, **changes: Any) -> Path:
    """The folder, with such a policy and its tokenizer in it."""
    small_llama(**changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
