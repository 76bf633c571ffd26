"""Answers that a stop string ends, whatever samples them.

`generation_kwargs` says which strings these are: ``stop_strings``, as transformers calls them, or ``stop``, as vLLM
does; where it says nothing, the model's own generation config may. The engine and vLLM end an answer there; what
`model.generate` went on to say is cut off, since TRL calls it without the tokenizer that it would need. An answer keeps
the token that completes its string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, overload

import numpy as np

from explorl.rollout.sampling.constraints import freeze_texts, is_per_request
from explorl.rollout.stops import StopStrings

NAMES = ("stop_strings", "stop")
"""Keys of `generation_kwargs`."""


class Stopped(list[int]):
    """Tokens of an answer that a stop string has ended, or an ``eos_token_id`` in `generation_kwargs`.

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

    def __radd__(self, before: list[int]) -> Stopped:
        """The last turn of a conversation, behind all that was said before."""
        return Stopped([*before, *self], self.end)


def plain(completion_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens themselves, for reward functions."""
    return [list(ids) if isinstance(ids, Stopped) else ids for ids in completion_ids]  # type: ignore[misc]


def strings_in(given: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The stop strings that `generation_kwargs` has."""
    said = {name: value for name in NAMES if (value := (given or {}).get(name)) is not None}
    found = {name: _for_all(f"generation_kwargs[{name!r}]", value) for name, value in said.items()}
    found = {name: strings for name, strings in found.items() if strings}
    if len(found) > 1:
        raise ValueError(f"generation_kwargs has {NAMES[0]!r} and {NAMES[1]!r}, which mean the same; leave out one")
    return next(iter(found.values()), ())


def _for_all(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Iterator):
        raise ValueError(f"{name} is {value!r}, which can be read only once; use a list such as ['</answer>']")
    strings = freeze_texts(name, value)
    if is_per_request(strings):
        raise ValueError(
            f"{name} is {value!r}; all answers end at the same strings, so give one list such as ['</answer>']"
        )
    return strings  # type: ignore[return-value]


def stops_of(given: Mapping[str, Any] | None, model: Any) -> tuple[str, ...]:
    """Those of `generation_kwargs`, or else the model's own."""
    own = getattr(getattr(model, "generation_config", None), "stop_strings", None)
    return strings_in(given) or (() if own is None else _for_all("generation_config.stop_strings", own))


@contextmanager
def without_own_stops(model: Any) -> Iterator[None]:
    """Within it, `model.generate` does not ask for a tokenizer because of the model's own strings."""
    config: Any = getattr(model, "generation_config", None)
    own = getattr(config, "stop_strings", None)
    if own is None:
        yield
        return
    config.stop_strings = None
    try:
        yield
    finally:
        config.stop_strings = own


def without_stops(given: Mapping[str, Any]) -> dict[str, Any]:
    """All other keys."""
    return {name: value for name, value in given.items() if name not in NAMES}


def cut_at_stops(
    completion_ids: Sequence[Sequence[int]], strings: Sequence[str], tokenizer: Any, end: int, *, fewest: int = 0
) -> list[list[int]]:
    """Answers up to the first stop string behind their first ``fewest`` tokens; those that have one are `Stopped`."""
    stops = StopStrings([strings], tokenizer, 1)
    cuts = [stops.cut(0, np.array(ids), floor=fewest) for ids in completion_ids]
    return [
        list(ids) if cut is None else Stopped(ids[: cut[0]], end) for ids, cut in zip(completion_ids, cuts, strict=True)
    ]


def marked_at_stops(
    completion_ids: Sequence[Sequence[int]], strings: Sequence[str], tokenizer: Any, end: int
) -> list[list[int]]:
    """Whole answers of somebody's own; those with a stop string at their end are `Stopped`."""
    cut = cut_at_stops(completion_ids, strings, tokenizer, end)
    return [list(ids) if len(own) < len(ids) else own for ids, own in zip(completion_ids, cut, strict=True)]
