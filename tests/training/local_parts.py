"""A generation batch of several processes, shaped by each on its own rows: what `test_local_batch` runs in them.

It stands apart from the tests so that a process which is started needs to import no trainer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from explorl.strategies import Batch, Strategy, build_all
from explorl.strategies.grpo import grpo_advantages
from explorl.training.grpo.batch import TokenStats, generation_batch, put_back
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.distributed import Distributed
from explorl.training.grpo.shaping import shape

GENERATIONS, ROWS, WIDTH = 4, 12, 9
"""Groups straddle the processes when there are two, with six rows each, and every group does when there are four."""
END = 1
WHOLE = SimpleNamespace(gather=lambda tensor: tensor, pad_across_processes=lambda tensor, dim: tensor)
"""An accelerator with a single process."""


@dataclass
class Scene:
    """The rows of all processes, as TRL and the engine leave them."""

    recorded: TokenStats
    output: dict[str, torch.Tensor]
    rewards: torch.Tensor
    prompts: list[str]
    answers: list[str | None]
    temperature: torch.Tensor

    def rows(self, own: slice) -> Scene:
        """Some rows, padded to the longest of them."""
        length = max(int(self.output["completion_mask"][own].sum(1).max()), 1)

        def cut(values: Any) -> Any:
            return values[own, :length] if isinstance(values, torch.Tensor) and values.dim() == 2 else values[own]

        return Scene(
            TokenStats(*(None if values is None else cut(values) for values in self.recorded)),
            {name: cut(values) for name, values in self.output.items()},
            self.rewards,
            self.prompts[own],
            self.answers[own],
            self.temperature[own],
        )


def scene(name: str) -> Scene:
    """any: the second half has the longer answers, with a tool's output among the tokens; masked: its rows count
    nowhere, and answers are short; ties: few different values; unscored: some rewards are unknown, and all answers of a
    process are."""
    seed = ["any", "masked", "ties", "unscored"].index(name)
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        if name == "ties":
            return torch.randint(-2, 3, (ROWS, WIDTH), generator=generator) / 2
        return torch.randn(ROWS, WIDTH, generator=generator)

    late = torch.arange(ROWS) >= ROWS // 2
    lengths = torch.where(late, 6, 1) + torch.randint(0, 4, (ROWS,), generator=generator)
    present = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    if name == "masked":
        present[late] = 0
    logps = -noise().abs()
    rewards = torch.randint(0, 5, (ROWS,), generator=generator) / 4
    if name == "unscored":
        rewards[torch.arange(ROWS) % 5 == 0] = torch.nan
        rewards[-3:] = torch.nan
    group = torch.arange(ROWS) // GENERATIONS
    drawn_by = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    drawn_by[1, :2] = -1  # the second answer goes on from the first one
    if name in ("ties", "masked"):
        drawn_by[6, :3] = -1  # and so does the seventh from the sixth, which another process has
    tool = (torch.rand(ROWS, WIDTH, generator=generator) > 0.1).long() | (torch.arange(WIDTH) == 0)
    recorded = TokenStats(
        logps=logps,
        entropy=noise().abs(),
        branching=None,
        sampling_logps=logps + 0.3 * noise(),
        min_p_mass=(noise() > 0) * torch.rand(ROWS, WIDTH, generator=generator),
        drawn_by=drawn_by,
    )
    completion_ids = torch.where(torch.rand(ROWS, WIDTH, generator=generator) < 0.5, END, 7)
    return Scene(
        TokenStats(*(None if values is None else values * present for values in recorded)),
        {
            "completion_ids": completion_ids,
            "completion_mask": present,
            "tool_mask": tool,
            "advantages": grpo_advantages(rewards, group),
            "ref_per_token_logps": logps + 0.1,
        },
        rewards,
        [f"prompt {row // GENERATIONS}" for row in range(ROWS)],
        [None if row % 5 == 4 else "ab"[row % 2] * 3 for row in range(ROWS)],
        torch.linspace(0.6, 1.5, ROWS),
    )


@dataclass(frozen=True)
class Undefined(Strategy):
    """NaN on the last row of the batch, which the last process has."""

    name = "undefined"
    acts_on_parts = True
    hook: str = "weights"

    def _said(self, batch: Any, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        if batch.group[-1] == (ROWS - 1) // GENERATIONS and batch.temperature[-1] > 1.49:
            values[-1] = torch.nan
        return values

    def weights(self, batch: Any) -> torch.Tensor | None:
        return self._said(batch, batch.mask) if self.hook == "weights" else None

    def rewards(self, batch: Any) -> torch.Tensor | None:
        return self._said(batch, batch.rewards) if self.hook == "rewards" else None


def shaped(parts: Scene, specs: Sequence[Any], *, process: int = 0, gathered: bool = True) -> dict[str, Any]:
    """What becomes of a batch: all that goes back to the trainer, what is logged and what is remembered.

    Once more, where something is remembered.
    """
    strategies = build_all(specs)
    results: dict[str, Any] = {}
    for step in (2, 3):
        output = dict(parts.output)
        batch = batch_of(parts, step, gathered=gathered)
        try:
            result = shape(strategies, batch, normalised)
        except ValueError as error:
            return {"error": str(error)}
        put_back(result, output, batch, process=process, penalties=True)
        results |= {f"{name} {step}": values for name, values in output.items()}
        results |= {f"{name} {step}": value for name, value in result.metrics.items()}
        if not any(strategy.memory for strategy in strategies):
            break
    return {**results, "memory": json.dumps([strategy.memory for strategy in strategies])}


def batch_of(parts: Scene, step: int, *, gathered: bool) -> Batch:
    return generation_batch(
        WHOLE,
        parts.recorded,
        parts.output,
        prompts=parts.prompts,
        parts=parts.rewards.unsqueeze(1),
        rewards=parts.rewards,
        correct=Correct.of(("score", 0.5), ["score"]),
        ends=[END],
        stopped=[False] * len(parts.output["completion_ids"]),
        generations=GENERATIONS,
        temperature=1.0,
        row_temperature=parts.temperature,
        step=step,
        answers=parts.answers,
        max_length=WIDTH,
        gathered=gathered,
    )


def normalised(rewards: torch.Tensor) -> torch.Tensor:
    """As a trainer does it with the rewards of all processes."""
    assert len(rewards) == ROWS
    return (rewards - rewards.nanmean()).nan_to_num()


def answers(rank: int) -> dict[str, Any]:
    """What a process hears that has one row more than the one before it, the first one having none."""
    collectives = Distributed(rank, torch.device("cpu"))
    rows = torch.full((rank, 2), float(rank))
    here = collectives.local_rows(collectives.gather_rows(rows))
    return {
        "total": collectives.sum(torch.tensor([1, rank])).tolist(),
        "largest": collectives.max(torch.tensor([-float(rank), 1.0])).tolist(),
        "smallest": collectives.min(torch.tensor([-float(rank), torch.inf])).tolist(),
        "unknown": collectives.max(torch.tensor([[torch.nan, 1.0][rank == 0], 2.0])).isnan().tolist(),
        "each": collectives.gather(torch.tensor(rank)).tolist(),
        "everywhere": collectives.gather_rows(rows)[:, 1].tolist(),
        "marks": collectives.gather_rows(rows[:, 0] > 1).tolist(),
        "here": torch.equal(here, rows),
        "objects": collectives.gather_objects([f"row of {rank}"] * rank),
        "before": collectives.sum_before(torch.tensor(rank)),
    }


def one_process(rank: int, processes: int, folder: str, cases: dict[str, tuple[str, Sequence[Any]]]) -> None:
    """Shapes this process's rows of one scene after the other, and writes down what came of it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=120),
    )
    rows = ROWS // processes
    own = slice(rank * rows, (rank + 1) * rows)
    outcomes = {
        name: shaped(scene(where).rows(own), specs, process=rank, gathered=False)
        for name, (where, specs) in cases.items()
    }
    outcomes["collectives"] = answers(rank)
    torch.save(outcomes, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
