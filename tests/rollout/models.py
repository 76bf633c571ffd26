"""Small models of every tested architecture, with random weights that are not too flat."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
EOS = 2
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
}
GQA = {**SHARED, "num_key_value_heads": 2}

BUILDERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GQA)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**GQA, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=16)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GQA,
            head_dim=24,
            sliding_window=8,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GQA,
            head_dim=24,
            sliding_window=8,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=5.0,
            attn_implementation="eager",  # older transformers drop the soft cap in others
        )
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHARED)),
}


def build(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0 if "embed" in key or "lm_head" in key else 3.0)
            elif "norm" in key and "bias" not in key:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@cache
def shared(name: str) -> Any:
    """The model that `build` gives, for tests that only read it: it is built and tried out once."""
    return build(name)


def prompts(lengths: tuple[int, ...] = (5, 17, 1, 9, 30), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
