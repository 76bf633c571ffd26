"""Evaluate policies: sample, verify and score under a named protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl.evaluation.evaluation import Evaluation, evaluate, fitting_template
    from explorl.evaluation.protocols import PROTOCOLS, Protocol, protocol

__all__ = ["PROTOCOLS", "Evaluation", "Protocol", "evaluate", "fitting_template", "protocol"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes seconds."""
    if name in __all__:
        from explorl.evaluation import evaluation

        return getattr(evaluation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
