"""Token records as columns of a file of rollouts: one list an answer, null where the answer has no such record.

    prompt_ids, token_ids, tokens                       what was read and written
    entropy, branching                                  at temperature 1
    logp                                                log π, at the temperature of sampling
    token_advantage, token_weight                       as the strategies have shaped them; 0 weighs a token out
    collision, other_ids, other, other_logp, state_norm, update_size, logp_after
                                                        of the answers that were looked at closely

    parent, forked_at                                   of answers that branch off others: the row of the file that an
                                                        answer has its first tokens from, and how many of them

`logp` of such an answer is from the same kind of pass as `logp_after` and at the same temperature, that of the loss, so
that exp(logp_after) − exp(logp) is what the updates did, without rounding between engine and model.
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
    asked: int,
    count: int,
    text_of: Callable[[int], str],
) -> dict[str, list[Any]]:
    """Columns of ``count`` rows with the records of the first ``asked``, where known, and of those in ``sampled``."""
    close = [] if sampled is None else sampled.rows.tolist()
    rows = sorted({*range(0 if recorded is None else asked), *close})
    if not rows:
        return {}
    seen, counted = output["completion_mask"], counted_tokens(output)

    def column(values: Tensor, of: list[int]) -> list[Any]:
        """``values`` has a row for each of these rows."""
        chosen = torch.tensor(of, device=values.device)
        return sparse_column(token_lists(values, seen[chosen], counted[chosen]), of, count)

    def chosen(values: Tensor) -> list[Any]:
        return column(values[torch.tensor(rows, device=values.device)], rows)

    found: dict[str, list[Any]] = {
        name: sparse_column(values, rows, count) for name, values in token_texts(output, rows, text_of).items()
    }
    found["token_advantage"], found["token_weight"] = chosen(token_advantages(output)), chosen(token_weights(output))
    if recorded is not None:
        found["entropy"], found["logp"] = chosen(recorded.entropy), chosen(recorded.logps)
        if recorded.drawn_by is not None:
            found |= _lineage(recorded.drawn_by, rows, count)
        if recorded.branching is not None:
            found["branching"] = chosen(recorded.branching.long())
    if sampled is None or records is None:
        return found
    if recorded is None:
        found["entropy"], found["branching"] = column(records.entropy, close), column(records.branching, close)
    logp = column(sampled.logps, close)
    found["logp"] = [new or old for new, old in zip(logp, found.get("logp", logp), strict=True)]
    found["collision"], found["state_norm"] = column(sampled.collision, close), column(sampled.state_norms, close)
    found["update_size"] = column(sampled.update_size, close)
    found["other_ids"], found["other_logp"] = column(sampled.other_ids, close), column(sampled.other_logps, close)
    found["other"] = [row and [None if one is None else text_of(one) for one in row] for row in found["other_ids"]]
    return found


def _lineage(drawn_by: Tensor, rows: list[int], count: int) -> dict[str, list[Any]]:
    """Where these rows branch off others; a fork's parent is the row that drew the last token that they share."""
    distances = drawn_by.cpu()
    shared = (distances != 0).sum(1).tolist()
    parents = [row + int(distances[row, shared[row] - 1]) if shared[row] else None for row in rows]
    return {
        "parent": sparse_column(parents, rows, count),
        "forked_at": sparse_column([shared[row] or None for row in rows], rows, count),
    }
