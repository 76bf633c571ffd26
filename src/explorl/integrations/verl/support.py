"""Which strategies run inside verl, and why the others do not.

This is derived from the hooks of a strategy, so it also applies to strategies of other packages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explorl.integrations.verl.sampling_params import EXTRA, REFUSED
from explorl.strategies import REGISTRY, Strategy, build
from explorl.strategies.base import overrides

EXAMPLES: dict[str, dict[str, Any]] = {
    "element_wise_temperature": {"source": "running"},
    "curriculum": {"solve_rates": {"prompt": 0.5}},
    "passk_training": {"k": 2},
    "pkpo": {"k": 2},
    "reference_reset": {"every": 100},
}
"""Hyperparameters of strategies that have required ones."""

IN_LOSS = ("weights", "clip", "keep", "penalty")
"""Hooks that change the policy loss."""
VERL_COMPONENTS = {
    "sampling": "agent loop",
    "rewards": "driver",
    "advantages": "driver",
    "select": "response mask",
    "weights": "policy loss",
    "clip": "policy loss",
    "penalty": "policy loss",
    "metrics": "driver",
}
"""Hooks that work inside verl, with the component that applies them."""

_REFUSALS: tuple[tuple[Callable[[Strategy], bool], str], ...] = (
    (
        lambda one: overrides(one, "after_step"),
        "the reference and the optimizer are in verl's workers, which cannot reset them",
    ),
    (
        lambda one: overrides(one, "order"),
        "verl reads the data set itself; write data.train_files in that order and set data.shuffle=False",
    ),
    (
        lambda one: overrides(one, "branching"),
        "verl's servers sample each request from its prompt; branching needs Explorl's engine",
    ),
    (lambda one: bool(one.needs_interpreter), REFUSED["tool_calls"]),
    (
        lambda one: one.needs_min_p_mass is not None,
        "it needs the mass of the likely tokens, a sum over the vocabulary that verl's workers do not return",
    ),
)


@dataclass(frozen=True)
class StrategySupport:
    """Whether and how a strategy runs inside verl."""

    strategy: str
    runs: bool
    through: tuple[str, ...]
    """Components of verl that apply its hooks."""
    reason: str
    """Why it is not supported; if it is, the settings that it requires."""


def refusal_reason(strategy: Strategy) -> str | None:
    """Return why a strategy cannot run inside verl, whatever the configuration; None if it can."""
    for applies, reason in _REFUSALS:
        if applies(strategy):
            return reason
    for name in sampling_parameters(strategy):
        if name in REFUSED:
            return REFUSED[name]
    unknown = set(strategy.arguments()) - {"entropy_coef", "use_adaptive_entropy"}
    if unknown:
        return f"it sets TRL's {', '.join(sorted(unknown))}, which verl does not have"
    return None


def requirements(strategy: Strategy) -> list[str]:
    """Return the settings of verl's configuration that a strategy requires."""
    settings = []
    if strategy.needs_sampling_logps:
        settings.append("actor_rollout_ref.rollout.calculate_log_probs=True")
    if strategy.needs_answers:
        settings.append("explorl.answers")
    parameters = sampling_parameters(strategy)
    if any(name in EXTRA for name in parameters):
        settings.append("actor_rollout_ref.rollout.name=vllm")
    if "temperature" in parameters:
        settings.append("actor_rollout_ref.model.use_fused_kernels=False")
    if any(overrides(strategy, hook) for hook in IN_LOSS):
        settings.append("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    if overrides(strategy, "rewards"):
        settings.append("algorithm.adv_estimator with one advantage per completion, such as grpo")
    return settings


def support() -> list[StrategySupport]:
    """Return for every strategy of the registry whether it runs inside verl, with its requirements or the reason."""
    rows = []
    for name in REGISTRY:
        strategy = build({name: EXAMPLES.get(name, {})})
        reason = refusal_reason(strategy)
        through = [component for hook, component in VERL_COMPONENTS.items() if overrides(strategy, hook)]
        through += ["actor.entropy_coeff"] if strategy.arguments() else []
        reason_or_needs = "; ".join(requirements(strategy)) if reason is None else reason
        rows.append(
            StrategySupport(
                name, reason is None, tuple(dict.fromkeys(through)) if reason is None else (), reason_or_needs
            )
        )
    return rows


def sampling_parameters(strategy: Strategy) -> tuple[str, ...]:
    """Return the names of the sampling parameters that a strategy sets, without changing its memory."""
    if not overrides(strategy, "sampling"):
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(build(strategy).sampling(["prompt"], 0) or ())
