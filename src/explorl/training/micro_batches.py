"""Split the rows of a step into micro-batches of about equally many tokens, keeping neighbouring rows together.

Time and memory of a step depend on its tokens, not its rows. Neighbours in GRPO are completions of one prompt, whose
tokens they share in the packed pass; in SFT they are rows of similar length. No micro-batch has more rows than the user
allows. The gradient of an optimizer step is a sum over its rows, so the assignment of rows to micro-batches does not
change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from explorl.training.grpo.batch import padded_to
from explorl.training.grpo.logged_columns import counted_tokens


def split_by_tokens(tokens: Sequence[int], parts: int, max_rows: int | None = None) -> list[range]:
    """Cut rows into `parts` runs of about equally many tokens, each with at least one row and at most ``max_rows``.

    ``tokens`` has the number of tokens of each row.
    """
    max_rows = len(tokens) if max_rows is None else max_rows
    if len(tokens) < parts:
        raise ValueError(f"{len(tokens)} rows cannot be split into {parts} micro-batches; each needs a row")
    if len(tokens) > parts * max_rows:
        raise ValueError(f"{len(tokens)} rows cannot be split into {parts} micro-batches of at most {max_rows} rows")
    ends = list(accumulate(tokens))
    cuts = [0]
    for part in range(1, parts):
        target = ends[-1] * part / parts
        remaining = parts - part
        row = max(cuts[-1] + 1, len(tokens) - remaining * max_rows)
        last = min(len(tokens) - remaining, cuts[-1] + max_rows)
        while row < last and abs(ends[row] - target) <= abs(ends[row - 1] - target):
            row += 1
        cuts.append(row)
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True)]


def take_rows(batch: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return these rows of all values that have rows; values of the whole batch are kept as they are."""

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[rows.to(value.device)]
        return None if value is None else [value[row] for row in rows.tolist()]

    return {key: take(value) for key, value in batch.items()}


def make_micro_batches(
    batch: Mapping[str, Any],
    *,
    windows: int,
    parts: int,
    needed: Tensor,
    max_rows: int | None = None,
    entropy: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Return the micro-batches of a generation batch: `parts` of about equally many tokens for each optimizer step.

    If a batch serves several optimizer steps (`windows`), rows are assigned to them at random. Rows that are not
    `needed` are left out. Keys added to the micro-batches:

        left_out    metrics of the rows left out: part, summed ``entropy`` and number of tokens of each
        mean_rows   mean number of rows of a micro-batch of the step, including rows left out
        trl_part    for each row, which of the step's ``trl_parts`` micro-batches TRL would have put it into
    """
    tokens = batch["completion_mask"].sum(1).cpu()
    order = torch.randperm(len(tokens))  # the same draw as TRL's, whose micro-batches have this order
    trl_part = torch.empty_like(order)
    trl_part[order] = torch.arange(len(order)) * windows * parts // len(order) % parts
    trl_part = trl_part.to(batch["completion_mask"].device)
    extra = {"trl_parts": torch.tensor(parts)}
    if not needed.all():
        assert entropy is not None
        counted, unneeded = counted_tokens(batch), ~needed.to(trl_part.device)
        sums = (padded_to(entropy, counted.size(1)) * counted).sum(1)
        extra["left_out"] = torch.stack([trl_part.float(), sums.float(), counted.sum(1).float()])[:, unneeded]
    batch = {**batch, "trl_part": trl_part}
    micro_batches = []
    for window in order.chunk(windows):
        rows = window.sort().values
        needed_rows = rows[needed[rows]]
        for run in split_by_tokens(tokens[needed_rows].tolist(), parts, max_rows):
            part = take_rows(batch, needed_rows[run.start : run.stop])
            micro_batches.append({**part, **extra, "mean_rows": torch.tensor(len(rows) / parts)})
    return micro_batches
