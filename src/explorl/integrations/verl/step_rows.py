"""The rows of a step as verl's driver reads them from TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from explorl.integrations.verl.conversion import order_of

TENSORS = (
    "responses", "response_mask", "rm_scores", "old_log_probs", "ref_log_prob", "rollout_log_probs",
    "entropy", "advantages", "token_level_rewards",
)  # fmt: skip
OTHERS = ("uid", "raw_prompt", "extra_fields")
READ = (*TENSORS, *OTHERS)
"""Columns of verl's batch that a `Batch` is made from."""


@dataclass(frozen=True)
class Rows:
    """The real rows of a step, the answers to a prompt side by side."""

    order: list[int]
    """Their places in verl's batch."""
    keys: list[str]
    columns: Mapping[str, Tensor]
    """verl's columns, padded on the right."""
    lengths: Int[Tensor, " rows"]
    uids: list[str]
    """verl's identifiers of the prompts."""
    prompts: list[Any]
    """Messages, or text."""
    extras: list[Mapping[str, Any]]
    """What the reward function returned beside the score."""

    @classmethod
    def of(
        cls,
        data: Any,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        asked: Sequence[str],
        *,
        single: bool = True,
    ) -> Rows:
        """From what TransferQueue holds; `asked` are the prompts' identifiers in their order."""
        order = order_of(keys, [bool(tag.get("is_padding", False)) for tag in tags], asked, single=single)
        places = torch.tensor(order, dtype=torch.long)
        others = {name: listed(data[name]) for name in OTHERS if name in data}
        padded = data.select(*[name for name in TENSORS if name in data]).to_padded_tensor()
        fields = others.get("extra_fields", [{}] * len(keys))
        return cls(
            order=order,
            keys=[keys[row] for row in order],
            columns={name: value[places] for name, value in padded.items()},
            lengths=data["responses"].offsets().diff()[places],
            uids=[str(others["uid"][row]) for row in order],
            prompts=[others["raw_prompt"][row] for row in order],
            extras=[_returned(fields[row]) for row in order],
        )

    @property
    def rewards(self) -> Tensor:
        return self.columns["rm_scores"].sum(1)

    @property
    def token_rewards(self) -> Tensor:
        """What verl's estimator reads: with the KL penalty, where that is in the reward."""
        return self.columns.get("token_level_rewards", self.columns["rm_scores"])

    def with_rewards(self, rewards: Tensor) -> Tensor:
        """The same with another total of each row: its last token has the difference."""
        mask = self.columns["response_mask"]
        last = (mask * torch.arange(1, mask.size(1) + 1)).argmax(1)
        changed = self.token_rewards.clone().float()
        changed[torch.arange(len(mask)), last] += rewards - self.rewards
        return changed


def listed(column: Any) -> list[Any]:
    """The values of a column that holds no tensor."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def _returned(fields: Any) -> Mapping[str, Any]:
    found = fields.get("reward_extra_info") if isinstance(fields, Mapping) else None
    return found if isinstance(found, Mapping) else {}
