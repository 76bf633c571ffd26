"""The strategies' sampling parameters of each row, as verl's servers expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides

FIELD = "explorl_sampling"
"""Column of verl's batch that takes the parameters of a prompt's completions to the agent loop."""
DIRECT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that are fields of a request."""
PREFIX = "explorl_"
EXTRA = {name: PREFIX + name for name in ("bottom_p", "bottom_p_frequency", "bottom_p_per_sequence")}
"""Parameters of Explorl's logits processor for vLLM, with their keys in ``extra_args``."""
CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Truncations applied before bottom-p, with the values that disable them. vLLM applies its own after all processors,
so in combination with bottom-p they are passed to the processor instead."""
TRAINING = "training_temperature"
"""Affects only the training log-probabilities, so it is not sent to a server."""
REFUSED = {
    "temperature_by_position": "verl's workers compute log-probabilities at one temperature for all tokens of a row",
    "tool_calls": "verl's own agent loops call tools and count the calls",
}


def collect_parameters(strategies: Sequence[Strategy], prompts: Sequence[str], step: int) -> dict[str, list[Any]]:
    """Return the parameters by name, one value per row; if two strategies set the same one, the later wins."""
    parameters: dict[str, list[Any]] = {}
    for strategy in strategies:
        if not overrides(strategy, "sampling"):
            continue
        for name, values in (strategy.sampling(prompts, step) or {}).items():
            if name not in (*DIRECT, *EXTRA, TRAINING):
                supported = ", ".join((*DIRECT, *EXTRA, TRAINING))
                why = REFUSED.get(name, f"inside verl a strategy can set {supported}")
                raise ValueError(f"{name_of(strategy)}.sampling sets {name!r}: {why}")
            if len(values) != len(prompts):
                raise ValueError(
                    f"{name_of(strategy)}.sampling returns {len(values)} values of {name!r} for {len(prompts)} rows"
                )
            parameters[name] = [_to_float(strategy, name, value) for value in values]
    return parameters


def split_rows(parameters: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Return the parameters of each row."""
    return [{name: values[row] for name, values in parameters.items()} for row in range(count)]


def request_parameters(params: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's sampling parameters, with the row's values instead of the run's."""
    changed = {**params, **{name: row[name] for name in DIRECT if name in row}}
    if "top_k" in row:
        changed["top_k"] = int(row["top_k"]) or -1  # verl's servers use −1 for no limit
    extra = {key: row[name] for name, key in EXTRA.items() if name in row}
    if extra:
        cuts = {name: changed[name] for name, off in CUTS.items() if changed.get(name, off) not in (off, 0)}
        changed |= {name: off for name, off in CUTS.items() if name in cuts}
        extra |= {f"{PREFIX}{name}": value for name, value in cuts.items()}
        changed["extra_args"] = {**(params.get("extra_args") or {}), **extra}
    return changed


def training_temperature(row: Mapping[str, Any], default: float) -> float:
    """Return the temperature of a row's training log-probabilities."""
    return float(row.get(TRAINING, row.get("temperature", default)))


def _to_float(strategy: Strategy, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name_of(strategy)}.sampling sets {name!r} to {value!r}; give one number per row") from None
