"""Exploration in RL fine-tuning of language models with verifiable rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl import strategies
    from explorl.rollout import Engine, SamplingParams
    from explorl.training.grpo.trainer import ExplorationTrainer
    from explorl.training.run_recorder import PassAtK, RunRecorder

__version__ = "0.1.0"
__all__ = ["Engine", "ExplorationTrainer", "PassAtK", "RunRecorder", "SamplingParams", "__version__", "strategies"]

_MODULES = {
    "Engine": "explorl.rollout",
    "ExplorationTrainer": "explorl.training.grpo.trainer",
    "PassAtK": "explorl.training.run_recorder",
    "RunRecorder": "explorl.training.run_recorder",
    "SamplingParams": "explorl.rollout",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch, transformers and TRL take seconds."""
    from importlib import import_module

    if name == "strategies":
        return import_module("explorl.strategies")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
