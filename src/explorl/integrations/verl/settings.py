"""The section `explorl` of verl's configuration.

explorl:
  strategies: [bottom_p, {egsw: {alpha: 0.3}}]   # as in a config of Explorl's
  correct: [acc, 1.0]                            # a number of the reward function, and its minimum if correct
  answers: pred                                  # key under which it returns the answer in normal form
  run: runs/mine                                 # a run's folder for `explorl report`; false disables it
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
"""Name of the advantage estimator that computes the same as TRL."""
KEYS = ("strategies", "correct", "answers", "run")


@dataclass(frozen=True)
class VerlSettings:
    """The values of the section."""

    strategies: tuple[Strategy, ...] = ()
    correct: tuple[str, float] | None = None
    """Name of a number that the reward function returns, and its minimum for a correct answer; None: guess."""
    answers: str | None = None
    """Key under which the reward function returns the answer."""
    run: Path | None = None
    """The run's folder; None: nothing is recorded."""


def read_settings(config: Mapping[str, Any]) -> VerlSettings:
    """Read and check the section `explorl` of a complete configuration of verl."""
    section = config.get(SECTION)
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ValueError(f"explorl is {section!r}; write a section with {', '.join(KEYS)}")
    for key in section:
        if key not in KEYS:
            raise ValueError(f"explorl.{key}: unknown key; {suggest(key, KEYS)}")
    try:
        strategies = build_all(section.get("strategies"))
    except ValueError as error:
        raise ValueError(f"explorl.strategies: {error}") from None
    correct, answers = _correct(section.get("correct")), _answers(section.get("answers"))
    return VerlSettings(tuple(strategies), correct, answers, _run(config))


def explorl_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of a configuration that need this plug-in, as ``key=value``, and the section's name."""
    values = {
        "trainer.v1.trainer_mode": (SECTION,),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (SECTION,),
        "algorithm.adv_estimator": (ESTIMATOR,),
    }
    keys = [f"{key}={lookup(config, key)}" for key, names in values.items() if lookup(config, key) in names]
    return keys + ([SECTION] if config.get(SECTION) is not None else [])


def lookup(config: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """Return the value of a dotted key such as ``actor_rollout_ref.rollout.n``."""
    value: Any = config
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return default if value is None else value


def _correct(value: Any) -> tuple[str, float] | None:
    if value is None:
        return None
    pair = (value, 1.0) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    has_number = len(pair) == 2 and isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
    if not has_number or not isinstance(pair[0], str):
        raise ValueError(
            f"explorl.correct is {value!r}; write the name of a number that the reward function returns, such as acc, "
            "or the name and its minimum for a correct answer, such as [acc, 1.0]"
        )
    return pair[0], float(pair[1])


def _answers(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"explorl.answers is {value!r}; write a key that the reward function returns, such as pred")
    return value


def _run(config: Mapping[str, Any]) -> Path | None:
    folder = lookup(config, f"{SECTION}.run", default="")
    if folder is False:
        return None
    if not isinstance(folder, str):
        raise ValueError(f"explorl.run is {folder!r}; write a folder such as runs/mine, or false to record nothing")
    return Path(folder or Path(str(lookup(config, "trainer.default_local_dir", "checkpoints"))) / "explorl").absolute()
