"""Rows to learn from as one array of tokens, and micro-batches of them without padding.

Everything about a micro-batch that the host knows, it computes with a few array operations and sends to the device in
one piece: nobody waits for the device, and nothing is done token by token.
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
from explorl.training.grpo.micro_batches import split_by_tokens

IGNORED = -100
"""The label of a token that is not learnt."""
NEARLY, BLOCKS = 1.5, 4
"""Rows of one block differ at most by this factor in length, but for the last of so many blocks."""
WORTH = {"cpu": 64, "cuda": 4096}
"""How many places of padding a block of its own saves at least, by device: each is one more call in every layer."""
ALIGNED = 16
"""Arrays begin at multiples of so many numbers, which kernels like."""


class TokenRows:
    """All rows of a tokenised dataset: ``ids`` and, at each place, the token that it has to predict (`IGNORED`: none).

    A row is ``ids[starts[row] : starts[row] + lengths[row]]``.
    """

    def __init__(self, ids: NDArray[Any], labels: NDArray[Any], lengths: NDArray[Any]) -> None:
        self.ids, self.lengths = ids.astype(np.int32, copy=False), lengths.astype(np.int64, copy=False)
        ends = self.lengths.cumsum()
        self.starts = ends - self.lengths
        self.targets = np.full_like(self.ids, IGNORED)
        self.targets[:-1] = labels[1:]
        self.targets[ends[self.lengths > 0] - 1] = IGNORED  # the next token is another row's
        scored = np.concatenate([[0], (self.targets != IGNORED).cumsum()])
        self.scored = scored[ends] - scored[self.starts]

    @classmethod
    def of(cls, dataset: Any) -> TokenRows:
        """The rows of a `datasets.Dataset` with input_ids and, where not all tokens are learnt, labels."""
        table = dataset.with_format("arrow")[:]
        ids, lengths = _flat(table, "input_ids")
        labels, sizes = _flat(table, "labels") if "labels" in table.column_names else (ids, lengths)
        other = np.flatnonzero(sizes != lengths)
        if len(other):
            row, many = int(other[0]), sizes[other[0]]
            raise ValueError(
                f"row {row} of the training dataset has {'no' if np.isnan(many) else int(many)} labels for "
                f"{int(lengths[row])} tokens; give one for each, {IGNORED} for a token that is not learnt"
            )
        return cls(ids, labels, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, chosen: Sequence[Sequence[int]], most_tokens: int) -> list[list[NDArray[np.int64]]]:
        """Deals the rows of an optimizer step anew: as many micro-batches as were chosen, with about equal tokens.

        None gets more rows than the largest had. Each is cut into passes of at most ``most_tokens`` tokens, or of a
        single row. Rows of like length stand together. The gradient of a step is a sum over its tokens, so that it
        does not matter which pass a row is in.
        """
        rows = np.concatenate([np.asarray(some, dtype=np.int64) for some in chosen])
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        lengths = self.lengths[rows].tolist()
        runs = split_by_tokens(lengths, len(chosen), max(len(some) for some in chosen))
        return [
            [rows[run.start + part.start : run.start + part.stop] for part in cut(lengths[run.start : run.stop], most)]
            for run, most in ((run, most_tokens) for run in runs)
        ]

    def packed(
        self, rows: NDArray[np.int64], device: torch.device, drawn: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """These rows, in the order of their lengths, as one row of tokens without padding, with what a pass needs.

        ``drawn``: the number of the micro-batch that each was drawn in, which is told of every scored token.
        """
        lengths = self.lengths[rows]
        tokens = int(lengths.sum())
        ends = lengths.cumsum()
        places = np.repeat(self.starts[rows] - (ends - lengths), lengths) + np.arange(tokens)
        positions = np.arange(tokens) - np.repeat(ends - lengths, lengths)
        targets = self.targets[places]
        scored = np.flatnonzero(targets != IGNORED)
        blocks = list(blocks_of(lengths, WORTH.get(device.type, WORTH["cuda"])))
        slots, source = _slots(lengths, positions, blocks)
        micro = np.repeat(np.zeros_like(rows) if drawn is None else np.asarray(drawn), self.scored[rows])
        arrays = [self.ids[places], positions, targets, scored, targets[scored], micro]
        arrays += [slots, source, np.arange(tokens + 1)]
        ids, places_in_row, following, at, asked, of, *layout = _sent(arrays, device)
        return {
            "input_ids": ids.unsqueeze(0),
            "position_ids": places_in_row.unsqueeze(0),
            "shift_labels": following.unsqueeze(0),
            "scored": at,
            "targets": asked,
            "drawn": of,
            "rows": PackedBlocks(blocks, lengths, *layout),
        }


def cut(tokens: Sequence[int], most: int) -> list[range]:
    """As few runs as possible of at most ``most`` tokens each, about equal; a longer row is alone."""
    for parts in range(min(max(-(-sum(tokens) // most), 1), len(tokens)), len(tokens)):
        runs = split_by_tokens(tokens, parts)
        if all(sum(tokens[run.start : run.stop]) <= most or len(run) == 1 for run in runs):
            return runs
    return split_by_tokens(tokens, len(tokens))


def blocks_of(lengths: NDArray[np.int64], worth: int) -> Iterator[tuple[int, int]]:
    """(rows, longest) of runs of rows of like length, from the longest on, for rows in the order of their lengths."""
    end, blocks = len(lengths), 0
    while end:
        longest, blocks = int(lengths[end - 1]), blocks + 1
        start = int(np.searchsorted(lengths[:end], longest / NEARLY))
        if start * (longest - lengths[max(start - 1, 0)]) < worth or blocks == BLOCKS:
            start = 0
        yield end - start, longest
        end = start


class PackedBlocks(PackedRows):
    """Packed rows that share nothing, in blocks of like length: attention is padded within each block alone.

    Blocks stand one behind the other from the last rows, the longest, to the first.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        lengths: NDArray[np.int64],
        slots: Int64[Tensor, " tokens"],
        source: Int64[Tensor, " slots"],
        numbers: Int64[Tensor, " tokens_and_one"],
    ) -> None:
        self.rows, self.longest = 1, len(source)  # to the kernels that spread tokens it is one long row
        self.slots, self.source = slots, source
        self.repeated = self.repeats = slots[:0]
        self.by_token = slots, numbers
        self.blocks: list[PackedRows] = []
        self.sizes: list[int] = []
        end, first, token = len(lengths), 0, len(slots)
        for rows, longest in blocks:
            tokens = int(lengths[end - rows : end].sum())
            self.blocks.append(_Block(rows, longest, slots[token - tokens : token] - first))
            self.sizes.append(rows * longest)
            end, first, token = end - rows, first + rows * longest, token - tokens

    def attend_spread(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """(1, heads, slots, size) → (1, tokens, heads, size)."""
        runs = zip(*(tensor[0].transpose(0, 1).split(self.sizes) for tensor in (query, key, value)), strict=True)
        mixed = []
        for block, run in zip(self.blocks, runs, strict=True):
            shape = block.rows, block.longest
            spread = [tensor.view(*shape, *tensor.shape[1:]).transpose(1, 2) for tensor in run]
            mixed.append(block.attend_spread(spread[0], spread[1], spread[2], scale, window, cap))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed[::-1], dim=1)


class _Block(PackedRows):
    """One of them; what is in it has been spread already."""

    def __init__(self, rows: int, longest: int, slots: Tensor) -> None:
        self.rows, self.longest, self.slots = rows, longest, slots


def _slots(
    lengths: NDArray[np.int64], positions: NDArray[np.int64], blocks: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each token stands among all slots of all blocks, and the token that stands in each; in padding any."""
    first = np.empty(len(lengths), dtype=np.int64)  # slot of each row's first token
    end, before = len(lengths), 0
    for rows, longest in blocks:
        first[end - rows : end] = before + longest * np.arange(rows)
        end, before = end - rows, before + rows * longest
    slots = np.repeat(first, lengths) + positions
    source = np.zeros(before, dtype=np.int64)
    source[slots] = np.arange(len(slots))
    return slots, source


def _sent(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Whole numbers on the device, by one transfer that nobody waits for."""
    begins = np.cumsum([0, *(-(-len(array) // ALIGNED) * ALIGNED for array in arrays)]).tolist()
    together = torch.empty(begins[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    for array, begin in zip(arrays, begins, strict=False):
        together.numpy()[begin : begin + len(array)] = array
    there = together.to(device, non_blocking=True)
    return [there[begin : begin + len(array)] for array, begin in zip(arrays, begins, strict=False)]


def _flat(table: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """The values of a column of lists, and how many each list has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    chunks = table.column(name)
    column = chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks
    if isinstance(column, pa.ChunkedArray):  # of no chunk
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), pc.list_value_length(column).to_numpy(zero_copy_only=False)
