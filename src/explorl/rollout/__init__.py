"""Drawing tokens: sampling parameters and warpers, and the engine that decodes with them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl.rollout.engine import Engine
    from explorl.rollout.processors import BottomPLogitsProcessor
    from explorl.rollout.rollouts import PaddedRollouts, Rollout, Rollouts
    from explorl.rollout.sampling import SamplingParams
    from explorl.rollout.session import Session
    from explorl.rollout.trial import UnsupportedModel

__all__ = [
    "BottomPLogitsProcessor",
    "Engine",
    "PaddedRollouts",
    "Rollout",
    "Rollouts",
    "SamplingParams",
    "Session",
    "UnsupportedModel",
]

_HOME = {
    "BottomPLogitsProcessor": "processors",
    "Engine": "engine",
    "PaddedRollouts": "rollouts",
    "Rollout": "rollouts",
    "Rollouts": "rollouts",
    "SamplingParams": "sampling",
    "Session": "session",
    "UnsupportedModel": "trial",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: the engine needs transformers, which takes seconds to import."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
