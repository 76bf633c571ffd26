"""Training rows as one array of tokens, and micro-batches of them without padding.

The host computes everything about a micro-batch with a few array operations and sends it to the device in one transfer:
nothing waits for the device, and nothing is done token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from explorl.modeling.packed import PackedRows
from explorl.training.micro_batches import split_by_tokens

IGNORED = -100
"""The label of a token that is not trained on."""
LENGTH_RATIO, MAX_BLOCKS = 1.5, 4
"""Rows of a block differ in length by at most this factor, except in the last block."""
MIN_SAVING = {"cpu": 64, "cuda": 4096}
"""Padding that another block must save, by device: each block is one more attention call in every layer."""
ALIGNMENT = 16
"""Arrays begin at multiples of this many numbers, for aligned access in kernels."""


class TokenRows:
    """All rows of a tokenised dataset: ``ids`` and, at each position, the token to predict (or `IGNORED`).

    A row is ``ids[starts[row] : starts[row] + lengths[row]]``.
    """

    def __init__(self, ids: NDArray[Any], labels: NDArray[Any], lengths: NDArray[Any]) -> None:
        self.ids, self.lengths = ids.astype(np.int32, copy=False), lengths.astype(np.int64, copy=False)
        ends = self.lengths.cumsum()
        self.starts = ends - self.lengths
        self.targets = np.full_like(self.ids, IGNORED)
        self.targets[:-1] = labels[1:]
        self.targets[ends[self.lengths > 0] - 1] = IGNORED  # the next token belongs to another row
        scored = np.concatenate([[0], (self.targets != IGNORED).cumsum()])
        self.scored = scored[ends] - scored[self.starts]

    @classmethod
    def from_dataset(cls, dataset: Any) -> TokenRows:
        """Read a `datasets.Dataset` with input_ids and optional labels; without labels all tokens are trained on."""
        table = dataset.with_format("arrow")[:]
        ids, lengths = _flat(table, "input_ids")
        labels, sizes = _flat(table, "labels") if "labels" in table.column_names else (ids, lengths)
        mismatched = np.flatnonzero(sizes != lengths)
        if len(mismatched):
            row, count = int(mismatched[0]), sizes[mismatched[0]]
            raise ValueError(
                f"row {row} of the training dataset has {'no' if np.isnan(count) else int(count)} labels for "
                f"{int(lengths[row])} tokens; give one per token, {IGNORED} for a token that is not trained on"
            )
        return cls(ids, labels, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, chosen: Sequence[Sequence[int]], most_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Regroup the rows of an optimizer step into equally many micro-batches with about equal numbers of tokens.

        No micro-batch has more rows than the largest of ``chosen``. Each is split into passes of at most
        ``most_tokens`` tokens, or of a single row, with rows of similar length together. Rows are given by their places
        in the concatenation of ``chosen``. The gradient of a step is a sum over its tokens, so it does not depend on
        which pass a row is in.
        """
        lengths = self.lengths[np.concatenate(chosen)]
        places = np.argsort(lengths, kind="stable")
        runs = split_by_tokens(lengths[places].tolist(), len(chosen), max(map(len, chosen)))
        return [_passes(places[run.start : run.stop], lengths, most_tokens) for run in runs]

    def packed(
        self, rows: NDArray[np.int64], device: torch.device, batch_numbers: NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Return these rows, sorted by length, as one row of tokens without padding, with the inputs of a packed pass.

        ``batch_numbers`` has the number of each row's sampled micro-batch; it is returned per scored token.
        """
        lengths = self.lengths[rows]
        tokens = int(lengths.sum())
        ends = lengths.cumsum()
        indices = np.repeat(self.starts[rows] - (ends - lengths), lengths) + np.arange(tokens)
        positions = np.arange(tokens) - np.repeat(ends - lengths, lengths)
        targets = self.targets[indices]
        scored = np.flatnonzero(targets != IGNORED)
        blocks = list(_blocks(lengths, MIN_SAVING.get(device.type, MIN_SAVING["cuda"])))
        slots, source = _slots(lengths, positions, blocks)
        numbers = np.zeros_like(rows) if batch_numbers is None else batch_numbers
        arrays = [self.ids[indices], positions, targets, scored, targets[scored], np.repeat(numbers, self.scored[rows])]
        arrays += [slots, source, np.arange(tokens + 1)]
        ids, positions_, labels, scored_, targets_, numbers_, *layout = _to_device(arrays, device)
        return {
            "input_ids": ids.unsqueeze(0),
            "position_ids": positions_.unsqueeze(0),
            "shift_labels": labels.unsqueeze(0),
            "scored": scored_,
            "targets": targets_,
            "batch_numbers": numbers_,
            "rows": PackedBlocks(blocks, lengths, *layout),
        }


def _passes(places: NDArray[np.int64], all_lengths: NDArray[np.int64], most_tokens: int) -> list[NDArray[np.int64]]:
    """Split rows into the fewest about equal passes; a row with more than ``most_tokens`` has a pass of its own."""
    lengths = all_lengths[places].tolist()
    fewest = min(max(-(-sum(lengths) // most_tokens), 1), len(places))
    for parts in range(fewest, len(places) + 1):
        passes = [places[run.start : run.stop] for run in split_by_tokens(lengths, parts)]
        if all(all_lengths[part].sum() <= most_tokens or len(part) == 1 for part in passes):
            break
    return passes


def _blocks(lengths: NDArray[np.int64], min_saving: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of runs of rows of similar length, longest first; ``lengths`` are sorted."""
    end, blocks = len(lengths), 0
    while end:
        longest, blocks = int(lengths[end - 1]), blocks + 1
        start = int(np.searchsorted(lengths[:end], longest / LENGTH_RATIO))
        if start * (longest - lengths[max(start - 1, 0)]) < min_saving or blocks == MAX_BLOCKS:
            start = 0
        yield start, end
        end = start


class PackedBlocks(PackedRows):
    """Packed rows without shared prompts, in blocks of similar length: attention is padded within each block only.

    The blocks follow each other from the last rows, the longest, to the first.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        lengths: NDArray[np.int64],
        slots: Int64[Tensor, " tokens"],
        source: Int64[Tensor, " slots"],
        numbers: Int64[Tensor, " tokens_and_one"],
    ) -> None:
        self.rows, self.longest = 1, len(source)  # one long row for the kernels that spread tokens
        self.slots, self.source = slots, source
        self.repeated = self.repeats = slots[:0]
        self.by_token = slots, numbers
        self.blocks: list[PackedRows] = []
        self.sizes: list[int] = []
        ends, first = lengths.cumsum(), 0
        for start, end in blocks:
            tokens = slice(int(ends[start] - lengths[start]), int(ends[end - 1]))
            block = _Block(end - start, int(lengths[end - 1]), slots[tokens] - first)
            self.blocks.append(block)
            self.sizes.append(block.rows * block.longest)
            first += self.sizes[-1]

    def attend_spread(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Compute attention: (1, heads, slots, size) → (1, tokens, heads, size)."""
        runs = zip(*(tensor[0].transpose(0, 1).split(self.sizes) for tensor in (query, key, value)), strict=True)
        mixed = []
        for block, run in zip(self.blocks, runs, strict=True):
            shape = block.rows, block.longest
            spread = [tensor.view(*shape, *tensor.shape[1:]).transpose(1, 2) for tensor in run]
            mixed.append(block.attend_spread(spread[0], spread[1], spread[2], scale, window, cap))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed[::-1], dim=1)


class _Block(PackedRows):
    """One block, whose tokens are already spread over its slots."""

    def __init__(self, rows: int, longest: int, slots: Tensor) -> None:
        self.rows, self.longest, self.slots = rows, longest, slots


def _slots(
    lengths: NDArray[np.int64], positions: NDArray[np.int64], blocks: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the slot of each token among all blocks, and the token of each slot (any, in padding)."""
    first = np.empty(len(lengths), dtype=np.int64)  # slot of each row's first token
    before = 0
    for start, end in blocks:
        first[start:end] = before + lengths[end - 1] * np.arange(end - start)
        before += (end - start) * lengths[end - 1]
    slots = np.repeat(first, lengths) + positions
    source = np.zeros(before, dtype=np.int64)
    source[slots] = np.arange(len(slots))
    return slots, source


def _to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to the device in one asynchronous transfer."""
    begins = np.cumsum([0, *(-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    joined = torch.empty(begins[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    for array, begin in zip(arrays, begins, strict=False):
        joined.numpy()[begin : begin + len(array)] = array
    copied = joined.to(device, non_blocking=True)
    return [copied[begin : begin + len(array)] for array, begin in zip(arrays, begins, strict=False)]


def _flat(table: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the values of a column of lists, and the length of each list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = table.column(name)
    column = chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks
    if isinstance(column, pa.ChunkedArray):  # without chunks
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), pc.list_value_length(column).to_numpy(zero_copy_only=False)
