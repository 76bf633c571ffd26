"""Turn prompts of any form into requests that the engine can run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.constraints import bias_tables, is_whole, spread, stop_sets, token_list

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
    """The distinct sets of stop tokens."""
    stop_set: np.ndarray
    """Index of each request's set in ``stop_sets``."""
    bias: np.ndarray | None
    """The distinct rows (sets, vocab) that are added to the logits; None if there are none."""
    bias_set: np.ndarray
    """Index of each request's row in ``bias``."""
    seed: int
    curves: Sequence[Sequence[float]] = ()
    """The distinct temperatures by position; ``rows["curve"]`` has each request's index."""

    def __len__(self) -> int:
        return len(self.prompts) * self.n

    @property
    def longest(self) -> int:
        """Most tokens that a prompt and its completion can have together."""
        return max(len(prompt) for prompt in self.prompts) + int(self.rows["max_tokens"].max())

    @cached_property
    def unique_prompts(self) -> list[list[int]]:
        """The prompts without repetitions; each is computed once."""
        return [list(prompt) for prompt in dict.fromkeys(tuple(prompt) for prompt in self.prompts)]

    @cached_property
    def prompt_of(self) -> list[int]:
        """Index of each request's prompt in ``unique_prompts``."""
        index = {tuple(prompt): i for i, prompt in enumerate(self.unique_prompts)}
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
    outputs: int | None = None,
) -> Requests:
    """Tokenize and check the prompts, and return the requests. Raise `ValueError` for what cannot be run.

    ``vocab`` is the number of input tokens, ``outputs`` that of the logits if it is different.
    """
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
    for i, (prompt, prefix) in enumerate(zip(prompts, _prefixes(params, len(prompts), tokenizer), strict=True)):
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
    outputs = outputs or vocab
    if int(rows["logprobs"].max()) > outputs:
        raise ValueError(
            f"logprobs is {int(rows['logprobs'].max())}, but the model has {outputs} tokens; use fewer, such as 5"
        )

    def each(name: str) -> list[Any]:
        return spread(name, getattr(params, name), len(ids), n)

    sets, stop_set = stop_sets(each("stop_token_ids"), tuple(eos), vocab)
    bias, bias_set = None, np.zeros(len(ids) * n, dtype=np.int64)
    if params.constrained:
        bias, bias_set = bias_tables(each("logit_bias"), each("banned_tokens"), each("allowed_tokens"), outputs)
    return Requests(ids, n, rows, each("stop"), sets, stop_set, bias, bias_set, seed, params.curves)


def _prefixes(params: SamplingParams, prompts: int, tokenizer: Any) -> list[list[int]]:
    """Return the tokens of each prompt's prefix."""
    prefixes = [params.prefix] * prompts if isinstance(params.prefix, str) else list(params.prefix)
    if len(prefixes) != prompts:
        raise ValueError(f"prefix has {len(prefixes)} values; give one, or one for each of the {prompts} prompts")
    if tokenizer is None and any(prefixes):
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    tokens = {text: continuation_tokens(tokenizer, text) if text else [] for text in set(prefixes)}
    return [tokens[text] for text in prefixes]


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
