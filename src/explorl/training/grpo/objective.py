"""The loss of a micro-batch, from log-probabilities to one number, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from explorl.training.grpo.batch import penalties
from explorl.training.grpo.logged_columns import counted_tokens
from explorl.training.grpo.logprobs import LogProbabilityTrainer
from explorl.training.grpo.loss import (
    Bounds,
    LoggedRows,
    Surrogate,
    importance_ratio,
    k3,
    normalised,
    surrogate,
)


class ObjectiveTrainer(LogProbabilityTrainer):
    """TRL's loss types with the strategies' values per token."""

    _logged_rows: Sequence[LoggedRows] = ()
    """Metrics of the micro-batches that the optimizer step has seen so far."""

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch."""
        logps, entropies, aux_loss = self._logps(
            batch,
            model=model,
            temperature=batch.get("row_temperature"),
            compute_entropy=True,
            **({"compute_aux_loss": True} if self.aux_loss_enabled else {}),
        )
        assert entropies is not None
        mask = batch.get("loss_mask", counted_tokens(batch))
        advantages = batch["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old_logps = self._old(batch, logps)

        ratio = importance_ratio(logps, old_logps, mask, self.importance_sampling_level)
        objective = self._surrogate(batch, ratio, advantages, logps, old_logps, mask)
        token_loss = objective.loss
        if "token_weights" in batch:
            token_loss = token_loss * batch["token_weights"]
        if self.off_policy_mask_threshold is not None:
            token_loss = token_loss * self.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=logps,
                sampling_per_token_logps=batch.get("sampling_per_token_logps", old_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        effective = mask
        if self.top_entropy_quantile < 1.0:
            chosen = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            token_loss, effective = token_loss * chosen, mask * chosen
        if "importance_sampling_ratio" in batch and self.loss_type != "vespo":
            token_loss = token_loss * batch["importance_sampling_ratio"]
        values = {"entropy": entropies, **objective.values}
        if self.beta != 0.0:
            kl = k3(logps, batch["ref_per_token_logps"])
            kl = kl * ratio if self.args.use_bias_correction_kl else kl
            token_loss = token_loss + self.beta * kl * batch.get("kl_weights", 1.0)
            values["kl"] = kl
        for strategy, penalty in penalties(
            self.strategies,
            batch,
            logps=logps,
            old_logps=old_logps,
            mask=mask,
            advantages=advantages,
            temperature=self.temperature,
            step=self.current_step,
        ):
            token_loss = token_loss + penalty
            self.activity.penalty(strategy, penalty, mask)

        loss = self._normalised(token_loss, mask, batch)
        if self.has_entropy_bonus:
            loss = self.with_entropy_bonus(loss, entropies, effective)
        if aux_loss is not None:
            accumulated = self.current_gradient_accumulation_steps if self.mode == "train" else 1.0
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulated
            self.record_metric("aux_loss", self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._log(objective, values, batch)
        return loss

    def _old(self, batch: dict[str, Any], logps: Tensor) -> Tensor:
        """Return log π_old. Until the policy changes that is log π itself, without rounding between two passes."""
        old: Tensor | None = batch.get("old_per_token_logps")
        unchanged = self.mode == "train" and "made_at" in batch and int(batch["made_at"]) == self.current_step
        if old is None or unchanged:
            old = logps.detach()
            if self.mode == "train" and self.needs_old_logps:
                batch["old_per_token_logps"] = old  # for the next iteration over this micro-batch
        return old

    def _surrogate(
        self, batch: Mapping[str, Any], ratio: Tensor, advantages: Tensor, logps: Tensor, old: Tensor, mask: Tensor
    ) -> Surrogate:
        custom = "clip_high" in batch
        bounds = Bounds(
            batch.get("clip_low", self.epsilon_low),
            batch.get("clip_high", self.epsilon_high),
            1 + batch["clip_high"] if custom else self.epsilon_high,
        )
        weight = None
        if self.loss_type == "vespo":
            weight = self.get_gamma_weights(
                advantages=advantages,
                log_ratio_per_token=logps - old,
                mask=mask,
                importance_sampling_ratio=batch.get("importance_sampling_ratio"),
                k_pos=self.args.vespo_k_pos,
                lambda_pos=self.args.vespo_lambda_pos,
                k_neg=self.args.vespo_k_neg,
                lambda_neg=self.args.vespo_lambda_neg,
            )
        return surrogate(self.loss_type, ratio, advantages, logps, bounds, self.args, weight)

    def _normalised(self, token_loss: Tensor, mask: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Reduce token losses to one number as TRL's loss types do, scaled for gradient accumulation."""
        training = self.mode == "train"
        accumulated = self.current_gradient_accumulation_steps if training else 1.0
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normalised(
            token_loss,
            mask,
            self.loss_type,
            rows=batch.get("mean_rows", len(token_loss)),
            longest=self.max_completion_length,
            tokens=tokens,
            accumulated=accumulated,
        )

    def _log(self, objective: Surrogate, values: dict[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Log means over counted tokens of all processes, whether or not a strategy took the tokens out of the loss.

        TRL averages the means of its micro-batches. Ours have other rows (see `micro_batches`), so rows are collected
        until an optimizer step has seen all of its micro-batches, and averaged as in those of TRL.
        """
        counted = counted_tokens(batch)
        if objective.low_clipped is not None and objective.high_clipped is not None:
            values["clip_ratio/low_mean"] = objective.low_clipped.float()
            values["clip_ratio/high_mean"] = objective.high_clipped.float()
            values["clip_ratio/region_mean"] = (objective.low_clipped | objective.high_clipped).float()
        if "trl_part" not in batch:  # TRL's own micro-batch
            part = counted.new_zeros(len(counted), dtype=torch.long)
            self._record(LoggedRows.of(values, counted, part), list(values), 1)
            return
        parts = int(batch["trl_parts"])
        index = self.micro_step % parts
        earlier = self._logged_rows if index else ()
        self._logged_rows = [*earlier, LoggedRows.of(values, counted, batch["trl_part"])]
        if index == parts - 1:
            rows = LoggedRows.joined([*self._logged_rows, *self._left_out(values, batch)])
            self._record(rows, list(values), parts)

    @staticmethod
    def _left_out(values: Mapping[str, Tensor], batch: Mapping[str, Any]) -> list[LoggedRows]:
        """Return the rows that need no pass: their entropy is recorded, and every other value is 0."""
        if "left_out" not in batch:
            return []
        part, entropy, tokens = batch["left_out"]
        sums = [entropy if name == "entropy" else torch.zeros_like(entropy) for name in values]
        counts = [torch.ones_like(tokens) if value.size(1) == 1 else tokens for value in values.values()]
        return [LoggedRows(part.long(), torch.stack(sums), torch.stack(counts))]

    def _record(self, rows: LoggedRows, names: list[str], parts: int) -> None:
        sums, counts = self.accelerator.reduce(rows.totals(parts), "sum")
        for name, means in zip(names, (sums / counts.clamp(min=1.0)).tolist(), strict=True):
            for mean in means:
                self.record_metric(name, mean)
        for name, largest in (("low_min", False), ("high_max", True)):
            source = f"clip_ratio/{name.split('_')[0]}_mean"
            if source not in names:
                continue
            gathered = self.accelerator.gather(rows.extremes(names.index(source), parts, largest=largest))
            gathered = gathered.view(-1, parts)
            for extreme in (gathered.amax(0) if largest else gathered.amin(0)).tolist():
                self.record_metric(f"clip_ratio/{name}", extreme if math.isfinite(extreme) else math.nan)
