"""What a training step leaves to be read: a generation batch as columns, some answers with a record of every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.training.grpo.tool_transcripts import ToolTranscript


def logged_columns(
    logs: Mapping[str, Any], count: int, seen: Callable[[Any], str] | None = None
) -> dict[str, list[Any]]:
    """The latest ``count`` rows of TRL's logs: prompts, completions, advantages and the parts of the reward.

    ``seen`` makes a text of a prompt; without it, messages are their contents.
    """
    latest = {key: list(logs[key])[-count:] for key in ("prompt", "completion", "advantages")}
    rewards = {f"reward/{key}": list(values)[-count:] for key, values in logs["rewards"].items()}
    return {
        "prompt": [(seen or prompt_text)(prompt) for prompt in latest["prompt"]],
        "completion": [prompt_text(completion) for completion in latest["completion"]],
        "advantage": latest["advantages"],
        **rewards,
    }


def policy_texts(logs: Mapping[str, Any], count: int, said: Sequence[ToolTranscript] | None) -> list[str]:
    """What the policy itself wrote of the latest ``count`` answers, without what tools said to it."""
    if said is not None:
        return [one.policy_text for one in said]
    return [_of_policy(completion) for completion in list(logs["completion"])[-count:]]


def _of_policy(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    return prompt_text([message for message in completion if message.get("role") != "tool"])


def tool_call_columns(said: Sequence[ToolTranscript]) -> dict[str, list[Any]]:
    """Answers with calls: with outputs left blank, without them, with them, and what was called."""
    return {
        "completion": [one.blanked_text for one in said],
        "written": [one.policy_text for one in said],
        "transcript": [one.text for one in said],
        "calls": [list(one.calls) for one in said],
    }


def token_texts(
    output: Mapping[str, Any], rows: Sequence[int], text_of: Callable[[int], str]
) -> dict[str, list[list[Any]]]:
    """The tokens of a prompt and of its answer, for these rows of a generation batch.

    A tool's output is among them, since what comes after it was written with it in sight.
    """
    chosen = torch.tensor(list(rows), dtype=torch.long, device=output["completion_ids"].device)
    found: dict[str, list[list[Any]]] = {}
    for name in ("prompt", "completion"):
        ids, mask = output[f"{name}_ids"][chosen].cpu(), output[f"{name}_mask"][chosen].cpu() > 0
        column = "prompt_ids" if name == "prompt" else "token_ids"
        found[column] = [row[seen].tolist() for row, seen in zip(ids, mask, strict=True)]
    return {**found, "tokens": [[text_of(token) for token in row] for row in found["token_ids"]]}


def token_lists(values: Tensor, completion_mask: Tensor, counted: Tensor) -> list[list[Any]]:
    """One value per token of each answer, None on a tool's output."""
    lengths = completion_mask.sum(1).tolist()
    lists = [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]
    if torch.equal(counted > 0, completion_mask > 0):
        return lists
    marks = counted.tolist()
    return [
        [value if own else None for value, own in zip(row, own_row, strict=False)]
        for row, own_row in zip(lists, marks, strict=True)
    ]


def sparse_column(values: Sequence[Any], rows: Sequence[int], count: int) -> list[Any]:
    """Values of some rows as a column of ``count`` rows; None elsewhere."""
    column: list[Any] = [None] * count
    for row, value in zip(rows, values, strict=True):
        column[row] = value
    return column


def token_weights(output: Mapping[str, Any]) -> Tensor:
    """Factor of each token's policy term: the strategies' weight, 0 where the token is not in the loss."""
    mask = counted_tokens(output)
    weights = output.get("token_weights", torch.ones_like(mask, dtype=torch.float))
    return weights * output.get("loss_mask", mask)


def token_advantages(output: Mapping[str, Any]) -> Tensor:
    """The advantage of each token, also where it is one for all tokens of an answer."""
    advantages: Tensor = output["advantages"]
    return advantages.unsqueeze(1).expand(output["completion_mask"].shape) if advantages.dim() == 1 else advantages


def prompt_text(prompt: Any) -> str:
    """The text of a prompt or completion: itself, or the contents of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content") or "") for message in prompt)


def counted_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """1 on completion tokens that the policy wrote: no padding, no tool output."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
