"""Sampling with `model.generate`: slower than the engine, but well known, and therefore the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import torch

from explorl.rollout.requests import eos_token_ids, prompt_token_ids
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.params import is_per_request
from explorl.rollout.stops import StopStrings, first_stop

LISTS = ("stop", "stop_token_ids")
"""Parameters whose single value is a list."""


@dataclass(frozen=True)
class Completion:
    """One completion."""

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


def _check(params: SamplingParams) -> None:
    """Raise `ValueError` for parameters that `model.generate` does not support."""
    for field in fields(params):
        value = getattr(params, field.name)
        numbers = isinstance(value, tuple) and field.name not in LISTS
        if numbers or is_per_request(value):
            raise ValueError(
                f"{field.name} has one value per request, but model.generate takes one for all; give one value"
            )


def _options(model: Any, params: SamplingParams) -> dict[str, Any]:
    """Return the arguments of `model.generate` that sample in the order of `explorl.rollout.sampling`."""
    from explorl.rollout.backends.processors import BottomPLogitsProcessor  # imports transformers, which takes seconds

    options: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "repetition_penalty": params.repetition_penalty,
        "do_sample": params.temperature != 0,
    }
    processors: list[Any] = []
    warpers = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    if options["do_sample"] and params.bottom_p != 1:  # bottom-p comes last, so our processor applies the others too
        bottom_p_options: Any = {"frequency": params.bottom_p_frequency, "per": params.bottom_p_per, **warpers}
        processors.append(BottomPLogitsProcessor(params.bottom_p, **bottom_p_options))  # type: ignore[arg-type]
        warpers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if options["do_sample"]:
        options |= {**warpers, "min_p": warpers["min_p"] or None}
    return options | ({"logits_processor": processors} if processors else {})


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
    """Return ``n`` completions of each prompt, prompt by prompt, sampled ``batch_size`` sequences at a time.

    Every parameter must have one value for all requests. Raise `ValueError` for what `model.generate` does not support.
    """
    if params.temperature_by_position is not None or params.min_p_mass is not None:
        raise ValueError("temperature_by_position and min_p_mass are not supported by model.generate; use the engine")
    _check(params)
    prefix = tokenizer(params.prefix, add_special_tokens=False)["input_ids"] if params.prefix else []
    ids = [[*prompt_token_ids(tokenizer, prompt), *prefix] for prompt in prompts]
    requests = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(n)]
    stop_ids: Any = params.stop_token_ids
    ends = set(eos_token_ids(model, tokenizer) if stop_ids is None else stop_ids)
    stops = StopStrings([params.stop], tokenizer)  # type: ignore[list-item]
    options = _options(model, params) | {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": sorted(ends) or [-1]}
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
                    cut = stops.cut(0, np.array(tokens))
                    tokens = tokens[: None if cut is None else cut[0]]
                    text = tokenizer.decode(tokens, skip_special_tokens=True)
                    if cut is not None and (last := first_stop(text, [cut[1]])) is not None:
                        text = text[: last[0]]
                    reason: Literal["stop", "length"] = "length" if end is None and cut is None else "stop"
                    completions.append(Completion(prompt, sample, text, tokens, reason))
                if on_batch is not None:
                    on_batch(len(rows))
    finally:
        model.train(was_training)
    return completions
