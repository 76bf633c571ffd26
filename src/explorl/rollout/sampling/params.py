"""`SamplingParams`: how to sample, validated. `Active`: which steps of sampling that needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from explorl.rollout.sampling.constraints import (
    freeze_bias,
    freeze_prefixes,
    freeze_texts,
    freeze_tokens,
    is_per_request,
    is_whole,
    request_indices,
)

PerRow = float | Sequence[float]
"""One value for all rows, or one per row."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop.

    Every number may be one value for all requests, or a sequence with one value per prompt or one per request (requests
    are prompt-major: all samples of the first prompt, then of the second). Stop strings, stop tokens, bias and bans may
    be given per prompt or request too, as a sequence of lists or mappings.
    """

    temperature: PerRow = 1.0
    """0 is greedy: the most likely token; only bias, bans and the repetition penalty still apply."""
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
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]] | None = None
    """Values to add to the logits of some tokens, before everything else."""
    banned_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None = None
    """Tokens that are never sampled."""
    allowed_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None = None
    """The only tokens that may be sampled; None allows all. List the end-of-sequence token if completions may end."""
    logprobs: int | Sequence[int] | None = None
    """How many of the most likely tokens to record at each position, with log π: `Rollout.top_ids`, `top_logps`."""
    prefix: str | Sequence[str] = ""
    """Text appended to every prompt, such as ``<think>``, or one text per prompt. It counts as part of the prompt."""
    min_p_mass: float | None = None
    """Record the mass of the tokens that are at least this fraction as likely as the most likely one."""
    seed: int | None = None
    """The same seed gives the same tokens. None takes a seed from torch's global generator."""

    def __post_init__(self) -> None:
        for name, (good, ok) in _RULES.items():
            if name != "logprobs" or self.logprobs is not None:
                _check(name, getattr(self, name), good, ok)
        if self.bottom_p_per not in ("token", "sequence"):
            raise ValueError(f"bottom_p_per is {self.bottom_p_per!r}; use 'token' or 'sequence'")
        for name in _RULES:
            value = getattr(self, name)
            if not _scalar(value):
                object.__setattr__(self, name, tuple(np.asarray(value).tolist()))
        if self.temperature_by_position is not None:
            object.__setattr__(self, "temperature_by_position", _curves(self.temperature_by_position))
        if self.min_p_mass is not None and not (_real(self.min_p_mass) and 0 < self.min_p_mass <= 1):
            raise ValueError(f"min_p_mass is {self.min_p_mass!r}; use a number in (0, 1] such as 0.02, or None")
        object.__setattr__(self, "stop", freeze_texts("stop", self.stop))
        for name in ("stop_token_ids", "banned_tokens", "allowed_tokens"):
            object.__setattr__(self, name, freeze_tokens(name, getattr(self, name)))
        if self.allowed_tokens == ():
            raise ValueError("allowed_tokens is empty; allow at least one token such as [13], or None for all")
        object.__setattr__(self, "logit_bias", freeze_bias(self.logit_bias))
        if not isinstance(self.prefix, str):
            object.__setattr__(self, "prefix", freeze_prefixes(self.prefix))
        if self.seed is not None:
            object.__setattr__(self, "seed", _seed(self.seed))

    @property
    def constrained(self) -> bool:
        """True if some tokens are biased or excluded."""
        return bool(self.logit_bias) or bool(self.banned_tokens) or self.allowed_tokens is not None

    def rows(self, prompts: int, n: int) -> Mapping[str, np.ndarray]:
        """Return every numeric parameter as an array with one value per request."""
        rows = {name: _spread(name, getattr(self, name), prompts, n) for name in _RULES}
        return rows | {"curve": _spread("temperature_by_position", self._which_curve, prompts, n)}

    @property
    def curves(self) -> Sequence[Sequence[float]]:
        """The distinct sequences of temperatures by position; ``rows`` has the index for each request."""
        return list(dict.fromkeys(self.temperature_by_position or ()))

    @property
    def _which_curve(self) -> int | list[int]:
        index = {curve: i for i, curve in enumerate(self.curves)}
        return 0 if self.temperature_by_position is None else [index[c] for c in self.temperature_by_position]


def _real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)


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
            if not _real(value) or not 1e-6 <= value <= 100:
                raise ValueError(f"temperature_by_position of row {row} contains {value!r}; use {good}")
        checked[id(curve)] = values
    return tuple(checked[id(curve)] for curve in curves)


def _integer(value: float) -> bool:
    return float(value).is_integer()


_RULES: Mapping[str, tuple[str, Any]] = {
    "temperature": ("a number from 1e-6 to 100 such as 1.0, or 0 for greedy", lambda v: v == 0 or 1e-6 <= v <= 100),
    "top_k": ("an integer ≥ 0 such as 50, or 0 to disable it", lambda v: v >= 0 and _integer(v)),
    "top_p": ("a number in (0, 1] such as 0.9", lambda v: 0 < v <= 1),
    "min_p": ("a number in [0, 1] such as 0.05", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("a number > 0 such as 1.1", lambda v: v > 0),
    "bottom_p": ("a number in (0, 1] such as 0.9", lambda v: 0 < v <= 1),
    "bottom_p_frequency": ("a number in [0, 1] such as 0.5", lambda v: 0 <= v <= 1),
    "max_tokens": ("an integer ≥ 1 such as 256", lambda v: v >= 1 and _integer(v)),
    "logprobs": ("an integer ≥ 0 such as 5, or None for none", lambda v: v >= 0 and _integer(v)),
}


_WHOLE = ("top_k", "max_tokens", "logprobs", "temperature_by_position")


def _scalar(value: Any) -> bool:
    return np.ndim(value) == 0


def _check(name: str, value: Any, good: str, ok: Any) -> None:
    if np.ndim(value) > 1 or np.size(value) == 0:
        raise ValueError(f"{name} is {value!r}; use {good}, or a flat list of such values")
    for v in np.atleast_1d(np.asarray(value)).tolist():
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not math.isfinite(v) or not ok(v):
            raise ValueError(f"{name} is {v!r}; use {good}")


def _spread(name: str, value: Any, prompts: int, n: int) -> np.ndarray:
    array = np.asarray(0 if value is None else value, dtype=np.int64 if name in _WHOLE else np.float64)
    if array.ndim == 0:
        return np.full(prompts * n, array)
    return array[request_indices(name, len(array), prompts, n)]


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
    bias: bool = False
    stop_sets: bool = False
    """True if requests have different stop tokens."""
    logprobs: int = 0
    """How many of the most likely tokens are recorded at each position."""

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
            bias=params.constrained,
            stop_sets=is_per_request(params.stop_token_ids),
            logprobs=int(rows["logprobs"].max()),
        )

    @property
    def warps(self) -> bool:
        """True if the distribution sampled from differs from the policy at the row's temperature."""
        return self.bias or self.repetition or self.top_k or self.top_p or self.min_p or self.bottom_p

    def __str__(self) -> str:
        return "+".join(f.name for f in fields(self) if getattr(self, f.name)) or "plain"
