"""Rows of a generation batch as they were sampled and rewarded: what a trainer's parts pass to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from explorl.rollout import PaddedRollouts
from explorl.training.grpo.tool_transcripts import ToolTranscript

SAMPLING_TEMPERATURE, TRAINING_TEMPERATURE = "sampling_temperature", "training_temperature"
_RECORDS = [field.name for field in fields(PaddedRollouts)]


class MovedRow(NamedTuple):
    """A completion that may move to another process."""

    completion_ids: list[int]
    extra: dict[str, Any]
    """What reward functions logged of it."""
    tensors: dict[str, Tensor]
    """Its token statistics and temperatures, by name."""
    transcript: ToolTranscript | None = None


@dataclass
class SampledRows:
    """This process's rows of a generation batch: prompts, what was sampled for them and how, and their rewards."""

    prompts: list[Any] = field(default_factory=list)
    completion_ids: list[list[int]] | None = None
    """Set if the rows are already sampled, and TRL only has to score them."""
    records: PaddedRollouts | None = None
    """Token statistics; None if the engine did not sample the rows."""
    recorded_ids: list[list[int]] = field(default_factory=list)
    """The tokens of the rows in `records`."""
    sampling_temperature: Tensor | None = None
    """Temperature of each row, or of each position of it, if it is not the trainer's."""
    training_temperature: Tensor | None = None
    """The same in the loss."""
    old_logps: Tensor | None = None
    """log π_old if TRL need not compute it."""
    transcripts: list[ToolTranscript] | None = None
    """Set if the trainer has an interpreter."""
    stopped: list[bool] = field(default_factory=list)
    """For each row, whether a stop string has ended it."""
    reward_parts: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Rewards of the rows of all processes, (rows, reward functions); NaN means not scored."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """What reward functions logged per completion (``log_extra``), by column."""
    rewarded: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reward functions, by name: prompts, completions and columns."""

    def record(
        self, ids: Iterable[Sequence[int]], records: PaddedRollouts, sampling: Tensor | None, training: Tensor | None
    ) -> None:
        """Store token statistics, and the temperatures in sampling and in the loss."""
        self.recorded_ids = [list(row) for row in ids]  # copies: a subclass may change the originals
        self.records, self.sampling_temperature, self.training_temperature = records, sampling, training

    def forget_records(self) -> None:
        self.records = self.sampling_temperature = self.training_temperature = None

    def take_old_logps(self) -> Tensor | None:
        """Return `old_logps` once."""
        taken, self.old_logps = self.old_logps, None
        return taken


class SampledGroups:
    """Rows of this process that are sampled and rewarded, some of which are replaced by others before training.

    Args:
        inputs: The rows of the data set.
        sampled: Their completions, and the rewards of all processes.
        temperature: The trainer's temperature.
    """

    def __init__(self, inputs: list[dict[str, Any]], sampled: SampledRows, temperature: float = 1.0) -> None:
        self.inputs, self.sampled = inputs, sampled
        self.tensors = _tensors(sampled, temperature)
        """Token statistics and temperatures by name, one row each; empty if something else than the engine sampled."""
        self._replacements: dict[int, MovedRow] = {}

    @property
    def reward_parts(self) -> Tensor:
        return self.sampled.reward_parts

    @property
    def completion_ids(self) -> list[list[int]]:
        assert self.sampled.completion_ids is not None
        return self.sampled.completion_ids

    def row(self, index: int) -> MovedRow:
        """Return a row of this process as something that can be sent to another one."""
        sampled = self.sampled
        extra = {name: values[index] for name, values in sampled.extra.items() if index < len(values)}
        tensors = {name: values[index].cpu() for name, values in self.tensors.items()}
        transcript = None if sampled.transcripts is None else sampled.transcripts[index]
        return MovedRow(self.completion_ids[index], extra, tensors, transcript)

    def drop_partial_records(self, rows: Sequence[MovedRow]) -> None:
        """Drop all records unless every moved row has the same ones.

        ``rows`` are the moved rows of all processes, so that every process makes the same decision.
        """
        if any(row.tensors.keys() != self.tensors.keys() for row in rows):
            self.tensors = {}

    def replace_row(self, index: int, inputs: dict[str, Any], row: MovedRow) -> None:
        """Replace a row of this process."""
        self.inputs[index] = inputs
        self._replacements[index] = row

    def replace_rewards(self, index: int, parts: Tensor) -> None:
        """Replace the reward parts of a row; ``index`` counts the rows of all processes."""
        self.reward_parts[index] = parts

    def merged(self) -> SampledRows:
        """Return the rows with all replacements made."""
        new_rows = [self._replacements.get(index) for index in range(len(self.inputs))]

        def pairs(values: Sequence[Any]) -> zip[tuple[Any, MovedRow | None]]:
            return zip(values, new_rows, strict=True)

        ids = [old if new is None else new.completion_ids for old, new in pairs(self.completion_ids)]
        extra = {}
        old_extra = self.sampled.extra
        for name in sorted({*old_extra, *(name for row in self._replacements.values() for name in row.extra)}):
            column = old_extra.get(name, [])
            column = [*column, *[None] * (len(new_rows) - len(column))][: len(new_rows)]
            extra[name] = [value if row is None else row.extra.get(name) for value, row in pairs(column)]
        transcripts = self.sampled.transcripts
        if transcripts is not None:
            transcripts = [new.transcript if new and new.transcript else old for old, new in pairs(transcripts)]
        merged = SampledRows(
            prompts=[row.get("prompt", "") for row in self.inputs],
            completion_ids=ids,
            transcripts=transcripts,
            reward_parts=self.reward_parts,
            extra=extra,
        )
        longest = max(map(len, ids))
        tensors = {name: _merged(values, name, new_rows, longest) for name, values in self.tensors.items()}
        if tensors:
            sampling = tensors.get(SAMPLING_TEMPERATURE)
            records = PaddedRollouts(**{name: tensors.get(name) for name in _RECORDS})  # type: ignore[arg-type]
            merged.record(ids, records, sampling, tensors.get(TRAINING_TEMPERATURE, sampling))
        return merged


def _tensors(sampled: SampledRows, temperature: float) -> dict[str, Tensor]:
    """Return token statistics and temperatures by name."""
    if sampled.records is None:
        return {}
    values = {name: getattr(sampled.records, name) for name in _RECORDS}
    tensors = {name: value for name, value in values.items() if value is not None}
    sampling, training = sampled.sampling_temperature, sampled.training_temperature
    if sampling is not None:
        tensors[SAMPLING_TEMPERATURE] = sampling
    if training is not sampling:
        default = torch.full((len(sampled.prompts),), float(temperature), device=sampled.records.logps.device)
        tensors[TRAINING_TEMPERATURE] = default if training is None else training
    return tensors


def _merged(values: Tensor, name: str, new_rows: list[MovedRow | None], longest: int) -> Tensor:
    """Return a tensor with the replaced rows; values per token get the length of the longest completion."""
    rows = [
        old if new is None else new.tensors[name].to(old) for old, new in zip(values.unbind(), new_rows, strict=True)
    ]
    if values.dim() == 1:
        return torch.stack(rows)
    padding = 1.0 if name in (SAMPLING_TEMPERATURE, TRAINING_TEMPERATURE) else 0.0  # logits are divided by temperatures
    pad = torch.nn.functional.pad  # a negative width cuts off
    return torch.stack([pad(row, (0, longest - len(row)), value=padding) for row in rows])
