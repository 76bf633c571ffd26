"""Which rows of a generation batch stand in which micro-batch: as many tokens in each, neighbours together.

A step takes as long, and as much memory, as its tokens, not its rows; and samples of one prompt share its tokens in the
packed pass, so they stay together. No micro-batch has more rows than the user allows. The gradient of an optimizer step
is a sum over its rows, so it does not matter which micro-batch a row is in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

WHOLE = ("left_out",)
"""Tensors of the whole batch, though they have a dimension."""


def deal(tokens: Sequence[int], parts: int, most: int | None = None) -> list[range]:
    """Cuts rows with so many tokens each into `parts` runs of about equally many tokens.

    Each has at least one row and at most `most`: memory has a bound that the user has set.
    """
    most = len(tokens) if most is None else most
    if len(tokens) < parts:
        raise ValueError(f"{len(tokens)} rows cannot be dealt to {parts} micro-batches; give each a row")
    if len(tokens) > parts * most:
        raise ValueError(f"{len(tokens)} rows cannot be dealt to {parts} micro-batches of at most {most} rows")
    ends = list(accumulate(tokens))
    cuts = [0]
    for part in range(1, parts):
        wanted = ends[-1] * part / parts
        left = parts - part
        row = max(cuts[-1] + 1, len(tokens) - left * most)
        last = min(len(tokens) - left, cuts[-1] + most)
        while row < last and abs(ends[row] - wanted) <= abs(ends[row - 1] - wanted):
            row += 1
        cuts.append(row)
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True)]


def rows_of(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """These rows of all that has rows; what is of the whole batch stays."""

    def chosen(key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 or key in WHOLE else value[rows.to(value.device)]
        return None if value is None else [value[row] for row in rows.tolist()]

    return {key: chosen(key, value) for key, value in batch.items()}


def dealt(
    batch: Mapping[str, Any], *, windows: int, parts: int, needed: Tensor, most: int | None = None
) -> list[dict[str, Any]]:
    """The micro-batches of a generation batch: for each of `windows` optimizer steps, `parts` of equal tokens.

    Where a batch serves several optimizer steps, chance decides which rows each sees. Rows that are not `needed` are
    left out. `mean_rows` is how many rows a micro-batch of the step has on average, counting those.
    """
    tokens = batch["completion_mask"].sum(1).cpu()
    order = torch.randperm(len(tokens))  # drawn in any case, as TRL does: random numbers after it stay the same
    if windows == 1:
        order = torch.arange(len(tokens))
    found = []
    for window in order.chunk(windows):
        rows = window.sort().values
        kept = rows[needed[rows]]
        for run in deal(tokens[kept].tolist(), parts, most):
            part = rows_of(batch, kept[run.start : run.stop])
            found.append({**part, "mean_rows": torch.tensor(len(rows) / parts)})
    return found
