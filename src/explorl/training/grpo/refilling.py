"""Choose the prompts of a generation batch: replace solved prompts before sampling, and groups without variance after.

    rows of the loader ─► skip_solved ─► sample, reward ─► dynamic_sampling ─► the batch
                               ▲                              │        ▲
                               └─────── fresh prompts ◄───────┘        └── sample, reward ◄── fresh prompts

Every process keeps its number of rows and makes the same number of collective calls: all decisions depend only on
rewards, prompts and states that all processes have. A batch that was sampled and rewarded here is then passed to TRL as
if TRL had sampled it. So everything that follows (logs, strategies, listeners, the loss) sees the rows that are trained
on, and no log-probabilities are computed for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from explorl.rollout import PaddedRollouts
from explorl.training.grpo.correct import SLACK
from explorl.training.grpo.dynamic import DynamicSampling, varies
from explorl.training.grpo.fresh import FreshPrompt, fresh_rows, row_key
from explorl.training.grpo.inspection import InspectingTrainer
from explorl.training.grpo.sampled_groups import (
    SAMPLING_TEMPERATURE,
    TRAINING_TEMPERATURE,
    EngineRecords,
    SampledGroups,
)
from explorl.training.grpo.solved import SkipSolved, SolveStreaks, solve_rates
from explorl.training.grpo.trl_adapter import RewardedRows

REFUSED = {
    "tools": "a conversation is sampled turn by turn; remove the tools",
    "environment_factory": "an environment is reset for each rollout; remove the environments",
    "rollout_func": "your function samples; replace groups there, or remove rollout_func",
}
"""Arguments of TRL's trainer that cannot be combined with dynamic sampling, and why."""
_RECORDS = [field.name for field in fields(PaddedRollouts)]


def refuse(
    dynamic: DynamicSampling | None, skip: SkipSolved | None, *, args: Any, dataset: Any, arguments: Mapping[str, Any]
) -> None:
    """Raise for options that replacing prompts does not work with, before anything is loaded."""
    names = [name for name, spec in (("dynamic_sampling", dynamic), ("skip_solved", skip)) if spec is not None]
    if names and dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"{names[0]} takes fresh prompts from anywhere in the data set, but {type(dataset).__name__} is a stream; "
            "use a datasets.Dataset"
        )
    if dynamic is None:
        return
    for name, why in REFUSED.items():
        if arguments.get(name):
            raise ValueError(f"dynamic_sampling cannot be combined with {name}: {why}, or remove dynamic_sampling")
    if args.use_vllm:
        raise ValueError("dynamic_sampling is untested with vLLM; set use_vllm=False, or remove it")
    prompts = args.generation_batch_size // args.num_generations
    if dataset is not None and len(dataset) <= prompts:
        raise ValueError(
            f"dynamic_sampling needs more prompts than a batch has: the data set has {len(dataset)}, and a batch takes "
            f"{prompts}; add prompts, or remove it"
        )


class RefillingTrainer(InspectingTrainer):
    """Replaces prompts that give no gradient by fresh ones."""

    dynamic_sampling: DynamicSampling | None
    skip_solved: SkipSolved | None
    _prepared: SampledGroups | None = None
    """A generation batch that is sampled and rewarded but not yet passed to TRL."""

    def _init_refilling(self, dynamic_sampling: DynamicSampling | None, skip_solved: SkipSolved | None) -> None:
        if dynamic_sampling is not None and self.sees_images:
            raise ValueError("dynamic_sampling cannot move images between processes; remove it, or use a text model")
        self.dynamic_sampling, self.skip_solved = dynamic_sampling, skip_solved
        self._streaks = None if skip_solved is None else SolveStreaks(skip_solved, self.args.seed)
        self._group_keys: list[str] = []

    # ---------------------------------------------------------------- a generation batch

    def refill(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows to train on; with dynamic sampling they are already sampled and rewarded."""
        if self.dynamic_sampling is None and self._streaks is None:
            return inputs
        self._group_keys = gather_object([row_key(row) for row in inputs])[:: self.num_generations]
        fresh = fresh_rows(
            len(self.train_dataset),
            self.row_at,
            seed=self.args.seed,
            number=self._batch_number,
            taken=self._group_keys,
            skips=self._skips,
        )
        if self._streaks is not None:
            inputs = self._without_solved(inputs, fresh)
        return inputs if self.dynamic_sampling is None else self._with_variance(inputs, fresh)

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Have TRL score the batch; rows that are already sampled and rewarded are not sampled again."""
        tokens = self.tokens_seen
        try:
            output = super().scored(inputs)
            if self._prepared is not None:
                self.tokens_seen = tokens  # they were counted when they were sampled
            elif self.mode == "train" and self._streaks is not None:
                assert self.reward_parts is not None
                self._record_visits(self._group_keys, self.reward_parts)
            return output
        finally:
            self._prepared = None

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        if self._prepared is None:
            return super().sample(prompt_ids, rows)
        tensors = self._prepared.records
        if tensors:
            sampling = tensors.get(SAMPLING_TEMPERATURE)
            records = PaddedRollouts(**{name: tensors.get(name) for name in _RECORDS})  # type: ignore[arg-type]
            self._store_records(
                self._prepared.rewarded.completion_ids, records, sampling, tensors.get(TRAINING_TEMPERATURE, sampling)
            )
        self.transcripts = self._prepared.rewarded.transcripts
        return self._prepared.rewarded.completion_ids

    def known_rewards(self) -> RewardedRows | None:
        return None if self._prepared is None else self._prepared.rewarded

    @property
    def _batch_number(self) -> int:
        """Number of generation batches before this one."""
        return self.micro_step // self._micro_batches_of_batch

    def _group_of(self, row: int, rows: int) -> int:
        """Return the group of a row of this process, if every process has ``rows`` rows."""
        return int(self.accelerator.process_index * rows + row) // int(self.num_generations)

    # ---------------------------------------------------------------- before sampling

    def _skips(self, key: str) -> bool:
        return self._streaks is not None and self._streaks.skips(key, self._batch_number)

    def _without_solved(self, inputs: list[dict[str, Any]], fresh: Iterator[FreshPrompt]) -> list[dict[str, Any]]:
        """Replace skipped prompts by fresh ones, as long as there are fresh ones."""
        assert self._streaks is not None
        skipped = [group for group, key in enumerate(self._group_keys) if self._skips(key)]
        replacements = dict(zip(skipped, islice(fresh, len(skipped)), strict=False))
        for group, prompt in replacements.items():
            self._group_keys[group] = prompt.key
        self.record_metric("skip_solved/skipped", float(len(replacements)))
        self.record_metric("skip_solved/solved", float(self._streaks.solved))
        groups = [self._group_of(row, len(inputs)) for row in range(len(inputs))]
        return [
            dict(replacements[group].row) if group in replacements else row
            for group, row in zip(groups, inputs, strict=True)
        ]

    def _record_visits(self, keys: Sequence[str], parts: Tensor) -> None:
        """Record which prompts were solved, whether or not their groups are trained on."""
        if self._streaks is not None:
            threshold = self.correct.threshold - SLACK
            self._streaks.record(keys, solve_rates(self.correct.rewards(parts), threshold, self.num_generations))

    # ---------------------------------------------------------------- after sampling

    def _with_variance(self, inputs: list[dict[str, Any]], fresh: Iterator[FreshPrompt]) -> list[dict[str, Any]]:
        """Sample and reward the batch, and replace groups without variance by those of fresh prompts."""
        spec = self.dynamic_sampling
        assert spec is not None
        batch = self._sample_groups(list(inputs), self._group_keys)
        reward = self._totals(batch.rewarded.reward_parts).nanmean().item()
        varied = self._varied_groups(batch)
        missing = [group for group, has_variance in enumerate(varied) if not has_variance]
        size = drawn = len(varied)
        total_varied, rounds = size - len(missing), 0
        while missing and rounds < spec.max_rounds:
            wanted = spec.groups(len(missing), batch=size, drawn=drawn, varied=total_varied)
            prompts = self._take_equal_shares(fresh, wanted)
            if not prompts:
                break
            rounds += 1
            further = self._sample_groups(self._local_rows(prompts), [prompt.key for prompt in prompts])
            usable = [group for group, has_variance in enumerate(self._varied_groups(further)) if has_variance]
            drawn, total_varied = drawn + len(prompts), total_varied + len(usable)
            moved = dict(zip(missing, usable, strict=False))
            self._replace_groups(batch, further, moved, prompts)
            missing = missing[len(moved) :]
        self._prepared = batch.merged()
        trained = size - len(missing)
        for name, value in {
            "drawn": drawn * self.num_generations,
            "kept": trained * self.num_generations,
            "wasted": (drawn - trained) * self.num_generations,
            "rounds": rounds,
            "without_variance": len(missing),
            "keep_rate": total_varied / drawn,
            "reward": reward,
        }.items():
            self.record_metric(f"dynamic_sampling/{name}", float(value))
        return batch.inputs

    def _sample_groups(self, inputs: list[dict[str, Any]], keys: Sequence[str]) -> SampledGroups:
        """Sample and reward the rows of this process, and record which of the prompts were solved."""
        self._clear_rollout()
        self._prompts = [row["prompt"] for row in inputs]
        rewarded = self.sample_and_reward(inputs)
        self._record_visits(keys, rewarded.reward_parts)
        records: EngineRecords = {}
        if self._records is not None:
            tensors = {name: getattr(self._records, name) for name in _RECORDS}
            records = {name: value for name, value in tensors.items() if value is not None}
            if self._sampling_temperature is not None:
                records[SAMPLING_TEMPERATURE] = self._sampling_temperature
            if self._row_temperature is not self._sampling_temperature:
                default = torch.full((len(inputs),), float(self.temperature), device=self.accelerator.device)
                records[TRAINING_TEMPERATURE] = default if self._row_temperature is None else self._row_temperature
        return SampledGroups(inputs, rewarded, records)

    def _totals(self, parts: Tensor) -> Tensor:
        """Return the weighted sum of the rewards of each row; NaN if no reward function scored it."""
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(dim=1)
        return torch.where(parts.isnan().all(dim=1), torch.nan, rewards)

    def _varied_groups(self, groups: SampledGroups) -> list[bool]:
        """Tell for each group whether the values that `DynamicSampling.by` names vary; equal on every process."""
        assert self.dynamic_sampling is not None
        parts = groups.rewarded.reward_parts
        if self.dynamic_sampling.by == "correct":
            marks = self.correct.marks(parts).to(parts.dtype)
            values = torch.where(self.correct.rewards(parts).isnan(), torch.nan, marks).unsqueeze(1)
        elif self.multi_objective_aggregation == "normalize_then_sum":  # each reward has its own baseline
            values = parts[:, self.reward_weights.to(parts.device) != 0]
        else:
            values = self._totals(parts).unsqueeze(1)
        return varies(values, self.num_generations).tolist()

    # ---------------------------------------------------------------- several processes

    def _take_equal_shares(self, fresh: Iterator[FreshPrompt], groups: int) -> list[FreshPrompt]:
        """Take fresh prompts for ``groups`` groups, rounded so that every process gets equally many rows.

        Rounded up, or down if the fresh prompts run out.
        """
        processes = int(self.accelerator.num_processes)
        multiple = processes // math.gcd(processes, self.num_generations)
        prompts = list(islice(fresh, -(-groups // multiple) * multiple))
        return prompts[: len(prompts) // multiple * multiple]

    def _local_rows(self, prompts: Sequence[FreshPrompt]) -> list[dict[str, Any]]:
        """Return this process's share of the rows of these prompts."""
        rows = [prompt.row for prompt in prompts for _ in range(self.num_generations)]
        share = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * share
        return [dict(row) for row in rows[first : first + share]]

    def _replace_groups(
        self, batch: SampledGroups, further: SampledGroups, moved: Mapping[int, int], prompts: Sequence[FreshPrompt]
    ) -> None:
        """Move groups of a further round into the batch; ``moved`` maps a group of the batch to one of the round."""
        if not moved:
            return
        size, share, batch_rows = self.num_generations, len(further.inputs), len(batch.inputs)
        sources = set(moved.values())
        local = [row for row in range(share) if self._group_of(row, share) in sources]
        gathered = gather_object([further.row(row) for row in local])  # in the order of the rows of all processes
        batch.drop_partial_records(gathered)
        rows = iter(gathered)
        for target, source in moved.items():
            for number in range(size):
                row, index = next(rows), target * size + number
                batch.replace_rewards(index, further.rewarded.reward_parts[source * size + number])
                if index // batch_rows == self.accelerator.process_index:
                    batch.replace_row(index % batch_rows, dict(prompts[source].row), row)

    # ---------------------------------------------------------------- checkpoints

    def _write_streaks(self, folder: Path) -> None:
        if self._streaks is not None:
            self._streaks.write(folder)

    def _read_streaks(self, folder: Path) -> None:
        if self._streaks is not None:
            self._streaks.read(folder)
