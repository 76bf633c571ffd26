"""A slot cache in which every row has a copy of its prompt, for short prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.memory.slots import NOWHERE, LayerShape, PromptCache, SlotCache
from explorl.rollout.state import OFFSET, SlotState

SHORT_PROMPT = 32
"""Prompt tokens up to which a copy in every row is faster than reading the prompt once for all rows that share it:
rows then need not be sorted by prompt, and one product covers prompt and completion."""


class JoinedCache(SlotCache):
    """Stores the prompt at the end of a row's first `SHORT_PROMPT` columns, and the completion after them.

    The position of a prompt depends only on its length, and the number of columns read on the longest prompt in flight:
    earlier calls must not change a bit of the result.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, length: int, state: SlotState, prompts: PromptCache
    ) -> None:
        super().__init__(layers, slots, length, state, prompts, prefix=SHORT_PROMPT)
        self.visible_prompt = SHORT_PROMPT
        """How many of the prompt columns are read, the last ones."""

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        self.visible_prompt = max(1, int(lengths.max()))

    def start(self, rows: np.ndarray, entries: np.ndarray, lengths: np.ndarray) -> None:
        source, target = torch.from_numpy(entries)[:, None], torch.from_numpy(rows)
        columns = torch.arange(self.prefix) - self.prefix + torch.from_numpy(lengths)[:, None]
        columns = columns.clamp(min=0)  # those before the prompt are masked
        for block, stored in zip(self.blocks, self.prompts.blocks, strict=True):
            block[:, target, : self.prefix] = stored[:, source, columns]

    def prompt_positions(self, offsets: Tensor, columns: int) -> Tensor:
        position = offsets[:, None] - columns + torch.arange(columns, device=offsets.device)
        return torch.where(position >= 0, position, NOWHERE)

    def read_columns(
        self, layer: int, slots: Tensor, entries: Tensor, prompt: int, completion: int
    ) -> tuple[Tensor, Tensor]:
        columns = slice(self.prefix - prompt, self.prefix + completion)
        first, last = int(slots[0]), int(slots[-1])
        rows: Any = slots
        if bool((slots == torch.arange(first, first + len(slots))).all()):
            rows = slice(first, last + 1)
        return self.keys[layer][rows, columns], self.values[layer][rows, columns]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads = query.shape[:2]
        kv_heads, columns = key.shape[1], slice(self.prefix - self.visible_prompt, self.prefix + self.length)
        keys, values = self.keys[self._layer][:rows, columns], self.values[self._layer][:rows, columns]
        query = query[:, :, 0]
        one_product = self.one_product(kv_heads, keys.shape[1])
        bias = self._bias(window, kv_heads, heads // kv_heads) if one_product else self._bias(window, 1, 1)
        assert bias is not None
        if one_product:
            out = _attend(query, keys.flatten(1, 2), values.flatten(1, 2), scale, bias, cap)
        else:
            parts = [
                _attend(part, keys[:, :, head], values[:, :, head], scale, bias, cap)
                for head, part in enumerate(query.split(heads // kv_heads, 1))
            ]
            out = torch.cat(parts, 1)
        return out.unsqueeze(1)

    def _apart(self) -> int:
        return 0

    def _prompt_columns(self) -> int:
        return self.visible_prompt

    def _hidden_prompt(self) -> Tensor:
        return self._prompt_at() < 0

    def _prompt_at(self) -> Tensor:
        return (
            self._columns[: self.visible_prompt] - self.visible_prompt + self.ints[OFFSET, :, None]
        )  # negative before the prompt


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor, cap: float | None) -> Tensor:
    """Attend with queries (rows, m, size) to keys and values (rows, n, size)."""
    if cap is None:
        scores = torch.baddbmm(bias, query, keys.mT, alpha=scale)
    else:
        scores = torch.bmm(query, keys.mT).mul_(scale / cap).tanh_().mul_(cap).add_(bias)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), values)
