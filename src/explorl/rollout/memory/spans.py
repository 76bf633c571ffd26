"""Keys and values in the layout that a CPU reads fastest.

`PromptCache` stores each prompt once, `SpanCache` the completion of each row. A row attends to its prompt's entry and
to its own columns. So the samples of a prompt share its memory, starting a row copies nothing, and attention reads a
prompt once for all of its samples. `explorl.rollout.memory.span_memory` assigns the rows. On a GPU, and if memory is
short, keys and values are stored in pages instead (`explorl.rollout.memory.pages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.memory.cache import Extension, LayerShape, StoredKv
from explorl.rollout.state import OFFSET, POSITION, SlotState

NOWHERE = 1 << 40
"""A position after every token, so that none attends to it."""
COPY_BYTES = 64 << 20
"""Most temporary memory for copying rows, in bytes."""
ROW_BYTES = 32 << 10
"""Bytes per row from which a CPU copies rows faster one by one than all at once by index."""
ROOM = 32
"""Columns by which the cached bias grows."""
FEW_COLUMNS = 1024
"""Columns × key/value heads of a row up to which one product is computed for all heads."""


@dataclass(frozen=True)
class Span:
    """A copy of the first columns of a row or of a prompt's entry."""

    blocks: list[Tensor]
    length: int

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def first(self, tokens: int, prompt: int) -> Span:
        """Return the part with the first completion tokens."""
        return Span(self.blocks, min(tokens, self.length))

    def drop(self) -> None:
        """Do nothing: the copy is freed with its last reference."""


class _Rows(StoredKv):
    """Rows that can be copied out and back."""

    def copy_out(self, row: int, length: int) -> Span:
        """Return a copy of the first columns of a row."""
        return Span([block[:, row, :length].clone() for block in self.blocks], length)

    def copy_in(self, row: int, span: Span, length: int) -> None:
        """Write the first columns of a copy to a row."""
        for block, stored in zip(self.blocks, span.blocks, strict=True):
            block[:, row, :length] = stored[:, :length]


class PromptCache(_Rows):
    """Keys and values of prompts, one per entry, computed once for all of their samples."""

    def places(self, entries: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Return where the tokens of prompts with these entries are stored, padded to a length."""
        return torch.tensor(entries)[:, None] * self.columns + torch.arange(length)


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
    def of(cls, entries: np.ndarray, lengths: np.ndarray) -> Grouping:
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
            torch.from_numpy(members),
            torch.from_numpy(index),
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
            size, head = len(self.members) // self.entries, torch.arange(kv_heads)
            forth = self.members.view(-1, 1, size) * kv_heads + head[:, None]
            back = (self.index // size * kv_heads)[:, None] + head
            self._orders[kv_heads] = forth.flatten(), (back * size + (self.index % size)[:, None]).flatten()
        return self._orders[kv_heads]


def shared_attention(
    query: Tensor,
    completion: tuple[Tensor, Tensor],
    prompt: tuple[Tensor, Tensor],
    grouping: Grouping,
    bias: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attend with a few queries per row, (rows, heads, size), to its prompt's entry and to its completion.

    ``completion`` is keys and values (rows, n, size), ``prompt`` those of all entries, (entries, m, kv heads, size).
    ``bias`` is added to the scores of the prompt's positions and then of the completion's.
    """
    keys, values = (part.transpose(1, 2).flatten(0, 1) for part in prompt)
    length = keys.shape[1]
    scores = torch.cat([grouping.product(query, keys.mT), torch.bmm(query, completion[0].mT)], dim=-1)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if bias is not None:
        scores = scores.add_(bias)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.baddbmm(grouping.product(weights[..., :length], values), weights[..., length:], completion[1])


class SpanCache(_Rows):
    """Keys and values of the rows being decoded; decodes one token per row.

    A row at absolute position p whose prompt entry holds o tokens writes to its column p − o.
    """

    grouping: Grouping

    def __init__(
        self, layers: Sequence[LayerShape], rows: int, length: int, state: SlotState, prompts: PromptCache
    ) -> None:
        super().__init__(layers, rows, length)
        self.capacity, self.state, self.prompts = length, state, prompts
        self._first = torch.arange(rows) * length
        self._columns = torch.arange(max(length, prompts.columns))
        self.ints, self.rows, self.length, self.even = state.ints, rows, length, False
        self._grouped: tuple[Any, ...] = ()
        self._step: dict[Any, Any] = {}
        """What the layers of one step share: indices of the new tokens, and biases."""
        self._cached_key: Any = None
        self._cached_bias, self._cached_columns = torch.zeros(0), 0
        """A bias that is valid for several steps, and for how many columns; the key says for which rows."""

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Set the prompt entry of each row (−1: none), and the lengths of the prompts."""
        key = (entries.tobytes(), int(lengths.max()), int(lengths.min()))
        if key != self._grouped:
            self.grouping, self._grouped = Grouping.of(entries, lengths), key

    def extension(
        self, targets: Sequence[tuple[int, int, int]], starts: Sequence[int], lengths: Sequence[int]
    ) -> Extension:
        """Return the cache for a pass over ``lengths`` new tokens of rows, from position ``starts`` on.

        Each target is a row, its prompt entry and the number of tokens in that entry.
        """
        rows, entries, offsets = np.array(targets).T
        position = np.asarray(starts)[:, None] + np.arange(max(lengths))
        column = position - offsets[:, None]
        inside = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        places = np.where(inside, rows[:, None] * self.columns + column, -1)
        prompt, completion = max(1, int(offsets.max())), int(column[inside].max()) + 1
        prompt_at = np.where(np.arange(prompt) < offsets[:, None], np.arange(prompt), NOWHERE)
        read_at = np.concatenate([prompt_at, offsets[:, None] + np.arange(completion)], 1)

        def read(layer: int) -> tuple[Tensor, Tensor]:
            stored = (self.prompts.keys, self.keys), (self.prompts.values, self.values)
            keys, values = (
                torch.cat([prompts[layer][entries, :prompt], spans[layer][rows, :completion]], 1).transpose(1, 2)
                for prompts, spans in stored
            )
            return keys, values

        return Extension(self, places, torch.from_numpy(position[:, :, None] - read_at[:, None]), read)

    def begin_step(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepare a step of rows with these `SlotState.ints` and ``length`` columns; ``even``: all rows fill them."""
        self.ints, self.rows, self.length, self.even = ints, ints.shape[1], length, even
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        if self.even:
            for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
                stored[: self.rows, self.length - 1] = new[:, :, 0]
            return key_states, value_states
        if "places" not in self._step:
            self._step["places"] = self._first[: self.rows] + self.ints[POSITION] - self.ints[OFFSET]
        self.store(layer_idx, self._step["places"], key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads = query.shape[:2]
        kv_heads, grouping = key.shape[1], self.grouping
        group = heads // kv_heads
        keys, values = (part[self._layer][:rows, : self.length] for part in (self.keys, self.values))
        prompt_keys, prompt_values = (
            part[self._layer][: grouping.entries, : grouping.length]
            for part in (self.prompts.keys, self.prompts.values)
        )
        query = query[:, :, 0] * scale
        if kv_heads * self.length <= FEW_COLUMNS:  # other heads are masked: wasteful, but fewer products
            bias = self._bias(window, kv_heads, group)
            completion, prompt = (keys.flatten(1, 2), values.flatten(1, 2)), (prompt_keys, prompt_values)
            return shared_attention(query, completion, prompt, grouping, bias, cap).unsqueeze(1)
        bias = self._bias(window, 1, 1)
        parts = [
            shared_attention(
                part,
                (keys[:, :, head], values[:, :, head]),
                (prompt_keys[:, :, head : head + 1], prompt_values[:, :, head : head + 1]),
                grouping,
                bias,
                cap,
            )
            for head, part in enumerate(query.split(group, 1))
        ]
        return torch.cat(parts, dim=1).unsqueeze(1)

    def _bias(self, window: int | None, kv_heads: int, group: int) -> Tensor | None:
        """Return 0 on the columns of prompt and completion that a row's newest token attends to, −inf elsewhere.

        The shape is (rows or 1, query heads, columns). A completion column appears once per kv head, and a query head
        attends only to that of its own kv head.
        """
        key = (window, kv_heads, group)
        if key not in self._step:
            if self.even and window is None:
                self._step[key] = self._even_bias(kv_heads, group)
            else:
                self._step[key] = self._spread(self._hidden(window), kv_heads, group)
        return self._step[key]

    def _even_bias(self, kv_heads: int, group: int) -> Tensor | None:
        """Return `_bias` if all rows fill all columns: it stays the same from step to step while the rows do."""
        if kv_heads == 1 and self.grouping.even:
            return None
        key = kv_heads, group, self.grouping.length, self.ints[OFFSET].numpy().tobytes()
        if key != self._cached_key or self._cached_columns < self.length:
            self._cached_key, self._cached_columns = key, min(-(-self.length // ROOM) * ROOM, self.capacity)
            hidden = self._after_prompt()
            if not bool(hidden.any()):
                hidden = hidden[:1]
            visible = hidden.new_zeros(len(hidden), self._cached_columns)
            self._cached_bias = self._spread(torch.cat([hidden, visible], -1), kv_heads, group)
        return self._cached_bias[..., : self._cached_bias.shape[-1] - (self._cached_columns - self.length) * kv_heads]

    def _spread(self, hidden: Tensor, kv_heads: int, group: int) -> Tensor:
        bias = self._hide(hidden)[:, None]
        if kv_heads == 1:
            return bias
        head = torch.arange(kv_heads)
        foreign = self._hide(head.repeat_interleave(group)[:, None] != head)[None, :, None]
        prompt, completion = bias.tensor_split([self.grouping.length], -1)
        completion = (completion[..., None] + foreign).flatten(2)
        return torch.cat([prompt.expand(-1, completion.shape[1], -1), completion], -1)

    def _hide(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.keys[0].dtype).masked_fill_(hidden, -torch.inf)

    def _hidden(self, window: int | None) -> Tensor:
        """Return a mask (rows, columns) of the columns that a row's newest token does not attend to."""
        ints = self.ints[..., None]
        newest, completion = ints[POSITION] - ints[OFFSET], self._columns[: self.length]
        hidden = torch.cat([self._after_prompt(), completion > newest], dim=-1)
        if window is not None:
            prompt = self._columns[: self.grouping.length]
            hidden |= torch.cat([prompt <= ints[POSITION] - window, completion <= newest - window], dim=-1)
        return hidden

    def _after_prompt(self) -> Tensor:
        """Return a mask (rows, prompt columns) of those after the end of the row's prompt."""
        return self._columns[: self.grouping.length] >= self.ints[OFFSET, :, None]

    def move(self, source: np.ndarray, target: np.ndarray, length: int) -> None:
        """Copy the first columns of rows to other rows; no row is both source and target."""
        for block in self.blocks:
            layer = length * block.shape[3] * block.shape[4] * block.dtype.itemsize
            if len(block) * layer >= ROW_BYTES:
                for old, new in zip(source.tolist(), target.tolist(), strict=True):
                    block[:, new, :length] = block[:, old, :length]
                continue
            for part in block.split(max(1, COPY_BYTES // max(1, len(source) * layer))):
                part[:, target, :length] = part[:, source, :length]
