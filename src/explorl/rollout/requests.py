"""From prompts in any form to requests that the engine can run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from explorl.rollout.sampling import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a list of chat messages."""


@dataclass(frozen=True)
class Requests:
    """All requests of a call: prompt-major, sample-minor."""

    prompts: list[list[int]]
    n: int
    rows: Mapping[str, np.ndarray]
    """Sampling numbers, one value per request."""
    stop_ids: tuple[int, ...]
    seed: int
    curves: Sequence[Sequence[float]] = ()
    """Temperatures by position; ``rows["curve"]`` says which of them a request has."""

    def __len__(self) -> int:
        return len(self.prompts) * self.n

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion can have together."""
        return max(len(prompt) for prompt in self.prompts) + int(self.rows["max_tokens"].max())

    @cached_property
    def different(self) -> list[list[int]]:
        """The prompts without repetitions: each is computed once."""
        return [list(prompt) for prompt in dict.fromkeys(tuple(prompt) for prompt in self.prompts)]

    @cached_property
    def which(self) -> list[int]:
        """Index in ``different`` of each request's prompt."""
        index = {tuple(prompt): i for i, prompt in enumerate(self.different)}
        return [index[tuple(prompt)] for prompt in self.prompts for _ in range(self.n)]


def prepare(
    prompts: Sequence[Prompt],
    n: int,
    params: SamplingParams,
    *,
    tokenizer: Any,
    vocab: int,
    context: int | None,
    eos: Sequence[int],
    seed: int,
) -> Requests:
    """Tokenizes and checks the prompts. Raises `ValueError` for what cannot be run, before anything is run."""
    if n < 1:
        raise ValueError(f"n is {n}; ask for at least 1 sample per prompt")
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError("prompts is empty or a single text; give a list such as ['2 + 2 =']")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop is {params.stop!r}, but the engine has no tokenizer; use stop_token_ids")
    prefix = _encode(tokenizer, params.prefix, special=False) if params.prefix else []
    texts: dict[str, list[int]] = {}  # a trainer gives each prompt once for every sample
    ids = []
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            ids.append(_tokens(i, prompt, tokenizer) + prefix)
            continue
        if prompt not in texts:
            texts[prompt] = _tokens(i, prompt, tokenizer) + prefix
        ids.append(list(texts[prompt]))
    for i, tokens in enumerate(ids):
        _check(i, tokens, vocab, context)
    rows = dict(params.rows(len(ids), n))
    if context is not None:
        rows["max_tokens"] = _shorten(rows["max_tokens"], ids, n, context)
    stop_ids = tuple(eos if params.stop_token_ids is None else params.stop_token_ids)
    for token in stop_ids:
        if params.stop_token_ids is not None and not 0 <= token < vocab:
            raise ValueError(f"stop token {token} is outside the vocabulary; use ids from 0 to {vocab - 1}")
    return Requests(ids, n, rows, stop_ids, seed, params.curves)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _tokens(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return _encode(tokenizer, prompt, special=getattr(tokenizer, "bos_token", None) is not None)
    if isinstance(prompt, Mapping):
        raise ValueError(f"prompt {index} is one chat message; give a list of messages")
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        if tokenizer is None:
            raise ValueError("the engine has no tokenizer; give prompts as token ids")
        text = tokenizer.apply_chat_template(items, add_generation_prompt=True, tokenize=False)
        return _encode(tokenizer, text, special=False)
    return [int(token) for token in items]


def _check(index: int, tokens: list[int], vocab: int, context: int | None) -> None:
    if not tokens:
        raise ValueError(f"prompt {index} is empty; give it at least one token, such as the beginning-of-text token")
    wrong = [token for token in tokens if not 0 <= token < vocab]
    if wrong:
        raise ValueError(f"prompt {index} holds token id {wrong[0]}; the model knows ids from 0 to {vocab - 1}")
    if context is not None and len(tokens) >= context:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens and the model's context is {context}; "
            f"shorten it to {context - 1} tokens or less"
        )


def _shorten(limits: np.ndarray, prompts: Sequence[Sequence[int]], n: int, context: int) -> np.ndarray:
    """max_tokens cut to what the context leaves after each prompt."""
    room = np.repeat([context - len(tokens) for tokens in prompts], n)
    cut = int((limits > room).sum())
    if cut:
        logger.warning(
            "max_tokens of %d of %d requests reaches beyond the model's context of %d; shortened, down to %d",
            cut,
            len(limits),
            context,
            int(np.minimum(limits, room).min()),
        )
    return np.minimum(limits, room)
