"""Attention over a cache: of rows that share prompts, and of whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from explorl.modeling.attention import scaled_attention


@dataclass(frozen=True)
class Grouping:
    """Groups of rows with the same prompt, so that its keys and values are read once for all of them."""

    members: Tensor
    """(entries · size): the rows of each prompt entry, padded with row 0."""
    index: Tensor
    """(rows): the index of each row in ``members``."""
    entries: int
    length: int
    """Number of prompt positions to read."""
    even: bool
    """True if all prompts have that length."""
    ordered: bool
    """True if the rows are already in the order of ``members``."""
    _orders: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: np.ndarray, lengths: np.ndarray, device: torch.device) -> Grouping:
        """Group rows by their prompt ``entries``, −1 for none; ``lengths`` are those of the prompts."""
        rows = np.flatnonzero(entries >= 0)
        of = entries[rows]
        count = np.bincount(of)
        size = int(count.max())
        order = np.argsort(of, kind="stable")
        rank = np.empty_like(of)
        rank[order] = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        members = np.zeros(len(count) * size, dtype=np.int64)
        index = np.zeros(len(entries), dtype=np.int64)
        index[rows] = of * size + rank
        members[index[rows]] = rows
        longest = max(1, int(lengths.max()))
        return cls(
            torch.from_numpy(members).to(device),
            torch.from_numpy(index).to(device),
            len(count),
            longest,
            even=bool((lengths == longest).all()),
            ordered=len(members) == len(entries) and bool((index == np.arange(len(entries))).all()),
        )

    def product(self, values: Tensor, matrices: Tensor) -> Tensor:
        """Multiply (rows, heads, k) × (entries · kv heads, k, n) → (rows, heads, n), each row by its entry's matrix."""
        rows, heads, k = values.shape
        kv_heads = len(matrices) // self.entries
        forth, back = self._order(kv_heads)
        grouped = values.reshape(rows * kv_heads, -1)
        grouped = grouped if forth is None else grouped.index_select(0, forth)
        result = torch.bmm(grouped.view(len(matrices), -1, k), matrices)
        if back is None:
            return result.view(rows, heads, -1)
        return result.view(len(grouped), -1).index_select(0, back).view(rows, heads, -1)

    def _order(self, kv_heads: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the permutation of rows, split into ``kv_heads`` parts, to entry, head, row; and its inverse."""
        if kv_heads == 1 and self.ordered:
            return None, None
        if kv_heads not in self._orders:
            size, head = len(self.members) // self.entries, torch.arange(kv_heads, device=self.members.device)
            forth = self.members.view(-1, 1, size) * kv_heads + head[:, None]
            back = (self.index // size * kv_heads)[:, None] + head
            self._orders[kv_heads] = forth.flatten(), (back * size + (self.index % size)[:, None]).flatten()
        return self._orders[kv_heads]


def shared_attention(
    query: Tensor,
    completion: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    rows_of: Grouping | Tensor,
    bias: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attend with a few queries per row, (rows, heads, size), to its prompt's entry and to its completion.

    ``completion`` is keys and values (rows, n, size), ``prompt`` those of all entries, (entries, m, kv heads, size);
    ``rows_of`` says which entry a row has. ``bias`` is added to the scores of the prompt's positions and then of the
    completion's.
    """
    keys, values = prompt
    product: Callable[[Tensor, Tensor], Tensor] = _own_product
    if isinstance(rows_of, Grouping):
        product = rows_of.product
    else:
        keys, values = keys[rows_of], values[rows_of]
    length = keys.shape[1]
    keys, values = keys.transpose(1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1)
    scores = torch.cat([product(query, keys.mT), torch.bmm(query, completion[0].mT)], dim=-1)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if bias is not None:
        scores = scores.add_(bias)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.baddbmm(product(weights[..., :length], values), weights[..., length:], completion[1])


def _own_product(values: Tensor, matrices: Tensor) -> Tensor:
    """Multiply (rows, heads, k) × (rows · kv heads, k, n) → (rows, heads, n)."""
    return torch.bmm(values.reshape(len(matrices), -1, values.shape[-1]), matrices).view(*values.shape[:2], -1)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, cap: float | None
) -> Tensor:
    """Attend with (rows, heads, m, size) to keys (rows, kv heads, n, size) where ``visible`` (rows or 1, 1, m, n)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if cap is None:
        out = scaled_attention(query, key, value, scale, mask=visible)
    else:
        scores = torch.matmul(query, key.transpose(-1, -2)) * scale
        scores = (torch.tanh(scores / cap) * cap).masked_fill(~visible, -torch.inf)
        out = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)
    return out.transpose(1, 2).contiguous()


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
) -> Tensor:
    """Compute the causal self-attention of whole sequences."""
    length = query.shape[2]
    if cap is None and (window is None or length <= window):
        out = scaled_attention(query, key, value, scale, causal=length > 1)
        return out.transpose(1, 2).contiguous()
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < (window or length))
    return masked_attention(query, key, value, visible[None, None], scale, cap)
