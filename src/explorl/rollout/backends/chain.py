"""The last steps of sampling for one request, from tempered logits on, in a form that another sampler can apply.

    top-k → top-p → min-p → bottom-p, each on what the previous one has left

A request carries its `Chain` as plain numbers under names that begin with ``explorl_`` (vLLM's ``extra_args``, or
``vllm_xargs`` of a server). `Chains` holds the chains of a batch as tensors: `Chains.removed` returns which tokens may
not be sampled, `Chains.log_q` the log-probability of a sampled token. As in our engine, cuts follow the rule of
`explorl.rollout.sampling.ranking`, and whether bottom-p is applied comes from the request's own stream of random
numbers (`explorl.rollout.sampling.rng`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.core.sampling_ranges import RANGES, Range
from explorl.rollout.sampling import bottom_p_cut, rng
from explorl.rollout.sampling.params import is_temperature
from explorl.rollout.sampling.sample import Coin, truncate

PREFIX = "explorl_"

_RANGES: Mapping[str, Range] = {
    **RANGES,
    "bottom_p_per_sequence": Range("0 or 1", 0, 1, whole=True),
    "only": Range("a token id such as 13", -1, whole=True),
    "key": Range("a whole number of 64 bits", -(2**63), 2**63 - 1, whole=True),
}
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "bottom_p": 1.0, "temperatures": (), "only": -1}


@dataclass(frozen=True)
class Chain:
    """The chain of one request; the values are those of `explorl.rollout.SamplingParams`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bottom_p: float = 1.0
    bottom_p_frequency: float = 1.0
    bottom_p_per_sequence: int = 0
    temperatures: tuple[float, ...] = ()
    """Temperatures by position; the last one holds from there on. Empty if the sampler applies the temperature."""
    only: int = -1
    """The only token that may be sampled, to test whether the processor is active; −1 means any."""
    key: int | None = None
    """Key of the request's stream of random numbers; None lets the receiver choose one."""

    @property
    def idle(self) -> bool:
        """True if it changes no distribution."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.bottom_p < 1
        return not cuts and not self.temperatures and self.only < 0

    def extra_args(self) -> dict[str, Any]:
        """Return the chain as numbers and lists for JSON; empty if it is idle."""
        if self.idle:
            return {}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        defaults = {field.name: field.default for field in fields(self)} | {"temperatures": []}
        return {PREFIX + name: value for name, value in values.items() if value != defaults[name]}

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Chain | None:
        """Return the chain in a request's arguments, or None if they have none; arguments of others are ignored.

        Raise `ValueError` for unknown names and bad values.
        """
        ours = {name: value for name, value in (extra_args or {}).items() if str(name).startswith(PREFIX)}
        if not ours:
            return None
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in ours.items():
            short = name.removeprefix(PREFIX)
            if short not in names:
                raise ValueError(f"unknown argument {name!r}; use one of {', '.join(PREFIX + name for name in names)}")
            values[short] = _value(short, value)
        return cls(**values)


def _value(name: str, value: Any) -> Any:
    """Return an argument's value, converted; raise `ValueError` if it is invalid."""
    if name == "temperatures":
        if (
            not isinstance(value, Sequence)
            or isinstance(value, str)
            or not value
            or not all(map(is_temperature, value))
        ):
            raise ValueError(f"{PREFIX}temperatures is {value!r}; use temperatures from 1e-6 to 100 such as [1.2, 1.0]")
        return tuple(float(temperature) for temperature in value)
    allowed = _RANGES[name]
    if not allowed.includes(value):
        raise ValueError(f"{PREFIX}{name} is {value!r}; use {allowed.good}")
    return int(value) if allowed.whole else float(value)


class LogQ(NamedTuple):
    """Log-probabilities of sampled tokens."""

    sampled: Float[Tensor, " rows"]
    """log q given whether bottom-p was applied."""
    mixed: Float[Tensor, " rows"]
    """log q over both outcomes, if that is random for every token: log(f · q_bottom + (1 − f) · q_rest)."""


class Chains(NamedTuple):
    """The chains of a batch of rows as tensors."""

    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    bottom_p: Float[Tensor, " rows"]
    frequency: Float[Tensor, " rows"]
    per_sequence: Bool[Tensor, " rows"]
    key: Int[Tensor, " rows"]
    only: Int[Tensor, " rows"]
    curve: Int[Tensor, " rows"]
    """Index of the row's temperatures in ``curves``."""
    curves: Float[Tensor, "curves positions"]
    """The first is 1 throughout, for rows without temperatures."""
    active: frozenset[str]
    """Names of the steps that some row needs; the others are skipped."""

    @classmethod
    def of(cls, chains: Sequence[Chain], device: torch.device | str = "cpu") -> Chains:
        """Return the chains as tensors. ``key`` must not be None if bottom-p is applied at random."""
        distinct = list(dict.fromkeys([(1.0,), *(chain.temperatures or (1.0,) for chain in chains)]))
        longest = max(map(len, distinct))
        curves = [[*curve, *[curve[-1]] * (longest - len(curve))] for curve in distinct]
        index = {curve: i for i, curve in enumerate(distinct)}

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
            column([index[chain.temperatures or (1.0,)] for chain in chains], torch.long),
            column(curves, torch.float32),
            frozenset(name for name, off in _OFF.items() if any(getattr(chain, name) != off for chain in chains)),
        )

    def select(self, index: Int[Tensor, " some"]) -> Chains:
        """Return the rows with these indices, which may repeat."""
        columns = {name: column[index] for name, column in self._asdict().items() if name not in ("curves", "active")}
        return self._replace(**columns)

    def temperatures(self, positions: Int[Tensor, " rows"]) -> Float[Tensor, " rows"]:
        """Return each row's temperature at its position; 1 if it has none."""
        return self.curves[self.curve, positions.clamp(0, self.curves.shape[1] - 1)]

    def applied(self, positions: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Return whether bottom-p is applied to each row's token at its position in the completion."""
        counters = torch.where(self.per_sequence, 0, positions)
        return rng.uniform(self.key, counters, rng.BERNOULLI) < self.frequency

    def _cut(
        self, scores: Float[Tensor, "rows vocab"], rate: Float[Tensor, " rows"] | None
    ) -> tuple[Bool[Tensor, "rows vocab"], Bool[Tensor, "rows vocab"], Float[Tensor, " rows"]]:
        """Return what is removed before bottom-p, what bottom-p removes of the rest, and the mass of that."""
        cuts = {name: getattr(self, name) if name in self.active else None for name in ("top_k", "top_p", "min_p")}
        ranked = truncate(scores.float(), **cuts, rate=rate)
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
        """Return the tokens that may not be sampled at these positions; ``rate`` is 1 / τ if scores come before it."""
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
        """Return log q of tokens that another sampler sampled for these rows.

        The other sampler's logits differ in the last bits, so a token at the edge of a cut may be on the other side of
        it here. As it was sampled, it counts as one that stays.
        """
        before, cut, mass = self._cut(scores, rate)
        applied = self.applied(positions)
        tempered = scores.float() if rate is None else scores.float() * rate.float()[:, None]
        warped = tempered.masked_fill(before | (cut & applied[:, None]), -torch.inf)
        sampled = tokens[:, None]
        warped = warped.scatter(-1, sampled, tempered.gather(-1, sampled))
        logq = torch.log_softmax(warped, -1).gather(-1, sampled)[:, 0]
        mixed = Coin(self.frequency, applied, cut, mass).mixture(logq, tokens)
        return LogQ(logq, torch.where(self.per_sequence, logq, mixed))
