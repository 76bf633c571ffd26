"""Columns of a generation batch for listeners, with a record of every token for some completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.training.grpo.tool_transcripts import ToolTranscript


def logged_columns(
    logs: Mapping[str, Any], count: int, render: Callable[[Any], str] | None = None
) -> dict[str, list[Any]]:
    """Return the latest ``count`` rows of TRL's logs: prompts, completions, advantages and reward parts.

    ``render`` converts a prompt to text; without it, messages become their contents.
    """
    latest = {key: list(logs[key])[-count:] for key in ("prompt", "completion", "advantages")}
    rewards = {f"reward/{key}": list(values)[-count:] for key, values in logs["rewards"].items()}
    return {
        "prompt": [(render or prompt_text)(prompt) for prompt in latest["prompt"]],
        "completion": [prompt_text(completion) for completion in latest["completion"]],
        "advantage": latest["advantages"],
        **rewards,
    }


def policy_texts(logs: Mapping[str, Any], count: int, transcripts: Sequence[ToolTranscript] | None) -> list[str]:
    """Return the latest ``count`` completions without the outputs of tools."""
    if transcripts is not None:
        return [transcript.policy_text for transcript in transcripts]
    return [_without_tool_messages(completion) for completion in list(logs["completion"])[-count:]]


def _without_tool_messages(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    return prompt_text([message for message in completion if message.get("role") != "tool"])


def tool_call_columns(transcripts: Sequence[ToolTranscript]) -> dict[str, list[Any]]:
    """Return the texts of completions with blank outputs, without and with outputs, and their calls."""
    return {
        "completion": [transcript.blanked_text for transcript in transcripts],
        "written": [transcript.policy_text for transcript in transcripts],
        "transcript": [transcript.text for transcript in transcripts],
        "calls": [list(transcript.calls) for transcript in transcripts],
    }


def token_texts(
    output: Mapping[str, Any], rows: Sequence[int], text_of: Callable[[int], str]
) -> dict[str, list[list[Any]]]:
    """Return the tokens of prompts and completions, for these rows of a generation batch.

    A tool's outputs are included, since later tokens are conditioned on them.
    """
    chosen = torch.tensor(list(rows), dtype=torch.long, device=output["completion_ids"].device)
    columns: dict[str, list[list[Any]]] = {}
    for name in ("prompt", "completion"):
        ids, mask = output[f"{name}_ids"][chosen].cpu(), output[f"{name}_mask"][chosen].cpu() > 0
        column = "prompt_ids" if name == "prompt" else "token_ids"
        columns[column] = [row[present].tolist() for row, present in zip(ids, mask, strict=True)]
    return {**columns, "tokens": [[text_of(token) for token in row] for row in columns["token_ids"]]}


def token_lists(values: Tensor, completion_mask: Tensor, counted: Tensor) -> list[list[Any]]:
    """Return one value per token of each completion, None on a tool's output."""
    lengths = completion_mask.sum(1).tolist()
    lists = [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]
    if torch.equal(counted > 0, completion_mask > 0):
        return lists
    marks = counted.tolist()
    return [
        [value if mark else None for value, mark in zip(row, row_marks, strict=False)]
        for row, row_marks in zip(lists, marks, strict=True)
    ]


def sparse_column(values: Sequence[Any], rows: Sequence[int], count: int) -> list[Any]:
    """Return values of some rows as a column of ``count`` rows, with None in the others."""
    column: list[Any] = [None] * count
    for row, value in zip(rows, values, strict=True):
        column[row] = value
    return column


def token_weights(output: Mapping[str, Any]) -> Tensor:
    """Return the factor of each token's policy term: the strategies' weight, 0 for tokens that are not in the loss."""
    mask = counted_tokens(output)
    weights = output.get("token_weights", torch.ones_like(mask, dtype=torch.float))
    return weights * output.get("loss_mask", mask)


def token_advantages(output: Mapping[str, Any]) -> Tensor:
    """Return the advantage of each token; an advantage per completion is expanded to its tokens."""
    advantages: Tensor = output["advantages"]
    return advantages.unsqueeze(1).expand(output["completion_mask"].shape) if advantages.dim() == 1 else advantages


def prompt_text(prompt: Any) -> str:
    """Return the text of a prompt or completion; of messages, their contents."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content") or "") for message in prompt)


def counted_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """Return a mask of the completion tokens that the policy sampled: no padding, no tool output."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
