"""`SamplingParams`: how to sample, validated. `Active`: which steps of sampling that needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any, Literal

import numpy as np

from explorl.core.sampling_ranges import MAX_TEMPERATURE, MIN_TEMPERATURE, RANGES

PerRow = float | Sequence[float]
"""One value for all rows, or one per row."""
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop.

    Every number may be one value for all requests, or a sequence with one value per prompt or one per request (requests
    are prompt-major: all samples of the first prompt, then of the second). Stop strings and stop tokens may be given
    per prompt or request too, as a sequence of lists.
    """

    temperature: PerRow = 1.0
    """0 is greedy: the most likely token; only the repetition penalty still applies."""
    temperature_by_position: Sequence[Sequence[float]] | None = None
    """Replaces ``temperature``: that of the first token, of the second, and so on; the last value is used for all later
    tokens. One sequence per prompt or one per request."""
    top_k: int | Sequence[int] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: PerRow = 1.0
    """Keep the smallest set of most likely tokens with at least this mass."""
    min_p: PerRow = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: PerRow = 1.0
    """Divides positive logits and multiplies negative ones of tokens already in the prompt or the completion."""
    bottom_p: PerRow = 1.0
    """Remove the most likely tokens as long as their total mass is at most 1 − p; 1 removes none."""
    bottom_p_frequency: PerRow = 1.0
    """Probability of applying bottom-p."""
    bottom_p_per: Literal["token", "sequence"] = "token"
    """True if to decide about applying bottom-p for every token or once per sequence."""
    max_tokens: int | Sequence[int] = 256
    """Largest number of completion tokens."""
    stop: str | Sequence[str] | Sequence[Sequence[str]] = ()
    """Strings that end a completion. The completion keeps the string, but no text that its last token adds after it."""
    stop_token_ids: Sequence[int] | Sequence[Sequence[int] | None] | None = None
    """Tokens that end a completion and stay in it; None means the model's end-of-sequence tokens, () none."""
    prefix: str = ""
    """Text appended to every prompt, such as ``<think>``. It counts as part of the prompt."""
    min_p_mass: float | None = None
    """Record the mass of the tokens that are at least this fraction as likely as the most likely one."""
    seed: int | None = None
    """The same seed gives the same tokens. None takes a seed from torch's global generator."""

    def __post_init__(self) -> None:
        for name in RANGES:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if self.bottom_p_per not in ("token", "sequence"):
            raise ValueError(f"bottom_p_per is {self.bottom_p_per!r}; use 'token' or 'sequence'")
        if self.temperature_by_position is not None:
            object.__setattr__(self, "temperature_by_position", _curves(self.temperature_by_position))
        if self.min_p_mass is not None and not RANGES["top_p"].includes(self.min_p_mass):
            raise ValueError(f"min_p_mass is {self.min_p_mass!r}; use a number in (0, 1] such as 0.02, or None")
        object.__setattr__(self, "stop", freeze_texts("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _freeze_tokens("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.prefix, str):
            raise ValueError(f"prefix is {self.prefix!r}; use one text for all prompts, such as '<think>'")
        if self.seed is not None:
            object.__setattr__(self, "seed", _seed(self.seed))

    def rows(self, prompts: int, n: int) -> Mapping[str, np.ndarray]:
        """Return every numeric parameter as an array with one value per request."""
        index = {curve: i for i, curve in enumerate(self.curves)}
        which = [index[curve] for curve in self.temperature_by_position or ()] or 0
        rows = {name: _array(name, getattr(self, name), prompts, n) for name in RANGES}
        return rows | {"curve": _array("temperature_by_position", which, prompts, n)}

    @property
    def curves(self) -> Sequence[Sequence[float]]:
        """The distinct sequences of temperatures by position; ``rows["curve"]`` has the index for each request."""
        return list(dict.fromkeys(self.temperature_by_position or ()))


# Values, checked and made immutable


def _numbers(name: str, value: Any) -> Any:
    """Return a number, or a tuple of one per prompt or request; raise `ValueError` if one is out of range."""
    allowed = RANGES[name]
    if np.ndim(value) > 1 or np.size(value) == 0:
        raise ValueError(f"{name} is {value!r}; use {allowed.good}, or a flat list of such values")
    for number in np.atleast_1d(np.asarray(value)).tolist():
        if not allowed.includes(number):
            raise ValueError(f"{name} is {number!r}; use {allowed.good}")
    return value if np.ndim(value) == 0 else tuple(np.asarray(value).tolist())


def _seed(value: Any) -> int:
    number = value.tolist() if hasattr(value, "tolist") else value  # a NumPy or torch scalar
    if not is_whole(number):
        raise ValueError(f"seed is {value!r}; use an integer such as 1, or None for torch's generator")
    return int(number)


def _curves(curves: Any) -> tuple[tuple[float, ...], ...]:
    """Validate temperatures by position; a sequence that several rows share is checked once."""
    good = "one sequence of temperatures per row, each from 1e-6 to 100, such as [[1.2, 1.1, 1.0], [1.0]]"
    checked: dict[int, tuple[float, ...]] = {}
    if isinstance(curves, str) or not isinstance(curves, Sequence | np.ndarray) or len(curves) == 0:
        raise ValueError(f"temperature_by_position is {curves!r}; use {good}")
    curves = list(curves)  # keeps the objects alive while their ids are used
    for row, curve in enumerate(curves):
        if id(curve) in checked:
            continue
        if isinstance(curve, str) or not isinstance(curve, Sequence | np.ndarray) or len(curve) == 0:
            raise ValueError(f"temperature_by_position of row {row} is {curve!r}; use {good}")
        values = tuple(np.asarray(curve).tolist())
        for value in values:
            if not is_temperature(value):
                raise ValueError(f"temperature_by_position of row {row} contains {value!r}; use {good}")
        checked[id(curve)] = values
    return tuple(checked[id(curve)] for curve in curves)


def is_temperature(value: Any) -> bool:
    """Return whether a value is a temperature to divide logits by, so not 0."""
    return RANGES["temperature"].includes(value) and MIN_TEMPERATURE <= value <= MAX_TEMPERATURE


def _freeze_tokens(name: str, value: Any) -> Tokens | tuple[Tokens | None, ...] | None:
    """Validate and freeze token ids: one list, or a list of lists. None, also in place of a list, means unset."""
    if value is None:
        return None
    items = _items(name, value, "token ids such as [13, 198]")
    if not any(item is None or _is_list(item) for item in items):
        return tuple(_token(name, item) for item in items)
    for item in items:
        if not (item is None or _is_list(item)):
            raise ValueError(f"{name} mixes {item!r} with lists; use token ids such as [13, 198], or only lists")
    return tuple(None if item is None else tuple(token_list(name, item)) for item in items)


def freeze_texts(name: str, value: Any) -> tuple[str, ...] | tuple[tuple[str, ...], ...]:
    """Validate and freeze stop strings: one text, a list of texts for all requests, or a list of lists."""
    items = (value,) if isinstance(value, str) else _items(name, value, "texts such as ['</answer>']")
    if items and all(item is None or _is_list(item) for item in items):
        return tuple(() if item is None else _texts(name, list(item)) for item in items)
    return _texts(name, items)


def _texts(name: str, items: Sequence[Any]) -> tuple[str, ...]:
    for item in items:
        if not isinstance(item, str) and not _is_list(item):
            raise ValueError(f"{name} contains {item!r}; use texts such as '</answer>'")
    for item in items:
        if _is_list(item):
            raise ValueError(f"{name} mixes {item!r} with texts; use texts such as '</answer>', or only lists")
        if not item:
            raise ValueError(f"{name} contains an empty string; use a text such as '</answer>'")
        if any("\ud800" <= character <= "\udfff" for character in item):  # a lone surrogate
            raise ValueError(f"{name} contains {item!r}, which can't be sampled; use a text such as '</answer>'")
    return tuple(items)


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


# One value per request


def is_per_request(value: Any) -> bool:
    """Return whether a frozen value has one entry per prompt or request."""
    return isinstance(value, tuple) and bool(value) and not isinstance(value[0], (int, str))


def spread(name: str, value: Any, prompts: int, n: int) -> list[Any]:
    """Return a frozen value as a list with one entry per request."""
    if not is_per_request(value):
        return [value] * (prompts * n)
    return [value[i] for i in _request_indices(name, len(value), prompts, n)]


def _array(name: str, value: Any, prompts: int, n: int) -> np.ndarray:
    whole = name not in RANGES or RANGES[name].whole
    array = np.asarray(value, dtype=np.int64 if whole else np.float64)
    if array.ndim == 0:
        return np.full(prompts * n, array)
    return array[_request_indices(name, len(array), prompts, n)]


def _request_indices(name: str, count: int, prompts: int, n: int) -> np.ndarray:
    """Return which of ``count`` values belongs to each of the prompts × n requests."""
    if count == prompts * n:
        return np.arange(count)
    if count == prompts:
        return np.repeat(np.arange(prompts), n)
    raise ValueError(
        f"{name} has {count} values; use one value, one for each of the {prompts} prompts, or one for each of the "
        f"{prompts * n} requests"
    )


@dataclass(frozen=True)
class Active:
    """The steps of sampling that these requests need, decided once per call so that the others cost nothing."""

    repetition: bool = False
    temperature: bool = False
    greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bottom_p: bool = False
    bottom_p_chance: bool = False
    per_sequence: bool = False
    by_position: bool = False
    min_p_mass: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams, rows: Mapping[str, np.ndarray]) -> Active:
        bottom_p = bool((rows["bottom_p"] < 1).any())
        chance = bottom_p and bool((rows["bottom_p_frequency"] < 1).any())
        by_position = params.temperature_by_position is not None
        tempered = (rows["temperature"] != 1) & (rows["temperature"] != 0)
        return cls(
            repetition=bool((rows["repetition_penalty"] != 1).any()),
            temperature=by_position or bool(tempered.any()),
            greedy=not by_position and bool((rows["temperature"] == 0).any()),
            top_k=bool((rows["top_k"] > 0).any()),
            top_p=bool((rows["top_p"] < 1).any()),
            min_p=bool((rows["min_p"] > 0).any()),
            bottom_p=bottom_p,
            bottom_p_chance=chance,
            per_sequence=chance and params.bottom_p_per == "sequence",
            by_position=by_position,
            min_p_mass=params.min_p_mass or 0.0,
        )

    @property
    def warps(self) -> bool:
        """True if the distribution sampled from differs from the policy at the row's temperature."""
        return self.repetition or self.top_k or self.top_p or self.min_p or self.bottom_p

    def __str__(self) -> str:
        return "+".join(f.name for f in fields(self) if getattr(self, f.name)) or "plain"
