"""Words that wander from step to step, around a level that does not change."""

from __future__ import annotations

import numpy as np

from explorl.analysis.entropy_drop import words
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import Completions, LensTable, Tokens
from explorl.stats.interval import LEVEL

from .planted_runs import noise

TYPES, EACH, DRAWS = 12, 120, 30


def wandering(rng: np.random.Generator, steps: int, correlation: float) -> LensTable:
    """One answer a step, whose tokens' frequencies and entropies are those of neighbouring steps in part."""
    share, level = (
        np.stack([noise(steps, deviation, rng, correlation) for _ in range(TYPES)], axis=1) for deviation in (0.2, 0.1)
    )
    chances = np.exp(share) / np.exp(share).sum(axis=1, keepdims=True)
    ids = np.stack([rng.choice(TYPES, EACH, p=row) for row in chances])
    entropy = 1.5 + 0.3 * rng.standard_normal(ids.shape) + np.take_along_axis(level, ids, 1)
    answer, step = np.repeat(np.arange(steps), EACH), np.arange(1, steps + 1)
    count = np.full(steps, EACH)
    columns = {"token_ids": ids.ravel(), "entropy": entropy.ravel()}
    return LensTable(
        "run",
        Completions(step, ["p"] * steps, [""] * steps, EACH * np.arange(steps), count, {}, [None] * steps),
        Tokens(answer, np.arange(ids.size) % EACH, count[answer], step[answer], columns),
    )


def test_wandering_is_not_told_as_a_change() -> None:
    found = 0
    for seed in range(DRAWS):
        result = words(wandering(np.random.default_rng(seed), 60, 0.7), Context(seed=seed))
        found += any((one.corrected or 0.0) < LEVEL for one in (*result["risen"], *result["fallen"]))
    assert found <= 2
