"""Completions that end at a stop string, whichever backend samples them.

The strings come from `generation_kwargs`: ``stop_strings``, as in transformers, or ``stop``, as in vLLM; otherwise from
the model's generation config. The engine and vLLM end a completion there; completions of `model.generate` are cut
afterwards, since TRL calls it without the tokenizer that it would need. A completion keeps the token that completes its
string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, overload

import numpy as np
from transformers import GenerationConfig

from explorl.modeling.proof import inner_model
from explorl.rollout.sampling.params import freeze_texts, is_per_request
from explorl.rollout.stops import StopStrings

NAMES = ("stop_strings", "stop")
"""Keys of `generation_kwargs`."""


class StoppedTokens(list[int]):
    """Tokens of a completion ended by a stop string, or by an ``eos_token_id`` in `generation_kwargs`.

    TRL considers a completion truncated unless its last token is an end-of-sequence token. Index -1 of this list
    returns such a token; otherwise it is the list of the sampled tokens.
    """

    def __init__(self, tokens: Sequence[int], end: int) -> None:
        super().__init__(tokens)
        self.end = end

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.end if index == -1 else super().__getitem__(index)

    def __radd__(self, before: list[int]) -> StoppedTokens:
        """Append the last turn of a conversation to the turns before it."""
        return StoppedTokens([*before, *self], self.end)


def plain_lists(completion_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Convert `StoppedTokens` to plain lists, for reward functions."""
    return [list(ids) if isinstance(ids, StoppedTokens) else ids for ids in completion_ids]  # type: ignore[misc]


def configured_stop_strings(generation_kwargs: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the stop strings in `generation_kwargs`."""
    values = {name: value for name in NAMES if (value := (generation_kwargs or {}).get(name)) is not None}
    checked = {name: _checked_strings(f"generation_kwargs[{name!r}]", value) for name, value in values.items()}
    nonempty = {name: strings for name, strings in checked.items() if strings}
    if len(nonempty) > 1:
        raise ValueError(f"generation_kwargs has {NAMES[0]!r} and {NAMES[1]!r}, which mean the same; leave out one")
    return next(iter(nonempty.values()), ())


def _checked_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Iterator):
        raise ValueError(f"{name} is {value!r}, which can be read only once; use a list such as ['</answer>']")
    strings = freeze_texts(name, value)
    if is_per_request(strings):
        raise ValueError(
            f"{name} is {value!r}; all completions share the same strings, so give one list such as ['</answer>']"
        )
    return strings  # type: ignore[return-value]


def stop_strings_of(generation_kwargs: Mapping[str, Any] | None, model: Any) -> tuple[str, ...]:
    """Return the stop strings in `generation_kwargs`, or else those of the model's generation config."""
    strings = configured_stop_strings(generation_kwargs)
    default = getattr(getattr(model, "generation_config", None), "stop_strings", None)
    return strings or (() if default is None else _checked_strings("generation_config.stop_strings", default))


@contextmanager
def without_model_stops(model: Any) -> Iterator[None]:
    """Remove the stop strings from the model's generation config, for which `model.generate` would need a tokenizer."""
    config: Any = getattr(model, "generation_config", None)
    strings = getattr(config, "stop_strings", None)
    if strings is None:
        yield
        return
    config.stop_strings = None
    try:
        yield
    finally:
        config.stop_strings = strings


def take_stop_strings(trainer: Any) -> tuple[str, ...]:
    """Return a trainer's stop strings, and remove them from the options of `generate`, which TRL calls without a
    tokenizer."""
    strings = stop_strings_of(trainer.args.generation_kwargs, inner_model(trainer.model))
    if trainer.use_vllm:  # TRL passes them to vLLM
        return strings
    remaining = without_stop_keys(trainer.generation_kwargs)
    if remaining != trainer.generation_kwargs:
        trainer.generation_kwargs = remaining
        trainer.generation_config = GenerationConfig(**remaining, disable_compile=True)
    return strings


def end_token(trainer: Any) -> int:
    """Return an end-of-sequence token."""
    return int([*trainer.eos_token_ids, trainer.tokenizer.pad_token_id][0])


def without_stop_keys(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `generation_kwargs` without its stop strings."""
    return {name: value for name, value in generation_kwargs.items() if name not in NAMES}


def cut_at_stops(
    completion_ids: Sequence[Sequence[int]], strings: Sequence[str], tokenizer: Any, end: int, *, min_tokens: int = 0
) -> list[list[int]]:
    """Cut completions at the first stop string after their first ``min_tokens`` tokens.

    Those with one are returned as `StoppedTokens`.
    """
    stops = StopStrings([strings], tokenizer, 1)
    cuts = [stops.cut(0, np.array(ids), floor=min_tokens) for ids in completion_ids]
    return [
        list(ids) if cut is None else StoppedTokens(ids[: cut[0]], end)
        for ids, cut in zip(completion_ids, cuts, strict=True)
    ]


def mark_stopped(
    completion_ids: Sequence[Sequence[int]], strings: Sequence[str], tokenizer: Any, end: int
) -> list[list[int]]:
    """Return completions of a custom rollout function uncut; those that end with a stop string as `StoppedTokens`."""
    cut_ids = cut_at_stops(completion_ids, strings, tokenizer, end)
    return [list(ids) if len(cut) < len(ids) else cut for ids, cut in zip(completion_ids, cut_ids, strict=True)]
