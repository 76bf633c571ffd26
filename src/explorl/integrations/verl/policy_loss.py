"""The policy loss "explorl", and the advantage estimator "explorl_grpo", in verl's registries.

The loss is verl's "vanilla" as long as no strategy speaks of it. verl's `ppo_loss` calls it with a fixed set of
tensors and adds entropy and KL terms by itself; `ExplorlLoss` is that function with the strategies' columns beside it.
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

from explorl.integrations.verl.check import in_loss
from explorl.integrations.verl.conversion import PREFIX, groups_of
from explorl.integrations.verl.settings import ESTIMATOR, SECTION
from explorl.integrations.verl.token_loss import Carried, carried_now, carrying, token_losses
from explorl.strategies import Strategy, grpo_advantages
from explorl.strategies._lib.validate import name_of

STEP = "explorl_step"
"""Key of a batch's extra information: the step that it is for."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def grpo(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """GRPO's advantage as TRL has it: A = (R − mean) / (std + 1e-4); verl's own adds 1e-6."""
    scaled = config is None or config.get("norm_adv_by_std_in_grpo", True)
    group = groups_of([str(prompt) for prompt in index]).to(token_level_rewards.device)
    found = grpo_advantages(token_level_rewards.sum(-1), group, scale="group" if scaled else "none")
    advantages = found.to(token_level_rewards).unsqueeze(-1) * response_mask
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
    """verl's clipped loss, with the strategies' bounds, weights and penalties where there are any."""
    carried = carried_now()
    if carried is None:
        return compute_policy_loss_vanilla(
            old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
        )
    low, high = (
        carried.columns.get(f"clip_{end}", config.clip_ratio if own is None else own)
        for end, own in (("low", config.clip_ratio_low), ("high", config.clip_ratio_high))
    )
    found = token_losses(
        log_prob, old_log_prob, advantages, low=low, high=high, dual=float(config.get("clip_ratio_c", 3.0))
    )
    losses = found.loss * carried.weights()
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    losses = losses + _beside(carried, old_log_prob, log_prob, advantages, response_mask, config)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    metrics = {
        "actor/pg_clipfrac": masked_mean(found.clipped.float(), response_mask).item(),
        "actor/ppo_kl": masked_mean(-found.log_ratio, response_mask).item(),
        "actor/pg_clipfrac_lower": masked_mean(found.clipped_below.float(), response_mask).item(),
    }
    return loss, metrics


def _beside(
    carried: Carried, old_logps: Tensor, logps: Tensor, advantages: Tensor, mask: Tensor, config: Any
) -> Tensor:
    """Penalties, and what the strategies' factors change of the KL term that verl adds without them."""
    terms = torch.zeros_like(logps)
    ref_logps = carried.columns.get("ref_logps")
    if config.use_kl_loss and ref_logps is not None:
        kl = kl_penalty(logprob=logps, ref_logprob=ref_logps, kl_penalty=config.kl_loss_type)
        terms = terms + config.kl_loss_coef * (carried.columns["kl_weights"] - 1) * kl
    for penalty in carried.penalties(
        logps=logps, old_logps=old_logps, mask=mask.to(logps.dtype), advantages=advantages, ref_logps=ref_logps
    ):
        terms = terms + penalty
    return torch.where(mask > 0, terms, 0.0)


class ExplorlLoss:
    """verl's `ppo_loss` on a micro-batch that carries what the strategies said."""

    def __init__(self, config: Any, strategies: Sequence[Strategy]) -> None:
        self.config, self.strategies = config, list(strategies)

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        if data["batch_num_tokens"] == 0:  # the strategies took every token of a mini-batch out of the loss
            tu.assign_non_tensor(data, batch_num_tokens=1)
        names = [name for name in data.keys() if str(name).startswith(PREFIX)]  # noqa: SIM118 (a TensorDict)
        if not names and in_loss(self.strategies):
            raise RuntimeError(
                f"{', '.join(map(name_of, self.strategies))}: what the strategies said of these rows did not reach the "
                "worker; update the batch by verl's trainer mode explorl alone"
            )
        more = ["ref_log_prob"] if "ref_log_prob" in data else []
        columns = dict(data.select(*names, *more).to_padded_tensor().items()) if names else {}
        if more and names:
            columns[f"{PREFIX}ref_logps"] = columns["ref_log_prob"]
        with carrying(columns, self.strategies, int(data[STEP]) if STEP in data else 0):
            return ppo_loss(self.config, model_output=model_output, data=data, dp_group=dp_group)
