"""Answers that a stop string ends, whatever samples them.

`generation_kwargs` says which strings these are: ``stop_strings``, as transformers calls them, or ``stop``, as vLLM
does. The engine and vLLM end an answer there; what `model.generate` went on to say is cut off, since TRL calls it
without the tokenizer that it would need. An answer keeps the token that completes its string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

from explorl.rollout.sampling.constraints import freeze_texts, is_per_request
from explorl.rollout.stops import StopStrings

NAMES = ("stop_strings", "stop")
"""Keys of `generation_kwargs`."""


class Stopped(list[int]):
    """Tokens of an answer that a stop string has ended.

    TRL takes an answer for cut off unless its last token is one that ends a sequence. Asked for its last token, this
    one names such a token; in everything else it is the list of what was sampled.
    """

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        super().__init__(tokens)
        self.end = end

    @overload
    def __getitem__(self, place: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: Any) -> Any:
        return self.end if place == -1 else super().__getitem__(place)


def plain(completion_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens themselves, for reward functions."""
    return [list(ids) if isinstance(ids, Stopped) else ids for ids in completion_ids]  # type: ignore[misc]


def strings_in(given: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The stop strings that `generation_kwargs` has."""
    found = [name for name in NAMES if (given or {}).get(name)]
    if len(found) > 1:
        raise ValueError(f"generation_kwargs has {found[0]!r} and {found[1]!r}, which mean the same; leave out one")
    if not found or given is None:
        return ()
    strings = freeze_texts(f"generation_kwargs[{found[0]!r}]", given[found[0]])
    if is_per_request(strings):
        raise ValueError(
            f"generation_kwargs[{found[0]!r}] is {given[found[0]]!r}; all answers end at the same strings, so give one "
            "list such as ['</answer>']"
        )
    return strings  # type: ignore[return-value]


def without_stops(given: Mapping[str, Any]) -> dict[str, Any]:
    """All other keys."""
    return {name: value for name, value in given.items() if name not in NAMES}


def cut_at_stops(
    completion_ids: Sequence[Sequence[int]], strings: Sequence[str], tokenizer: Any, end: int
) -> list[list[int]]:
    """Answers up to the first of their stop strings; those that have one are `Stopped`."""
    stops = StopStrings([strings], tokenizer, 1)
    cuts = [stops.cut(0, np.array(ids)) for ids in completion_ids]
    return [
        list(ids) if cut is None else Stopped(ids[: cut[0]], end) for ids, cut in zip(completion_ids, cuts, strict=True)
    ]
