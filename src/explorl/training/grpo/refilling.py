"""Which prompts a generation batch is made of: solved ones give way before it is sampled, dull groups after it.

    rows of the loader ─► skip_solved ─► sample, reward ─► dynamic_sampling ─► the batch
                               ▲                              │        ▲
                               └─────── fresh prompts ◄───────┘        └── sample, reward ◄── fresh prompts

Whatever is exchanged, every process holds as many rows as before and makes as many calls as the others: all that is
decided follows from rewards, prompts and states that all of them have. A batch that was sampled and rewarded here is
then handed to TRL as if TRL had sampled it. So everything that comes after (logs, strategies, listeners, the loss) sees
the rows that are trained on, and no log-probability is computed of the others.
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
    "tools": "a conversation is sampled turn by turn; leave out the tools",
    "environment_factory": "an environment is reset for each rollout; leave out the environments",
    "rollout_func": "a function of yours samples; exchange groups there, or leave out rollout_func",
}
"""Arguments of TRL's trainer that dynamic sampling does not go with, and why."""
_RECORDS = [one.name for one in fields(PaddedRollouts)]


def refuse(
    dynamic: DynamicSampling | None, skip: SkipSolved | None, *, args: Any, dataset: Any, given: Mapping[str, Any]
) -> None:
    """What exchanging prompts cannot work with is an error before anything is loaded, with what to do instead."""
    names = [name for name, spec in (("dynamic_sampling", dynamic), ("skip_solved", skip)) if spec is not None]
    if names and dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"{names[0]} takes fresh prompts from any place of the data set, and {type(dataset).__name__} is a stream; "
            "give a datasets.Dataset"
        )
    if dynamic is None:
        return
    for name, why in REFUSED.items():
        if given.get(name):
            raise ValueError(f"dynamic_sampling does not go with {name}: {why}, or dynamic_sampling")
    if args.use_vllm:
        raise ValueError("dynamic_sampling has not been tried with vLLM; set use_vllm=False, or leave it out")
    prompts = args.generation_batch_size // args.num_generations
    if dataset is not None and len(dataset) <= prompts:
        raise ValueError(
            f"dynamic_sampling needs prompts beside those of a batch: the data set has {len(dataset)}, and a batch "
            f"takes {prompts}; give more prompts, or leave it out"
        )


class RefillingTrainer(InspectingTrainer):
    """Exchanges prompts that teach nothing for fresh ones."""

    dynamic_sampling: DynamicSampling | None
    skip_solved: SkipSolved | None
    _settled: SampledGroups | None = None
    """A generation batch that is sampled and rewarded, and that TRL has not seen yet."""

    def _begin_refilling(self, dynamic_sampling: DynamicSampling | None, skip_solved: SkipSolved | None) -> None:
        if dynamic_sampling is not None and self.sees_images:
            raise ValueError("dynamic_sampling cannot move images between processes; leave it out, or use a text model")
        self.dynamic_sampling, self.skip_solved = dynamic_sampling, skip_solved
        self._streaks = None if skip_solved is None else SolveStreaks(skip_solved, self.args.seed)
        self._group_keys: list[str] = []

    # ---------------------------------------------------------------- a generation batch

    def refill(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows to train on; with dynamic sampling they are sampled and rewarded already."""
        if self.dynamic_sampling is None and self._streaks is None:
            return inputs
        self._group_keys = gather_object([row_key(row) for row in inputs])[:: self.num_generations]
        fresh = fresh_rows(
            len(self.train_dataset),
            self.row_at,
            seed=self.args.seed,
            number=self._batch_number,
            taken=self._group_keys,
            skips=self._passes_over,
        )
        if self._streaks is not None:
            inputs = self._without_solved(inputs, fresh)
        return inputs if self.dynamic_sampling is None else self._with_variance(inputs, fresh)

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Of rows that are sampled and rewarded already, TRL makes the rest."""
        sampled = self.tokens_seen
        try:
            output = super().scored(inputs)
            if self._settled is not None:
                self.tokens_seen = sampled  # they were counted when they were sampled
            elif self.mode == "train" and self._streaks is not None:
                assert self.reward_parts is not None
                self._take_down(self._group_keys, self.reward_parts)
            return output
        finally:
            self._settled = None

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        if self._settled is None:
            return super().sample(prompt_ids, rows)
        recorded = self._settled.records
        if recorded:
            sampling = recorded.get(SAMPLING_TEMPERATURE)
            records = PaddedRollouts(**{name: recorded.get(name) for name in _RECORDS})  # type: ignore[arg-type]
            self._keep(
                self._settled.rewarded.completion_ids, records, sampling, recorded.get(TRAINING_TEMPERATURE, sampling)
            )
        self.transcripts = self._settled.rewarded.transcripts
        return self._settled.rewarded.completion_ids

    def known_rewards(self) -> RewardedRows | None:
        return None if self._settled is None else self._settled.rewarded

    @property
    def _batch_number(self) -> int:
        """Generation batches before this one."""
        return self.micro_step // self._micro_batches_of_batch

    def _slot(self, place: int, rows: int) -> int:
        """Group of a row of this process, where every process has so many."""
        return int(self.accelerator.process_index * rows + place) // int(self.num_generations)

    # ---------------------------------------------------------------- before sampling

    def _passes_over(self, key: str) -> bool:
        return self._streaks is not None and self._streaks.skips(key, self._batch_number)

    def _without_solved(self, inputs: list[dict[str, Any]], fresh: Iterator[FreshPrompt]) -> list[dict[str, Any]]:
        """Puts fresh prompts in the place of those that are passed over, as long as there are some."""
        assert self._streaks is not None
        passed = [slot for slot, key in enumerate(self._group_keys) if self._passes_over(key)]
        exchanged = dict(zip(passed, islice(fresh, len(passed)), strict=False))
        for slot, one in exchanged.items():
            self._group_keys[slot] = one.key
        self.record_metric("skip_solved/skipped", float(len(exchanged)))
        self.record_metric("skip_solved/solved", float(self._streaks.solved))
        slots = [self._slot(place, len(inputs)) for place in range(len(inputs))]
        return [
            dict(exchanged[slot].row) if slot in exchanged else row for slot, row in zip(slots, inputs, strict=True)
        ]

    def _take_down(self, keys: Sequence[str], parts: Tensor) -> None:
        """Takes down which prompts were solved, whether or not their groups are trained on."""
        if self._streaks is not None:
            right = self.correct.threshold - SLACK
            self._streaks.record(keys, solve_rates(self.correct.rewards(parts), right, self.num_generations))

    # ---------------------------------------------------------------- after sampling

    def _with_variance(self, inputs: list[dict[str, Any]], fresh: Iterator[FreshPrompt]) -> list[dict[str, Any]]:
        """Samples and rewards the batch, and exchanges groups without variance for those of fresh prompts."""
        spec = self.dynamic_sampling
        assert spec is not None
        batch = self._drawn(list(inputs), self._group_keys)
        reward = self._totals(batch.rewarded.reward_parts).nanmean().item()
        varied = self._varied_groups(batch)
        missing = [slot for slot, good in enumerate(varied) if not good]
        size = drawn = len(varied)
        good_ones, rounds = size - len(missing), 0
        while missing and rounds < spec.max_rounds:
            wanted = spec.groups(len(missing), batch=size, drawn=drawn, varied=good_ones)
            found = self._in_equal_shares(fresh, wanted)
            if not found:
                break
            rounds += 1
            further = self._drawn(self._own_rows(found), [one.key for one in found])
            good = [place for place, good in enumerate(self._varied_groups(further)) if good]
            drawn, good_ones = drawn + len(found), good_ones + len(good)
            moved = dict(zip(missing, good, strict=False))
            self._exchange(batch, further, moved, found)
            missing = missing[len(moved) :]
        self._settled = batch.merged()
        kept = size - len(missing)
        for name, value in {
            "drawn": drawn * self.num_generations,
            "kept": kept * self.num_generations,
            "wasted": (drawn - kept) * self.num_generations,
            "rounds": rounds,
            "without_variance": len(missing),
            "keep_rate": good_ones / drawn,
            "reward": reward,
        }.items():
            self.record_metric(f"dynamic_sampling/{name}", float(value))
        return batch.inputs

    def _drawn(self, inputs: list[dict[str, Any]], keys: Sequence[str]) -> SampledGroups:
        self._forget_rollout()
        self._prompts = [row["prompt"] for row in inputs]
        answered = self.sample_and_reward(inputs)
        self._take_down(keys, answered.reward_parts)
        recorded: EngineRecords = {}
        if self._records is not None:
            every = {name: getattr(self._records, name) for name in _RECORDS}
            recorded = {name: value for name, value in every.items() if value is not None}
            if self._sampling_temperature is not None:
                recorded[SAMPLING_TEMPERATURE] = self._sampling_temperature
            if self._row_temperature is not self._sampling_temperature:
                own = self._row_temperature
                usual = torch.full((len(inputs),), float(self.temperature), device=self.accelerator.device)
                recorded[TRAINING_TEMPERATURE] = usual if own is None else own
        return SampledGroups(inputs, answered, recorded)

    def _totals(self, parts: Tensor) -> Tensor:
        """Weighted sum of the rewards of each row; NaN where no reward function scored it."""
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(dim=1)
        return torch.where(parts.isnan().all(dim=1), torch.nan, rewards)

    def _varied_groups(self, draw: SampledGroups) -> list[bool]:
        """Whether each group has what `DynamicSampling.by` asks for; the same on every process."""
        assert self.dynamic_sampling is not None
        parts = draw.rewarded.reward_parts
        if self.dynamic_sampling.by == "correct":
            marks = self.correct.marks(parts).to(parts.dtype)
            values = torch.where(self.correct.rewards(parts).isnan(), torch.nan, marks).unsqueeze(1)
        elif self.multi_objective_aggregation == "normalize_then_sum":  # each reward has a baseline of its own
            values = parts[:, self.reward_weights.to(parts.device) != 0]
        else:
            values = self._totals(parts).unsqueeze(1)
        return varies(values, self.num_generations).tolist()

    # ---------------------------------------------------------------- several processes

    def _in_equal_shares(self, fresh: Iterator[FreshPrompt], groups: int) -> list[FreshPrompt]:
        """So many fresh prompts that all processes get as many rows of them: rounded up, or down where they run out."""
        processes = int(self.accelerator.num_processes)
        at_once = processes // math.gcd(processes, self.num_generations)
        found = list(islice(fresh, -(-groups // at_once) * at_once))
        return found[: len(found) // at_once * at_once]

    def _own_rows(self, found: Sequence[FreshPrompt]) -> list[dict[str, Any]]:
        """This process's share of the rows of these prompts."""
        rows = [one.row for one in found for _ in range(self.num_generations)]
        share = len(rows) // self.accelerator.num_processes
        first = self.accelerator.process_index * share
        return [dict(row) for row in rows[first : first + share]]

    def _exchange(
        self, batch: SampledGroups, further: SampledGroups, moved: Mapping[int, int], found: Sequence[FreshPrompt]
    ) -> None:
        """Puts groups of a further round into the batch: ``moved`` is the group there by the group here."""
        if not moved:
            return
        size, share, own = self.num_generations, len(further.inputs), len(batch.inputs)
        sources = set(moved.values())
        here = [place for place in range(share) if self._slot(place, share) in sources]
        gathered = gather_object([further.row(place) for place in here])  # in the order of all rows
        batch.drop_partial_records(gathered)
        rows = iter(gathered)
        for slot, source in moved.items():
            for number in range(size):
                row, place = next(rows), slot * size + number
                batch.replace_rewards(place, further.rewarded.reward_parts[source * size + number])
                if place // own == self.accelerator.process_index:
                    batch.replace_row(place % own, dict(found[source].row), row)

    # ---------------------------------------------------------------- checkpoints

    def _write_streaks(self, folder: Path) -> None:
        if self._streaks is not None:
            self._streaks.write(folder)

    def _read_streaks(self, folder: Path) -> None:
        if self._streaks is not None:
            self._streaks.read(folder)
