"""Keys and values in pages, on the device: `PageCache`.

A page holds a few consecutive tokens of a sequence, in all layers. A row is a list of pages, its *table*, which the
attention reads on the device. `explorl.rollout.memory.page_memory` says whose the pages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.memory.cached_attention import causal_attention, masked_attention
from explorl.rollout.memory.slots import LayerShape, _allocate, _Base
from explorl.rollout.state import POSITION, RUNNING, STATUS, SlotState, upload

PAGE = {"cuda": 64, "cpu": 16}
"""Tokens in a page: a multiple of the attention kernel's tiles, so that no tile crosses a page."""
BLANK, TRASH = 0, 1
"""Pages that are nobody's: one that is only read (where a table has no page), and one that is only written to."""
NOBODYS = 2
COPY_BYTES = 32 << 20
"""Most of what is copied at once from pages to others, which takes as much memory again."""


def pages_for(tokens: Any, page: int) -> Any:
    """Pages of so many tokens: a number, or an array of them."""
    return -(-tokens // page)


class PageCache(_Base):
    """Pages, and the table of every row; decodes one token per row, in torch.

    Args:
        slots: Rows that have a table.
        pages: How many there are, with the two that are nobody's.
        row_pages: Most pages of a row.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, pages: int, row_pages: int, page: int, state: SlotState
    ):
        super().__init__()
        self.page, self.pages, self.state = page, pages, state
        self.blocks, self.keys, self.values = _allocate(layers, pages, page)
        device = state.ints.device
        self.table = torch.full((slots, row_pages), BLANK, dtype=torch.int32, device=device)
        self._columns = torch.arange(row_pages * page, device=device)
        self.ints, self.rows, self.length = state.ints, slots, page * row_pages
        self._layer = 0
        self._step: dict[Any, Any] = {}
        """What the layers of one step share."""

    @property
    def capacity(self) -> int:
        """Most tokens of a row."""
        return int(self.table.shape[1]) * self.page

    def look(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepares a step of rows with these `SlotState.ints`, which have up to ``length`` tokens with the new one."""
        self.ints, self.rows, self.length = ints, ints.shape[1], min(length, self.capacity)
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        if "places" not in self._step:
            position = self.ints[POSITION]
            page = self.table[: self.rows].gather(1, (position // self.page)[:, None])[:, 0].long()
            page = torch.where(self.ints[STATUS] == RUNNING, page, TRASH)
            self._step["places"] = page * self.page + position % self.page
        self.write(layer_idx, self._step["places"], key_states, value_states)
        return key_states, value_states

    def write(self, layer: int, places: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        """Stores keys and values (rows, heads, length, size) at ``places`` (rows · length) of the pages in a line."""
        for mine, new in ((self.keys[layer], key_states), (self.values[layer], value_states)):
            width = mine.shape[2] * mine.shape[3]
            mine.view(-1, width).index_copy_(0, places, new.transpose(1, 2).reshape(-1, width).to(mine.dtype))

    def gathered(self, layer: int, table: Tensor) -> list[Tensor]:
        """Keys and values (rows, kv heads, tokens, size) of these tables."""
        return [part[layer][table].flatten(1, 2).transpose(1, 2) for part in (self.keys, self.values)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        count = pages_for(self.length, self.page)
        if window not in self._step:
            distance = self.ints[POSITION][:, None] - self._columns[: count * self.page]
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._step[window] = seen[:, None, None]
        key, value = self.gathered(self._layer, self.table[: self.rows, :count])
        return masked_attention(query, key, value, self._step[window], scale, cap)

    def extension(self, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]) -> Extension:
        """A pass over several new tokens of rows with these pages; see `Extension`."""
        return Extension(self, tables, starts, lengths)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies pages; none is both source and target."""
        here, there = upload(np.stack([source, target]).astype(np.int64), self.table.device)
        for block in self.blocks:
            layer = len(source) * block[0, 0].nbytes
            for part in block.split(max(1, COPY_BYTES // max(1, layer))):
                part[:, there] = part[:, here]

    def put_tables(self, tables: np.ndarray) -> None:
        """The tables of the first rows."""
        self.table[: len(tables)].copy_(upload(tables, self.table.device))

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages whose contents may hold NaN."""
        for block in self.blocks:
            block[:, torch.tensor(pages, device=block.device)] = 0


class Filling(_Base):
    """A pass over whole prompts, from their first token on; ``at`` (rows, length) says where each token is stored."""

    def __init__(self, cache: PageCache) -> None:
        super().__init__()
        self.cache = cache
        self.at: Tensor = torch.zeros(0, 0, dtype=torch.long)

    def places(self, tables: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Where the tokens of prompts with these pages go, padded to a length."""
        page = self.cache.page
        places = np.full((len(tables), length), TRASH * page, dtype=np.int64)
        for row, table, prompt in zip(places, tables, prompts, strict=True):
            position = np.arange(len(prompt))
            row[: len(prompt)] = np.asarray(table)[position // page] * page + position % page
        return upload(places, self.cache.table.device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.cache.write(layer_idx, self.at.flatten(), key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        # Padding stands on the right, where causality alone keeps it out of sight.
        return causal_attention(query, key, value, scale, window, cap)


class Extension(_Base):
    """A pass over ``lengths[i]`` tokens of each row from position ``starts[i]`` on, which sees all before them."""

    def __init__(
        self, cache: PageCache, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        super().__init__()
        self.cache, self._layer = cache, 0
        page, device = cache.page, cache.table.device
        width = max(len(table) for table in tables)
        padded = np.full((len(tables), width), BLANK, dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        position = np.asarray(starts)[:, None] + np.arange(max(lengths))
        inside = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        own = np.take_along_axis(padded, np.where(inside, position // page, 0), 1)
        places = np.where(inside, own, TRASH) * page + position % page
        self._table, self._places = upload(padded, device), upload(places, device).flatten()
        self._distance = upload(position, device)[..., None] - torch.arange(width * page, device=device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        self.cache.write(layer_idx, self._places, key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        seen = self._distance >= 0
        if window is not None:
            seen &= self._distance < window
        key, value = (part.to(query.dtype) for part in self.cache.gathered(self._layer, self._table))
        return masked_attention(query, key, value, seen[:, None], scale, cap)
