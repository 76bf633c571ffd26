"""From prompts in any form to requests that the engine can run."""

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

_BEFORE = ("\n", "a", "=")
"""Texts to try as a beginning, since one of them may be in one token with what follows."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or a list of chat messages."""


@dataclass(frozen=True)
class Requests:
    """All requests of a call: prompt-major, sample-minor."""

    prompts: list[list[int]]
    n: int
    rows: Mapping[str, np.ndarray]
    """Sampling numbers, one value per request."""
    stops: Sequence[Sequence[str]]
    """Stop strings of each request."""
    stop_sets: tuple[tuple[int, ...], ...]
    """The different sets of stop tokens."""
    stop_set: np.ndarray
    """Which of them each request has."""
    bias: np.ndarray | None
    """What is added to the logits: the different rows (sets, vocab); None where nothing is."""
    bias_set: np.ndarray
    """Which of these rows each request has."""
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
    outputs: int | None = None,
) -> Requests:
    """Tokenizes and checks the prompts. Raises `ValueError` for what cannot be run, before anything is run.

    ``vocab`` counts the tokens that the model reads, ``outputs`` its logits where those are more or fewer.
    """
    if not is_whole(n) or n < 1:
        raise ValueError(f"n is {n!r}; ask for at least 1 sample per prompt")
    given: Any = prompts
    if isinstance(given, Mapping) or not hasattr(given, "__len__"):
        raise ValueError(f"prompts is {given!r}; give a list such as ['2 + 2 =']")
    if isinstance(prompts, str) or len(prompts) == 0:
        raise ValueError("prompts is empty or a single text; give a list such as ['2 + 2 =']")
    if params.stop and tokenizer is None:
        raise ValueError(f"stop is {params.stop!r}, but the engine has no tokenizer; use stop_token_ids")
    texts: dict[str, list[int]] = {}  # a trainer gives each prompt once for every sample
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
            f"logprobs is {int(rows['logprobs'].max())}; the model has {outputs} tokens, use fewer, such as 5"
        )

    def each(name: str) -> list[Any]:
        return spread(name, getattr(params, name), len(ids), n)

    sets, stop_set = stop_sets(each("stop_token_ids"), tuple(eos), vocab)
    bias, bias_set = None, np.zeros(len(ids) * n, dtype=np.int64)
    if params.constrained:
        bias, bias_set = bias_tables(each("logit_bias"), each("banned_tokens"), each("allowed_tokens"), outputs)
    return Requests(ids, n, rows, each("stop"), sets, stop_set, bias, bias_set, seed, params.curves)


def _prefixes(params: SamplingParams, prompts: int, tokenizer: Any) -> list[list[int]]:
    """The tokens of each prompt's prefix."""
    given = [params.prefix] * prompts if isinstance(params.prefix, str) else list(params.prefix)
    if len(given) != prompts:
        raise ValueError(f"prefix has {len(given)} values; give one, or one for each of the {prompts} prompts")
    if tokenizer is None and any(given):
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    known = {text: continued(tokenizer, text) if text else [] for text in set(given)}
    return [known[text] for text in given]


def continued(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """Tokens of a text that goes on behind another one, and before which some tokenizers would put a space."""

    def encoded(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False, **how)["input_ids"])

    joins = tokenizer.decode([*encoded("a"), *encoded("b")]) == "ab"
    for before in () if joins else _BEFORE:
        head, both = encoded(before), encoded(before + text)
        if both[: len(head)] == head:
            return both[len(head) :]
    return encoded(text)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    if tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids and no prefix")
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def prompt_as_seen(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as the model sees it: text as it stands, or messages through the model's chat template."""
    if isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("the engine has no tokenizer; give prompts as token ids")
    return str(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False))


def prompt_token_ids(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a prompt: text as it stands, or messages through the model's chat template."""
    text = prompt_as_seen(tokenizer, prompt)
    ids = _encode(
        tokenizer, text, special=isinstance(prompt, str) and getattr(tokenizer, "bos_token", None) is not None
    )
    if not ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; give it at least one character")
    return ids


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that the model or its tokenizer declares to end a completion."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = getattr(tokenizer, "eos_token_id", None)
    return list(dict.fromkeys(int(token) for token in [*found, *([] if own is None else [own])]))


def _tokens(index: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return prompt_token_ids(tokenizer, prompt) if prompt else []
    if isinstance(prompt, Sequence | np.ndarray) and len(prompt) and isinstance(prompt[0], Mapping):
        return prompt_token_ids(tokenizer, list(prompt))
    good = "a text, token ids or chat messages, such as '2 + 2 =', [13, 198] or [{'role': 'user', 'content': 'Hi'}]"
    return token_list(f"prompt {index}", prompt, good)


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
