"""The last part of sampling, from the tempered logits on, as one request takes it along to another sampler.

    top-k → top-p → min-p → bottom-p, each on what the one before has left

A request carries its `Chain` as plain numbers under names that begin with ``explorl_`` (vLLM's ``extra_args``, or
``vllm_xargs`` of a server). `Chains` are those of a batch as tensors: `Chains.removed` says which tokens may not be
drawn, `Chains.log_q` how likely a drawn token was. Cuts follow the rule of `explorl.rollout.sampling.ranking`, and
whether bottom-p is applied is read from the request's own stream of random numbers (`explorl.rollout.sampling.rng`),
as in our engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.rollout.sampling import bottom_p_cut, rng, warp_min_p, warp_top_k, warp_top_p
from explorl.rollout.sampling.sample import Coin

PREFIX = "explorl_"

_GOOD: Mapping[str, tuple[str, Any]] = {
    "top_k": ("a whole number ≥ 0 such as 50", lambda v: v >= 0 and float(v).is_integer()),
    "top_p": ("a number in (0, 1] such as 0.9", lambda v: 0 < v <= 1),
    "min_p": ("a number in [0, 1] such as 0.05", lambda v: 0 <= v <= 1),
    "bottom_p": ("a number in (0, 1] such as 0.9", lambda v: 0 < v <= 1),
    "bottom_p_frequency": ("a number in [0, 1] such as 0.5", lambda v: 0 <= v <= 1),
    "bottom_p_per_sequence": ("0 or 1", lambda v: v in (0, 1)),
    "key": ("a whole number of 64 bits", lambda v: float(v).is_integer() and -(2**63) <= v < 2**63),
}
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "bottom_p": 1.0, "temperatures": (), "only": -1}
_WHOLE = ("top_k", "bottom_p_per_sequence", "key")


@dataclass(frozen=True)
class Chain:
    """What one request asks for; the values are those of `explorl.rollout.SamplingParams`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bottom_p: float = 1.0
    bottom_p_frequency: float = 1.0
    bottom_p_per_sequence: int = 0
    temperatures: tuple[float, ...] = ()
    """By position, the last one holds on; empty where another sampler sees to the temperature."""
    only: int = -1
    """The one token that may be drawn, to see whether anybody listens; −1 is any."""
    key: int | None = None
    """Of the request's stream of random numbers; None is one that the receiver makes up."""

    @property
    def idle(self) -> bool:
        """Whether it leaves every distribution as it is."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.bottom_p < 1
        return not cuts and not self.temperatures and self.only < 0

    def extra_args(self) -> dict[str, Any]:
        """As numbers and lists that go through JSON; empty where it is idle."""
        if self.idle:
            return {}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        nothing = {field.name: field.default for field in fields(self)} | {"temperatures": []}
        return {PREFIX + name: value for name, value in given.items() if value != nothing[name]}

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Chain | None:
        """The chain of a request, checked; None where it has none. What belongs to others is left alone."""
        ours = {name: value for name, value in (extra_args or {}).items() if str(name).startswith(PREFIX)}
        if not ours:
            return None
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in ours.items():
            short = name.removeprefix(PREFIX)
            if short not in known:
                raise ValueError(f"unknown argument {name!r}; use one of {', '.join(PREFIX + one for one in known)}")
            values[short] = _value(short, value)
        return cls(**values)


def _value(name: str, value: Any) -> Any:
    if name == "temperatures":
        if not isinstance(value, Sequence) or isinstance(value, str) or not value or not all(map(_warm, value)):
            raise ValueError(f"{PREFIX}temperatures is {value!r}; use temperatures from 1e-6 to 100 such as [1.2, 1.0]")
        return tuple(float(one) for one in value)
    if name == "only":
        good, ok = "a token id such as 13", lambda v: v >= -1 and float(v).is_integer()
    else:
        good, ok = _GOOD[name]
    if not _number(value) or not ok(value):
        raise ValueError(f"{PREFIX}{name} is {value!r}; use {good}")
    return int(value) if name in _WHOLE or name == "only" else float(value)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _warm(value: Any) -> bool:
    return _number(value) and 1e-6 <= value <= 100


class LogQ(NamedTuple):
    """How likely drawn tokens were."""

    drawn: Float[Tensor, " rows"]
    """log q on the side that the coin of bottom-p showed."""
    mixed: Float[Tensor, " rows"]
    """Over both sides, where a coin is thrown for every token: log(f · q_bottom + (1 − f) · q_rest)."""


class Chains(NamedTuple):
    """The chains of some rows."""

    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    bottom_p: Float[Tensor, " rows"]
    frequency: Float[Tensor, " rows"]
    per_sequence: Bool[Tensor, " rows"]
    key: Int[Tensor, " rows"]
    only: Int[Tensor, " rows"]
    curve: Int[Tensor, " rows"]
    """Which row of ``curves`` holds its temperatures."""
    curves: Float[Tensor, "curves positions"]
    """The first is 1 throughout, for rows that have none."""
    active: frozenset[str]
    """The names of the steps that some row needs; the others cost nothing."""

    @classmethod
    def of(cls, chains: Sequence[Chain], device: torch.device | str = "cpu") -> Chains:
        """``key`` must not be None where a coin is thrown."""
        different = list(dict.fromkeys([(1.0,), *(chain.temperatures or (1.0,) for chain in chains)]))
        longest = max(map(len, different))
        curves = [[*curve, *[curve[-1]] * (longest - len(curve))] for curve in different]
        place = {curve: i for i, curve in enumerate(different)}

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            column([chain.top_k for chain in chains], torch.long),
            column([chain.top_p for chain in chains], torch.float64),
            column([chain.min_p for chain in chains], torch.float64),
            column([chain.bottom_p for chain in chains], torch.float64),
            column([chain.bottom_p_frequency for chain in chains], torch.float64),
            column([bool(chain.bottom_p_per_sequence) for chain in chains], torch.bool),
            column([chain.key or 0 for chain in chains], torch.long),
            column([chain.only for chain in chains], torch.long),
            column([place[chain.temperatures or (1.0,)] for chain in chains], torch.long),
            column(curves, torch.float32),
            frozenset(name for name, off in _OFF.items() if any(getattr(chain, name) != off for chain in chains)),
        )

    def take(self, index: Int[Tensor, " some"]) -> Chains:
        """Some of the rows, or some of them several times."""
        taken = {name: column[index] for name, column in self._asdict().items() if name not in ("curves", "active")}
        return self._replace(**taken)

    def temperatures(self, positions: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """By position; 1 where a row has none."""
        return self.curves[self.curve, positions.clamp(0, self.curves.shape[1] - 1)]

    def applied(self, positions: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Whether bottom-p is applied to the token at each position of the completion."""
        places = torch.where(self.per_sequence, 0, positions)
        return rng.uniform(self.key, places, rng.BERNOULLI) < self.frequency

    def _cut(
        self, scores: Float[Tensor, "rows vocab"], rate: Float[Tensor, " rows"] | None
    ) -> tuple[Bool[Tensor, "rows vocab"], Bool[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
        """What goes before bottom-p, what bottom-p removes of the rest, and the share of that."""
        ranked = scores.float()
        if "top_k" in self.active:
            ranked = warp_top_k(ranked, self.top_k)
        if "top_p" in self.active:
            ranked = warp_top_p(ranked, self.top_p, rate)
        if "min_p" in self.active:
            ranked = warp_min_p(ranked, self.min_p, rate)
        gone = ranked == -torch.inf
        if "bottom_p" not in self.active:
            return gone, torch.zeros_like(gone), torch.zeros_like(self.bottom_p)
        return gone, *bottom_p_cut(ranked, self.bottom_p, rate)

    def removed(
        self,
        scores: Float[Tensor, "rows vocab"],
        positions: Int[Tensor, " rows"],
        rate: Float[Tensor, " rows"] | None = None,
    ) -> Bool[Tensor, "rows vocab"]:
        """The tokens that may not be drawn at these positions; ``rate`` is 1 / τ where scores come before it."""
        before, cut, _ = self._cut(scores, rate)
        gone = before | (cut & self.applied(positions)[:, None])
        if "only" not in self.active:
            return gone
        others = torch.arange(scores.shape[-1], device=scores.device) != self.only[:, None]
        return torch.where((self.only >= 0)[:, None], others, gone)

    def log_q(
        self,
        scores: Float[Tensor, "rows vocab"],
        positions: Int[Tensor, " rows"],
        tokens: Int[Tensor, " rows"],
        rate: Float[Tensor, " rows"] | None = None,
    ) -> LogQ:
        """log q of tokens that were drawn by these rows.

        Another sampler's logits are not these to the last bit, so a token at the edge of a cut may be on the other side
        of it here. Since it was drawn, it counts as one that stays.
        """
        before, cut, mass = self._cut(scores, rate)
        applied = self.applied(positions)
        warm = scores.float() if rate is None else scores.float() * rate.float()[:, None]
        warped = warm.masked_fill(before | (cut & applied[:, None]), -torch.inf)
        drawn = tokens[:, None]
        warped = warped.scatter(-1, drawn, warm.gather(-1, drawn))
        logq = torch.log_softmax(warped, -1).gather(-1, drawn)[:, 0]
        mixed = Coin(self.frequency, applied, cut, mass).mixture(logq, tokens)
        return LogQ(logq, torch.where(self.per_sequence, logq, mixed))
