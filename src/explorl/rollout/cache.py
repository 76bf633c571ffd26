"""Where keys and values live: `PromptCache` holds each prompt once, `SlotCache` what each row has sampled.

A row attends to its prompt's entry and to its own slot. So the samples of a prompt share its memory, starting a row
copies nothing, and attention reads a prompt once for all of its samples where they are decoded together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from explorl.rollout.attention import (
    Grouping,
    attending,
    causal_attention,
    join,
    partial_attention,
    sampling_mode,
)
from explorl.rollout.state import OFFSET, POSITION, PROMPT, State

COPY_BYTES = 64 << 20
"""Most memory that a copy of rows takes on its way."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class _Base(Cache):
    """The parts of transformers' `Cache` that decoder-only models ask for."""

    def __init__(self) -> None:
        # Not Cache.__init__: it wants layer objects, and ours are slices of one tensor.
        self.layers: list[Any] = []

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


class _Probe(_Base):
    """Learns each layer's shape from one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}
        self.attended = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[-1], value_states.shape[-1], key_states.dtype, key_states.device
        )
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        self.attended += 1
        return causal_attention(query, key, value, scale, window, cap)


def probe(model: nn.Module, device: torch.device) -> tuple[list[LayerShape], int]:
    """What every layer of the model stores, and the width of its logits."""
    cache = _Probe()
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    name = type(model).__name__
    try:
        with sampling_mode(model), attending(cache):
            logits = model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True).logits
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise TypeError(f"{name} cannot be decoded by Engine ({error}); use model.generate") from error
    layers = [cache.shapes[i] for i in sorted(cache.shapes)]
    if not layers or cache.attended != len(layers) or sorted(cache.shapes) != list(range(len(layers))):
        raise TypeError(
            f"{name} made {cache.attended} attention calls for {len(layers)} cached layers: it does not go through "
            "transformers' attention interface in every layer; use model.generate"
        )
    return layers, int(logits.shape[-1])


def _allocate(layers: Sequence[LayerShape], rows: int, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Blocks (layers of one kind, rows, heads, length, size) and, for each layer, its keys and values in them."""
    kinds: dict[tuple[Any, ...], int] = {}
    for shape in layers:
        for size in (shape.key_size, shape.value_size):
            kind = (shape.heads, size, shape.dtype, shape.device)
            kinds[kind] = kinds.get(kind, 0) + 1
    # Zeros, not empty: a masked position is multiplied by 0, and 0 · NaN is NaN.
    blocks = {
        kind: torch.zeros(count, rows, kind[0], length, kind[1], dtype=kind[2], device=kind[3])
        for kind, count in kinds.items()
    }
    used = dict.fromkeys(kinds, 0)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for shape in layers:
        for size, out in ((shape.key_size, keys), (shape.value_size, values)):
            kind = (shape.heads, size, shape.dtype, shape.device)
            out.append(blocks[kind][used[kind]])
            used[kind] += 1
    return list(blocks.values()), keys, values


class PromptCache(_Base):
    """Keys and values of prompts, each computed once for all of its samples. ``length`` is what an entry can hold."""

    def __init__(self, layers: Sequence[LayerShape], entries: int, length: int) -> None:
        super().__init__()
        self.entries, self.length = entries, length
        self.blocks, self.keys, self.values = _allocate(layers, entries, length)
        self.at: Tensor = torch.arange(0)
        """Entries that the next forward pass fills."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        self.keys[layer_idx][self.at, :, :length] = key_states
        self.values[layer_idx][self.at, :, :length] = value_states
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        # Padding stands on the right, where causality alone keeps it out of sight.
        return causal_attention(query, key, value, scale, window, cap)

    def clear(self, entries: Tensor) -> None:
        """Zeroes entries whose contents may hold NaN."""
        for block in self.blocks:
            block[:, entries] = 0


class SlotCache(_Base):
    """Keys and values of the rows being decoded, one slot a row, allocated once; decodes one token a row.

    A row at absolute position p whose prompt entry holds o tokens writes into column p − o of its slot.
    """

    def __init__(
        self, layers: Sequence[LayerShape], slots: int, length: int, state: State, prompts: PromptCache
    ) -> None:
        super().__init__()
        self.slots, self.capacity, self.state, self.prompts = slots, length, state, prompts
        self.blocks, self.keys, self.values = _allocate(layers, slots, length)
        self.dtype = layers[0].dtype
        device = state.ints.device
        self._slot = torch.arange(slots, device=device)[:, None]
        self._head = {shape.heads: torch.arange(shape.heads, device=device) for shape in layers}
        self._columns = torch.arange(max(length, prompts.length), device=device)
        self.rows, self.length, self.even = slots, length, False
        self.grouping: Grouping | None = None
        self._layer = 0
        self._step: dict[Any, Any] = {}
        """What the layers of one step share: places of the new tokens and masks."""

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Says which prompt entry each row belongs to (−1: none) and how long the prompts are."""
        device = self.state.ints.device
        self.grouping = Grouping.of(entries, lengths, device) if device.type == "cpu" else None

    def look(self, rows: int, length: int, even: bool = False) -> None:
        """Prepares a step of the first rows over the first columns of their slots; ``even``: all rows fill them."""
        self.rows, self.length, self.even = rows, length, even
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        places = self._places(keys.shape[1])
        for mine, new in ((keys, key_states), (values, value_states)):
            mine.view(-1, mine.shape[-1]).index_copy_(0, places, new.reshape(-1, mine.shape[-1]))
        self._layer = layer_idx
        return keys[: self.rows, :, : self.length], values[: self.rows, :, : self.length]

    def _places(self, heads: int) -> Tensor:
        """Where the new token of every row and head goes, in a slot cache seen as (slot · head · column, size)."""
        if heads not in self._step:
            ints = self.state.ints[:, : self.rows]
            column = (ints[POSITION] - ints[OFFSET])[:, None]
            lines = (self._slot[: self.rows] * heads + self._head[heads]) * self.capacity + column
            self._step[heads] = lines.flatten()
        return self._step[heads]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads, _, size = query.shape
        kv_heads, grouping = key.shape[1], self.grouping
        # The query heads that share a key take the place of query positions, so each key is read once for all of them.
        query = query.reshape(rows, kv_heads, heads // kv_heads, size)
        own, own_total = partial_attention(query, key, value, self._own_bias(window), scale, cap)
        prompt_key, prompt_value = self.prompts.keys[self._layer], self.prompts.values[self._layer]
        bias = self._prompt_bias(window, heads // kv_heads)
        if grouping is None:
            entries = self.state.ints[PROMPT, :rows]
            theirs, total = partial_attention(query, prompt_key[entries], prompt_value[entries], bias, scale, cap)
        else:
            prompt_key = prompt_key[: grouping.entries, :, : grouping.length]
            prompt_value = prompt_value[: grouping.entries, :, : grouping.length]
            theirs, total = partial_attention(grouping.gather(query), prompt_key, prompt_value, bias, scale, cap)
            theirs, total = grouping.scatter(theirs, rows), grouping.scatter(total, rows)
        return join(own, own_total, theirs, total).reshape(rows, 1, heads, value.shape[-1])

    def _own_bias(self, window: int | None) -> Tensor | None:
        """(rows, 1, 1, columns): 0 on the slot's columns that a row's newest token sees, hugely negative elsewhere."""
        if window is not None and window >= self.length:
            window = None
        if self.even and window is None:
            return None
        if ("own", window) not in self._step:
            ints = self.state.ints[:, : self.rows, None]
            newest, columns = ints[POSITION] - ints[OFFSET], self._columns[: self.length]
            hidden = columns > newest
            if window is not None:
                hidden = hidden | (columns <= newest - window)
            self._step["own", window] = self._hide(hidden)[:, None, None]
        return self._step["own", window]

    def _prompt_bias(self, window: int | None, group: int) -> Tensor | None:
        """The same for the columns of the prompts; with a grouping one line for each of its queries."""
        grouping = self.grouping
        if window is None and grouping is not None and grouping.even:
            return None
        if ("prompt", window, group) not in self._step:
            ints = self.state.ints[:, : self.rows, None]
            columns = self._columns[: self.prompts.length if grouping is None else grouping.length]
            hidden = columns >= ints[OFFSET]
            if window is not None:
                hidden = hidden | (columns <= ints[POSITION] - window)
            bias = self._hide(hidden)[:, None, None]
            if grouping is not None:
                bias = grouping.gather(bias.expand(-1, -1, group, -1))
            self._step["prompt", window, group] = bias
        return self._step["prompt", window, group]

    def _hide(self, hidden: Tensor) -> Tensor:
        # Finite, so that a row that sees nothing of its prompt gets a weight of 0 for it, and not NaN.
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        return bias.masked_fill_(hidden, torch.finfo(self.dtype).min / 2)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first columns of slots to others; no slot is both source and target."""
        for block in self.blocks:
            layer = len(source) * block.shape[2] * length * block.shape[4] * block.dtype.itemsize
            for part in block.split(max(1, COPY_BYTES // max(1, layer))):
                part[:, target, :, :length] = part[:, source, :, :length]

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots whose contents may hold NaN."""
        for block in self.blocks:
            block[:, slots] = 0
