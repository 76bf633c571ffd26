"""The section `explorl` of verl's configuration.

explorl:
  strategies: [bottom_p, {egsw: {alpha: 0.3}}]   # as in a config of Explorl's
  correct: [acc, 1.0]                            # what a correct answer is: a number that the reward function returns
  answers: pred                                  # where it returns an answer's normal form
  run: runs/mine                                 # a run's folder for `explorl report`; false keeps none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from explorl.core.plugins import suggest
from explorl.strategies import Strategy, build_all

SECTION = "explorl"
"""Name of the section, of the trainer mode and of the policy loss."""
ESTIMATOR = "explorl_grpo"
"""Name of the advantage estimator that is TRL's."""
KEYS = ("strategies", "correct", "answers", "run")


@dataclass(frozen=True)
class Settings:
    """What the section says."""

    strategies: tuple[Strategy, ...] = ()
    correct: tuple[str, float] | None = None
    """A number that the reward function returns, and the least one of a correct answer; None guesses."""
    answers: str | None = None
    """The key under which the reward function returns what an answer says."""
    run: Path | None = None
    """The run's folder; None keeps none."""


def settings_of(config: Mapping[str, Any]) -> Settings:
    """The section of a whole configuration of verl's, checked."""
    given = config.get(SECTION)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError(f"explorl is {given!r}; write a section with {', '.join(KEYS)}")
    for key in given:
        if key not in KEYS:
            raise ValueError(f"explorl.{key}: there is no such setting; {suggest(key, KEYS)}")
    try:
        strategies = build_all(given.get("strategies"))
    except ValueError as error:
        raise ValueError(f"explorl.strategies: {error}") from None
    return Settings(tuple(strategies), _correct(given.get("correct")), _answers(given.get("answers")), _run(config))


def names_explorl(config: Mapping[str, Any]) -> list[str]:
    """The settings of a configuration that need this plug-in."""
    places = {
        "trainer.v1.trainer_mode": (SECTION,),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (SECTION,),
        "algorithm.adv_estimator": (ESTIMATOR,),
    }
    found = [f"{place}={at(config, place)}" for place, names in places.items() if at(config, place) in names]
    return found + ([SECTION] if config.get(SECTION) is not None else [])


def at(config: Mapping[str, Any], place: str, default: Any = None) -> Any:
    """The value at a place such as ``actor_rollout_ref.rollout.n``."""
    found: Any = config
    for key in place.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return default if found is None else found


def _correct(given: Any) -> tuple[str, float] | None:
    if given is None:
        return None
    pair = (given, 1.0) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    number = len(pair) == 2 and isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
    if not number or not isinstance(pair[0], str):
        raise ValueError(
            f"explorl.correct is {given!r}; write the name of a number that the reward function returns, such as acc, "
            "or that and the least one of a correct answer, such as [acc, 1.0]"
        )
    return pair[0], float(pair[1])


def _answers(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        raise ValueError(f"explorl.answers is {given!r}; write a key that the reward function returns, such as pred")
    return given


def _run(config: Mapping[str, Any]) -> Path | None:
    given = at(config, f"{SECTION}.run", default="")
    if given is False:
        return None
    if not isinstance(given, str):
        raise ValueError(f"explorl.run is {given!r}; write a folder such as runs/mine, or false to keep none")
    return Path(given or Path(str(at(config, "trainer.default_local_dir", "checkpoints"))) / "explorl").absolute()
