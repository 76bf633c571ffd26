"""Convert TRL's generation batch to the `Batch` of the strategies, and their results back.

Strategies act on the whole batch of all processes. If one of them needs it at once, token statistics are gathered, and
each process puts its rows of the results into the dictionary that is split into micro-batches. If all of them can act
on parts, each process handles its own rows, and uses collectives for sums and for values per row
(`explorl.training.grpo.distributed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from explorl.modeling.token_records import answer_records
from explorl.rollout import PaddedRollouts
from explorl.strategies import Batch, Strategy
from explorl.strategies._lib.collectives import LOCAL
from explorl.strategies.base import masked_mean
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.distributed import Distributed
from explorl.training.grpo.hook_checks import finite, per_token
from explorl.training.grpo.logged_columns import counted_tokens, prompt_text
from explorl.training.grpo.shaping import Shaped


class TokenStats(NamedTuple):
    """Statistics of every completion token of this process."""

    logps: Tensor
    """log π at the temperature of sampling."""
    entropy: Tensor
    """Entropy at temperature 1."""
    branching: Tensor | None
    """Branching factor at temperature 1; None if no full distribution was seen."""
    sampling_logps: Tensor | None
    """log q; None unless the engine sampled."""
    min_p_mass: Tensor | None = None
    """None unless a strategy needs it."""
    drawn_by: Tensor | None = None
    """None unless completions branch."""


def padded_to(values: Tensor, length: int) -> Tensor:
    """Pad with zeros on the right to `length`, which TRL may round up."""
    return torch.nn.functional.pad(values, (0, length - values.size(1)))


def engine_token_stats(records: PaddedRollouts, length: int) -> TokenStats:
    """Return the token statistics that the engine recorded while sampling."""
    values = records.logps, records.entropy, records.branching.float(), records.sampling_logps
    mass = None if records.min_p_mass is None else padded_to(records.min_p_mass, length)
    drawn_by = None if records.drawn_by is None else padded_to(records.drawn_by, length)
    logps, entropy, branching, sampling_logps = (padded_to(value, length) for value in values)
    return TokenStats(logps, entropy, branching, sampling_logps, mass, drawn_by)


def forward_token_stats(
    model: Any, output: Mapping[str, Any], *, temperature: float, rows: int, autocast: Any
) -> TokenStats:
    """Compute token statistics by a pass over the batch, for completions that the engine did not sample.

    Values are 0 where the mask is 0. The pass is not packed: equal completions must have equal values regardless of the
    number of rows, because strategies rank them.
    """
    records = answer_records(
        model,
        torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
        torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
        output["completion_ids"].size(1),
        rows=rows,
        temperature=temperature,
        autocast=autocast,
        packed=False,
    )
    return TokenStats(records.logps, records.entropy, records.branching.float(), None)


def truncated_rows(
    completion_ids: Tensor, lengths: Tensor, ends: Sequence[int], stopped: Sequence[bool] | None = None
) -> Tensor:
    """Tell which completions are truncated: their last token ends none and no stop string did, or they are empty."""
    last = completion_ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    ended = torch.isin(last, torch.tensor(list(ends), dtype=last.dtype, device=last.device))
    if stopped is not None:
        ended = ended | torch.tensor(list(stopped), device=last.device)
    return ~ended | (lengths == 0)


def build_batch(*, correct: Correct, parts: Tensor, **values: Any) -> Batch:
    """Return the strategies' batch, of whichever trainer.

    Args:
        correct: What decides which completions are correct.
        parts: Reward parts of the rows.
        values: The other fields of `Batch`.
    """
    return Batch(correct=correct.marks(parts), correctness=correct.rewards(parts), **values)


def generation_batch(
    accelerator: Any,
    stats: TokenStats,
    output: Mapping[str, Any],
    *,
    prompts: Sequence[Any],
    parts: Tensor,
    rewards: Tensor,
    correct: Correct,
    ends: Sequence[int],
    stopped: Sequence[bool],
    generations: int,
    temperature: float,
    row_temperature: Tensor | None,
    step: int,
    answers: Sequence[str | None] | None = None,
    max_length: int | None = None,
    gathered: bool = True,
) -> Batch:
    """Return the generation batch of all processes if `gathered`, else this process's rows of it.

    Args:
        parts: Reward parts of the rows of all processes.
        rewards: Total rewards of the rows of all processes.
        ends: Tokens that end a completion.
        stopped: Whether a stop string has ended the completion, for each row of this process.
    """
    rows, length = output["completion_ids"].shape
    collectives = LOCAL if gathered else Distributed(rows, rewards.device)
    width = length if gathered else int(collectives.max(rewards.new_tensor(float(length))))

    def tokens(tensor: Tensor) -> Tensor:
        if gathered:
            return accelerator.gather(accelerator.pad_across_processes(tensor, dim=1))
        return tensor if tensor.size(1) == width else padded_to(tensor, width)

    def optional(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tokens(tensor)

    def rowwise(values: Tensor) -> Tensor:
        return accelerator.gather(values) if gathered else values

    def texts(values: Sequence[Any]) -> Sequence[Any]:
        return gather_object(list(values)) if gathered else list(values)

    mask = counted_tokens(output).to(stats.logps.dtype)
    lengths = output["completion_mask"].sum(1)
    truncated = truncated_rows(output["completion_ids"], lengths, ends, stopped)
    old = output.get("old_per_token_logps")
    return build_batch(
        correct=correct,
        parts=collectives.local_rows(parts),
        logps=tokens(stats.logps),
        old_logps=tokens(stats.logps if old is None else old),
        ref_logps=optional(output.get("ref_per_token_logps")),
        sampling_logps=optional(
            output.get("sampling_per_token_logps") if stats.sampling_logps is None else stats.sampling_logps
        ),
        entropy=tokens(stats.entropy),
        branching=optional(stats.branching),
        mask=tokens(mask),
        advantages=tokens(output["advantages"].unsqueeze(1) * mask),
        rewards=collectives.local_rows(rewards),
        group=collectives.local_rows(torch.arange(len(rewards), device=rewards.device) // generations),
        truncated=rowwise(truncated),
        temperature=(
            torch.full_like(collectives.local_rows(rewards), temperature)
            if row_temperature is None
            else rowwise(per_row(row_temperature, mask))
        ),
        step=step,
        prompts=texts([prompt_text(prompt) for prompt in prompts]),
        answers=() if answers is None else texts(answers),
        max_length=max_length,
        min_p_mass=optional(stats.min_p_mass),
        drawn_by=optional(stats.drawn_by),
        collectives=collectives,
    )


def per_row(temperature: Tensor, mask: Tensor) -> Tensor:
    """Return one temperature per row; of temperatures per token, the mean over the counted tokens, or the first."""
    if temperature.dim() == 1:
        return temperature
    width = min(temperature.size(1), mask.size(1))
    mean = masked_mean(temperature[:, :width], mask[:, :width], dim=1)
    return torch.where(mask[:, :width].sum(1) > 0, mean, temperature[:, 0])


ROW_FIELDS = ("rewards", "correct", "correctness", "group", "truncated")
"""Fields of a `Batch` with one value per row that `Strategy.penalty` finds in a micro-batch."""


def put_back(shaped: Shaped, output: dict[str, Any], batch: Batch, *, process: int, penalties: bool) -> None:
    """Write this process's rows of the strategies' results into the dictionary that is split into micro-batches."""
    rows, length = output["completion_ids"].shape
    first = process * rows if len(batch.mask) > rows else 0  # of the whole batch, or of this process's part
    local = slice(first, first + rows)
    output["advantages"] = shaped.advantages[local, :length]
    output["loss_mask"] = shaped.loss_mask[local, :length]
    output["token_weights"] = shaped.weights[local, :length]
    output["kl_weights"] = shaped.kl_weights[local, :length]
    if shaped.clip is not None:
        output["clip_low"], output["clip_high"] = (bound[local, :length] for bound in shaped.clip)
    if penalties:
        output["recorded_entropy"] = batch.entropy[local, :length]
        for name in ROW_FIELDS:
            output[f"row_{name}"] = getattr(batch, name)[local]
        for name, tensor in shaped.kept.items():
            output[f"kept/{name}"] = tensor[local, :length]
    output["num_items_in_batch"] = batch.collectives.sum(shaped.loss_mask.sum())


def penalties(
    strategies: Sequence[Strategy],
    inputs: Mapping[str, Any],
    *,
    logps: Tensor,
    old_logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    temperature: float,
    step: int,
) -> Iterator[tuple[Strategy, Tensor]]:
    """Yield the strategies' penalty terms, with gradient, for a micro-batch."""
    if "recorded_entropy" not in inputs:
        return
    rows = {name: inputs[f"row_{name}"] for name in ROW_FIELDS}
    batch = Batch(
        logps=logps,
        old_logps=old_logps,
        ref_logps=inputs.get("ref_per_token_logps"),
        sampling_logps=inputs.get("sampling_per_token_logps"),
        entropy=inputs["recorded_entropy"],
        branching=None,
        mask=mask,
        advantages=advantages,
        temperature=per_row(inputs.get("row_temperature", torch.full_like(rows["rewards"], temperature)), mask),
        step=step,
        **rows,
    )
    for index, strategy in enumerate(strategies):
        prefix = f"kept/{index}/"
        kept = {key.removeprefix(prefix): value for key, value in inputs.items() if key.startswith(prefix)}
        term = strategy.penalty(batch, kept)
        if term is not None:
            yield strategy, finite(strategy, "penalty", per_token(strategy, "penalty", term, batch), batch)
