"""Counts of what is wrong with a batch of responses (Deng et al. 2025, §3.2.2 and Figure 3d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from explorl.metrics.format import format_violations, language_mixing, trigram_redundancy

REPETITIVE = 0.31
"""3-gram redundancy above which a response counts as repetitive (Deng et al. 2025 §4.4.1)."""


@dataclass(frozen=True)
class Quality:
    """Counts over some responses."""

    responses: int
    format_violations: int
    """Responses that got no reward for their form, or, where there is no such reward, without exactly one mark."""
    repetitive: int
    """Responses whose 3-gram redundancy is above 0.31."""
    language_mixing: int
    """Responses with a CJK character."""
    redundancy: float
    """Mean 3-gram redundancy; 0 where there is no response."""


def response_quality(
    texts: Sequence[str], form: Sequence[float | None] | None = None, *, mark: str = "<answer>"
) -> Quality:
    """Counts of what is wrong with responses.

    ``form`` is what a reward function gave each for its form: below 1, NaN or None is malformed. Without it, malformed
    is what has not exactly one ``mark``.
    """
    if form is None:
        malformed = sum(format_violations(text, mark) > 0 for text in texts)
    else:
        malformed = sum(not (value is not None and value >= 1) for value in form)
    redundancy = [trigram_redundancy(text) for text in texts]
    return Quality(
        responses=len(texts),
        format_violations=malformed,
        repetitive=sum(value > REPETITIVE for value in redundancy),
        language_mixing=sum(language_mixing(text) > 0 for text in texts),
        redundancy=sum(redundancy) / len(texts) if texts else 0.0,
    )
