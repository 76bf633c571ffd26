"""Keys and values in the layout that a CPU reads fastest.

`PromptCache` stores each prompt once, `SlotCache` the completion of each row. A row attends to its prompt's entry and
to its own columns. So the samples of a prompt share its memory, starting a row copies nothing, and attention reads a
prompt once for all of its samples. `explorl.rollout.memory.spans` assigns the rows. On a GPU, and if memory is short,
keys and values are stored in pages instead (`explorl.rollout.memory.pages`).
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
class LayerShape:
    """Shape and type of what one layer stores for one token."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class _Base(Cache):
    """The parts of transformers' `Cache` that decoder-only models use."""

    def __init__(self) -> None:
        # Cache.__init__ needs layer objects, but our layers are slices of one tensor.
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
        # Under autocast keys may be wider than values; attention then casts both to the narrower type.
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
    """Return what every layer of the model stores, and the width of its logits.

    Raises:
        TypeError: The model needs a cache of another kind.
    """
    cache = Probe()
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with sampling_mode(model), attending(cache):
            logits = model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may fail in any way with a cache that it does not know
        reason = f"{type(error).__name__}: {error}"
        raise TypeError(f"its layers need more from a cache than keys and values ({reason})") from error
    layers = [cache.shapes[i] for i in sorted(cache.shapes)]
    if not layers or cache.attended != len(layers) or sorted(cache.shapes) != list(range(len(layers))):
        raise TypeError(
            f"it made {cache.attended} attention calls for {len(layers)} cached layers: it does not go through "
            "transformers' attention interface in every layer"
        )
    return layers, int(logits.shape[-1])


def _allocate(layers: Sequence[LayerShape], rows: int, length: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return zeroed blocks (layers of one kind, rows, length, heads, size), and views of them for each layer."""
    kinds: dict[tuple[Any, ...], int] = {}
    for shape in layers:
        for size in (shape.key_size, shape.value_size):
            kind = (shape.heads, size, shape.dtype, shape.device)
            kinds[kind] = kinds.get(kind, 0) + 1
    # Not `empty`, because masked positions are multiplied by 0, and 0 · NaN is NaN.
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


class _Slots(_Base):
    """Blocks (layers of one kind, rows, columns, heads, size) whose spans can be copied out and back."""

    blocks: list[Tensor]
    prefix = 0
    """Columns of a row before the span."""

    def copy_out(self, slot: int, length: int) -> Span:
        """Return a copy of the first columns of a row."""
        columns = slice(self.prefix, self.prefix + length)
        return Span([block[:, slot, columns].clone() for block in self.blocks], length)

    def copy_in(self, slot: int, span: Span, length: int) -> None:
        """Write the first columns of a copy to a row."""
        for block, stored in zip(self.blocks, span.blocks, strict=True):
            block[:, slot, self.prefix : self.prefix + length] = stored[:, :length]

    def clear(self, slots: Tensor) -> None:
        """Zero rows that may hold NaN."""
        for block in self.blocks:
            block[:, slots] = 0


class PromptCache(_Slots):
    """Keys and values of prompts, computed once for all of their samples. ``length`` is the capacity of an entry."""

    def __init__(self, layers: Sequence[LayerShape], entries: int, length: int) -> None:
        super().__init__()
        self.entries, self.length = entries, length
        self.blocks, self.keys, self.values = _allocate(layers, entries, length)
        self.at: Tensor = torch.arange(0)
        """Entries that the next forward pass writes to."""

    def places(self, entries: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Return where the tokens of prompts with these entries are stored."""
        return torch.tensor(entries, device=self.keys[0].device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        length = key_states.shape[2]
        for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            stored[self.at, :length] = new.transpose(1, 2).to(stored.dtype)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        # Padding is on the right, where the causal mask hides it.
        return causal_attention(query, key, value, scale, window, cap)


class SlotCache(_Slots):
    """Keys and values of the rows being decoded, allocated once; decodes one token per row.

    A row at absolute position p whose prompt entry holds o tokens writes to its column p − o; the ``prefix`` columns
    before column 0 belong to the prompt.
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
        """Number of positions that a row can have."""
        self._layer = 0
        self._step: dict[Any, Any] = {}
        """What the layers of one step share: indices of the new tokens, and biases."""
        self._cached_key: Any = None
        self._cached_bias, self._cached_columns = torch.zeros(0), 0
        """A bias that is valid for several steps, and for how many columns; the key says for which rows."""

    def regroup(self, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Set the prompt entry of each row (−1: none), and the lengths of the prompts."""
        device = self.state.ints.device
        key = (entries.tobytes(), int(lengths.max()), int(lengths.min()))
        if device.type == "cpu" and key != self._grouped:
            self.grouping, self._grouped = Grouping.of(entries, lengths, device), key

    def start(self, rows: np.ndarray, entries: np.ndarray, lengths: np.ndarray) -> None:
        """Start completions in rows; ``lengths`` are those of the prompt entries. Nothing has to be copied here."""

    def extension(
        self, targets: Sequence[tuple[int, int, int]], starts: Sequence[int], lengths: Sequence[int]
    ) -> SlotExtension:
        """Return the cache for a pass over new tokens of rows, from position ``starts`` on.

        Each target is a row, its prompt entry and the number of tokens in that entry.
        """
        slots, entries, offsets = torch.tensor(targets, device=self.state.ints.device).T
        begin, count = (torch.tensor(values, device=slots.device) for values in (starts, lengths))
        return SlotExtension(self, slots, entries, offsets, begin - offsets, count)

    def begin_step(self, ints: Tensor, length: int, even: bool = False) -> None:
        """Prepare a step of rows with these `SlotState.ints` and ``length`` columns; ``even``: all rows fill them."""
        self.ints, self.rows, self.length, self.even = ints, ints.shape[1], length, even
        self._step.clear()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            if self.even:
                stored[: self.rows, self.prefix + self.length - 1] = new[:, :, 0]
            else:
                width = stored.shape[2] * stored.shape[3]
                stored.view(-1, width).index_copy_(0, self._places(), new.reshape(-1, width).to(stored.dtype))
        return key_states, value_states

    def _places(self) -> Tensor:
        """Return the index of every row's new token in the cache viewed as (row · column, head · size)."""
        if "places" not in self._step:
            self._step["places"] = self._first[: self.rows] + self.ints[POSITION] - self.ints[OFFSET]
        return self._step["places"]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        rows, heads = query.shape[:2]
        kv_heads, grouping = key.shape[1], self.grouping
        group = heads // kv_heads
        completion = self.keys[self._layer][:rows, : self.length], self.values[self._layer][:rows, : self.length]
        prompt = self.prompts.keys[self._layer], self.prompts.values[self._layer]
        rows_of: Grouping | Tensor = self.ints[PROMPT]
        if grouping is not None:
            rows_of = grouping
            prompt = tuple(part[: grouping.entries, : grouping.length] for part in prompt)  # type: ignore[assignment]
        query = query[:, :, 0] * scale
        if self.one_product(kv_heads, self.length):
            bias = self._bias(window, kv_heads, group)
            completion = completion[0].flatten(1, 2), completion[1].flatten(1, 2)
            out = shared_attention(query, completion, prompt, rows_of, bias, cap)
        else:
            bias = self._bias(window, 1, 1)
            parts = [
                shared_attention(
                    query[:, head * group : (head + 1) * group],
                    (completion[0][:, :, head], completion[1][:, :, head]),
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
        """Return whether all heads share one product, in which other heads are masked: wasteful, but fewer products."""
        return kv_heads * columns <= FEW_COLUMNS

    def _bias(self, window: int | None, kv_heads: int, group: int) -> Tensor | None:
        """Return 0 on the columns of prompt and completion that a row's newest token attends to, −inf elsewhere.

        The shape is (rows or 1, query heads, columns). A column that all heads share appears once per kv head, and a
        query head attends only to that of its own kv head.
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
        if kv_heads == 1 and self.grouping is not None and self.grouping.even:
            return None
        rows = self.ints[OFFSET].cpu().numpy().tobytes()
        key = kv_heads, group, self._prompt_columns(), rows
        if key != self._cached_key or self._cached_columns < self.length:
            self._cached_key, self._cached_columns = key, min(-(-self.length // ROOM) * ROOM, self.capacity)
            hidden = self._hidden_prompt()
            if not bool(hidden.any()):
                hidden = hidden[:1]
            visible = hidden.new_zeros(len(hidden), self._cached_columns)
            self._cached_bias = self._spread(torch.cat([hidden, visible], -1), kv_heads, group)
        return self._cached_bias[..., : self._cached_bias.shape[-1] - (self._cached_columns - self.length) * kv_heads]

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
        """Return how many of the first columns are stored per head even if one product is computed for all heads."""
        return self._prompt_columns()

    def _prompt_columns(self) -> int:
        return self.prompts.length if self.grouping is None else self.grouping.length

    def _hide(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.keys[0].dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )

    def _hidden(self, window: int | None) -> Tensor:
        """Return a mask (rows, columns) of the columns that a row's newest token does not attend to."""
        ints = self.ints[..., None]
        newest, completion = ints[POSITION] - ints[OFFSET], self._columns[: self.length]
        hidden = torch.cat([self._hidden_prompt(), completion > newest], dim=-1)
        if window is not None:
            old = torch.cat([self._prompt_at() <= ints[POSITION] - window, completion <= newest - window], dim=-1)
            hidden = hidden | old
        return hidden

    def _hidden_prompt(self) -> Tensor:
        """Return the prompt columns of that mask: True after the end of the prompt."""
        return self._prompt_at() >= self.ints[OFFSET, :, None]

    def _prompt_at(self) -> Tensor:
        """Return the positions (rows or 1, columns) of the prompt's columns."""
        return self._columns[None, : self._prompt_columns()]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first columns of rows to other rows; no row is both source and target."""
        columns = self.prefix + length
        for block in self.blocks:
            layer = columns * block.shape[3] * block.shape[4] * block.dtype.itemsize
            if block.device.type == "cpu" and len(block) * layer >= ROW_BYTES:
                for old, new in zip(source.tolist(), target.tolist(), strict=True):
                    block[:, new, :columns] = block[:, old, :columns]
                continue
            for part in block.split(max(1, COPY_BYTES // max(1, len(source) * layer))):
                part[:, target, :columns] = part[:, source, :columns]

    def prompt_positions(self, offsets: Tensor, columns: int) -> Tensor:
        """Return the positions of the prompt columns of `read_columns` for prompts of ``offsets`` tokens."""
        column = torch.arange(columns, device=offsets.device)
        return torch.where(column < offsets[:, None], column, NOWHERE)

    def read_columns(
        self, layer: int, slots: Tensor, entries: Tensor, prompt: int, completion: int
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values (rows, columns, heads, size) of the first prompt and completion columns."""
        stored, prompts = (self.keys[layer], self.values[layer]), (self.prompts.keys[layer], self.prompts.values[layer])
        keys, values = (
            torch.cat([shared[entries, :prompt], part[slots, self.prefix : self.prefix + completion]], 1)
            for shared, part in zip(prompts, stored, strict=True)
        )
        return keys, values


class SlotExtension(_Base):
    """The cache for a pass over several new tokens of rows that already have some, such as forced or recomputed ones.

    Sequence i of the pass fills ``lengths[i]`` columns of row ``slots[i]`` from ``starts[i]`` on, after prompt entry
    ``entries[i]`` of ``offsets[i]`` tokens; padding is on the right and not stored.
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
        self._prompt, self._completion = max(1, int(offsets.max())), int((starts + lengths).max())
        completion = offsets[:, None] + torch.arange(self._completion, device=device)
        at = torch.cat([cache.prompt_positions(offsets, self._prompt), completion], 1)[:, None]
        """Position of each column that is read."""
        self._distance = (offsets[:, None] + column)[:, :, None] - at
        self._visible = self._distance >= 0
        self._layer = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        for stored, new in zip((self.cache.keys, self.cache.values), (key_states, value_states), strict=True):
            rows = new.transpose(1, 2)[self._row, self._step]
            stored[layer_idx][self.slots[self._row], self._column] = rows.to(stored[layer_idx].dtype)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        columns = self.cache.read_columns(self._layer, self.slots, self.entries, self._prompt, self._completion)
        key, value = (part.transpose(1, 2).to(query.dtype) for part in columns)
        visible = self._visible if window is None else self._visible & (self._distance < window)
        return masked_attention(query, key, value, visible[:, None], scale, cap)
