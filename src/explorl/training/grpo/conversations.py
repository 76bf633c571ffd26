"""Answers in several turns, as TRL's tool loop asks for them, in one session of the engine.

A row keeps its sampling parameters, its random numbers and what was computed of it from turn to turn; what a tool said
is put in between and carries no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from explorl.rollout import Engine, Rollout, Rollouts, SamplingParams

RECORDS = ("logps", "sampling_logps", "entropy", "branching", "sampled", "min_p_mass", "top_ids", "top_logps")
"""What a rollout has for each token."""


class RowTokens(list[int]):
    """Tokens that know which row of the generation batch they begin; so does what is added to them."""

    def __init__(self, tokens: Sequence[int], row: int) -> None:
        super().__init__(tokens)
        self.row = row

    def __add__(self, more: list[int]) -> RowTokens:  # type: ignore[override]
        return RowTokens([*self, *more], self.row)


def rows_of(tokens: Sequence[Sequence[int]]) -> list[int] | None:
    """The rows that these are of; None where they do not know."""
    rows = [one.row for one in tokens if isinstance(one, RowTokens)]
    return rows if rows and len(rows) == len(tokens) else None


class Conversation:
    """A generation batch that is sampled turn by turn."""

    def __init__(self, engine: Engine, prompt_ids: list[list[int]], params: SamplingParams) -> None:
        self._session = engine.open(prompt_ids, 1, params)
        self._prompts = prompt_ids
        self._limits = params.rows(len(prompt_ids), 1)["max_tokens"].tolist()
        self._session.run()

    def rollouts(self) -> Rollouts:
        """All rows as they stand."""
        rows = [self._session.rollout(row) for row in range(len(self._prompts))]
        return Rollouts(rows, self._prompts, 1, 0).check()

    def go_on(self, rows: Sequence[int], contexts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What these rows say next, after prompts and completions so far with what tools said to them."""
        for row, context in zip(rows, contexts, strict=True):
            length = len(context) - len(self._prompts[row])
            said = self._session.rollout(row)
            # A strategy may allow a row fewer tokens than TRL allows a conversation: then nothing follows.
            limit = max(self._limits[row], length)
            self._session.extend(row, context[len(self._prompts[row]) + len(said) :], limit)
        self._session.run()
        self.rollouts()
        return [
            self._session.rollout(row).token_ids[len(context) - len(self._prompts[row]) :]
            for row, context in zip(rows, contexts, strict=True)
        ]

    def close(self, completion_ids: Sequence[Sequence[int]]) -> Rollouts | None:
        """All rows, as far as the completions that TRL made of them go; None where those say something else."""
        rollouts = self.rollouts()
        self._session.close()
        rows = [_first(rollout, len(ids)) for rollout, ids in zip(rollouts, completion_ids, strict=True)]
        same = all(row.token_ids == list(ids) for row, ids in zip(rows, completion_ids, strict=True))
        return Rollouts(rows, self._prompts, 1, 0) if same else None


def _first(rollout: Rollout, length: int) -> Rollout:
    """A rollout's first tokens."""
    if length >= len(rollout):
        return rollout
    records = {name: getattr(rollout, name) for name in RECORDS}
    cut: dict[str, Any] = {name: None if values is None else values[:length] for name, values in records.items()}
    return replace(rollout, token_ids=rollout.token_ids[:length], **cut, finish_reason="length", stop=None)
