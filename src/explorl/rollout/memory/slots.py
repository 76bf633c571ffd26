"""Keys and values as a CPU reads them fastest: `PromptCache` holds each prompt once, `SlotCache` each row's completion.

A row attends to its prompt's entry and to its own slot. So the samples of a prompt share its memory, starting a row
copies nothing, and attention reads a prompt once for all of its samples. `explorl.rollout.memory.spans` says whose the
slots are; on a GPU, and where memory is short, there are pages instead (`explorl.rollout.memory.pages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from explorl.modeling.attention import attending, sampling_mode
from explorl.rollout.memory.cached_attention import Grouping, causal_attention, masked_attention, shared_attention
from explorl.rollout.state import OFFSET, POSITION, PROMPT, SlotState

NOWHERE = 1 << 40
"""A position that no token sees."""
COPY_BYTES = 64 << 20
"""Most memory that a copy of rows takes on its way."""
ROW_BYTES = 32 << 10
"""Bytes of a slot from which a CPU copies slots one by one faster than all at once by their numbers."""
ROOM = 32
"""Columns by which a bias that is kept for the next steps grows."""
FEW_COLUMNS = 1024
"""Columns of a row, counted once for each key/value head, up to which one product serves all of its heads."""


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


class Probe(_Base):
    """Learns each layer's shape from one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}
        self.attended = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        # Under autocast keys may be wider than values; attention, which it narrows, reads both as the narrower type.
        dtype = min((key_states.dtype, value_states.dtype), key=lambda kind: kind.itemsize)
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[-1], value_states.shape[-1], dtype, key_states.device
        )
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        self.attended += 1
        return causal_attention(query, key, value, scale, window, cap)


def probe(model: nn.Module, device: torch.device) -> tuple[list[LayerShape], int]:
    """What every layer of the model stores, and the width of its logits. `TypeError` where a cache cannot hold it."""
    cache = Probe()
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with sampling_mode(model), attending(cache):
            logits = model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model does with a cache that it does not know
        said = f"{type(error).__name__}: {error}"
        raise TypeError(f"its layers ask more of a cache than keys and values ({said})") from error
    layers = [cache.shapes[i] for i in sorted(cache.shapes)]
    if not layers or cache.attended != len(layers) or sorted(cache.shapes) != list(range(len(layers))):
        raise TypeError(
            f"it made {cache.attended} attention calls for {len(layers)} cached layers: it does not go through "
            "transformers' attention interface in every layer"
        )
    return layers, int(logits.shape[-1])


def _allocate(layers: Sequence[LayerShape], rows: int, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Blocks (layers of one kind, rows, length, heads, size) and, for each layer, its keys and values in them."""
    kinds: dict[tuple[Any, ...], int] = {}
    for shape in layers:
        for size in (shape.key_size, shape.value_size):
            kind = (shape.heads, size, shape.dtype, shape.device)
            kinds[kind] = kinds.get(kind, 0) + 1
    # Zeros, not empty: a masked position is multiplied by 0, and 0 · NaN is NaN.
    blocks = {
        kind: torch.zeros(count, rows, length, kind[0], kind[1], dtype=kind[2], device=kind[3])
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


@dataclass(frozen=True)
class Span:
    """A copy of the first columns of a slot or of a prompt's entry, which outlives them."""

    blocks: list[Tensor]
    length: int

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def first(self, tokens: int, prompt: int) -> Span:
        """What is kept of the first completion tokens."""
        return Span(self.blocks, min(tokens, self.length))

    def drop(self) -> None:
        """It is gone with its last owner."""


class _Slots(_Base):
    """Blocks (layers of one kind, slots, columns, heads, size) of which spans can be copied out and back."""

    blocks: list[Tensor]
    prefix = 0
    """Columns of a slot before the first that counts."""

    def take(self, slot: int, length: int) -> Span:
        """A copy of the first columns of a slot."""
        columns = slice(self.prefix, self.prefix + length)
        return Span([block[:, slot, columns].clone() for block in self.blocks], length)

    def put(self, slot: int, span: Span, length: int) -> None:
        """Fills the first columns of a slot with those of a copy."""
        for block, mine in zip(self.blocks, span.blocks, strict=True):
            block[:, slot, self.prefix : self.prefix + length] = mine[:, :length]

    def clear(self, slots: Tensor) -> None:
        """Zeroes slots whose contents may hold NaN."""
        for block in self.blocks:
            block[:, slots] = 0


class PromptCache(_Slots):
    """Keys and values of prompts, each computed once for all of its samples. ``length`` is what an entry can hold."""

    def __init__(self, layers: Sequence[LayerShape], entries: int, length: int) -> None:
        super().__init__()
        self.entries, self.length = entries, length
        self.blocks, self.keys, self.values = _allocate(layers, entries, length)
        self.at: Tensor = torch.arange(0)
        """Entries that the next forward pass fills."""

    def places(self, entries: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Where prompts with these entries go."""
        return torch.tensor(entries, device=self.keys[0].device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        for mine, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            mine[self.at, :length] = new.transpose(1, 2).to(mine.dtype)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        # Padding stands on the right, where causality alone keeps it out of sight.
        return causal_attention(query, key, value, scale, window, cap)


class SlotCache(_Slots):
    """Keys and values of the rows being decoded, one slot per row, allocated once; decodes one token per row.

    A row at absolute position p whose prompt entry holds o tokens writes into column p − o of its slot; ``prefix``
    columns before that belong to the prompt.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        length: int,
        state: SlotState,
        prompts: PromptCache,
        prefix: int = 0,
    ) -> None:
        super().__init__()
        self.slots, self.capacity, self.state, self.prompts = slots, length, state, prompts
        self.prefix = prefix
        self.blocks, self.keys, self.values = _allocate(layers, slots, prefix + length)
        device = state.ints.device
        self._first = torch.arange(slots, device=device) * (prefix + length) + prefix
        self._columns = torch.arange(max(length, prompts.length, prefix), device=device)
        self.ints, self.rows, self.length, self.even = state.ints, slots, length, False
        self.grouping: Grouping | None = None
        self._grouped: tuple[Any, ...] = ()
        self.reach = prompts.length + length + 1
        """Positions that a row can have."""
        self._layer = 0
        self._step: dict[Any, Any] = {}
        """What the layers of one step share: places of the new tokens, and biases."""
        self._known: Any = None
        self._kept, self._room = torch.zeros(0), 0
        """A bias that holds for more steps, of which rows, and for how many columns of their own."""

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Says which prompt entry each row belongs to (−1: none) and how long the prompts are."""
        device = self.state.ints.device
        known = (entries.tobytes(), int(lengths.max()), int(lengths.min()))
        if device.type == "cpu" and known != self._grouped:
            self.grouping, self._grouped = Grouping.of(entries, lengths, device), known

    def start(self, rows: np.ndarray, entries: np.ndarray, lengths: np.ndarray) -> None:
        """These rows begin completions of these prompt entries, which hold so many tokens."""

    def extension(
        self, where: Sequence[tuple[int, int, int]], starts: Sequence[int], lengths: Sequence[int]
    ) -> Extension:
        """A pass over several new tokens of rows, each a (slot, prompt entry, tokens in it), from ``starts`` on."""
        slots, entries, offsets = torch.tensor(where, device=self.state.ints.device).T
        begin, count = (torch.tensor(values, device=slots.device) for values in (starts, lengths))
        return Extension(self, slots, entries, offsets, begin - offsets, count)

    def look(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepares a step of rows with these `SlotState.ints` over the first columns; ``even``: all rows fill them."""
        self.ints, self.rows, self.length, self.even = ints, ints.shape[1], length, even
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        for mine, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if self.even:
                mine[: self.rows, self.prefix + self.length - 1] = new[:, :, 0]
            else:
                width = mine.shape[2] * mine.shape[3]
                mine.view(-1, width).index_copy_(0, self._places(), new.reshape(-1, width).to(mine.dtype))
        return key_states, value_states

    def _places(self) -> Tensor:
        """Where the new token of every row goes, in a slot cache seen as (slot · column, head · size)."""
        if "places" not in self._step:
            self._step["places"] = self._first[: self.rows] + self.ints[POSITION] - self.ints[OFFSET]
        return self._step["places"]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads = query.shape[:2]
        kv_heads, grouping = key.shape[1], self.grouping
        group = heads // kv_heads
        own = self.keys[self._layer][:rows, : self.length], self.values[self._layer][:rows, : self.length]
        prompt = self.prompts.keys[self._layer], self.prompts.values[self._layer]
        rows_of: Grouping | Tensor = self.ints[PROMPT]
        if grouping is not None:
            rows_of = grouping
            prompt = tuple(part[: grouping.entries, : grouping.length] for part in prompt)  # type: ignore[assignment]
        query = query[:, :, 0] * scale
        if self.one_product(kv_heads, self.length):
            bias = self._bias(window, kv_heads, group)
            own = own[0].flatten(1, 2), own[1].flatten(1, 2)
            out = shared_attention(query, own, prompt, rows_of, bias, cap)
        else:
            bias = self._bias(window, 1, 1)
            parts = [
                shared_attention(
                    query[:, head * group : (head + 1) * group],
                    (own[0][:, :, head], own[1][:, :, head]),
                    (prompt[0][:, :, head : head + 1], prompt[1][:, :, head : head + 1]),
                    rows_of,
                    bias,
                    cap,
                )
                for head in range(kv_heads)
            ]
            out = torch.cat(parts, dim=1)
        return out.unsqueeze(1)

    @staticmethod
    def one_product(kv_heads: int, columns: int) -> bool:
        """Whether one product serves all heads of a row, foreign heads hidden: wasteful, but far fewer products."""
        return kv_heads * columns <= FEW_COLUMNS

    def _bias(self, window: int | None, kv_heads: int, group: int) -> Tensor | None:
        """0 on the prompt's and the slot's columns that a row's newest token sees, −inf elsewhere.

        (rows or 1, query heads, columns), where a column that all heads share counts once for each kv head: a query
        head sees none but its own.
        """
        key = (window, kv_heads, group)
        if key not in self._step:
            if self.even and window is None:
                self._step[key] = self._even_bias(kv_heads, group)
            else:
                self._step[key] = self._spread(self._hidden(window), kv_heads, group)
        return self._step[key]

    def _even_bias(self, kv_heads: int, group: int) -> Tensor | None:
        """`_bias` where all rows fill all columns: nothing new is hidden in a step, as long as the rows are those."""
        if kv_heads == 1 and self.grouping is not None and self.grouping.even:
            return None
        rows = self.ints[OFFSET].cpu().numpy().tobytes()
        known = kv_heads, group, self._prompt_columns(), rows
        if known != self._known or self._room < self.length:
            self._known, self._room = known, min(-(-self.length // ROOM) * ROOM, self.capacity)
            hidden = self._hidden_prompt()
            if not bool(hidden.any()):
                hidden = hidden[:1]
            seen = hidden.new_zeros(len(hidden), self._room)
            self._kept = self._spread(torch.cat([hidden, seen], -1), kv_heads, group)
        return self._kept[..., : self._kept.shape[-1] - (self._room - self.length) * kv_heads]

    def _spread(self, hidden: Tensor, kv_heads: int, group: int) -> Tensor:
        bias = self._hide(hidden)[:, None]
        if kv_heads == 1:
            return bias
        head = torch.arange(kv_heads, device=bias.device)
        foreign = self._hide(head.repeat_interleave(group)[:, None] != head)[None, :, None]
        apart, joint = bias.tensor_split([self._apart()], -1)
        joint = (joint[..., None] + foreign).flatten(2)
        return torch.cat([apart.expand(-1, joint.shape[1], -1), joint], -1)

    def _apart(self) -> int:
        """The first columns, which every head has for itself where one product serves all heads of a row."""
        return self._prompt_columns()

    def _prompt_columns(self) -> int:
        return self.prompts.length if self.grouping is None else self.grouping.length

    def _hide(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.keys[0].dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )

    def _hidden(self, window: int | None) -> Tensor:
        """(rows, columns): True on the columns that a row's newest token does not see."""
        ints = self.ints[..., None]
        newest, own = ints[POSITION] - ints[OFFSET], self._columns[: self.length]
        hidden = torch.cat([self._hidden_prompt(), own > newest], dim=-1)
        if window is not None:
            old = torch.cat([self._prompt_at() <= ints[POSITION] - window, own <= newest - window], dim=-1)
            hidden = hidden | old
        return hidden

    def _hidden_prompt(self) -> Tensor:
        """The prompt's part of it: what is behind a prompt."""
        return self._prompt_at() >= self.ints[OFFSET, :, None]

    def _prompt_at(self) -> Tensor:
        """Positions (rows or 1, columns) of the prompt's columns."""
        return self._columns[None, : self._prompt_columns()]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copies the first columns of slots to others; no slot is both source and target."""
        columns = self.prefix + length
        for block in self.blocks:
            layer = columns * block.shape[3] * block.shape[4] * block.dtype.itemsize
            if block.device.type == "cpu" and len(block) * layer >= ROW_BYTES:
                for here, there in zip(source.tolist(), target.tolist(), strict=True):
                    block[:, there, :columns] = block[:, here, :columns]
                continue
            for part in block.split(max(1, COPY_BYTES // max(1, len(source) * layer))):
                part[:, target, :columns] = part[:, source, :columns]

    def prompt_positions(self, offsets: Tensor, columns: int) -> Tensor:
        """The position in each of the prompt columns that `stretch` gives rows with prompts of ``offsets`` tokens."""
        column = torch.arange(columns, device=offsets.device)
        return torch.where(column < offsets[:, None], column, NOWHERE)

    def stretch(self, layer: int, slots: Tensor, entries: Tensor, prompt: int, own: int) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, columns, heads, size) of so many prompt columns and columns of their own."""
        mine, prompts = (self.keys[layer], self.values[layer]), (self.prompts.keys[layer], self.prompts.values[layer])
        keys, values = (
            torch.cat([shared[entries, :prompt], slot[slots, self.prefix : self.prefix + own]], 1)
            for shared, slot in zip(prompts, mine, strict=True)
        )
        return keys, values


class Extension(_Base):
    """A pass over several new tokens of rows that have others before them: forced ones, or forgotten ones.

    Row i of the pass fills ``lengths[i]`` columns of slot ``slots[i]`` from ``starts[i]`` on, after a prompt entry
    ``entries[i]`` of ``offsets[i]`` tokens; padding stands on the right and is not stored.
    """

    def __init__(
        self, cache: SlotCache, slots: Tensor, entries: Tensor, offsets: Tensor, starts: Tensor, lengths: Tensor
    ) -> None:
        super().__init__()
        self.cache, self.slots, self.entries = cache, slots, entries
        device, longest = slots.device, int(lengths.max())
        step = torch.arange(longest, device=device)
        column = starts[:, None] + step
        self._row, self._step = torch.nonzero(step < lengths[:, None], as_tuple=True)
        self._column = column[self._row, self._step] + cache.prefix
        self._prompt, self._own = max(1, int(offsets.max())), int((starts + lengths).max())
        own = offsets[:, None] + torch.arange(self._own, device=device)
        at = torch.cat([cache.prompt_positions(offsets, self._prompt), own], 1)[:, None]
        """The position of each column that is read."""
        self._distance = (offsets[:, None] + column)[:, :, None] - at
        self._seen = self._distance >= 0
        self._layer = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        for mine, new in zip((self.cache.keys, self.cache.values), (key_states, value_states), strict=True):
            rows = new.transpose(1, 2)[self._row, self._step]
            mine[layer_idx][self.slots[self._row], self._column] = rows.to(mine[layer_idx].dtype)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        stretch = self.cache.stretch(self._layer, self.slots, self.entries, self._prompt, self._own)
        key, value = (part.transpose(1, 2).to(query.dtype) for part in stretch)
        seen = self._seen if window is None else self._seen & (self._distance < window)
        return masked_attention(query, key, value, seen[:, None], scale, cap)
