"""`PageCache` stores keys and values in pages on the device.

A page holds a few consecutive tokens of a sequence, in all layers. A row has a list of pages, its *table*, which
attention reads on the device. `explorl.rollout.memory.page_memory` assigns the pages.
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
"""Tokens per page: a multiple of the attention kernel's tile, so that no tile crosses a page."""
BLANK, TRASH = 0, 1
"""Reserved pages: one that is only read, where a table has no page, and one that is only written to."""
RESERVED_PAGES = 2
COPY_BYTES = 32 << 20
"""Most bytes copied at once between pages; the copy needs as much temporary memory."""


def pages_for(tokens: Any, page: int) -> Any:
    """Return the number of pages for ``tokens`` tokens, a number or an array."""
    return -(-tokens // page)


class PageCache(_Base):
    """Pages and the table of every row; decodes one token per row, in torch.

    Args:
        slots: Number of rows with a table.
        pages: Number of pages, including the reserved ones.
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

    def begin_step(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepare a step of rows with these `SlotState.ints` and up to ``length`` tokens, including the new one."""
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
        """Store keys and values (rows, heads, length, size) at ``places`` (rows · length) of the concatenated pages."""
        for stored, new in ((self.keys[layer], key_states), (self.values[layer], value_states)):
            width = stored.shape[2] * stored.shape[3]
            stored.view(-1, width).index_copy_(0, places, new.transpose(1, 2).reshape(-1, width).to(stored.dtype))

    def gathered(self, layer: int, table: Tensor) -> list[Tensor]:
        """Return keys and values (rows, kv heads, tokens, size) of these tables."""
        return [part[layer][table].flatten(1, 2).transpose(1, 2) for part in (self.keys, self.values)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        count = pages_for(self.length, self.page)
        if window not in self._step:
            distance = self.ints[POSITION][:, None] - self._columns[: count * self.page]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._step[window] = visible[:, None, None]
        key, value = self.gathered(self._layer, self.table[: self.rows, :count])
        return masked_attention(query, key, value, self._step[window], scale, cap)

    def extension(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]
    ) -> PageExtension:
        """Return the cache for a pass over new tokens of rows with these pages; see `PageExtension`."""
        return PageExtension(self, tables, starts, lengths)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages; no page is both source and target."""
        sources, targets = upload(np.stack([source, target]).astype(np.int64), self.table.device)
        for block in self.blocks:
            layer = len(source) * block[0, 0].nbytes
            for part in block.split(max(1, COPY_BYTES // max(1, layer))):
                part[:, targets] = part[:, sources]

    def put_tables(self, tables: np.ndarray) -> None:
        """Set the tables of the first rows."""
        self.table[: len(tables)].copy_(upload(tables, self.table.device))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that may hold NaN."""
        for block in self.blocks:
            block[:, torch.tensor(pages, device=block.device)] = 0


class PagePrefill(_Base):
    """The cache for a pass over whole prompts; ``at`` (rows, length) says where each token is stored."""

    def __init__(self, cache: PageCache) -> None:
        super().__init__()
        self.cache = cache
        self.at: Tensor = torch.zeros(0, 0, dtype=torch.long)

    def places(self, tables: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Return where the tokens of prompts with these pages are stored, padded to a length."""
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
        # Padding is on the right, where the causal mask hides it.
        return causal_attention(query, key, value, scale, window, cap)


class PageExtension(_Base):
    """The cache for a pass over ``lengths[i]`` new tokens of each row from position ``starts[i]`` on."""

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
        page_of_token = np.take_along_axis(padded, np.where(inside, position // page, 0), 1)
        places = np.where(inside, page_of_token, TRASH) * page + position % page
        self._table, self._places = upload(padded, device), upload(places, device).flatten()
        self._distance = upload(position, device)[..., None] - torch.arange(width * page, device=device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        self.cache.write(layer_idx, self._places, key_states, value_states)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        visible = self._distance >= 0
        if window is not None:
            visible &= self._distance < window
        key, value = (part.to(query.dtype) for part in self.cache.gathered(self._layer, self._table))
        return masked_attention(query, key, value, visible[:, None], scale, cap)
