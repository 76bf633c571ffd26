"""Build strategies from the entries of a config's list, by name."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from explorl.core.plugins import PluginKind, is_class, safe_repr, suggest
from explorl.strategies._lib.schedule import Schedule
from explorl.strategies._lib.validate import name_of
from explorl.strategies.annealed_temperature import AnnealedTemperature
from explorl.strategies.base import Strategy, overrides
from explorl.strategies.bottom_p import BottomP
from explorl.strategies.clip_cov import ClipCov
from explorl.strategies.clip_higher import ClipHigher
from explorl.strategies.curriculum import Curriculum
from explorl.strategies.egsw import EntropyGuidedWeighting
from explorl.strategies.element_wise_temperature import ElementWiseTemperature
from explorl.strategies.entropy_advantage import EntropyAdvantage
from explorl.strategies.entropy_bonus import EntropyBonus
from explorl.strategies.entropy_branching import EntropyBranching
from explorl.strategies.forking_tokens import ForkingTokens
from explorl.strategies.importance_correction import ImportanceCorrection
from explorl.strategies.kl_cov import KLCov
from explorl.strategies.lp_reg import LowProbabilityRegularization
from explorl.strategies.mask_truncated import MaskTruncated
from explorl.strategies.maxrl import MaxRL
from explorl.strategies.negative_reinforcement import NegativeReinforcement
from explorl.strategies.outcome_exploration import OutcomeExploration
from explorl.strategies.overlong_penalty import OverlongPenalty
from explorl.strategies.pass_threshold import PassThreshold
from explorl.strategies.passk_training import PassKTraining
from explorl.strategies.pkpo import PKPO
from explorl.strategies.position_shaping import PositionShaping
from explorl.strategies.ppl_shaping import PerplexityShaping
from explorl.strategies.quantile_baseline import QuantileBaseline
from explorl.strategies.reference_reset import ReferenceReset
from explorl.strategies.risk_sensitive import RiskSensitive
from explorl.strategies.tool_progression import ToolProgression
from explorl.strategies.ucpo import UniformCorrect
from explorl.strategies.unlikeliness import Unlikeliness

REGISTRY: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        BottomP,
        ImportanceCorrection,
        ElementWiseTemperature,
        AnnealedTemperature,
        EntropyBranching,
        ToolProgression,
        MaskTruncated,
        PassThreshold,
        OverlongPenalty,
        Curriculum,
        EntropyGuidedWeighting,
        PerplexityShaping,
        PositionShaping,
        EntropyAdvantage,
        NegativeReinforcement,
        PassKTraining,
        PKPO,
        MaxRL,
        RiskSensitive,
        QuantileBaseline,
        Unlikeliness,
        UniformCorrect,
        OutcomeExploration,
        ClipHigher,
        ForkingTokens,
        ClipCov,
        KLCov,
        LowProbabilityRegularization,
        EntropyBonus,
        ReferenceReset,
    )
}

Spec = str | Mapping[str, Any] | Strategy
"""An entry of a config's list: ``egsw``, ``{egsw: {alpha: 0.3}}``, ``{name: egsw, alpha: 0.3}``, or a strategy."""


def build(spec: Spec) -> Strategy:
    """Build a strategy from an entry of a config. The name may be an import path, ``my_pkg.my_module:MyStrategy``.

    A `Strategy` is copied with an empty memory, so that nothing carries over from a previous training.
    """
    if isinstance(spec, Strategy):
        return _fresh(spec)
    strategy, values = _resolved(spec)
    return strategy(**{key: _convert(strategy, key, value) for key, value in values.items()})


def build_all(specs: Iterable[Spec] | None, *, construct: bool = True) -> list[Strategy]:
    """Build all strategies of a config, in its order; raise if some of them cannot be combined.

    ``construct=False`` builds only Explorl's own strategies, which just check their values. Others are looked up, and
    the names of their hyperparameters are checked, but they are not constructed and not part of the returned list.
    """
    if isinstance(specs, (str, Mapping, Strategy)):
        raise ValueError(f"strategies must be a list, such as [bottom_p, egsw]; got {specs!r}")
    if specs is not None and not isinstance(specs, Iterable):
        raise ValueError(f"strategies must be a list, such as [bottom_p, egsw]; got {specs!r}")
    listed = [build(spec) if construct or _is_own(spec) else _resolved(spec)[0] for spec in specs or ()]
    names = [name_of(strategy) for strategy in listed]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed {names.count(name)} times; list it once")
    replacing = [name_of(strategy) for strategy in listed if strategy.replaces_advantage is True]
    if len(replacing) > 1:
        raise ValueError(f"{' and '.join(replacing)} each replace the base advantage; keep one of them")
    return [strategy for strategy in listed if isinstance(strategy, Strategy)]


def warn_inert(strategies: Sequence[Strategy], *, reused: bool) -> list[str]:
    """Return warnings about strategies without effect in this list; `reused`: a batch is used for several updates."""
    messages = [
        f"{name_of(strategy)} {getattr(strategy, 'used_once', 'does nothing')} on a batch that is used for one update "
        "only; set num_iterations to 2 or more (in a configuration training.iterations), or steps_per_generation above "
        "gradient_accumulation_steps"
        for strategy in strategies
        if strategy.needs_reuse and not reused
    ]
    for position, strategy in enumerate(strategies):
        for earlier in strategies[:position]:
            if strategy.replaces_advantage and overrides(earlier, "advantages"):
                messages.append(
                    f"{name_of(earlier)} has no effect on the advantages: {name_of(strategy)}, listed after it, "
                    f"replaces them; list {name_of(strategy)} first"
                )
            if overrides(strategy, "clip") and overrides(earlier, "clip"):
                messages.append(
                    f"the clip of {name_of(earlier)} has no effect: {name_of(strategy)}, listed after it, sets "
                    "another; keep one of them"
                )
    binary = (s for s in strategies if type(s) in REGISTRY.values() and s.replaces_advantage and s.needs_correct)
    for strategy in binary:
        hint = f", or set of='reward' in {name_of(strategy)}" if hasattr(strategy, "of") else ""
        messages += [
            f"the rewards of {name_of(other)} have no effect on the advantages: {name_of(strategy)} uses only "
            f"correctness; keep one of them{hint}"
            for other in strategies
            if overrides(other, "rewards")
        ]
    return messages


def describe() -> list[dict[str, Any]]:
    """Return name, class, effect, paper, hyperparameters and documentation of each known strategy."""
    strategies = dict(REGISTRY)
    for name in KIND.points():
        try:
            strategies.setdefault(name, find(name))
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
    return [_description(name, strategy) for name, strategy in strategies.items()]


def find(name: str) -> type[Strategy]:
    """Return the class of a name, an entry point or an import path, without constructing it."""
    return KIND.find(name).value


def _refusal(value: Any) -> str | None:
    """Return why an object is not a strategy class, or None if it is one."""
    if is_class(value, Strategy) and value is not Strategy:
        return None
    return f"is {safe_repr(value)}; name a subclass of explorl.strategies.Strategy"


KIND = PluginKind("strategy", REGISTRY, "my_pkg.concise:Concise", _refusal, "explorl.strategies")


def _is_own(spec: Spec) -> bool:
    """Return whether an entry of a config is a `Strategy` already, or names one of Explorl's own."""
    return isinstance(spec, Strategy) or _split(spec)[0] in [*REGISTRY]


def _resolved(spec: Any) -> tuple[type[Strategy], Mapping[str, Any]]:
    """Return the class and the checked hyperparameters of an entry of a config."""
    name, values = _split(spec)
    strategy = find(name)
    allowed = {field.name: field for field in fields(strategy) if field.init}
    for key in values:
        if key not in allowed:
            advice = strategy.moved.get(key) or (suggest(key, allowed) if allowed else "it has none")
            raise ValueError(f"{name_of(strategy)} has no hyperparameter {key!r}; {advice}")
    missing = [key for key, field in allowed.items() if _required(field) and key not in values]
    if missing:
        raise ValueError(f"{name_of(strategy)} needs {' and '.join(missing)}{_example(strategy, missing)}")
    return strategy, values


def _fresh(strategy: Strategy) -> Strategy:
    """Return a copy with the same hyperparameters and an empty memory."""
    if set(inspect.signature(type(strategy)).parameters) == {field.name for field in fields(strategy) if field.init}:
        try:
            return replace(strategy)
        except (TypeError, ValueError):  # a file that existed when it was built is gone, for example
            pass
    fresh = copy.copy(strategy)  # its constructor does not take its fields
    object.__setattr__(fresh, "memory", {})
    return fresh


def _split(spec: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the hyperparameters of an entry."""
    if isinstance(spec, str):
        return spec, {}
    if isinstance(spec, Mapping) and "name" in spec:
        return spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, values = next(iter(spec.items()))
        if values is None or isinstance(values, Mapping):
            return name, values or {}
    if isinstance(spec, type) and issubclass(spec, Strategy):
        raise ValueError(f"{spec.__name__} is a class; write {spec.__name__}(), with its hyperparameters")
    raise ValueError(
        f"a strategy must be a name such as egsw, or a name over its hyperparameters such as {{egsw: {{alpha: 0.3}}}}; "
        f"got {spec!r} (in YAML, indent the hyperparameters below the name)"
    )


def _convert(strategy: type[Strategy], key: str, value: Any) -> Any:
    """Convert a value of a config file to the field's type: a mapping to a schedule, a list to a tuple."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, Mapping) or not _takes_schedule(strategy, key, value):
        return value
    where = f"{name_of(strategy)}: {key}"
    good = "{from: 0.1, to: 0.0, start: 200, steps: 100, shape: linear}"
    keys = ("from", "to", "start", "steps", "shape")
    for part, content in value.items():
        if part not in keys:
            raise ValueError(f"{where}: a schedule has no {part!r}; {suggest(part, keys)}")
        kind: type = {"from": Real, "to": Real, "start": Integral, "steps": Integral}.get(part, str)
        if not isinstance(content, kind) or isinstance(content, bool):
            raise ValueError(f"{where}: {part} of the schedule is {content!r}; write {good}")
    for part in ("from", "to"):
        if part not in value:
            raise ValueError(f"{where}: the schedule has no {part!r}; write {good}")
    try:
        return Schedule(begin=value["from"], **{part: value[part] for part in keys[1:] if part in value})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _takes_schedule(strategy: type[Strategy], key: str, value: Mapping[str, Any]) -> bool:
    try:
        hint = get_type_hints(strategy)[key]
    except (NameError, TypeError):  # annotations that cannot be resolved at runtime
        return "from" in value or "to" in value
    return hint is Schedule or Schedule in get_args(hint)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _example(strategy: type[Strategy], missing: list[str]) -> str:
    examples = {"k": "4", "solve_rates": "rates.json"}
    if not set(missing) <= set(examples):
        return ""
    return f", for example {{{name_of(strategy)}: {{{', '.join(f'{key}: {examples[key]}' for key in missing)}}}}}"


def _description(name: str, strategy: type[Strategy]) -> dict[str, Any]:
    docs = inspect.getdoc(sys.modules[strategy.__module__]) or inspect.getdoc(strategy) or ""
    return {
        "name": name,
        "class": strategy.__name__,
        "effect": docs.partition("\n")[0],
        "paper": strategy.paper,
        "hyperparameters": [_hyperparameter(field) for field in fields(strategy) if field.init],
        "docs": docs,
    }


def _hyperparameter(field: Field[Any]) -> dict[str, Any]:
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    default = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if isinstance(default, Schedule):  # as in a config file
        default = {"from": default.begin, "to": default.to, "steps": default.steps}
    return {
        "name": field.name,
        "type": kind.replace("Scheduled", "float | Schedule").replace("SolveRates", "mapping | path"),
        "required": _required(field),
        "default": default,
    }
