"""What all caches of keys and values have in common: their interface to models, and passes over several tokens.

`spans` and `pages` store the keys and values of sequences that are being decoded. `Prefill` and `Extension` are the
caches of passes that write there: over whole prompts, and over further tokens of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache

from explorl.modeling.attention import attending, sampling_mode, scaled_attention
from explorl.rollout.state import upload


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


@dataclass(frozen=True)
class Layout:
    """Rows and slots of the next steps: a row is what the model decodes, a slot what is sampled for."""

    rows: int
    """Number of rows to decode, from the first on."""
    slots: int
    """Number of slots to sample for, from the first on."""
    length: int
    """Number of columns that the longest row has filled."""
    lead: np.ndarray | None = None
    """A slot of each row; None if rows and slots are the same."""
    row_of: np.ndarray | None = None
    """The row of each slot; None if rows and slots are the same."""


class KvCache(Cache):
    """The parts of transformers' `Cache` that decoder-only models use; sequences attend to themselves alone."""

    _layer = 0
    """The layer that `update` was last called for."""

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

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        # Padding is on the right, where the causal mask hides it.
        return causal_attention(query, key, value, scale, window, cap)


class StoredKv(KvCache):
    """Keys and values in ``blocks``: (layers of one kind, rows or pages, columns, heads, size)."""

    def __init__(self, layers: Sequence[LayerShape], rows: int, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.blocks, self.keys, self.values = _allocate(layers, rows, columns)

    def store(self, layer: int, places: Tensor, key_states: Tensor, value_states: Tensor) -> None:
        """Store keys and values (rows, heads, length, size) at ``places`` (rows · length) of all columns."""
        for stored, new in ((self.keys[layer], key_states), (self.values[layer], value_states)):
            width = stored.shape[2] * stored.shape[3]
            stored.view(-1, width).index_copy_(0, places, new.transpose(1, 2).reshape(-1, width).to(stored.dtype))

    def clear(self, rows: Sequence[int]) -> None:
        """Zero rows or pages that may hold NaN."""
        for block in self.blocks:
            block[:, torch.tensor(rows, device=block.device)] = 0


def _allocate(layers: Sequence[LayerShape], rows: int, columns: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return zeroed blocks (layers of one kind, rows, columns, heads, size), and views of them for each layer."""
    kinds: dict[tuple[Any, ...], int] = {}
    for shape in layers:
        for size in (shape.key_size, shape.value_size):
            kind = (shape.heads, size, shape.dtype, shape.device)
            kinds[kind] = kinds.get(kind, 0) + 1
    # Not `empty`, because masked positions are multiplied by 0, and 0 · NaN is NaN.
    blocks = {
        kind: torch.zeros(count, rows, columns, kind[0], kind[1], dtype=kind[2], device=kind[3])
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


class Prefill(KvCache):
    """The cache of a pass over whole prompts; ``at`` (rows, length) says where each token is stored."""

    def __init__(self, cache: StoredKv) -> None:
        super().__init__()
        self.cache = cache
        self.at: Tensor = torch.zeros(0, 0, dtype=torch.long)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.cache.store(layer_idx, self.at.flatten(), key_states, value_states)
        return key_states, value_states


class Extension(KvCache):
    """The cache of a pass over several new tokens of rows that have earlier ones, such as forced or recomputed tokens.

    Args:
        places: Where each token is stored, (rows, length); −1 for padding, which is on the right and not stored.
        distance: How far each token is from each column that is read, (rows, length, columns).
        read: Returns the keys and values of a layer that are read, (rows, kv heads, columns, size).
    """

    def __init__(
        self, cache: StoredKv, places: np.ndarray, distance: Tensor, read: Callable[[int], tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        self.cache, self.distance, self.read = cache, distance, read
        rows, steps = np.nonzero(places >= 0)
        self.rows, self.steps, self.places = upload(np.stack([rows, steps, places[rows, steps]]), distance.device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._layer = layer_idx
        key, value = (states[self.rows, :, self.steps, None] for states in (key_states, value_states))
        self.cache.store(layer_idx, self.places, key, value)
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        visible = self.distance >= 0
        if window is not None:
            visible &= self.distance < window
        key, value = (part.to(query.dtype) for part in self.read(self._layer))
        return masked_attention(query, key, value, visible[:, None], scale, cap)


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


class Probe(KvCache):
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

    def attend(self, *args: Any) -> Tensor:
        self.attended += 1
        return super().attend(*args)


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
