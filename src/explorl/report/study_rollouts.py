"""The data of the rollout browser: compact token records, trimmed evenly to a size limit and safe inside a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from explorl.analysis.categories import CATEGORIES, categories_of
from explorl.analysis.study_answers import in_turns
from explorl.core.text import clean
from explorl.report.rollout_shapes import blocks, lineage
from explorl.report.study_numbers import finite_or_none


@dataclass(frozen=True)
class TokenMeasure:
    """A number recorded for every token, and the scale that shades the token by it.

    ``sequential`` shades more the further a value lies above ``low``, ``reversed`` the further it lies below ``high``,
    ``diverging`` in two colours on both sides of ``centre``. ``nominal`` numbers are indices into ``names``, each with
    its own colour and underline style.
    """

    key: str
    label: str
    unit: str = ""
    scale: Literal["sequential", "reversed", "diverging", "nominal"] = "sequential"
    centre: float = 0.0
    low: float | None = None
    high: float | None = None
    exponential: bool = False
    """The record is a logarithm; the browser shows its exponential."""
    names: Sequence[str] = ()


MEASURES = (
    TokenMeasure("entropy", "entropy", "nats", low=0.0),
    TokenMeasure("logp", "probability", scale="reversed", low=0.0, high=1.0, exponential=True),
    TokenMeasure("advantage", "advantage", scale="diverging"),
    TokenMeasure("weight", "strategy weight", scale="diverging", centre=1.0),
    TokenMeasure("update_size", "update size G", low=0.0),
    TokenMeasure("delta_p", "probability change Δp", scale="diverging"),
    TokenMeasure("impact", "impact", scale="diverging", low=-1.0, high=1.0),
    TokenMeasure("category", "category", scale="nominal", names=CATEGORIES),
)
"""Measures in the order of the keys 1, 2, … that select them; records with other names follow."""
_NOT_MEASURES = (
    "tokens", "correct", "reward", "finish", "recorded", "other", "other_logp", "impacts", "calls", "blocks", "row",
    "parent", "forked_at",
)  # fmt: skip
MAX_CONTINUATIONS, MAX_CHARACTERS = 8, 400
"""Continuations of a token that the page shows, and characters of each; the counts on the page include the rest."""
_QUANTILE = 0.98  # a few extreme tokens would leave all others unshaded


def token_measures(rollouts: Sequence[Mapping[str, Any]]) -> list[TokenMeasure]:
    """Return the measures that these rollouts have, with the ends of their scales."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for completion in rollout.get("answers") or []:
            for key in _record_keys(completion):
                record = completion[key] if isinstance(completion[key], list) else [completion[key]]
                values.setdefault(key, []).extend(value for value in record if value is not None)
    by_key = {measure.key: measure for measure in MEASURES}
    order = [key for key in by_key if values.get(key)] + sorted(
        key for key in values if key not in by_key and values[key]
    )
    return [_with_scale(by_key.get(key, TokenMeasure(key, key.replace("_", " "))), values[key]) for key in order]


def _with_scale(measure: TokenMeasure, values: list[float]) -> TokenMeasure:
    if measure.scale == "nominal" or (measure.scale == "diverging" and measure.high is not None):
        return measure
    if measure.scale == "diverging":
        reach = _quantile([abs(value - measure.centre) for value in values]) or 1.0
        low, high = measure.centre - reach, measure.centre + reach
    else:
        low = measure.low if measure.low is not None else min(values)
        high = measure.high if measure.high is not None else _quantile(values)
        high = high if high > low else low + 1.0
    return TokenMeasure(**(asdict(measure) | {"low": round(low, 4), "high": round(high, 4)}))


def _quantile(values: list[float]) -> float:
    return sorted(values)[math.ceil(_QUANTILE * (len(values) - 1))]


def compact(rollouts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rollouts in a smaller form: rounded numbers, and one number for a record that is constant."""
    return [
        {
            "arm": str(rollout.get("arm")),
            "seed": rollout.get("seed"),
            "step": rollout.get("step"),
            "prompt": str(rollout.get("prompt")),
            "answers": [_compact_completion(completion) for completion in rollout.get("answers") or []],
        }
        for rollout in rollouts
    ]


def _compact_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {
        "tokens": [str(token) for token in completion.get("tokens") or []],
        "correct": completion.get("correct"),
        "reward": _rounded(completion.get("reward")),
        "finish": completion.get("finish"),
    }
    if completion.get("recorded") is False:
        return small | {"recorded": False}
    small |= lineage(completion, len(small["tokens"]))
    if call_blocks := blocks(small["tokens"], completion.get("calls")):
        small["blocks"] = call_blocks
    for key in _record_keys(completion):
        small[key] = _collapse_constant([_rounded(value) for value in completion[key]])
    if completion.get("recorded") and "category" not in small:
        small["category"] = _collapse_constant([CATEGORIES.index(name) for name in categories_of(small["tokens"])])
    if any(completion.get("other") or []):
        small["other"] = ["" if token is None else clean(str(token), 200) for token in completion["other"]]
        other_logp = completion.get("other_logp") or [None] * len(small["other"])
        small["other_logp"] = [_rounded(value) for value in other_logp]
    if completion.get("impacts"):
        small["impacts"] = {
            str(position): _compact_impact(impact) for position, impact in completion["impacts"].items()
        }
        means = {int(position): impact["mean"] for position, impact in small["impacts"].items()}
        small["impact"] = [means.get(position) for position in range(len(small["tokens"]))]
    return small


def _collapse_constant(record: list[Any]) -> Any:
    """Return a constant record as one value, any other unchanged."""
    return record[0] if len(record) > 1 and len(set(record)) == 1 else record


def _compact_impact(impact: Mapping[str, Any]) -> dict[str, Any]:
    """Return the impact of a replaced token, with the continuations from both tokens."""
    return {
        **{key: _rounded(impact.get(key)) for key in ("mean", "low", "high", "p")},
        **{side: _compact_side(impact[side]) for side in ("sampled", "other")},
    }


def _compact_side(side: Mapping[str, Any]) -> dict[str, Any]:
    texts = side.get("continuations") or []
    return {
        "token": clean(str(side.get("token")), 200),
        "probability": _rounded(side.get("probability")),
        "correct": int(side.get("correct") or 0),
        "count": int(side.get("count") or 0),
        "texts": [
            [clean(str(texts[index][0]), MAX_CHARACTERS), bool(texts[index][1])]
            for index in sorted(in_turns([bool(correct) for _, correct in texts])[:MAX_CONTINUATIONS])
        ],
    }


def _record_keys(completion: Mapping[str, Any]) -> list[str]:
    return [key for key, value in completion.items() if key not in _NOT_MEASURES and value is not None]


def _rounded(value: Any) -> float | None:
    number = finite_or_none(value)
    if number is None:
        return None
    rounded = round(float(f"{number:.4g}"), 3)
    return int(rounded) if rounded.is_integer() else rounded


def script_json(value: Any) -> str:
    """Return JSON that is safe in a script element: nothing in it can end the element or start another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def trim_rollouts(rollouts: Sequence[dict[str, Any]], max_bytes: int) -> list[dict[str, Any]]:
    """Return as many of the rollouts as fit into `max_bytes`, evenly over arms, seeds and steps.

    First, prompts of each arm, seed and step are dropped, down to one; then completions of that prompt, down to a
    correct and a wrong one; then every other step.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout["arm"], rollout["seed"], rollout["step"]), []).append(rollout)
    sizes = {id(completion): _bytes(completion) for rollout in rollouts for completion in rollout["answers"]}
    head_sizes = {id(rollout): _bytes(rollout | {"answers": []}) for rollout in rollouts}

    def fits(selected: Sequence[dict[str, Any]], count: int) -> bool:
        return max_bytes >= 2 + sum(
            head_sizes[id(rollout)] + sum(sizes[id(completion)] for completion in _mixed(rollout["answers"], count))
            for rollout in selected
        )

    max_prompts = max((len(group) for group in groups.values()), default=0)
    max_completions = max((len(rollout["answers"]) for rollout in rollouts), default=0)
    steps = sorted({key[2] for key in groups}, key=lambda step: (step is None, step))
    ladder = [(prompts, max_completions, 1) for prompts in range(max_prompts, 0, -1)]
    ladder += [(1, completions, 1) for completions in range(max_completions - 1, 1, -1)]
    ladder += [(1, min(2, max_completions), 2**power) for power in range(1, len(steps).bit_length() + 1)]
    for prompts, completions, stride in ladder:
        selected_steps = steps[::-1][::stride]  # always includes the last step
        selected = [rollout for key, group in groups.items() if key[2] in selected_steps for rollout in group[:prompts]]
        if fits(selected, completions):
            selected_ids = {id(rollout) for rollout in selected}
            return [
                rollout | {"answers": _mixed(rollout["answers"], completions)}
                for rollout in rollouts
                if id(rollout) in selected_ids
            ]
    return []


def _mixed(completions: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return `count` of the completions in their order, chosen alternately among correct and wrong ones."""
    if count >= len(completions):
        return completions
    turns = in_turns([bool(completion["correct"]) for completion in completions])
    return [completions[index] for index in sorted(turns[:count])]


def _bytes(value: Any) -> int:
    return len(script_json(value).encode("utf-8", "replace")) + 1  # the comma
