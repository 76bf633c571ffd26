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

from explorl.training.grpo.batch import padded_to
from explorl.training.grpo.logged_columns import counted_tokens


def split_by_tokens(tokens: Sequence[int], parts: int, most: int | None = None) -> list[range]:
    """Cuts rows with so many tokens each into `parts` runs of about equally many tokens.

    Each has at least one row and at most `most`: memory has a bound that the user has set.
    """
    most = len(tokens) if most is None else most
    if len(tokens) < parts:
        raise ValueError(f"{len(tokens)} rows cannot be split into {parts} micro-batches; give each a row")
    if len(tokens) > parts * most:
        raise ValueError(f"{len(tokens)} rows cannot be split into {parts} micro-batches of at most {most} rows")
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

    def chosen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[rows.to(value.device)]
        return None if value is None else [value[row] for row in rows.tolist()]

    return {key: chosen(value) for key, value in batch.items()}


def make_micro_batches(
    batch: Mapping[str, Any],
    *,
    windows: int,
    parts: int,
    needed: Tensor,
    most: int | None = None,
    entropy: Tensor | None = None,
) -> list[dict[str, Any]]:
    """The micro-batches of a generation batch: for each of `windows` optimizer steps, `parts` of equal tokens.

    Where a batch serves several optimizer steps, chance decides which rows each sees. Rows that are not `needed` are
    left out; of each, ``left_out`` has what is logged: its part, its summed ``entropy`` and its tokens. ``mean_rows``
    is how many rows a micro-batch of the step has on average, counting those. ``trl_part`` is which of the step's
    ``trl_parts`` micro-batches TRL would have put a row into.
    """
    tokens = batch["completion_mask"].sum(1).cpu()
    order = torch.randperm(len(tokens))  # drawn as TRL does, in whose micro-batches the order is this one
    trl_part = torch.empty_like(order)
    trl_part[order] = torch.arange(len(order)) * windows * parts // len(order) % parts
    trl_part = trl_part.to(batch["completion_mask"].device)
    more = {"trl_parts": torch.tensor(parts)}
    if not needed.all():
        assert entropy is not None
        counted, without = counted_tokens(batch), ~needed.to(trl_part.device)
        sums = (padded_to(entropy, counted.size(1)) * counted).sum(1)
        more["left_out"] = torch.stack([trl_part.float(), sums.float(), counted.sum(1).float()])[:, without]
    batch = {**batch, "trl_part": trl_part}
    found = []
    for window in order.chunk(windows):
        rows = window.sort().values
        kept = rows[needed[rows]]
        for run in split_by_tokens(tokens[kept].tolist(), parts, most):
            part = rows_of(batch, kept[run.start : run.stop])
            found.append({**part, **more, "mean_rows": torch.tensor(len(rows) / parts)})
    return found
