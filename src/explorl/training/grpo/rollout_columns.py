"""Token records as columns of a file of rollouts: one list per completion, null for completions without the record.

    prompt_ids, token_ids, tokens                       prompt and completion
    entropy, branching                                  at temperature 1
    logp                                                log π, at the temperature of sampling
    token_advantage, token_weight                       after the strategies; 0 for tokens that are not in the loss
    collision, other_ids, other, other_logp, state_norm, update_size, logp_after
                                                        of inspected completions

    parent, forked_at                                   of completions that branch off others: the row of the file that
                                                        has the same first tokens, and how many of them

`logp` of an inspected completion comes from the same kind of pass as `logp_after`, at the temperature of the loss. So
exp(logp_after) − exp(logp) is the effect of the updates, without rounding differences between engine and model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from explorl.modeling.token_records import AnswerRecords
from explorl.training.grpo.batch import TokenStats
from explorl.training.grpo.inspection_schedule import InspectedRows
from explorl.training.grpo.logged_columns import (
    counted_tokens,
    sparse_column,
    token_advantages,
    token_lists,
    token_texts,
    token_weights,
)


def token_columns(
    output: Mapping[str, Any],
    recorded: TokenStats | None,
    sampled: InspectedRows | None,
    records: AnswerRecords | None,
    recorded_rows: int,
    count: int,
    text_of: Callable[[int], str],
) -> dict[str, list[Any]]:
    """Return columns of ``count`` rows with records of the first ``recorded_rows`` and of the inspected rows."""
    inspected = [] if sampled is None else sampled.rows.tolist()
    rows = sorted({*range(0 if recorded is None else recorded_rows), *inspected})
    if not rows:
        return {}
    mask, counted = output["completion_mask"], counted_tokens(output)

    def column(values: Tensor, indices: list[int]) -> list[Any]:
        """Return a column from ``values``, which has a row for each index."""
        chosen = torch.tensor(indices, device=values.device)
        return sparse_column(token_lists(values, mask[chosen], counted[chosen]), indices, count)

    def column_of_all(values: Tensor) -> list[Any]:
        return column(values[torch.tensor(rows, device=values.device)], rows)

    columns: dict[str, list[Any]] = {
        name: sparse_column(values, rows, count) for name, values in token_texts(output, rows, text_of).items()
    }
    columns["token_advantage"] = column_of_all(token_advantages(output))
    columns["token_weight"] = column_of_all(token_weights(output))
    if recorded is not None:
        columns["entropy"], columns["logp"] = column_of_all(recorded.entropy), column_of_all(recorded.logps)
        if recorded.drawn_by is not None:
            columns |= _lineage(recorded.drawn_by, rows, count)
        if recorded.branching is not None:
            columns["branching"] = column_of_all(recorded.branching.long())
    if sampled is None or records is None:
        return columns
    if recorded is None:
        columns["entropy"] = column(records.entropy, inspected)
        columns["branching"] = column(records.branching, inspected)
    logp = column(sampled.logps, inspected)
    columns["logp"] = [new or old for new, old in zip(logp, columns.get("logp", logp), strict=True)]
    columns["collision"] = column(sampled.collision, inspected)
    columns["state_norm"] = column(sampled.state_norms, inspected)
    columns["update_size"] = column(sampled.update_size, inspected)
    columns["other_ids"] = column(sampled.other_ids, inspected)
    columns["other_logp"] = column(sampled.other_logps, inspected)
    columns["other"] = [
        row and [None if token is None else text_of(token) for token in row] for row in columns["other_ids"]
    ]
    return columns


def _lineage(drawn_by: Tensor, rows: list[int], count: int) -> dict[str, list[Any]]:
    """Return the parents of these rows: the row that sampled the last shared token, and the number of shared tokens."""
    distances = drawn_by.cpu()
    shared = (distances != 0).sum(1).tolist()
    parents = [row + int(distances[row, shared[row] - 1]) if shared[row] else None for row in rows]
    return {
        "parent": sparse_column(parents, rows, count),
        "forked_at": sparse_column([shared[row] or None for row in rows], rows, count),
    }
