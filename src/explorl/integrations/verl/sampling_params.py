"""What strategies say of each row's sampling, in the words of verl's servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides

FIELD = "explorl_sampling"
"""The column of verl's batch in which the parameters of a prompt's answers travel to the agent loop."""
DIRECT = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a request has of its own."""
PREFIX = "explorl_"
EXTRA = {name: PREFIX + name for name in ("bottom_p", "bottom_p_frequency", "bottom_p_per_sequence")}
"""Parameters of Explorl's logits processor for vLLM, and the keys of ``extra_args`` under which it reads them."""
CUTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Cuts that come before bottom-p, and what switches them off. vLLM has its own behind all processors, so beside
bottom-p they go to the processor as well."""
TRAINING = "training_temperature"
"""Of the training log-probabilities alone: no server is told."""
REFUSED = {
    "temperature_by_position": "verl's workers compute log-probabilities at one temperature for all tokens of a row",
    "tool_calls": "verl's tools are agent loops of its own, which count their calls by themselves",
}


def said(strategies: Sequence[Strategy], prompts: Sequence[str], step: int) -> dict[str, list[Any]]:
    """Parameters by name, one value per row; of two strategies that set the same one, the later wins."""
    found: dict[str, list[Any]] = {}
    for strategy in strategies:
        if not overrides(strategy, "sampling"):
            continue
        for name, values in (strategy.sampling(prompts, step) or {}).items():
            if name not in (*DIRECT, *EXTRA, TRAINING):
                known = ", ".join((*DIRECT, *EXTRA, TRAINING))
                why = REFUSED.get(name, f"inside verl a row may have {known}")
                raise ValueError(f"{name_of(strategy)}.sampling sets {name!r}: {why}")
            if len(values) != len(prompts):
                raise ValueError(
                    f"{name_of(strategy)}.sampling gives {len(values)} of {name!r} for {len(prompts)} rows"
                )
            found[name] = [_plain(strategy, name, value) for value in values]
    return found


def rows_of(parameters: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """The parameters of each row by itself."""
    return [{name: values[row] for name, values in parameters.items()} for row in range(count)]


def request(given: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A request's sampling parameters with those of its row in place of the run's."""
    changed = {**given, **{name: row[name] for name in DIRECT if name in row}}
    if "top_k" in row:
        changed["top_k"] = int(row["top_k"]) or -1  # verl's servers say −1 where there is no limit
    extra = {key: row[name] for name, key in EXTRA.items() if name in row}
    if extra:
        cuts = {name: changed[name] for name, off in CUTS.items() if changed.get(name, off) not in (off, 0)}
        changed |= {name: off for name, off in CUTS.items() if name in cuts}
        extra |= {f"{PREFIX}{name}": value for name, value in cuts.items()}
        changed["extra_args"] = {**(given.get("extra_args") or {}), **extra}
    return changed


def training_temperature(row: Mapping[str, Any], default: float) -> float:
    """The temperature of a row's training log-probabilities."""
    return float(row.get(TRAINING, row.get("temperature", default)))


def _plain(strategy: Strategy, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name_of(strategy)}.sampling sets {name!r} to {value!r}; give one number per row") from None
