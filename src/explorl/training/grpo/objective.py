"""The loss of a micro-batch, from log-probabilities to one number, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.training.grpo.batch import penalties
from explorl.training.grpo.logged_columns import counted_tokens
from explorl.training.grpo.loss import (
    Bounds,
    LoggedRows,
    Surrogate,
    importance_ratio,
    k3,
    normalised,
    surrogate,
)
from explorl.training.grpo.trl_adapter import with_entropy_bonus


def grpo_loss(
    trainer: Any, batch: dict[str, Any], logps: Tensor, entropies: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, and values per token or row whose means are logged.

    TRL's loss types with the strategies' values per token; ``trainer`` has their options.
    """
    mask = batch.get("loss_mask", counted_tokens(batch))
    advantages = batch["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    old_logps = _old_logps(trainer, batch, logps)

    ratio = importance_ratio(logps, old_logps, mask, trainer.importance_sampling_level)
    objective = _surrogate(trainer, batch, ratio, advantages, logps, old_logps, mask)
    token_loss = objective.loss
    if "token_weights" in batch:
        token_loss = token_loss * batch["token_weights"]
    if trainer.off_policy_mask_threshold is not None:
        token_loss = token_loss * trainer.get_off_policy_mask(
            advantages=advantages,
            per_token_logps=logps,
            sampling_per_token_logps=batch.get("sampling_per_token_logps", old_logps),
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    effective = mask
    if trainer.top_entropy_quantile < 1.0:
        chosen = trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
        token_loss, effective = token_loss * chosen, mask * chosen
    if "importance_sampling_ratio" in batch and trainer.loss_type != "vespo":
        token_loss = token_loss * batch["importance_sampling_ratio"]
    values = {"entropy": entropies, **objective.values}
    if trainer.beta != 0.0:
        kl = k3(logps, batch["ref_per_token_logps"])
        kl = kl * ratio if trainer.args.use_bias_correction_kl else kl
        token_loss = token_loss + trainer.beta * kl * batch.get("kl_weights", 1.0)
        values["kl"] = kl
    for strategy, penalty in penalties(
        trainer.strategies,
        batch,
        logps=logps,
        old_logps=old_logps,
        mask=mask,
        advantages=advantages,
        temperature=trainer.temperature,
        step=trainer.state.global_step,
    ):
        token_loss = token_loss + penalty
        trainer.activity.penalty(strategy, penalty, mask)
    if objective.low_clipped is not None and objective.high_clipped is not None:
        values["clip_ratio/low_mean"] = objective.low_clipped.float()
        values["clip_ratio/high_mean"] = objective.high_clipped.float()
        values["clip_ratio/region_mean"] = (objective.low_clipped | objective.high_clipped).float()
    loss = _normalised(trainer, token_loss, mask, batch)
    if trainer.has_entropy_bonus:
        loss = with_entropy_bonus(trainer, loss, entropies, effective)
    return loss, values


def _old_logps(trainer: Any, batch: dict[str, Any], logps: Tensor) -> Tensor:
    """Return log π_old. Until the policy changes that is log π itself, without rounding between two passes."""
    old: Tensor | None = batch.get("old_per_token_logps")
    training = trainer.mode == "train"
    unchanged = training and "made_at" in batch and int(batch["made_at"]) == trainer.state.global_step
    if old is None or unchanged:
        old = logps.detach()
        if trainer.logprobs.needs_old:
            batch["old_per_token_logps"] = old  # for the next iteration over this micro-batch
    return old


def _surrogate(
    trainer: Any, batch: Mapping[str, Any], ratio: Tensor, advantages: Tensor, logps: Tensor, old: Tensor, mask: Tensor
) -> Surrogate:
    custom = "clip_high" in batch
    bounds = Bounds(
        batch.get("clip_low", trainer.epsilon_low),
        batch.get("clip_high", trainer.epsilon_high),
        1 + batch["clip_high"] if custom else trainer.epsilon_high,
    )
    weight = None
    if trainer.loss_type == "vespo":
        weight = trainer.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=logps - old,
            mask=mask,
            importance_sampling_ratio=batch.get("importance_sampling_ratio"),
            k_pos=trainer.args.vespo_k_pos,
            lambda_pos=trainer.args.vespo_lambda_pos,
            k_neg=trainer.args.vespo_k_neg,
            lambda_neg=trainer.args.vespo_lambda_neg,
        )
    return surrogate(trainer.loss_type, ratio, advantages, logps, bounds, trainer.args, weight)


def accumulation(trainer: Any) -> float:
    """Return the number of micro-batches over which TRL accumulates gradients; 1 in evaluation."""
    return float(trainer.current_gradient_accumulation_steps) if trainer.mode == "train" else 1.0


def _normalised(trainer: Any, token_loss: Tensor, mask: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Reduce token losses to one number as TRL's loss types do, scaled for gradient accumulation."""
    tokens = batch["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.mode == "train":
        tokens = tokens * trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return normalised(
        token_loss,
        mask,
        trainer.loss_type,
        rows=batch.get("mean_rows", len(token_loss)),
        longest=trainer.max_completion_length,
        tokens=tokens,
        accumulated=accumulation(trainer),
    )


class LossMetrics:
    """Logs means over counted tokens of all processes, whether or not a strategy took the tokens out of the loss.

    TRL averages the means of its micro-batches. Ours have other rows (see `micro_batches`), so rows are collected until
    an optimizer step has seen all of its micro-batches, and averaged as in those of TRL.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._rows: Sequence[LoggedRows] = ()
        """Values of the micro-batches that the optimizer step has seen so far."""

    def add(self, values: Mapping[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Add the values of a micro-batch, and log those of the step with its last one."""
        counted = counted_tokens(batch)
        if "trl_part" not in batch:  # TRL's own micro-batch
            part = counted.new_zeros(len(counted), dtype=torch.long)
            self._log(LoggedRows.of(values, counted, part), list(values), 1)
            return
        parts = int(batch["trl_parts"])
        index = self.trainer.micro_step % parts
        earlier = self._rows if index else ()
        self._rows = [*earlier, LoggedRows.of(values, counted, batch["trl_part"])]
        if index == parts - 1:
            self._log(LoggedRows.joined([*self._rows, *_left_out(values, batch)]), list(values), parts)

    def _log(self, rows: LoggedRows, names: list[str], parts: int) -> None:
        trainer = self.trainer
        sums, counts = trainer.accelerator.reduce(rows.totals(parts), "sum")
        for name, means in zip(names, (sums / counts.clamp(min=1.0)).tolist(), strict=True):
            for mean in means:
                trainer.record_metric(name, mean)
        for name, largest in (("low_min", False), ("high_max", True)):
            source = f"clip_ratio/{name.split('_')[0]}_mean"
            if source not in names:
                continue
            gathered = trainer.accelerator.gather(rows.extremes(names.index(source), parts, largest=largest))
            gathered = gathered.view(-1, parts)
            for extreme in (gathered.amax(0) if largest else gathered.amin(0)).tolist():
                trainer.record_metric(f"clip_ratio/{name}", extreme if math.isfinite(extreme) else math.nan)


def _left_out(values: Mapping[str, Tensor], batch: Mapping[str, Any]) -> list[LoggedRows]:
    """Return the rows that need no pass: their entropy is recorded, and every other value is 0."""
    if "left_out" not in batch:
        return []
    part, entropy, tokens = batch["left_out"]
    sums = [entropy if name == "entropy" else torch.zeros_like(entropy) for name in values]
    counts = [torch.ones_like(tokens) if value.size(1) == 1 else tokens for value in values.values()]
    return [LoggedRows(part.long(), torch.stack(sums), torch.stack(counts))]
