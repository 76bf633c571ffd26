"""Choose the prompts of a generation batch: replace solved prompts before sampling, and groups without variance after.

    rows of the loader ─► skip_solved ─► sample, reward ─► dynamic_sampling ─► the batch
                               ▲                              │        ▲
                               └─────── fresh prompts ◄───────┘        └── sample, reward ◄── fresh prompts

Every process keeps its number of rows and makes the same number of collective calls: all decisions depend only on
rewards, prompts and states that all processes have. A batch that was sampled and rewarded here is then passed to TRL as
if TRL had sampled it. So everything that follows (logs, strategies, listeners, the loss) sees the rows that are trained
on, and no log-probabilities are computed for the others.

Fresh prompts come in a random order of the data set, given by the seed and the batch's number. Nothing is carried over
from batch to batch, so a resumed run and every process get the same ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from explorl.training.grpo.correct import SLACK
from explorl.training.grpo.dynamic import DynamicSampling, varies
from explorl.training.grpo.sampled_rows import MovedRow, SampledGroups, SampledRows
from explorl.training.grpo.solved import SkipSolved, SolveStreaks, keyed_seed, solve_rates
from explorl.training.grpo.trl_adapter import training_row


class PromptSource:
    """Replaces prompts that give no gradient by fresh ones, if the trainer is asked to."""

    def __init__(self, trainer: Any, dynamic_sampling: DynamicSampling | None, skip_solved: SkipSolved | None) -> None:
        if dynamic_sampling is not None and trainer.sees_images:
            raise ValueError("dynamic_sampling cannot move images between processes; remove it, or use a text model")
        self.trainer, self.dynamic_sampling, self.skip_solved = trainer, dynamic_sampling, skip_solved
        self.streaks = None if skip_solved is None else SolveStreaks(skip_solved, trainer.args.seed)

    def next(self, inputs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], SampledRows | None, list[str]]:
        """Return the rows to train on; with dynamic sampling, how they were sampled and rewarded; and groups' keys."""
        if self.dynamic_sampling is None and self.streaks is None:
            return inputs, None, []
        keys = gather_object([row_key(row) for row in inputs])[:: self.trainer.num_generations]
        fresh = fresh_rows(
            len(self.trainer.train_dataset),
            lambda index: training_row(self.trainer, index),
            seed=self.trainer.args.seed,
            number=self._batch_number,
            taken=list(keys),
            skips=self._skips,
        )
        if self.streaks is not None:
            inputs = self._without_solved(self.streaks, inputs, keys, fresh)
        if self.dynamic_sampling is None:
            return inputs, None, keys
        groups = self._with_variance(self.dynamic_sampling, inputs, keys, fresh)
        return groups.inputs, groups.merged(), []

    def record_visits(self, keys: Sequence[str], parts: Tensor) -> None:
        """Record which prompts were solved, whether or not their groups are trained on."""
        if self.streaks is not None and keys:
            correct = self.trainer.correct
            rates = solve_rates(correct.rewards(parts), correct.threshold - SLACK, self.trainer.num_generations)
            self.streaks.record(keys, rates)

    @property
    def _batch_number(self) -> int:
        """Number of generation batches before this one."""
        trainer = self.trainer
        return int(trainer.micro_step // (trainer.args.steps_per_generation * trainer.num_iterations))

    def _group_of(self, row: int, rows: int) -> int:
        """Return the group of a row of this process, if every process has ``rows`` rows."""
        return int(self.trainer.accelerator.process_index * rows + row) // int(self.trainer.num_generations)

    # ---------------------------------------------------------------- before sampling

    def _skips(self, key: str) -> bool:
        return self.streaks is not None and self.streaks.skips(key, self._batch_number)

    def _without_solved(
        self, streaks: SolveStreaks, inputs: list[dict[str, Any]], keys: list[str], fresh: Iterator[FreshPrompt]
    ) -> list[dict[str, Any]]:
        """Replace skipped prompts, and their ``keys``, by fresh ones, as long as there are fresh ones."""
        skipped = [group for group, key in enumerate(keys) if self._skips(key)]
        replacements = dict(zip(skipped, islice(fresh, len(skipped)), strict=False))
        for group, prompt in replacements.items():
            keys[group] = prompt.key
        self.trainer.record_metric("skip_solved/skipped", float(len(replacements)))
        self.trainer.record_metric("skip_solved/solved", float(streaks.solved))
        groups = [self._group_of(row, len(inputs)) for row in range(len(inputs))]
        return [
            dict(replacements[group].row) if group in replacements else row
            for group, row in zip(groups, inputs, strict=True)
        ]

    # ---------------------------------------------------------------- after sampling

    def _with_variance(
        self, spec: DynamicSampling, inputs: list[dict[str, Any]], keys: Sequence[str], fresh: Iterator[FreshPrompt]
    ) -> SampledGroups:
        """Sample and reward the batch, and replace groups without variance by those of fresh prompts."""
        trainer = self.trainer
        batch = self._sample_groups(list(inputs), keys)
        reward = trainer.total_rewards(batch.reward_parts).nanmean().item()
        varied = self.varied_groups(batch.reward_parts)
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
            usable = [group for group, has in enumerate(self.varied_groups(further.reward_parts)) if has]
            drawn, total_varied = drawn + len(prompts), total_varied + len(usable)
            moved = dict(zip(missing, usable, strict=False))
            self._replace_groups(batch, further, moved, prompts)
            missing = missing[len(moved) :]
        trained = size - len(missing)
        for name, value in {
            "drawn": drawn * trainer.num_generations,
            "kept": trained * trainer.num_generations,
            "wasted": (drawn - trained) * trainer.num_generations,
            "rounds": rounds,
            "without_variance": len(missing),
            "keep_rate": total_varied / drawn,
            "reward": reward,
        }.items():
            trainer.record_metric(f"dynamic_sampling/{name}", float(value))
        return batch

    def _sample_groups(self, inputs: list[dict[str, Any]], keys: Sequence[str]) -> SampledGroups:
        """Sample and reward the rows of this process, and record which of the prompts were solved."""
        sampled = self.trainer.sample_and_reward(inputs)
        self.record_visits(keys, sampled.reward_parts)
        return SampledGroups(inputs, sampled, self.trainer.temperature)

    def varied_groups(self, parts: Tensor) -> list[bool]:
        """Tell for each group whether the values that `DynamicSampling.by` names vary; equal on every process."""
        assert self.dynamic_sampling is not None
        trainer = self.trainer
        if self.dynamic_sampling.by == "correct":
            marks = trainer.correct.marks(parts).to(parts.dtype)
            values = torch.where(trainer.correct.rewards(parts).isnan(), torch.nan, marks).unsqueeze(1)
        elif trainer.multi_objective_aggregation == "normalize_then_sum":  # each reward has its own baseline
            values = parts[:, trainer.reward_weights.to(parts.device) != 0]
        else:
            values = trainer.total_rewards(parts).unsqueeze(1)
        return varies(values, trainer.num_generations).tolist()

    # ---------------------------------------------------------------- several processes

    def _take_equal_shares(self, fresh: Iterator[FreshPrompt], groups: int) -> list[FreshPrompt]:
        """Take fresh prompts for ``groups`` groups, rounded so that every process gets equally many rows.

        Rounded up, or down if the fresh prompts run out.
        """
        processes = int(self.trainer.accelerator.num_processes)
        multiple = processes // math.gcd(processes, self.trainer.num_generations)
        prompts = list(islice(fresh, -(-groups // multiple) * multiple))
        return prompts[: len(prompts) // multiple * multiple]

    def _local_rows(self, prompts: Sequence[FreshPrompt]) -> list[dict[str, Any]]:
        """Return this process's share of the rows of these prompts."""
        rows = [prompt.row for prompt in prompts for _ in range(self.trainer.num_generations)]
        share = len(rows) // self.trainer.accelerator.num_processes
        first = self.trainer.accelerator.process_index * share
        return [dict(row) for row in rows[first : first + share]]

    def _replace_groups(
        self, batch: SampledGroups, further: SampledGroups, moved: Mapping[int, int], prompts: Sequence[FreshPrompt]
    ) -> None:
        """Move groups of a further round into the batch; ``moved`` maps a group of the batch to one of the round."""
        if not moved:
            return
        size, share, batch_rows = self.trainer.num_generations, len(further.inputs), len(batch.inputs)
        sources = set(moved.values())
        local = [row for row in range(share) if self._group_of(row, share) in sources]
        # in the order of the rows of all processes
        gathered: list[MovedRow] = gather_object([further.row(row) for row in local])
        batch.drop_partial_records(gathered)
        rows = iter(gathered)
        for target, source in moved.items():
            for number in range(size):
                row, index = next(rows), target * size + number
                batch.replace_rewards(index, further.reward_parts[source * size + number])
                if index // batch_rows == self.trainer.accelerator.process_index:
                    batch.replace_row(index % batch_rows, dict(prompts[source].row), row)


# -------------------------------------------------------------------- fresh prompts


class FreshPrompt(NamedTuple):
    """A prompt of the data set."""

    key: str
    row: dict[str, Any]


def row_key(row: Mapping[str, Any]) -> str:
    """Return a key that identifies a row of the data set: a digest of everything in it that JSON can represent."""
    text = json.dumps(row, skipkeys=True, default=lambda _: None)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fresh_rows(
    size: int,
    row_at: Callable[[int], Mapping[str, Any]],
    *,
    seed: int,
    number: int,
    taken: Iterable[str],
    skips: Callable[[str], bool] = lambda key: False,
) -> Iterator[FreshPrompt]:
    """Yield rows of a data set of this size in random order, each at most once, except those in ``taken``.

    Args:
        number: Number of the generation batch.
        skips: Tells whether a prompt is skipped, given its key.
    """
    used = set(taken)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(keyed_seed("fresh", seed, number)))
    for index in order.tolist():
        row = dict(row_at(index))
        key = row_key(row)
        if key not in used and not skips(key):
            used.add(key)
            yield FreshPrompt(key, row)
