"""Which strategies run inside verl, and why the others do not.

The answer follows from the hooks that a strategy has, so it holds for strategies of other packages too.
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
"""Hyperparameters of strategies that cannot be built without any."""

IN_LOSS = ("weights", "clip", "keep", "penalty")
"""Hooks whose word is heard in the policy loss."""
THROUGH = {
    "sampling": "agent loop",
    "rewards": "driver",
    "advantages": "driver",
    "select": "response mask",
    "weights": "policy loss",
    "clip": "policy loss",
    "penalty": "policy loss",
    "metrics": "driver",
}
"""Hooks that verl has a place for."""

_REFUSALS: tuple[tuple[Callable[[Strategy], bool], str], ...] = (
    (
        lambda one: overrides(one, "after_step"),
        "the reference and the optimizer are in verl's workers, which have no call that resets them",
    ),
    (
        lambda one: overrides(one, "order"),
        "verl reads the data set by itself; write data.train_files in that order and set data.shuffle=False",
    ),
    (
        lambda one: overrides(one, "branching"),
        "verl's servers answer each request from its prompt; answers that branch off others need Explorl's engine",
    ),
    (lambda one: bool(one.needs_interpreter), REFUSED["tool_calls"]),
    (
        lambda one: one.needs_min_p_mass is not None,
        "it needs the mass of the likely tokens, a sum over the vocabulary that verl's workers do not return",
    ),
)


@dataclass(frozen=True)
class Support:
    """A strategy inside verl."""

    strategy: str
    runs: bool
    through: tuple[str, ...]
    """What of verl its hooks are heard in."""
    reason: str
    """Why it is refused; where it runs, what it needs beyond the list of strategies, if anything."""


def refusal(strategy: Strategy) -> str | None:
    """Why a strategy cannot run inside verl, whatever else is set; None where it can."""
    for applies, reason in _REFUSALS:
        if applies(strategy):
            return reason
    for name in sampled(strategy):
        if name in REFUSED:
            return REFUSED[name]
    unknown = set(strategy.arguments()) - {"entropy_coef", "use_adaptive_entropy"}
    if unknown:
        return f"it sets TRL's {', '.join(sorted(unknown))}, which verl does not have"
    return None


def needs(strategy: Strategy) -> list[str]:
    """What a strategy that runs needs of verl's configuration."""
    found = []
    if strategy.needs_sampling_logps:
        found.append("actor_rollout_ref.rollout.calculate_log_probs=True")
    if strategy.needs_answers:
        found.append("explorl.answers")
    parameters = sampled(strategy)
    if any(name in EXTRA for name in parameters):
        found.append("actor_rollout_ref.rollout.name=vllm")
    if "temperature" in parameters:
        found.append("actor_rollout_ref.model.use_fused_kernels=False")
    if any(overrides(strategy, hook) for hook in IN_LOSS):
        found.append("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    if overrides(strategy, "rewards"):
        found.append("algorithm.adv_estimator with one advantage per answer, such as grpo")
    return found


def support() -> list[Support]:
    """Every strategy of the registry: runs inside verl, or refused with the reason."""
    rows = []
    for name in REGISTRY:
        strategy = build({name: EXAMPLES.get(name, {})})
        reason = refusal(strategy)
        through = [place for hook, place in THROUGH.items() if overrides(strategy, hook)]
        through += ["actor.entropy_coeff"] if strategy.arguments() else []
        told = "; ".join(needs(strategy)) if reason is None else reason
        rows.append(Support(name, reason is None, tuple(dict.fromkeys(through)) if reason is None else (), told))
    return rows


def sampled(strategy: Strategy) -> tuple[str, ...]:
    """The sampling parameters that a strategy sets; a copy is asked, which remembers nothing of it."""
    if not overrides(strategy, "sampling"):
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(build(strategy).sampling(["prompt"], 0) or ())
