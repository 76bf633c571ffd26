"""`PageCache` stores keys and values in pages on the device.

A page holds a few consecutive tokens of a sequence, in all layers. A slot has a list of pages, its *table*, which
attention reads on the device. `explorl.rollout.memory.page_memory` assigns the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.memory.cache import Extension, LayerShape, StoredKv, masked_attention
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


class PageCache(StoredKv):
    """Pages and the table of every slot; decodes one token per slot, in torch.

    Args:
        slots: Number of slots with a table.
        pages: Number of pages, including the reserved ones.
        slot_pages: Most pages of a sequence.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, pages: int, slot_pages: int, page: int, state: SlotState
    ):
        super().__init__(layers, pages, page)
        self.page, self.pages, self.state = page, pages, state
        device = state.ints.device
        self.table = torch.full((slots, slot_pages), BLANK, dtype=torch.int32, device=device)
        self._columns = torch.arange(slot_pages * page, device=device)
        self.ints, self.rows, self.length = state.ints, slots, page * slot_pages
        self._step: dict[Any, Any] = {}
        """What the layers of one step share."""

    @property
    def capacity(self) -> int:
        """Most tokens of a slot."""
        return int(self.table.shape[1]) * self.page

    def begin_step(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepare a step of slots with these `SlotState.ints` and up to ``length`` tokens, including the new one."""
        self.ints, self.rows, self.length = ints, ints.shape[1], min(length, self.capacity)
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        if "places" not in self._step:
            position = self.ints[POSITION]
            page = self.table[: self.rows].gather(1, (position // self.page)[:, None])[:, 0].long()
            page = torch.where(self.ints[STATUS] == RUNNING, page, TRASH)
            self._step["places"] = page * self.page + position % self.page
        self.store(layer_idx, self._step["places"], key_states, value_states)
        return key_states, value_states

    def gathered(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (rows, kv heads, tokens, size) of these tables."""
        keys, values = (part[layer][table].flatten(1, 2).transpose(1, 2) for part in (self.keys, self.values))
        return keys, values

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

    def places(self, tables: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Return where the tokens of prompts with these pages are stored, padded to a length."""
        places = np.full((len(tables), length), TRASH * self.page, dtype=np.int64)
        for row, table, prompt in zip(places, tables, prompts, strict=True):
            position = np.arange(len(prompt))
            row[: len(prompt)] = np.asarray(table)[position // self.page] * self.page + position % self.page
        return upload(places, self.table.device)

    def extension(self, tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]) -> Extension:
        """Return the cache for a pass over ``lengths`` new tokens of sequences with these pages, from ``starts`` on."""
        page, device = self.page, self.table.device
        width = max(len(table) for table in tables)
        padded = np.full((len(tables), width), BLANK, dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        position = np.asarray(starts)[:, None] + np.arange(max(lengths))
        inside = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        page_of_token = np.take_along_axis(padded, np.where(inside, position // page, 0), 1)
        places = np.where(inside, page_of_token * page + position % page, -1)
        on_device = upload(padded, device)
        distance = upload(position, device)[..., None] - torch.arange(width * page, device=device)
        return Extension(self, places, distance, lambda layer: self.gathered(layer, on_device))

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy pages; no page is both source and target."""
        sources, targets = upload(np.stack([source, target]).astype(np.int64), self.table.device)
        for block in self.blocks:
            layer = len(source) * block[0, 0].nbytes
            for part in block.split(max(1, COPY_BYTES // max(1, layer))):
                part[:, targets] = part[:, sources]

    def put_tables(self, tables: np.ndarray) -> None:
        """Set the tables of the first slots."""
        self.table[: len(tables)].copy_(upload(tables, self.table.device))
