"""Sampling by `model.generate`: slower than an engine, but what everybody knows, and so the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from explorl.rollout.sampling import SamplingParams


@dataclass(frozen=True)
class Completion:
    """One sampled answer."""

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


def prompt_token_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt: text as it stands, or messages through the model's chat template."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=tokenizer.bos_token is not None)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens")
    return list(ids)


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that the model or its tokenizer declares to end a completion."""
    declared = model.generation_config.eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    return ids


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    n: int,
    params: SamplingParams,
    *,
    batch_size: int = 64,
    on_batch: Callable[[int], None] | None = None,
) -> list[Completion]:
    """n completions of each prompt, prompt by prompt; `batch_size` sequences at a time. Parameters must be scalars."""
    if params.temperature_by_position is not None or params.min_p_mass is not None:
        raise ValueError("temperature_by_position and min_p_mass are for the engine; model.generate has neither")
    ids = [prompt_token_ids(tokenizer, prompt) for prompt in prompts]
    requests = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(n)]
    ends = set(eos_token_ids(model, tokenizer))
    greedy = params.temperature == 0
    options: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "repetition_penalty": params.repetition_penalty,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": sorted(ends),
        "do_sample": not greedy,
    }
    if not greedy:
        options |= {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p or None,
        }
    was_training = model.training
    model.eval()
    completions = []
    try:
        with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
            if params.seed is not None:
                torch.manual_seed(params.seed)
            for start in range(0, len(requests), batch_size):
                rows = requests[start : start + batch_size]
                longest = max(len(ids[prompt]) for prompt, _ in rows)
                padded = [[tokenizer.pad_token_id] * (longest - len(ids[p])) + ids[p] for p, _ in rows]
                mask = [[0] * (longest - len(ids[p])) + [1] * len(ids[p]) for p, _ in rows]
                output = model.generate(
                    input_ids=torch.tensor(padded, device=model.device),
                    attention_mask=torch.tensor(mask, device=model.device),
                    **options,
                )[:, longest:].tolist()
                for (prompt, sample), tokens in zip(rows, output, strict=True):
                    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
                    tokens = tokens[:end]
                    text = tokenizer.decode(tokens, skip_special_tokens=True)
                    completions.append(Completion(prompt, sample, text, tokens, "length" if end is None else "stop"))
                if on_batch is not None:
                    on_batch(len(rows))
    finally:
        model.train(was_training)
    return completions
