"""Fresh prompts for a generation batch: an order of the data set that follows from the seed and the batch's number.

Nothing is remembered from batch to batch, so that a resumed run and every process find the same prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class FreshPrompt(NamedTuple):
    """A prompt of the data set."""

    key: str
    row: dict[str, Any]


def row_key(row: Mapping[str, Any]) -> str:
    """What tells a row of the data set from others: a digest of its prompt and of all else in it that JSON can hold."""
    text = json.dumps(row, skipkeys=True, default=lambda _: None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keyed_seed(*parts: object) -> int:
    """A seed that follows from these values alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # below 2^63, as torch asks


def keyed_uniform(*parts: object) -> float:
    """A number from 0 to 1 that follows from these values alone."""
    return keyed_seed(*parts) / 2**63


def fresh_rows(
    size: int,
    row_at: Callable[[int], Mapping[str, Any]],
    *,
    seed: int,
    number: int,
    taken: Iterable[str],
    skips: Callable[[str], bool] = lambda key: False,
) -> Iterator[FreshPrompt]:
    """Rows of a data set of this size in random order, each at most once, without those that are taken.

    number: of the generation batch.
    """
    seen = set(taken)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(keyed_seed("fresh", seed, number)))
    for place in order.tolist():
        row = dict(row_at(place))
        key = row_key(row)
        if key not in seen and not skips(key):
            seen.add(key)
            yield FreshPrompt(key, row)
