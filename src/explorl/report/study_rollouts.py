"""What the rollout browser is given: token records made small, trimmed evenly to the room there is, safe in a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from explorl.analysis.categories import CATEGORIES, categories_of
from explorl.core.text import clean
from explorl.report.rollout_shapes import blocks, lineage
from explorl.report.study_numbers import finite_or_none


@dataclass(frozen=True)
class TokenMeasure:
    """A number that every token has, and the scale in which it shades the token.

    ``sequential`` shades more the further a value lies above ``low``, ``reversed`` the further it lies below ``high``,
    ``diverging`` in two colours on both sides of ``centre``. ``nominal`` numbers are places among ``names``, with a
    colour and a kind of line each.
    """

    key: str
    label: str
    unit: str = ""
    scale: Literal["sequential", "reversed", "diverging", "nominal"] = "sequential"
    centre: float = 0.0
    low: float | None = None
    high: float | None = None
    exponential: bool = False
    """The record is a logarithm, shown as what it is the logarithm of."""
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
"""Measures in the order of their keys 1, 2, …; a record with another name is shown too, after these."""
_NOT_MEASURES = (
    "tokens", "correct", "reward", "finish", "recorded", "other", "other_logp", "impacts", "calls", "blocks", "row",
    "parent", "forked_at",
)  # fmt: skip
CONTINUATIONS, LETTERS = 8, 400
"""Continuations of a token that the page shows, and letters of each; their number counts all of them."""
_QUANTILE = 0.98  # a few extreme tokens would leave all others unshaded


def token_measures(rollouts: Sequence[Mapping[str, Any]]) -> list[TokenMeasure]:
    """The measures that these rollouts have, with the ends of their scales."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for answer in rollout.get("answers") or []:
            for key in _records(answer):
                record = answer[key] if isinstance(answer[key], list) else [answer[key]]
                values.setdefault(key, []).extend(value for value in record if value is not None)
    known = {measure.key: measure for measure in MEASURES}
    order = [key for key in known if values.get(key)] + sorted(
        key for key in values if key not in known and values[key]
    )
    return [_ended(known.get(key, TokenMeasure(key, key.replace("_", " "))), values[key]) for key in order]


def _ended(measure: TokenMeasure, values: list[float]) -> TokenMeasure:
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
    """The same rollouts in fewer letters: short numbers, and one number for a record that never changes."""
    return [
        {
            "arm": str(rollout.get("arm")),
            "seed": rollout.get("seed"),
            "step": rollout.get("step"),
            "prompt": str(rollout.get("prompt")),
            "answers": [_compact(answer) for answer in rollout.get("answers") or []],
        }
        for rollout in rollouts
    ]


def _compact(answer: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {
        "tokens": [str(token) for token in answer.get("tokens") or []],
        "correct": answer.get("correct"),
        "reward": _short(answer.get("reward")),
        "finish": answer.get("finish"),
    }
    if answer.get("recorded") is False:
        return small | {"recorded": False}
    small |= lineage(answer, len(small["tokens"]))
    if found := blocks(small["tokens"], answer.get("calls")):
        small["blocks"] = found
    for key in _records(answer):
        small[key] = _once([_short(value) for value in answer[key]])
    if answer.get("recorded") and "category" not in small:
        small["category"] = _once([CATEGORIES.index(name) for name in categories_of(small["tokens"])])
    if any(answer.get("other") or []):
        small["other"] = ["" if token is None else clean(str(token), 200) for token in answer["other"]]
        small["other_logp"] = [_short(value) for value in answer.get("other_logp") or [None] * len(small["other"])]
    if answer.get("impacts"):
        small["impacts"] = {str(place): _impact(one) for place, one in answer["impacts"].items()}
        known = {int(place): one["mean"] for place, one in small["impacts"].items()}
        small["impact"] = [known.get(place) for place in range(len(small["tokens"]))]
    return small


def _once(record: list[Any]) -> Any:
    """A record that never changes as one value."""
    return record[0] if len(record) > 1 and len(set(record)) == 1 else record


def _impact(one: Mapping[str, Any]) -> dict[str, Any]:
    """A replaced token: its impact, and what both sides went on with."""
    return {
        **{key: _short(one.get(key)) for key in ("mean", "low", "high", "p")},
        **{side: _side(one[side]) for side in ("sampled", "other")},
    }


def _side(side: Mapping[str, Any]) -> dict[str, Any]:
    texts = side.get("continuations") or []
    return {
        "token": clean(str(side.get("token")), 200),
        "probability": _short(side.get("probability")),
        "correct": int(side.get("correct") or 0),
        "count": int(side.get("count") or 0),
        "texts": [[clean(str(text), LETTERS), bool(correct)] for text, correct in _both(texts, CONTINUATIONS)],
    }


def _both(texts: Sequence[Any], count: int) -> list[Any]:
    """Up to `count` continuations in their order, right and wrong ones by turns as long as there are both."""
    kept = _mixed([{"correct": one[1], "one": one} for one in texts], count)
    return [entry["one"] for entry in kept]


def _records(answer: Mapping[str, Any]) -> list[str]:
    return [key for key, value in answer.items() if key not in _NOT_MEASURES and value is not None]


def _short(value: Any) -> float | None:
    number = finite_or_none(value)
    if number is None:
        return None
    short = round(float(f"{number:.4g}"), 3)
    return int(short) if short.is_integer() else short


def script_json(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def trim_rollouts(rollouts: Sequence[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    """As many of the rollouts as fit into `room` bytes, evenly over arms, seeds and steps.

    First each arm, seed and step loses prompts, down to one; then that prompt loses answers, down to a correct and a
    wrong one; then every other step goes.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout["arm"], rollout["seed"], rollout["step"]), []).append(rollout)
    sizes = {id(answer): _bytes(answer) for rollout in rollouts for answer in rollout["answers"]}
    heads = {id(rollout): _bytes(rollout | {"answers": []}) for rollout in rollouts}

    def fits(kept: Sequence[dict[str, Any]], answers: int) -> bool:
        return room >= 2 + sum(
            heads[id(rollout)] + sum(sizes[id(answer)] for answer in _mixed(rollout["answers"], answers))
            for rollout in kept
        )

    most_prompts = max((len(group) for group in groups.values()), default=0)
    most_answers = max((len(rollout["answers"]) for rollout in rollouts), default=0)
    steps = sorted({key[2] for key in groups}, key=lambda step: (step is None, step))
    ladder = [(prompts, most_answers, 1) for prompts in range(most_prompts, 0, -1)]
    ladder += [(1, answers, 1) for answers in range(most_answers - 1, 1, -1)]
    ladder += [(1, min(2, most_answers), 2**power) for power in range(1, len(steps).bit_length() + 1)]
    for prompts, answers, stride in ladder:
        last = steps[::-1][::stride]  # the last step stays in any case
        kept = [rollout for key, group in groups.items() if key[2] in last for rollout in group[:prompts]]
        if fits(kept, answers):
            chosen = {id(rollout) for rollout in kept}
            return [
                rollout | {"answers": _mixed(rollout["answers"], answers)}
                for rollout in rollouts
                if id(rollout) in chosen
            ]
    return []


def _mixed(answers: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` of the answers in their order, correct and wrong ones in turn as long as there are both."""
    if count >= len(answers):
        return answers
    turns = {True: 0, False: 0}
    ranked = []
    for index, answer in enumerate(answers):
        correct = bool(answer["correct"])
        ranked.append((turns[correct], not correct, index))
        turns[correct] += 1
    return [answers[index] for index in sorted(index for _, _, index in sorted(ranked)[:count])]


def _bytes(value: Any) -> int:
    return len(script_json(value).encode("utf-8", "replace")) + 1  # the comma
