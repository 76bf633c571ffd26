"""Which tokens a request may sample and what ends it: the values of `SamplingParams` that are lists or mappings.

Each may be one value for all requests, or a sequence with one per prompt or one per request. Bias and bans become rows
of one table, so that requests with the same ones share a row:

    x ← x + bias,   x ← −∞ on banned tokens and on all tokens that are not allowed

They are applied before everything else, including the repetition penalty and the greedy choice, as in vLLM (allowed
tokens, banned tokens, bias, penalties, temperature) and in transformers (sequence bias, then penalties). log π, the
entropy and the branching factor are those of the policy without them; log q includes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

LARGEST_BIAS = 1e4
"""A larger bias would drown the logits; use allowed or banned tokens to force or exclude a token."""

Tokens = tuple[int, ...]


class Bias(dict[int, float]):
    """Values to add to the logits of tokens. It is hashable, so it must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def freeze_bias(value: Any) -> Bias | tuple[Bias, ...] | None:
    """Validate and freeze ``logit_bias``: one mapping, or one per prompt or request."""
    if value is None or isinstance(value, Mapping):
        return None if value is None else _bias(value)
    items = _items("logit_bias", value, "a mapping such as {13: -2.0}")
    wrong = [item for item in items if item is not None and not isinstance(item, Mapping)]
    if wrong or not items:
        raise ValueError(f"logit_bias is {value!r}; use a mapping such as {{13: -2.0}}, or a list of mappings")
    return tuple(_bias(item or {}) for item in items)


def _bias(value: Mapping[Any, Any]) -> Bias:
    bias = Bias()
    for token, amount in value.items():
        if isinstance(token, str) and token.isdecimal():  # a key from JSON
            token = int(token)
        number = isinstance(amount, (int, float, np.number)) and not isinstance(amount, bool)
        if not number or not math.isfinite(amount) or abs(amount) > LARGEST_BIAS:
            raise ValueError(
                f"logit_bias of token {token!r} is {amount!r}; use a number from −10000 to 10000 such as −2.0 "
                "(banned_tokens excludes a token)"
            )
        bias[_token("logit_bias", token)] = float(amount)
    return bias


def freeze_tokens(name: str, value: Any) -> Tokens | tuple[Tokens | None, ...] | None:
    """Validate and freeze token ids: one list, or a list of lists. None, also in place of a list, means unset."""
    if value is None:
        return None
    items = _items(name, value, "token ids such as [13, 198]")
    if not any(item is None or _is_list(item) for item in items):
        return tuple(_token(name, item) for item in items)
    for item in items:
        if not (item is None or _is_list(item)):
            raise ValueError(f"{name} mixes {item!r} with lists; use token ids such as [13, 198], or only lists")
    return tuple(
        None if item is None else tuple(_token(name, token) for token in _items(name, item, "token ids"))
        for item in items
    )


def freeze_texts(name: str, value: Any) -> tuple[str, ...] | tuple[tuple[str, ...], ...]:
    """Validate and freeze stop strings: one text, a list of texts for all requests, or a list of lists."""
    items = (value,) if isinstance(value, str) else _items(name, value, "texts such as ['</answer>']")
    if items and all(item is None or _is_list(item) for item in items):
        return tuple(() if item is None else _texts(name, list(item)) for item in items)
    return _texts(name, items)


def freeze_prefixes(value: Any) -> tuple[str, ...]:
    """Validate and freeze the prefixes of several prompts."""
    items = _items("prefix", value, "a text such as '<think>', or one per prompt")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"prefix contains {item!r}; use a text such as '<think>', or one per prompt")
    return tuple(items)


def _texts(name: str, items: Sequence[Any]) -> tuple[str, ...]:
    for item in items:
        if not isinstance(item, str) and not _is_list(item):
            raise ValueError(f"{name} contains {item!r}; use texts such as '</answer>'")
    for item in items:
        if _is_list(item):
            raise ValueError(f"{name} mixes {item!r} with texts; use texts such as '</answer>', or only lists")
        if not item:
            raise ValueError(f"{name} contains an empty string; use a text such as '</answer>'")
        if not _is_unicode(item):
            raise ValueError(f"{name} contains {item!r}, which can't be sampled; use a text such as '</answer>'")
    return tuple(items)


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _items(name: str, value: Any, good: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__") or getattr(value, "ndim", 1) == 0:
        raise ValueError(f"{name} is {value!r}; use {good}")
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of any library, and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def token_list(name: str, value: Any, good: str = "token ids such as [13, 198]") -> list[int]:
    """Return the token ids of a list, array or tensor as a list of integers."""
    items = _items(name, value, good)
    return [item if type(item) is int else _token(name, item) for item in items]


def _token(name: str, value: Any) -> int:
    value = value.tolist() if hasattr(value, "tolist") else value  # a NumPy or torch scalar
    if not is_whole(value) or value < 0:
        raise ValueError(f"{name} contains {value!r}; use token ids such as 13")
    return int(value)


def is_per_request(value: Any) -> bool:
    """Return whether a frozen value has one entry per prompt or request."""
    return isinstance(value, tuple) and bool(value) and not isinstance(value[0], (int, str))


def request_indices(name: str, count: int, prompts: int, n: int) -> np.ndarray:
    """Return which of ``count`` values belongs to each of the prompts × n requests."""
    if count == prompts * n:
        return np.arange(count)
    if count == prompts:
        return np.repeat(np.arange(prompts), n)
    raise ValueError(
        f"{name} has {count} values; use one value, one for each of the {prompts} prompts, or one for each of the "
        f"{prompts * n} requests"
    )


def spread(name: str, value: Any, prompts: int, n: int) -> list[Any]:
    """Return a frozen value as a list with one entry per request."""
    if not is_per_request(value):
        return [value] * (prompts * n)
    return [value[i] for i in request_indices(name, len(value), prompts, n)]


def bias_tables(
    biases: Sequence[Bias | None],
    banned: Sequence[Tokens | None],
    allowed: Sequence[Tokens | None],
    vocab: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows (sets, vocab) to add to the logits, and the row of each request; arguments have one entry each."""
    rows: dict[Any, int] = {}
    by_identity: dict[tuple[int, ...], int] = {}  # most requests share the same objects
    tables: list[np.ndarray] = []
    row_of = np.zeros(len(biases), dtype=np.int64)
    for request, parts in enumerate(zip(biases, banned, allowed, strict=True)):
        same = tuple(map(id, parts))
        if same not in by_identity:
            if parts not in rows:
                rows[parts] = len(tables)
                tables.append(_table(request, *parts, vocab))
            by_identity[same] = rows[parts]
        row_of[request] = by_identity[same]
    return np.stack(tables), row_of


def _table(request: int, bias: Bias | None, banned: Tokens | None, allowed: Tokens | None, vocab: int) -> np.ndarray:
    for name, tokens in (("logit_bias", bias), ("banned_tokens", banned), ("allowed_tokens", allowed)):
        check_tokens(name, tokens or (), request, vocab)
    if allowed is not None and not allowed:
        raise ValueError(f"allowed_tokens of request {request} is empty; allow at least one token, or None for all")
    table = np.zeros(vocab, dtype=np.float32)
    if bias:
        table[list(bias)] = list(bias.values())
    if allowed is not None:
        excluded = np.ones(vocab, dtype=bool)
        excluded[list(allowed)] = False
        table[excluded] = -np.inf
    if banned:
        table[list(banned)] = -np.inf
    if not (table > -np.inf).any():
        allowed_names = "tokens of the model" if allowed is None else "of its allowed_tokens"
        raise ValueError(f"request {request} can't sample any token: banned_tokens has all {allowed_names}; allow one")
    return table


def check_tokens(name: str, tokens: Iterable[int], request: int, vocab: int) -> None:
    """Raise `ValueError` if a token is outside the vocabulary."""
    for token in tokens:
        if token >= vocab:
            raise ValueError(
                f"{name} of request {request} contains token {token}, which is outside the vocabulary; "
                f"use ids from 0 to {vocab - 1}"
            )


def stop_sets(ids: Sequence[Tokens | None], eos: Tokens, vocab: int) -> tuple[tuple[Tokens, ...], np.ndarray]:
    """Return the distinct sets of stop tokens, and the set of each request; None means the model's ``eos``."""
    sets: dict[Tokens, int] = {}
    row_of = np.zeros(len(ids), dtype=np.int64)
    for request, tokens in enumerate(ids):
        for token in tokens or ():
            if token >= vocab:
                raise ValueError(
                    f"stop token {token} of request {request} is outside the vocabulary; use ids from 0 to {vocab - 1}"
                )
        row_of[request] = sets.setdefault(eos if tokens is None else tokens, len(sets))
    return tuple(sets), row_of
