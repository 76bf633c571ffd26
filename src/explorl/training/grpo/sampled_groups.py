"""Groups that were sampled and rewarded, some of which are replaced by others before they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.grpo.trl_adapter import RewardedRows

EngineRecords = dict[str, Tensor]
"""What the engine recorded of completions, by name, one row each; empty if something else sampled."""


SAMPLING_TEMPERATURE, TRAINING_TEMPERATURE = "sampling_temperature", "training_temperature"
"""Among the records: the temperature of each completion, or of each of its tokens, in sampling and in the loss."""


class MovedRow(NamedTuple):
    """A completion that may move to another process."""

    completion_ids: list[int]
    extra: dict[str, Any]
    """What reward functions logged of it."""
    records: EngineRecords
    transcript: ToolTranscript | None = None


@dataclass
class SampledGroups:
    """Rows of this process with their completions, and the rewards of all processes."""

    inputs: list[dict[str, Any]]
    rewarded: RewardedRows
    records: EngineRecords
    _replacements: dict[int, MovedRow] = field(default_factory=dict)

    def row(self, index: int) -> MovedRow:
        """Return a row of this process as something that can be sent to another one."""
        extra = {name: values[index] for name, values in self.rewarded.extra.items() if index < len(values)}
        records = {name: values[index].cpu() for name, values in self.records.items()}
        transcript = None if self.rewarded.transcripts is None else self.rewarded.transcripts[index]
        return MovedRow(self.rewarded.completion_ids[index], extra, records, transcript)

    def drop_partial_records(self, rows: Sequence[MovedRow]) -> None:
        """Drop all records unless every moved row has the same ones.

        ``rows`` are the moved rows of all processes, so that every process makes the same decision.
        """
        if any(row.records.keys() != self.records.keys() for row in rows):
            self.records = {}

    def replace_row(self, index: int, inputs: dict[str, Any], row: MovedRow) -> None:
        """Replace a row of this process."""
        self.inputs[index] = inputs
        self._replacements[index] = row

    def replace_rewards(self, index: int, parts: Tensor) -> None:
        """Replace the reward parts of a row; ``index`` counts the rows of all processes."""
        self.rewarded.reward_parts[index] = parts

    def merged(self) -> SampledGroups:
        """Return the groups with all replacements made."""
        new_rows = [self._replacements.get(index) for index in range(len(self.inputs))]
        pairs = self._pairs(self.rewarded.completion_ids, new_rows)
        ids = [old if new is None else new.completion_ids for old, new in pairs]
        names = {*self.rewarded.extra, *(name for row in self._replacements.values() for name in row.extra)}
        extra = {name: self._extra_column(name, new_rows) for name in sorted(names)}
        longest = max(map(len, ids))
        records = {name: _merged_records(values, name, new_rows, longest) for name, values in self.records.items()}
        transcripts = self.rewarded.transcripts
        if transcripts is not None:
            pairs = self._pairs(transcripts, new_rows)
            transcripts = [old if new is None or new.transcript is None else new.transcript for old, new in pairs]
        return SampledGroups(self.inputs, RewardedRows(ids, extra, self.rewarded.reward_parts, transcripts), records)

    @staticmethod
    def _pairs(values: list[Any], new_rows: list[MovedRow | None]) -> zip[tuple[Any, MovedRow | None]]:
        return zip(values, new_rows, strict=True)

    def _extra_column(self, name: str, new_rows: list[MovedRow | None]) -> list[Any]:
        """Return a column that reward functions logged, None for rows without a value."""
        old = self.rewarded.extra.get(name, [])
        old = [*old, *[None] * (len(new_rows) - len(old))][: len(new_rows)]
        return [value if row is None else row.extra.get(name) for value, row in self._pairs(old, new_rows)]


def _merged_records(values: Tensor, name: str, new_rows: list[MovedRow | None], longest: int) -> Tensor:
    """Return a record with the replaced rows; values per token get the length of the longest completion."""
    rows = [
        old if new is None else new.records[name].to(old) for old, new in zip(values.unbind(), new_rows, strict=True)
    ]
    if values.dim() == 1:
        return torch.stack(rows)
    padding = 1.0 if name in (SAMPLING_TEMPERATURE, TRAINING_TEMPERATURE) else 0.0  # logits are divided by temperatures
    pad = torch.nn.functional.pad  # a negative width cuts off
    return torch.stack([pad(row, (0, longest - len(row)), value=padding) for row in rows])
