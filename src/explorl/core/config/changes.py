"""Compare configurations, and change that of a run that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from explorl.core.config.loading import apply_overrides, validate
from explorl.core.config.schema import Config
from explorl.core.errors import ConfigError
from explorl.core.merge import deep_merge, flatten

RESUMABLE = {
    "grpo": (
        "training.steps", "training.checkpoint_every", "training.keep_checkpoints", "training.report_to",
        "training.lens", "training.lens.every", "training.lens.answers", "training.lens.rate",
        "training.lens.observers", "evaluation.every", "evaluation.ends",
    ),
    "sft": ("sft.epochs", "sft.checkpoint_every", "sft.score"),
    "rft": ("rft.iterations",),
}  # fmt: skip
"""Keys that may change when a run is resumed, by its kind."""


def resumed_config(stored: Config, overrides: Sequence[str], kind: str, place: str) -> Config:
    """Return a run's configuration with --set applied; ConfigError if a key changes that is not in `RESUMABLE`."""
    if not overrides:
        return stored
    config = validate(apply_overrides(stored.dump(), overrides), "--set")
    for key, (old, new) in changed_keys(stored.dump(), config.dump()).items():
        if key not in RESUMABLE[kind]:
            raise ConfigError(
                f"{key} is {old!r} in {place} and {new!r} in --set: a resumed run may only change "
                f"{', '.join(RESUMABLE[kind])}; start a new run for it"
            )
    return config


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the default of each missing key.

    So one written by a version without a key is equal to one that leaves it at its default.
    """
    return deep_merge(Config().dump(), stored)


def rft_config(config: Config) -> Config:
    """Return the configuration of an RFT run, in which `training.steps` is the number of iterations."""
    training = config.training.model_copy(update={"steps": config.rft.iterations, "iterations": 1})
    return config.model_copy(update={"training": training})


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, with the old and the new value; a missing key has its default."""
    before, after = flatten(with_defaults(old)), flatten(with_defaults(new))
    keys = dict.fromkeys([*before, *after])
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
