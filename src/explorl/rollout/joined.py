"""A slot cache in which every row has a copy of its prompt, where prompts are short."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.cache import LayerShape, PromptCache, SlotCache
from explorl.rollout.state import State

SHORT_PROMPT = 32
"""Prompt tokens up to which a copy in every row is faster than reading the prompt once for all rows that share it:
rows then need not be brought into the order of their prompts, and one product covers prompt and completion."""


class JoinedCache(SlotCache):
    """A slot holds its prompt in the first ``prompts.length`` columns, and the completion after them."""

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, length: int, state: State, prompts: PromptCache
    ) -> None:
        super().__init__(layers, slots, length, state, prompts, prefix=prompts.length)

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Nothing to do: no row reads what another one has."""

    def start(self, rows: np.ndarray, entries: np.ndarray) -> None:
        here, there = torch.from_numpy(entries), torch.from_numpy(rows)
        for block, stored in zip(self.blocks, self.prompts.blocks, strict=True):
            block[:, there, : self.prefix] = stored[:, here]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads = query.shape[:2]
        kv_heads, columns = key.shape[1], self.prefix + self.length
        keys, values = self.keys[self._layer][:rows, :columns], self.values[self._layer][:rows, :columns]
        query = query[:, :, 0] * scale
        at_once = self.at_once(kv_heads, columns)
        bias = self._bias(window, kv_heads, heads // kv_heads) if at_once else self._bias(window, 1, 1)
        assert bias is not None  # prompts of any length stand in the first columns
        if at_once:
            out = _attend(query, keys.flatten(1, 2), values.flatten(1, 2), bias, cap)
        else:
            parts = [
                _attend(part, keys[:, :, head], values[:, :, head], bias, cap)
                for head, part in enumerate(query.split(heads // kv_heads, 1))
            ]
            out = torch.cat(parts, 1)
        return out.unsqueeze(1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, cap: float | None) -> Tensor:
    """(rows, m, size) over (rows, n, size)."""
    if cap is None:
        scores = torch.baddbmm(bias, query, keys.mT)
    else:
        scores = torch.bmm(query, keys.mT).div_(cap).tanh_().mul_(cap).add_(bias)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), values)
