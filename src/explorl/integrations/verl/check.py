"""What a configuration of verl's asks for and cannot have, said in words before Ray starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from explorl.core.store import RunStore
from explorl.integrations.verl.sampling_params import EXTRA
from explorl.integrations.verl.settings import ESTIMATOR, SECTION, Settings, at, names_explorl, settings_of
from explorl.integrations.verl.support import IN_LOSS, refusal, sampled
from explorl.strategies import BottomP, Strategy, warn_inert
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides

PER_ANSWER = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", ESTIMATOR)
"""Advantage estimators that give all tokens of an answer the same advantage, from its reward alone."""
SERVERS_WITHOUT_PROCESSOR = ("sglang", "trtllm")
LOSSES = ("vanilla", SECTION)
"""Loss modes that Explorl's policy loss may stand for."""
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def checked(config: Mapping[str, Any]) -> Settings | None:
    """The settings of a configuration that names explorl, or None; `ValueError` where something cannot be had."""
    named = names_explorl(config)
    if not named:
        return None
    mode = at(config, "trainer.v1.trainer_mode")
    if not at(config, "trainer.use_v1", True):
        raise ValueError(f"{named[0]} needs verl's trainer of version 1; set trainer.use_v1=True")
    if mode != SECTION and named != [f"algorithm.adv_estimator={ESTIMATOR}"]:
        raise ValueError(
            f"{named[0]} is set, and trainer.v1.trainer_mode is {mode!r}, whose trainer does not know it; set "
            f"trainer.v1.trainer_mode={SECTION}, which is verl's synchronous trainer with strategies"
        )
    if mode != SECTION:  # the estimator alone works with every trainer
        return None
    settings = settings_of(config)
    for strategy in settings.strategies:
        reason = refusal(strategy) or _missing(strategy, settings, config)
        if reason is not None:
            raise ValueError(f"{name_of(strategy)} cannot run inside verl here: {reason}; or take it out of the list")
        strategy.check(num_generations=int(at(config, f"{_ROLLOUT}.n", 1)))
        strategy.check_length(max_completion_length=at(config, f"{_ROLLOUT}.response_length"))
    _refuse_beside(settings.strategies, config)
    _check_run(settings, config)
    _warn(settings.strategies, config)
    return settings


def in_loss(strategies: Sequence[Strategy]) -> bool:
    """Whether a strategy speaks of the policy loss."""
    return any(overrides(one, hook) for one in strategies for hook in IN_LOSS)


def _missing(strategy: Strategy, settings: Settings, config: Mapping[str, Any]) -> str | None:
    """What a strategy that could run lacks in this configuration."""
    estimator, loss = at(config, "algorithm.adv_estimator"), at(config, f"{_ACTOR}.policy_loss.loss_mode", "vanilla")
    server, parameters = at(config, f"{_ROLLOUT}.name"), sampled(strategy)
    if strategy.needs_sampling_logps and not at(config, f"{_ROLLOUT}.calculate_log_probs", False):
        return f"it needs the log-probabilities that were sampled from; set {_ROLLOUT}.calculate_log_probs=True"
    if strategy.needs_sampling_logps and at(config, "algorithm.rollout_correction.rollout_is"):
        return "algorithm.rollout_correction.rollout_is already weighs tokens by the same ratio; keep one of them"
    if strategy.needs_sampling_logps and any(_by_chance(other) for other in settings.strategies):
        return (
            "bottom_p throws a coin for every token, and vLLM records how likely a token was on the side that it "
            "showed, not over both; set frequency to 1, or per to sequence"
        )
    if strategy.needs_answers and settings.answers is None:
        return (
            "it looks at what each answer says, and nobody tells it; set explorl.answers to the key under which your "
            "reward function returns that, such as pred"
        )
    if server in SERVERS_WITHOUT_PROCESSOR and any(name in EXTRA for name in parameters):
        return f"{_ROLLOUT}.name is {server}, and bottom-p is a logits processor of vLLM; set {_ROLLOUT}.name=vllm"
    if at(config, "actor_rollout_ref.model.use_fused_kernels", False) and "temperature" in parameters:
        place = "actor_rollout_ref.model.use_fused_kernels"
        return f"verl's fused kernels take one temperature for all rows; set {place}=False"
    if overrides(strategy, "rewards") and estimator not in PER_ANSWER:
        return (
            f"it changes rewards before they are normalised, and algorithm.adv_estimator={estimator} gives each token "
            f"an advantage of its own; set one of {', '.join(PER_ANSWER)}"
        )
    if in_loss([strategy]) and loss not in LOSSES:
        return (
            f"it speaks of single tokens in the policy loss, and {_ACTOR}.policy_loss.loss_mode={loss} is another "
            "loss; set vanilla"
        )
    return None


def _by_chance(strategy: Strategy) -> bool:
    return isinstance(strategy, BottomP) and strategy.per == "token" and strategy.frequency not in (0, 1)


def _refuse_beside(strategies: Sequence[Strategy], config: Mapping[str, Any]) -> None:
    if not strategies:
        return
    if at(config, "algorithm.rollout_correction.bypass_mode", False):
        raise ValueError(
            "explorl.strategies: algorithm.rollout_correction.bypass_mode leaves out the pass that records "
            "log-probabilities and entropy; set it to False"
        )
    if at(config, "distillation.enabled", False) and (
        in_loss(strategies) or any(overrides(one, "select") for one in strategies)
    ):
        raise ValueError("explorl.strategies: distillation has a loss of its own; set distillation.enabled=False")
    wanted = {float(one.arguments()["entropy_coef"]) for one in strategies if one.arguments()}
    own = float(at(config, f"{_ACTOR}.entropy_coeff", 0.0))
    if wanted and own not in (0.0, *wanted):
        raise ValueError(f"{_ACTOR}.entropy_coeff is {own:g} and entropy_bonus sets {wanted.pop():g}; keep one of them")


def _check_run(settings: Settings, config: Mapping[str, Any]) -> None:
    """That the run's folder is free, or that of the run that verl resumes."""
    if settings.run is None:
        return
    store = RunStore(settings.run)
    store.check_kind("grpo")
    if at(config, "trainer.resume_mode") == "disable" and store.config_path.exists() and store.has_steps:
        raise ValueError(
            f"explorl.run: {store.folder} already holds a run, and trainer.resume_mode=disable starts a new one; name "
            "another folder with explorl.run, or set trainer.experiment_name"
        )


def _warn(strategies: Sequence[Strategy], config: Mapping[str, Any]) -> None:
    rows, part = at(config, "data.train_batch_size", 0), at(config, f"{_ACTOR}.ppo_mini_batch_size", 0)
    reused = at(config, f"{_ACTOR}.ppo_epochs", 1) > 1 or rows > part
    messages = warn_inert(strategies, reused=True)
    messages += [
        f"{name_of(strategy)} {getattr(strategy, 'used_once', 'does nothing')} on a batch that is used for one update "
        f"only; set {_ACTOR}.ppo_mini_batch_size below data.train_batch_size, or {_ACTOR}.ppo_epochs to 2 or more"
        for strategy in strategies
        if strategy.needs_reuse and not reused
    ]
    for message in messages:
        warnings.warn(message, stacklevel=3)
