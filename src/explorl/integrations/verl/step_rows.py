"""The rows of a step as verl's driver reads them from TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from explorl.integrations.verl.conversion import real_row_order

TENSORS = (
    "responses", "response_mask", "rm_scores", "old_log_probs", "ref_log_prob", "rollout_log_probs",
    "entropy", "advantages", "token_level_rewards",
)  # fmt: skip
OTHERS = ("uid", "raw_prompt", "extra_fields")
READ = (*TENSORS, *OTHERS)
"""Columns of verl's batch from which a `Batch` is built."""


@dataclass(frozen=True)
class StepRows:
    """The real rows of a step, with the completions of a prompt side by side."""

    order: list[int]
    """Their indices in verl's batch."""
    keys: list[str]
    columns: Mapping[str, Tensor]
    """verl's columns, right-padded."""
    lengths: Int[Tensor, " rows"]
    uids: list[str]
    """verl's identifiers of the prompts."""
    prompts: list[Any]
    """Messages, or text."""
    extras: list[Mapping[str, Any]]
    """Values that the reward function returned in addition to the score."""

    @classmethod
    def from_batch(
        cls,
        data: Any,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[str],
        *,
        single: bool = True,
    ) -> StepRows:
        """Build the rows from the content of TransferQueue; `prompt_ids` are verl's identifiers in submission order."""
        order = real_row_order(keys, [bool(tag.get("is_padding", False)) for tag in tags], prompt_ids, single=single)
        indices = torch.tensor(order, dtype=torch.long)
        others = {name: as_list(data[name]) for name in OTHERS if name in data}
        padded = data.select(*[name for name in TENSORS if name in data]).to_padded_tensor()
        fields = others.get("extra_fields", [{}] * len(keys))
        return cls(
            order=order,
            keys=[keys[row] for row in order],
            columns={name: value[indices] for name, value in padded.items()},
            lengths=data["responses"].offsets().diff()[indices],
            uids=[str(others["uid"][row]) for row in order],
            prompts=[others["raw_prompt"][row] for row in order],
            extras=[_returned(fields[row]) for row in order],
        )

    @property
    def rewards(self) -> Tensor:
        return self.columns["rm_scores"].sum(1)

    @property
    def token_rewards(self) -> Tensor:
        """Rewards per token that verl's estimator uses, including the KL penalty if it is part of the reward."""
        return self.columns.get("token_level_rewards", self.columns["rm_scores"])

    def token_rewards_with(self, rewards: Tensor) -> Tensor:
        """Return the token rewards with new row totals; the last token of a row gets the difference."""
        mask = self.columns["response_mask"]
        last = (mask * torch.arange(1, mask.size(1) + 1)).argmax(1)
        changed = self.token_rewards.clone().float()
        changed[torch.arange(len(mask)), last] += rewards - self.rewards
        return changed


def as_list(column: Any) -> list[Any]:
    """Return the values of a column that is not a tensor."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def _returned(fields: Any) -> Mapping[str, Any]:
    extra = fields.get("reward_extra_info") if isinstance(fields, Mapping) else None
    return extra if isinstance(extra, Mapping) else {}
