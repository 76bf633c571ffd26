"""Fresh prompts for a generation batch: a random order of the data set, given by the seed and the batch's number.

Nothing is carried over from batch to batch, so a resumed run and every process get the same prompts.
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
    """Return a key that identifies a row of the data set: a digest of everything in it that JSON can represent."""
    text = json.dumps(row, skipkeys=True, default=lambda _: None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keyed_seed(*parts: object) -> int:
    """Return a seed that depends on these values alone."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch needs a seed below 2^63


def keyed_uniform(*parts: object) -> float:
    """Return a number from 0 to 1 that depends on these values alone."""
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
    """Yield rows of a data set of this size in random order, each at most once, except those in ``taken``.

    Args:
        number: Number of the generation batch.
        skips: Tells whether a prompt is skipped, given its key.
    """
    used = set(taken)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(keyed_seed("fresh", seed, number)))
    for index in order.tolist():
        row = dict(row_at(index))
        key = row_key(row)
        if key not in used and not skips(key):
            used.add(key)
            yield FreshPrompt(key, row)
