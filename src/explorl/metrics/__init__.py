"""Pure measures of what a policy explores: numbers and arrays in, numbers and arrays out, no model.

The functions on logits live in `explorl.metrics.tokens` and need torch, which is imported only when one is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from explorl.metrics.boundary import Diversity, answer_diversity, set_regions, unsolvable, upset_counts
from explorl.metrics.passk import avg_at_k, maj_at_k, pass_at_k
from explorl.metrics.quality import format_violations, language_mixing, trigram_redundancy

if TYPE_CHECKING:
    from explorl.metrics.tokens import (
        branching_factor,
        branching_factor_of_probs,
        masked_mean,
        perplexity,
        token_entropy,
    )

__all__ = [
    "Diversity",
    "answer_diversity",
    "avg_at_k",
    "branching_factor",
    "branching_factor_of_probs",
    "format_violations",
    "language_mixing",
    "maj_at_k",
    "masked_mean",
    "pass_at_k",
    "perplexity",
    "set_regions",
    "token_entropy",
    "trigram_redundancy",
    "unsolvable",
    "upset_counts",
]

_NEEDS_TORCH = {"branching_factor", "branching_factor_of_probs", "masked_mean", "perplexity", "token_entropy"}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from explorl.metrics import tokens

        return getattr(tokens, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
