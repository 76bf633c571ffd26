"""Check a configuration of verl for what Explorl does not support, before Ray starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from explorl.core.store import RunStore
from explorl.integrations.verl.sampling_params import EXTRA
from explorl.integrations.verl.settings import ESTIMATOR, SECTION, VerlSettings, explorl_keys, lookup, read_settings
from explorl.integrations.verl.support import IN_LOSS, refusal_reason, sampling_parameters
from explorl.strategies import BottomP, Strategy, warn_inert
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides

SEQUENCE_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", ESTIMATOR)
"""Advantage estimators with one advantage per completion, computed from its reward alone."""
SERVERS_WITHOUT_PROCESSOR = ("sglang", "trtllm")
LOSSES = ("vanilla", SECTION)
"""Loss modes that Explorl's policy loss can replace."""
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def check_config(config: Mapping[str, Any]) -> VerlSettings | None:
    """Return the settings of a configuration that uses Explorl, else None; raise `ValueError` if unsupported."""
    keys = explorl_keys(config)
    if not keys:
        return None
    mode = lookup(config, "trainer.v1.trainer_mode")
    if not lookup(config, "trainer.use_v1", True):
        raise ValueError(f"{keys[0]} needs verl's trainer of version 1; set trainer.use_v1=True")
    if mode != SECTION and keys != [f"algorithm.adv_estimator={ESTIMATOR}"]:
        raise ValueError(
            f"{keys[0]} is set, but the trainer of trainer.v1.trainer_mode={mode!r} does not support it; set "
            f"trainer.v1.trainer_mode={SECTION}, which is verl's synchronous trainer with strategies"
        )
    if mode != SECTION:  # the estimator alone works with every trainer
        return None
    settings = read_settings(config)
    for strategy in settings.strategies:
        reason = refusal_reason(strategy) or _missing(strategy, settings, config)
        if reason is not None:
            raise ValueError(f"{name_of(strategy)} cannot run inside verl here: {reason}; or remove it from the list")
        strategy.check(num_generations=int(lookup(config, f"{_ROLLOUT}.n", 1)))
        strategy.check_length(max_completion_length=lookup(config, f"{_ROLLOUT}.response_length"))
    _check_conflicts(settings.strategies, config)
    _check_run(settings, config)
    _warn(settings.strategies, config)
    return settings


def acts_in_loss(strategies: Sequence[Strategy]) -> bool:
    """Return whether any strategy changes the policy loss."""
    return any(overrides(strategy, hook) for strategy in strategies for hook in IN_LOSS)


def _missing(strategy: Strategy, settings: VerlSettings, config: Mapping[str, Any]) -> str | None:
    """Return what a strategy needs and this configuration lacks, or None."""
    estimator, server = lookup(config, "algorithm.adv_estimator"), lookup(config, f"{_ROLLOUT}.name")
    loss = lookup(config, f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    parameters = sampling_parameters(strategy)
    if strategy.needs_sampling_logps and not lookup(config, f"{_ROLLOUT}.calculate_log_probs", False):
        return f"it needs the sampling log-probabilities; set {_ROLLOUT}.calculate_log_probs=True"
    if strategy.needs_sampling_logps and lookup(config, "algorithm.rollout_correction.rollout_is"):
        return "algorithm.rollout_correction.rollout_is already weights tokens by the same ratio; keep one of them"
    if strategy.needs_sampling_logps and any(_random_per_token(other) for other in settings.strategies):
        return (
            "bottom_p decides at random for every token, and vLLM records a token's probability under that decision "
            "rather than over both; set frequency to 1, or per to sequence"
        )
    if strategy.needs_answers and settings.answers is None:
        return (
            "it needs the answers; set explorl.answers to the key under which your reward function returns them, such "
            "as pred"
        )
    if server in SERVERS_WITHOUT_PROCESSOR and any(name in EXTRA for name in parameters):
        return f"{_ROLLOUT}.name is {server}, but bottom-p needs a logits processor of vLLM; set {_ROLLOUT}.name=vllm"
    if lookup(config, "actor_rollout_ref.model.use_fused_kernels", False) and "temperature" in parameters:
        key = "actor_rollout_ref.model.use_fused_kernels"
        return f"verl's fused kernels take one temperature for all rows; set {key}=False"
    if overrides(strategy, "rewards") and estimator not in SEQUENCE_ESTIMATORS:
        return (
            f"it changes rewards before normalisation, but algorithm.adv_estimator={estimator} computes one advantage "
            f"per token; set one of {', '.join(SEQUENCE_ESTIMATORS)}"
        )
    if acts_in_loss([strategy]) and loss not in LOSSES:
        return (
            "it changes the policy loss per token, which is not supported with "
            f"{_ACTOR}.policy_loss.loss_mode={loss}; set vanilla"
        )
    return None


def _random_per_token(strategy: Strategy) -> bool:
    return isinstance(strategy, BottomP) and strategy.per == "token" and strategy.frequency not in (0, 1)


def _check_conflicts(strategies: Sequence[Strategy], config: Mapping[str, Any]) -> None:
    if not strategies:
        return
    if lookup(config, "algorithm.rollout_correction.bypass_mode", False):
        raise ValueError(
            "explorl.strategies: algorithm.rollout_correction.bypass_mode skips the pass that records "
            "log-probabilities and entropy; set it to False"
        )
    if lookup(config, "distillation.enabled", False) and (
        acts_in_loss(strategies) or any(overrides(strategy, "select") for strategy in strategies)
    ):
        raise ValueError("explorl.strategies: distillation uses its own loss; set distillation.enabled=False")
    coefficients = {float(strategy.arguments()["entropy_coef"]) for strategy in strategies if strategy.arguments()}
    configured = float(lookup(config, f"{_ACTOR}.entropy_coeff", 0.0))
    if coefficients and configured not in (0.0, *coefficients):
        coefficient = coefficients.pop()
        raise ValueError(
            f"{_ACTOR}.entropy_coeff is {configured:g}, but entropy_bonus sets {coefficient:g}; keep one of them"
        )


def _check_run(settings: VerlSettings, config: Mapping[str, Any]) -> None:
    """Raise if the run's folder holds a run that verl does not resume."""
    if settings.run is None:
        return
    store = RunStore(settings.run)
    store.check_kind("grpo")
    if lookup(config, "trainer.resume_mode") == "disable" and store.config_path.exists() and store.has_steps:
        raise ValueError(
            f"explorl.run: {store.folder} already holds a run, but trainer.resume_mode=disable starts a new one; set "
            "another folder in explorl.run, or set trainer.experiment_name"
        )


def _warn(strategies: Sequence[Strategy], config: Mapping[str, Any]) -> None:
    rows, mini_batch = lookup(config, "data.train_batch_size", 0), lookup(config, f"{_ACTOR}.ppo_mini_batch_size", 0)
    reused = lookup(config, f"{_ACTOR}.ppo_epochs", 1) > 1 or rows > mini_batch
    messages = warn_inert(strategies, reused=True)
    messages += [
        f"{name_of(strategy)} {getattr(strategy, 'used_once', 'does nothing')} on a batch that is used for one update "
        f"only; set {_ACTOR}.ppo_mini_batch_size below data.train_batch_size, or {_ACTOR}.ppo_epochs to 2 or more"
        for strategy in strategies
        if strategy.needs_reuse and not reused
    ]
    for message in messages:
        warnings.warn(message, stacklevel=3)
