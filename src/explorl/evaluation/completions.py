"""Texts and statistics of one completion, in which tokens of a tool's output do not count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from explorl.rollout import Rollout
from explorl.rollout.backends.generate import Completion

TOOL_COLUMNS: Mapping[str, str] = {"calls": "int32", "tool_tokens": "int32", "tool_calls": "string"}
"""Columns of completions that may call a tool: the number of calls that ran, the number of tokens that were not
sampled, and all calls as JSON (a list of `ToolCall`s, including refused ones)."""


def answer_text(completion: Rollout | Completion) -> str:
    """Return the text that answers are parsed from, without the output of tools."""
    return completion.own_text if isinstance(completion, Rollout) else completion.text


def measured_text(completion: Rollout | Completion) -> str:
    """Return the text whose style is measured."""
    return completion.sampled_text if isinstance(completion, Rollout) else completion.text


def sampled_tokens(completion: Rollout | Completion) -> int:
    """Return the number of tokens that the model sampled."""
    return completion.model_tokens if isinstance(completion, Rollout) else len(completion.token_ids)


def mean_of(completion: Rollout | Completion, record: str) -> float | None:
    """Return the mean of a token statistic over the sampled tokens, or None if there is none."""
    if not isinstance(completion, Rollout) or not completion.sampled.any():
        return None
    return float(getattr(completion, record)[completion.sampled].float().mean())


def records_of(rollout: Rollout, record: str) -> list[Any]:
    """Return a statistic of every token, None for tokens that were not sampled."""
    values = getattr(rollout, record).tolist()
    return [value if sampled else None for value, sampled in zip(values, rollout.sampled.tolist(), strict=True)]


def tool_columns(rollout: Rollout) -> dict[str, Any]:
    """Return a completion's values of `TOOL_COLUMNS`."""
    calls = [{key: value for key, value in asdict(call).items() if key != "blank"} for call in rollout.calls]
    return {
        "calls": sum(call.status != "refused" for call in rollout.calls),
        "tool_tokens": len(rollout) - rollout.model_tokens,
        "tool_calls": json.dumps(calls, ensure_ascii=False),
    }
