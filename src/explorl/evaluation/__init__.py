"""Evaluations: sample, verify and score, under a protocol that can be named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl.evaluation.evaluation import Evaluation, evaluate, fitting_template
    from explorl.evaluation.protocols import PROTOCOLS, Protocol, protocol

__all__ = ["PROTOCOLS", "Evaluation", "Protocol", "evaluate", "fitting_template", "protocol"]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command needs `judge`'s error when it starts, and torch takes seconds."""
    if name in __all__:
        from explorl.evaluation import evaluation  # which has them all

        return getattr(evaluation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
