"""Groups that were sampled and rewarded, some of them to be exchanged for others before they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from explorl.training.grpo.tool_transcripts import Said
from explorl.training.grpo.trl_adapter import Answered

Recorded = dict[str, Tensor]
"""What the engine recorded of answers, by name, one row for each; empty where something else sampled."""


SAMPLED_AT, TRAINED_AT = "sampling_temperature", "training_temperature"
"""Among what was recorded: the temperature of each answer, or of each of its tokens, in sampling and in the loss."""


class Row(NamedTuple):
    """An answer that may go to another process."""

    completion_ids: list[int]
    extra: dict[str, Any]
    """What reward functions logged of it."""
    recorded: Recorded
    said: Said | None = None


@dataclass
class Draw:
    """Rows of this process, with their answers, and the rewards of all processes."""

    inputs: list[dict[str, Any]]
    answered: Answered
    recorded: Recorded
    _exchanged: dict[int, Row] = field(default_factory=dict)

    def row(self, place: int) -> Row:
        extra = {name: values[place] for name, values in self.answered.extra.items() if place < len(values)}
        recorded = {name: values[place].cpu() for name, values in self.recorded.items()}
        said = None if self.answered.said is None else self.answered.said[place]
        return Row(self.answered.completion_ids[place], extra, recorded, said)

    def agree(self, rows: Sequence[Row]) -> None:
        """Looks at all rows that are moved, to whichever process: where something else sampled some of them, nothing
        counts as recorded, so that every process goes on alike."""
        if any(row.recorded.keys() != self.recorded.keys() for row in rows):
            self.recorded = {}

    def put(self, place: int, inputs: dict[str, Any], row: Row) -> None:
        """Exchanges a row of this process."""
        self.inputs[place] = inputs
        self._exchanged[place] = row

    def put_rewards(self, place: int, parts: Tensor) -> None:
        """Exchanges the rewards of a row of all processes'."""
        self.answered.reward_parts[place] = parts

    def settled(self) -> Draw:
        """With the exchanged rows in their places."""
        rows = [self._exchanged.get(place) for place in range(len(self.inputs))]
        ids = [
            old if new is None else new.completion_ids for old, new in self._both(self.answered.completion_ids, rows)
        ]
        names = {*self.answered.extra, *(name for row in self._exchanged.values() for name in row.extra)}
        extra = {name: self._column(name, rows) for name in sorted(names)}
        longest = max(map(len, ids))
        recorded = {name: _joined(values, name, rows, longest) for name, values in self.recorded.items()}
        said = self.answered.said
        if said is not None:
            said = [old if new is None or new.said is None else new.said for old, new in self._both(said, rows)]
        return Draw(self.inputs, Answered(ids, extra, self.answered.reward_parts, said), recorded)

    @staticmethod
    def _both(values: list[Any], rows: list[Row | None]) -> zip[tuple[Any, Row | None]]:
        return zip(values, rows, strict=True)

    def _column(self, name: str, rows: list[Row | None]) -> list[Any]:
        """A column that reward functions logged, None where they logged nothing of a row."""
        old = self.answered.extra.get(name, [])
        old = [*old, *[None] * (len(rows) - len(old))][: len(rows)]
        return [value if row is None else row.extra.get(name) for value, row in self._both(old, rows)]


def _joined(values: Tensor, name: str, rows: list[Row | None], longest: int) -> Tensor:
    """One row for each answer; values of tokens are as long as the longest answer."""
    lines = [old if row is None else row.recorded[name].to(old) for old, row in zip(values.unbind(), rows, strict=True)]
    if values.dim() == 1:
        return torch.stack(lines)
    padding = 1.0 if name in (SAMPLED_AT, TRAINED_AT) else 0.0  # a temperature is divided by
    pad = torch.nn.functional.pad  # by less than 0 it cuts off
    return torch.stack([pad(line, (0, longest - len(line)), value=padding) for line in lines])
