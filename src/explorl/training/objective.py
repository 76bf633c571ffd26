"""The loss of a micro-batch, from log-probabilities to one number, and what is logged of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from explorl.training.batch import penalties
from explorl.training.logps import LogProbabilityTrainer
from explorl.training.loss import (
    Bounds,
    Surrogate,
    importance_ratio,
    is_per_sequence,
    k3,
    normalised,
    sequence_means,
    sums_and_counts,
    surrogate,
)
from explorl.training.records import counted_tokens


class ObjectiveTrainer(LogProbabilityTrainer):
    """TRL's loss types, with what the strategies say of each token."""

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch."""
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
        found = self._surrogate(batch, ratio, advantages, logps, old_logps, mask)
        token_loss = found.loss
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
        values = {"entropy": entropies, **found.values}
        if self.beta != 0.0:
            kl = k3(logps, batch["ref_per_token_logps"])
            kl = kl * ratio if self.args.use_bias_correction_kl else kl
            token_loss = token_loss + self.beta * kl * batch.get("kl_weights", 1.0)
            values["kl"] = kl
        for penalty in penalties(
            self.strategies,
            batch,
            logps=logps,
            old_logps=old_logps,
            mask=mask,
            advantages=advantages,
            temperature=self.temperature,
            step=self.now,
        ):
            token_loss = token_loss + penalty

        loss = self._normalised(token_loss, mask, batch)
        if self.has_entropy_bonus:
            loss = self.with_entropy_bonus(loss, entropies, effective)
        if aux_loss is not None:
            accumulated = self.current_gradient_accumulation_steps if self.mode == "train" else 1.0
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulated
            self.record_metric("aux_loss", self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._log(found, values, batch)
        return loss

    def _old(self, batch: dict[str, Any], logps: Tensor) -> Tensor:
        """log π_old. Until the policy has moved that is log π, without the rounding between two passes."""
        old: Tensor | None = batch.get("old_per_token_logps")
        unmoved = self.mode == "train" and "made_at" in batch and int(batch["made_at"]) == self.now
        if old is None or unmoved:
            old = logps.detach()
            if self.mode == "train" and self.asked_for_old:
                batch["old_per_token_logps"] = old  # for when this micro-batch comes again
        return old

    def _surrogate(
        self, batch: Mapping[str, Any], ratio: Tensor, advantages: Tensor, logps: Tensor, old: Tensor, mask: Tensor
    ) -> Surrogate:
        own = "clip_high" in batch
        bounds = Bounds(
            batch.get("clip_low", self.epsilon_low),
            batch.get("clip_high", self.epsilon_high),
            1 + batch["clip_high"] if own else self.epsilon_high,
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
        """From token losses to one number, as TRL's loss types do it, scaled for gradient accumulation."""
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

    def _log(self, found: Surrogate, values: dict[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Logs means over counted tokens, whether or not a strategy took them out of the loss, of all processes."""
        counted, gather = counted_tokens(batch), self.accelerator.gather
        if found.low_clipped is not None and found.high_clipped is not None:
            low, high = found.low_clipped.float(), found.high_clipped.float()
            region = (found.low_clipped | found.high_clipped).float()
            values |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": region}
            for name, clipped, most in (("low_min", low, torch.min), ("high_max", high, torch.max)):
                # One number per process: they may have different numbers of rows.
                of_rows = sequence_means(clipped, counted)
                of_rows = of_rows[~of_rows.isnan()]
                here = most(of_rows) if len(of_rows) else torch.tensor(torch.nan, device=counted.device)
                everywhere = gather(here)
                everywhere = everywhere[~everywhere.isnan()]
                self.record_metric(f"clip_ratio/{name}", most(everywhere).item() if len(everywhere) else math.nan)
        sums_counts = sums_and_counts(values, counted)
        if "left_out" in batch:  # rows that need no pass: their entropy is known, and nothing of them is clipped
            sums, counts = batch["left_out"]
            per_token = torch.tensor(
                [not is_per_sequence(value, counted) for value in values.values()], device=sums_counts.device
            )
            sums_counts[1] += counts * per_token
            sums_counts[0, list(values).index("entropy")] += sums
        total_sums, total_counts = self.accelerator.reduce(sums_counts, "sum")
        for name, mean in zip(values, (total_sums / total_counts.clamp(min=1.0)).tolist(), strict=True):
            self.record_metric(name, mean)
