"""Turn prompts of any form into requests that the engine can run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.params import Tokens, is_whole, spread, token_list

logger = logging.getLogger(__name__)

_HEADS = ("\n", "a", "=")
"""Texts to tokenize before a continuation; several, as a tokenizer may merge one of them with the continuation."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a list of chat messages."""


@dataclass(frozen=True)
class Requests:
    """All requests of a call: prompt-major, sample-minor."""

    prompts: list[list[int]]
    n: int
    rows: Mapping[str, np.ndarray]
    """Sampling parameters, one value per request."""
    stops: Sequence[Sequence[str]]
    """Stop strings of each request."""
    stop_sets: tuple[tuple[int, ...], ...]
    """The distinct sets of stop tokens; ``rows["stop_set"]`` has each request's index."""
    seed: int
    curves: Sequence[Sequence[float]] = ()
    """The distinct temperatures by position; ``rows["curve"]`` has each request's index."""

    def __len__(self) -> int:
        return len(self.prompts) * self.n


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
    """Tokenize and check the prompts, and return the requests. Raise `ValueError` for what cannot be run."""
    if not is_whole(n) or n < 1:
        raise ValueError(f"n is {n!r}; ask for at least 1 sample per prompt")
    value: Any = prompts
    if isinstance(value, Mapping) or not hasattr(value, "__len__"):
        raise ValueError(f"prompts is {value!r}; give a list such as ['2 + 2 =']")
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError("prompts is empty or a single text; give a list such as ['2 + 2 =']")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop is {params.stop!r}, but the engine has no tokenizer; use stop_token_ids")
    texts: dict[str, list[int]] = {}  # a trainer passes each prompt once per sample
    ids = []
    prefix = _prefix(params.prefix, tokenizer)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            ids.append(_tokens(i, prompt, tokenizer) + prefix)
            continue
        if prompt not in texts:
            texts[prompt] = _tokens(i, prompt, tokenizer)
        ids.append(texts[prompt] + prefix)
    for i, tokens in enumerate(ids):
        _check(i, tokens, vocab, context)
    rows = dict(params.rows(len(ids), n))
    if context is not None:
        rows["max_tokens"] = _shorten(rows["max_tokens"], ids, n, context)
    sets, rows["stop_set"] = _stop_sets(spread("stop_token_ids", params.stop_token_ids, len(ids), n), tuple(eos), vocab)
    return Requests(ids, n, rows, spread("stop", params.stop, len(ids), n), sets, seed, params.curves)


def _stop_sets(ids: Sequence[Tokens | None], eos: Tokens, vocab: int) -> tuple[tuple[Tokens, ...], np.ndarray]:
    """Return the distinct sets of stop tokens, and the set of each request; None means the model's ``eos``."""
    sets: dict[Tokens, int] = {}
    set_of = np.zeros(len(ids), dtype=np.int64)
    for request, tokens in enumerate(ids):
        for token in tokens or ():
            if token >= vocab:
                raise ValueError(
                    f"stop token {token} of request {request} is outside the vocabulary; use ids from 0 to {vocab - 1}"
                )
        set_of[request] = sets.setdefault(eos if tokens is None else tokens, len(sets))
    return tuple(sets), set_of


def _prefix(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of the prefix of all prompts."""
    if text and tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    return continuation_tokens(tokenizer, text) if text else []


def continuation_tokens(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the tokens of a text that continues another one, without the space that some tokenizers prepend."""

    def encode(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, **options)["input_ids"])

    joins = tokenizer.decode([*encode("a"), *encode("b")]) == "ab"
    for head_text in () if joins else _HEADS:
        head, both = encode(head_text), encode(head_text + text)
        if both[: len(head)] == head:
            return both[len(head) :]
    return encode(text)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def render_prompt(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as the model sees it: text unchanged, messages through the model's chat template."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids")
    return str(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False))


def prompt_token_ids(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a prompt: text unchanged, messages through the model's chat template."""
    text = render_prompt(tokenizer, prompt)
    ids = _encode(
        tokenizer, text, special=isinstance(prompt, str) and getattr(tokenizer, "bos_token", None) is not None
    )
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; give it at least one character")
    return ids


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return every token that the model or its tokenizer declares to end a completion."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    model_ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    tokenizer_id = getattr(tokenizer, "eos_token_id", None)
    tokenizer_ids = [] if tokenizer_id is None else [tokenizer_id]
    return list(dict.fromkeys(int(token) for token in [*model_ids, *tokenizer_ids]))


def _tokens(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return prompt_token_ids(tokenizer, prompt) if prompt else []
    if isinstance(prompt, Sequence | np.ndarray) and len(prompt) and isinstance(prompt[0], Mapping):
        return prompt_token_ids(tokenizer, list(prompt))
    good = "a text, token ids or chat messages, such as '2 + 2 =', [13, 198] or [{'role': 'user', 'content': 'Hi'}]"
    return token_list(f"prompt {index}", prompt, good)


def _check(index: int, tokens: list[int], vocab: int, context: int | None) -> None:
    """Raise `ValueError` if a prompt is empty, too long, or has a token that the model does not know."""
    if not tokens:
        raise ValueError(f"prompt {index} is empty; give it at least one token, such as the beginning-of-text token")
    wrong = [token for token in tokens if not 0 <= token < vocab]
    if wrong:
        raise ValueError(f"prompt {index} has token id {wrong[0]}; the model has ids from 0 to {vocab - 1}")
    if context is not None and len(tokens) >= context:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens, but the model's context is {context}; "
            f"shorten it to {context - 1} tokens or less"
        )


def _shorten(limits: np.ndarray, prompts: Sequence[Sequence[int]], n: int, context: int) -> np.ndarray:
    """Return max_tokens, reduced to what the context leaves after each prompt."""
    room = np.repeat([context - len(tokens) for tokens in prompts], n)
    shortened = int((limits > room).sum())
    if shortened:
        logger.warning(
            "max_tokens of %d of %d requests exceeds the model's context of %d; shortened, down to %d",
            shortened,
            len(limits),
            context,
            int(np.minimum(limits, room).min()),
        )
    return np.minimum(limits, room)
