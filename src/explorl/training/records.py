"""What a training step leaves to be read: a generation batch as columns, some answers with a record of every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from explorl.rollout import PaddedRollouts


def logged_columns(logs: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """The latest ``count`` rows of TRL's logs: prompts, completions, advantages and the parts of the reward."""
    latest = {key: list(logs[key])[-count:] for key in ("prompt", "completion", "advantages")}
    rewards = {f"reward/{key}": list(values)[-count:] for key, values in logs["rewards"].items()}
    return {
        "prompt": [prompt_text(prompt) for prompt in latest["prompt"]],
        "completion": [prompt_text(completion) for completion in latest["completion"]],
        "advantage": latest["advantages"],
        **rewards,
    }


def token_columns(
    output: Mapping[str, Any], records: PaddedRollouts, rows: int, text_of: Callable[[int], str]
) -> dict[str, list[Any]]:
    """Tokens, entropy, log π, advantage and weight of the first rows, a list per answer."""
    mask = counted_tokens(output)[:rows]
    lengths = mask.sum(1).tolist()
    advantages = output["advantages"][:rows]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    weights = output["token_weights"][:rows] if "token_weights" in output else torch.ones_like(mask, dtype=torch.float)
    if "loss_mask" in output:
        weights = weights * output["loss_mask"][:rows]
    columns = {
        "entropy": records.entropy[:rows],
        "logp": records.logps[:rows],
        "token_advantage": advantages.expand(mask.shape),
        "token_weight": weights,
    }
    ids = output["completion_ids"][:rows].tolist()
    found: dict[str, list[Any]] = {
        "tokens": [[text_of(token) for token in row[:length]] for row, length in zip(ids, lengths, strict=True)]
    }
    for name, values in columns.items():
        found[name] = [row[:length] for row, length in zip(values.tolist(), lengths, strict=True)]
    return found


def prompt_text(prompt: Any) -> str:
    """The text of a prompt or completion: itself, or the contents of its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content") or "") for message in prompt)


def counted_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """1 on completion tokens that the policy wrote: no padding, no tool output."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
