"""Completions in several turns, as TRL's tool loop requests them, in one session of the engine.

A row keeps its sampling parameters, its random numbers and its cache from turn to turn; the tool's outputs are inserted
between turns and have no token statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams

RECORDS = ("logps", "sampling_logps", "entropy", "branching", "sampled", "min_p_mass")
"""Fields of a rollout with one value per token."""


class RowTokens(list[int]):
    """Tokens that carry the number of their row in the generation batch, also when tokens are appended."""

    def __init__(self, tokens: Sequence[int], row: int) -> None:
        super().__init__(tokens)
        self.row = row

    def __add__(self, more: list[int]) -> RowTokens:  # type: ignore[override]
        return RowTokens([*self, *more], self.row)


def row_numbers(tokens: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the row number of each sequence of tokens; None unless all carry one."""
    rows = [sequence.row for sequence in tokens if isinstance(sequence, RowTokens)]
    return rows if rows and len(rows) == len(tokens) else None


class Conversation:
    """A generation batch that is sampled turn by turn."""

    def __init__(self, engine: Engine, prompt_ids: list[list[int]], params: SamplingParams) -> None:
        self._session = engine.open(prompt_ids, 1, params)
        self._prompts = prompt_ids
        self._limits = params.rows(len(prompt_ids), 1)["max_tokens"].tolist()
        self._session.run()

    def rollouts(self) -> Rollouts:
        """Return all rows as sampled so far."""
        rows = [self._session.rollout(row) for row in range(len(self._prompts))]
        return Rollouts(rows, self._prompts, 1, 0).check()

    def continue_rows(self, rows: Sequence[int], contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Sample the next turn of these rows, given the prompts and completions so far with the tools' outputs."""
        for row, context in zip(rows, contexts, strict=True):
            length = len(context) - len(self._prompts[row])
            rollout = self._session.rollout(row)
            # A strategy may allow a row fewer tokens than TRL allows a conversation: then nothing more is sampled.
            limit = max(self._limits[row], length)
            self._session.extend(row, context[len(self._prompts[row]) + len(rollout) :], limit)
        self._session.run()
        self.rollouts()
        return [
            self._session.rollout(row).token_ids[len(context) - len(self._prompts[row]) :]
            for row, context in zip(rows, contexts, strict=True)
        ]

    def close(self, completion_ids: Sequence[Sequence[int]]) -> Rollouts | None:
        """Close the session and return all rows, cut to TRL's completions; None if those have other tokens."""
        rollouts = self.rollouts()
        self._session.close()
        rows = [_truncated(rollout, len(ids)) for rollout, ids in zip(rollouts, completion_ids, strict=True)]
        same = all(row.token_ids == list(ids) for row, ids in zip(rows, completion_ids, strict=True))
        return Rollouts(rows, self._prompts, 1, 0) if same else None


def _truncated(rollout: Rollout, length: int) -> Rollout:
    """Return a rollout with its first ``length`` tokens."""
    if length >= len(rollout):
        return rollout
    records = {name: getattr(rollout, name) for name in RECORDS}
    cut: dict[str, Any] = {name: None if values is None else values[:length] for name, values in records.items()}
    return replace(rollout, token_ids=rollout.token_ids[:length], **cut, finish_reason="length", stop=None)
