"""A run's folder of a training inside verl, for `explorl report`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from explorl.core.store import RunStore, StoreError
from explorl.integrations.verl.settings import Settings, at
from explorl.strategies import Batch
from explorl.strategies.base import masked_mean

NAMES = {
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/loss": "loss",
    "actor/kl_loss": "kl",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "response_length/mean": "completions/mean_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "timing_s/step": "step_time",
    "explorl/correct": "rewards/correctness/mean",
}
"""verl's names of what Explorl's pages show, and Explorl's; everything else keeps verl's name."""


def line_of(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl from what verl logs of a step: its numbers, under Explorl's names where it has some."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    found = {NAMES.get(name, name): value for name, value in numbers.items() if value is not None}
    if "actor/pg_loss" in found:
        found.setdefault("loss", found["actor/pg_loss"])
    return {"step": step, "kind": "train", **found}


def run_config(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """The run's configuration, in the words of `explorl train` where it has them, and verl's own beside."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "task": {"name": ""},
        "model": {"name": str(at(config, "actor_rollout_ref.model.path", ""))},
        "rollout": {
            "temperature": at(config, f"{rollout}.temperature"),
            "max_tokens": at(config, f"{rollout}.response_length"),
        },
        "strategies": [repr(strategy) for strategy in settings.strategies],
        "training": {
            "steps": at(config, "trainer.total_training_steps"),
            "iterations": 1,
            "learning_rate": at(config, f"{actor}.optim.lr"),
            "generations": at(config, f"{rollout}.n"),
            "beta": at(config, f"{actor}.kl_loss_coef") if at(config, f"{actor}.use_kl_loss", False) else 0.0,
            "loss": at(config, f"{actor}.policy_loss.loss_mode"),
        },
        "evaluation": None,
        "seed": int(at(config, "data.seed", 0)),
        "verl": _plain(config),
    }


def answer_columns(seen: Batch, advantages: Tensor, texts: Sequence[str]) -> dict[str, list[Any]]:
    """The answers of a step as columns; the advantage is the mean over an answer's tokens."""
    return {
        "prompt": list(seen.prompts),
        "completion": list(texts),
        "advantage": masked_mean(advantages, seen.mask, dim=1).tolist(),
        "reward/correctness": seen.correctness.tolist(),
        "reward/score": seen.rewards.tolist(),
    }


class Recorder:
    """Writes the folder, from verl's driver."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        assert settings.run is not None
        self.store = RunStore(settings.run)
        self._config = run_config(settings, config)

    def begin(self, step: int) -> None:
        """Starts the folder, or takes it back to the step that verl resumes from."""
        if step == 0 and self.store.config_path.exists() and self.store.has_steps:
            raise StoreError(
                f"{self.store.folder} already holds a run, and verl found no checkpoint to go on from; name another "
                "folder with explorl.run, or set trainer.experiment_name"
            )
        self.store.begin(self._config, "grpo")
        self.store.rewind(step)
        resumed = f"global_step_{step}" if step else None
        self.store.record_start(kind="grpo", seed=self._config["seed"], resumed_from=resumed)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.store.append_metrics(line_of(step, metrics))

    def keep(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Keeps the answers of a step."""
        self.store.write_rollouts(step, columns)


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value) if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Values that YAML has; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
