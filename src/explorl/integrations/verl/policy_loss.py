"""The policy loss "explorl", and the advantage estimator "explorl_grpo", in verl's registries.

Unless a strategy changes it, the loss is verl's "vanilla". verl's `ppo_loss` calls it with a fixed set of tensors and
adds entropy and KL terms itself; `ExplorlLoss` wraps that function and passes the strategies' columns along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_policy_loss_vanilla,
    kl_penalty,
    register_adv_est,
    register_policy_loss,
)
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import masked_mean
from verl.workers.utils.losses import ppo_loss

from explorl.integrations.verl.check import acts_in_loss
from explorl.integrations.verl.conversion import PREFIX, group_indices
from explorl.integrations.verl.settings import ESTIMATOR, SECTION
from explorl.integrations.verl.token_loss import LossColumns, activate_columns, active_columns, token_losses
from explorl.strategies import Strategy, grpo_advantages
from explorl.strategies._lib.validate import name_of

STEP = "explorl_step"
"""Key of the step in a batch's extra information."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return GRPO's advantages as in TRL: A = (R − mean) / (std + 1e-4); verl's own estimator adds 1e-6."""
    scaled = config is None or config.get("norm_adv_by_std_in_grpo", True)
    group = group_indices([str(prompt) for prompt in index]).to(token_level_rewards.device)
    values = grpo_advantages(token_level_rewards.sum(-1), group, scale="group" if scaled else "none")
    advantages = values.to(token_level_rewards).unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss(SECTION)  # type: ignore[untyped-decorator]
def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's clipped loss, with the strategies' bounds, weights and penalties if there are any."""
    strategy_columns = active_columns()
    if strategy_columns is None:
        return compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
    low, high = (
        strategy_columns.columns.get(f"clip_{end}", config.clip_ratio if bound is None else bound)
        for end, bound in (("low", config.clip_ratio_low), ("high", config.clip_ratio_high))
    )
    clipped = token_losses(
        log_prob, old_log_prob, advantages, low=low, high=high, dual=float(config.get("clip_ratio_c", 3.0))
    )
    losses = clipped.loss * strategy_columns.weights()
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    losses = losses + _extra_terms(strategy_columns, old_log_prob, log_prob, advantages, response_mask, config)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics = {
        "actor/pg_clipfrac": masked_mean(clipped.clipped.float(), response_mask).item(),
        "actor/ppo_kl": masked_mean(-clipped.log_ratio, response_mask).item(),
        "actor/pg_clipfrac_lower": masked_mean(clipped.clipped_below.float(), response_mask).item(),
    }
    return loss, metrics


def _extra_terms(
    strategy_columns: LossColumns, old_logps: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor, config: Any
) -> Tensor:
    """Return the penalties, and the correction of the KL term, which verl adds without the strategies' weights."""
    terms = torch.zeros_like(logps)
    ref_logps = strategy_columns.columns.get("ref_logps")
    if config.use_kl_loss and ref_logps is not None:
        kl = kl_penalty(logprob=logps, ref_logprob=ref_logps, kl_penalty=config.kl_loss_type)
        terms = terms + config.kl_loss_coef * (strategy_columns.columns["kl_weights"] - 1) * kl
    for penalty in strategy_columns.penalties(
        logps=logps, old_logps=old_logps, mask=mask.to(logps.dtype), advantages=advantages, ref_logps=ref_logps
    ):
        terms = terms + penalty
    return torch.where(mask > 0, terms, 0.0)


class ExplorlLoss:
    """verl's `ppo_loss` on a micro-batch with the strategies' columns."""

    def __init__(self, config: Any, strategies: Sequence[Strategy]) -> None:
        self.config, self.strategies = config, list(strategies)

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        if data["batch_num_tokens"] == 0:  # the strategies removed every token of a mini-batch from the loss
            tu.assign_non_tensor(data, batch_num_tokens=1)
        names = [name for name in data.keys() if str(name).startswith(PREFIX)]  # noqa: SIM118 (a TensorDict)
        if not names and acts_in_loss(self.strategies):
            raise RuntimeError(
                f"{', '.join(map(name_of, self.strategies))}: the strategies' columns of these rows did not reach the "
                "worker; update the batch only with verl's trainer mode explorl"
            )
        more = ["ref_log_prob"] if "ref_log_prob" in data else []
        columns = dict(data.select(*names, *more).to_padded_tensor().items()) if names else {}
        if more and names:
            columns[f"{PREFIX}ref_logps"] = columns["ref_log_prob"]
        with activate_columns(columns, self.strategies, int(data[STEP]) if STEP in data else 0):
            return ppo_loss(self.config, model_output=model_output, data=data, dp_group=dp_group)
