"""What an evaluation says of one completion: only what was sampled is measured, and calls of a tool are told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from explorl.rollout import Rollout
from explorl.rollout.backends.generate import Completion

TOOL_COLUMNS: Mapping[str, str] = {"calls": "int32", "tool_tokens": "int32", "tool_calls": "string"}
"""Of completions that may call a tool: calls that were run, tokens that were not sampled, and all calls as JSON (a list
of `ToolCall`s, those that were refused included)."""


def answer_text(completion: Rollout | Completion) -> str:
    """The text that answers are read from: what a tool printed is not what the model answered."""
    return completion.own_text if isinstance(completion, Rollout) else completion.text


def measured_text(completion: Rollout | Completion) -> str:
    """The text whose style is measured."""
    return completion.sampled_text if isinstance(completion, Rollout) else completion.text


def sampled_tokens(completion: Rollout | Completion) -> int:
    """Tokens that the model sampled."""
    return completion.model_tokens if isinstance(completion, Rollout) else len(completion.token_ids)


def mean_of(completion: Rollout | Completion, record: str) -> float | None:
    """Mean of a record over the sampled tokens; None where there is none."""
    if not isinstance(completion, Rollout) or not completion.sampled.any():
        return None
    return float(getattr(completion, record)[completion.sampled].float().mean())


def records_of(rollout: Rollout, record: str) -> list[Any]:
    """A record of every token; None where the token was not sampled."""
    values = getattr(rollout, record).tolist()
    return [value if own else None for value, own in zip(values, rollout.sampled.tolist(), strict=True)]


def tool_columns(rollout: Rollout) -> dict[str, Any]:
    """A completion's values of `TOOL_COLUMNS`."""
    calls = [{key: value for key, value in asdict(call).items() if key != "blank"} for call in rollout.calls]
    return {
        "calls": sum(call.status != "refused" for call in rollout.calls),
        "tool_tokens": len(rollout) - rollout.model_tokens,
        "tool_calls": json.dumps(calls, ensure_ascii=False),
    }
