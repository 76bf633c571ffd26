"""Record a training inside verl in a run's folder, for `explorl report`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from explorl.core.store import RunStore, StoreError
from explorl.integrations.verl.settings import VerlSettings, lookup
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
"""Explorl's names of verl's metrics that its pages show; other metrics keep verl's names."""


def metrics_line(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with the numbers that verl logs for a step, renamed to Explorl's names."""
    numbers = {name: _number(value) for name, value in metrics.items()}
    renamed = {NAMES.get(name, name): value for name, value in numbers.items() if value is not None}
    if "actor/pg_loss" in renamed:
        renamed.setdefault("loss", renamed["actor/pg_loss"])
    return {"step": step, "kind": "train", **renamed}


def run_config(settings: VerlSettings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's configuration: the keys of `explorl train` that apply, and verl's complete configuration."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "task": {"name": ""},
        "model": {"name": str(lookup(config, "actor_rollout_ref.model.path", ""))},
        "rollout": {
            "temperature": lookup(config, f"{rollout}.temperature"),
            "max_tokens": lookup(config, f"{rollout}.response_length"),
        },
        "strategies": [repr(strategy) for strategy in settings.strategies],
        "training": {
            "steps": lookup(config, "trainer.total_training_steps"),
            "iterations": 1,
            "learning_rate": lookup(config, f"{actor}.optim.lr"),
            "generations": lookup(config, f"{rollout}.n"),
            "beta": lookup(config, f"{actor}.kl_loss_coef") if lookup(config, f"{actor}.use_kl_loss", False) else 0.0,
            "loss": lookup(config, f"{actor}.policy_loss.loss_mode"),
        },
        "evaluation": None,
        "seed": int(lookup(config, "data.seed", 0)),
        "verl": _plain(config),
    }


def completion_columns(batch: Batch, advantages: Tensor, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the completions of a step as columns; an advantage is the mean over a completion's tokens."""
    return {
        "prompt": list(batch.prompts),
        "completion": list(texts),
        "advantage": masked_mean(advantages, batch.mask, dim=1).tolist(),
        "reward/correctness": batch.correctness.tolist(),
        "reward/score": batch.rewards.tolist(),
    }


class VerlRecorder:
    """Writes the run's folder from verl's driver."""

    def __init__(self, settings: VerlSettings, config: Mapping[str, Any]) -> None:
        assert settings.run is not None
        self.store = RunStore(settings.run)
        self._config = run_config(settings, config)

    def begin(self, step: int) -> None:
        """Start the folder, or rewind it to the step from which verl resumes."""
        if step == 0 and self.store.config_path.exists() and self.store.has_steps:
            raise StoreError(
                f"{self.store.folder} already holds a run, but verl found no checkpoint to resume from; set another "
                "folder in explorl.run, or set trainer.experiment_name"
            )
        self.store.begin(self._config, "grpo")
        self.store.rewind(step)
        resumed = f"global_step_{step}" if step else None
        self.store.record_start(kind="grpo", seed=self._config["seed"], resumed_from=resumed)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.store.append_metrics(metrics_line(step, metrics))

    def record_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Store the completions of a step."""
        self.store.write_rollouts(step, columns)


def _number(value: Any) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return float(value) if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Return a value with types that YAML supports, others converted to text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
