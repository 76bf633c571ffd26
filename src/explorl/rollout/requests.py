"""Turn prompts of any form into requests that the engine can run, and requests into sequences in flight."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.rollouts import FinishReason, Rollout
from explorl.rollout.sampling import SamplingParams
from explorl.rollout.sampling.params import Tokens, is_whole, spread, token_list
from explorl.rollout.sampling.rng import fork_key

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


# Sequences: requests in flight

STATS: Mapping[str, torch.dtype] = {
    "logps": torch.float32,
    "sampling_logps": torch.float32,
    "entropy": torch.float32,
    "branching": torch.int32,
    "sampled": torch.bool,
}
"""The statistics that every rollout has of each token, with their types."""


@dataclass(eq=False, frozen=True)
class PromptTokens:
    """A prompt that is computed once for all its sequences. Equal prompts of a session are the same object."""

    tokens: tuple[int, ...]

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are stored: all except the last, which is the first input of the decoding."""
        return len(self.tokens) - 1


@dataclass(eq=False, slots=True)
class SequenceState:
    """One sequence of a session: a prompt, the completion so far, and how to continue it."""

    index: int
    """Its number in the session."""
    prompt: PromptTokens
    requests: Requests
    """Holds the sampling parameters, under ``request``."""
    request: int
    key: int
    """Key of its stream of random numbers (`explorl.rollout.sampling.rng`)."""
    limit: int
    """Most tokens of the completion, forced ones included."""
    stat_types: Mapping[str, torch.dtype] = field(default_factory=lambda: STATS)
    """Statistics that are kept of each token."""
    tokens: list[int] = field(default_factory=list)
    """The completion as far as it has been read back."""
    stat_parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Statistics of ``tokens``, in consecutive parts."""
    no_stop_spans: list[tuple[int, int]] = field(default_factory=list)
    """Spans of tokens in which no stop string may begin: forced tokens, and the last token of an earlier stop."""
    searched: int = 0
    """Tokens that have been searched for stop strings."""
    parent: int | None = None
    forked_at: int | None = None
    forks: int = 0
    """Number of sequences forked from it."""
    slot: int = -1
    """−1 while it is not being decoded."""
    stop: str | None = None
    """The stop string that ended it."""
    reason: FinishReason | None = None
    """Why it ended; None while it is decoded or waits."""
    error: str = ""
    cancelled: bool = False
    saved_kv: Any = None
    """Keys and values that the memory keeps for it while it has no slot."""

    def discard_kv(self) -> None:
        """Discard the saved keys and values. They will be computed again from the tokens."""
        if self.saved_kv is not None:
            self.saved_kv.drop()
        self.saved_kv = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of prompt and completion."""
        return (*self.prompt.tokens, *self.tokens)

    @property
    def prompt_index(self) -> int:
        return self.request // self.requests.n

    @property
    def sample_index(self) -> int:
        return self.request % self.requests.n

    @property
    def strings(self) -> Sequence[str]:
        """Its stop strings."""
        return self.requests.stops[self.request]

    @property
    def priority(self) -> tuple[bool, int, int]:
        """Sort key for admission to slots (see `Scheduler`), the smallest first."""
        return not self.tokens, -self.limit, self.index

    def append_sampled(self, tokens: Sequence[int], stats: dict[str, Tensor]) -> None:
        """Append sampled tokens with their statistics."""
        self.tokens.extend(tokens)
        self.stat_parts.append(stats)

    def append_forced(self, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled, and therefore have no statistics."""
        begin = len(self.tokens)
        if self.stop is not None:
            self.no_stop_spans.append((begin - 1, begin))
        if tokens:
            self.tokens.extend(tokens)
            self.stat_parts.append({name: _missing(dtype, len(tokens)) for name, dtype in self.stat_types.items()})
            self.no_stop_spans.append((begin, len(self.tokens)))

    def spans_without_stop(self, length: int) -> list[tuple[int, int]]:
        """Return `no_stop_spans` of the first ``length`` tokens."""
        return [(begin, min(end, length)) for begin, end in self.no_stop_spans if begin < length]

    def cut_back(self, length: int) -> None:
        """Keep the first ``length`` tokens with their keys and values, and continue with new random numbers."""
        if self.saved_kv is not None:
            saved_kv, self.saved_kv = self.saved_kv, self.saved_kv.first(length, self.prompt.stored)
            saved_kv.drop()
        self.key, self.forks = fork_key(self.key, self.forks), 0
        self.no_stop_spans, self.searched, self.stop = self.spans_without_stop(length), length, None
        self.truncate(length)

    def stop_search_start(self, length: int) -> int:
        """Return before which of the first ``length`` tokens no stop string may begin."""
        return max((min(end, length) for begin, end in self.no_stop_spans if begin < length), default=0)

    def truncate(self, length: int) -> None:
        """Remove the tokens after the first ``length``."""
        if length < len(self.tokens):
            self.stat_parts = [self.stats(length)]
            del self.tokens[length:]

    def stats(self, length: int | None = None) -> dict[str, Tensor]:
        """Return the statistics of the first ``length`` tokens (None: all)."""
        parts = self.stat_parts or [{name: _missing(dtype, 0) for name, dtype in self.stat_types.items()}]
        joined = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return joined if length is None else {name: values[:length] for name, values in joined.items()}

    def rollout(self, tokenizer: Any) -> Rollout:
        """Return the completion so far; its ``finish_reason`` is None if it has not ended."""
        return Rollout(
            request=self.index,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=list(self.tokens),
            **self.stats(),
            finish_reason=self.reason,
            stop=self.stop,
            error=self.error,
            tokenizer=tokenizer,
            parent=self.parent,
            forked_at=self.forked_at,
            calls=(),
        )


def _missing(dtype: torch.dtype, length: int) -> Tensor:
    """Return the value of a statistic for tokens without one: NaN for floats, else 0."""
    return torch.full((length,), torch.nan if dtype.is_floating_point else 0, dtype=dtype)
