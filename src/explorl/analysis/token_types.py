"""The tokens of the vocabulary over the steps of a training: how often each is seen, in which answers, and its entropy.

What is counted over tokens gets its interval from steps drawn with replacement, because the answers of a step have
their prompts and the policy in common. Neighbouring steps have nearly the same policy, so blocks of them are drawn
(Politis and Romano 1992). Where the entropy of 20 words wanders by 0.1 nats around a level that does not change, runs
of 40 in which some word is told as changed, each step drawn alone and in blocks: 10 and 0 (60 steps, correlation 0.5
from step to step), 26 and 4 (60 steps, 0.8), 6 and 1 (300 steps, 0.5).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context
from explorl.analysis.lens_table import LensTable, NotRecorded, number_keys
from explorl.analysis.positions import completion_signs
from explorl.analysis.reward_stages import MIN_STEPS, rising_end
from explorl.stats.regression import Effect

Floats = NDArray[np.float64]

MIN_SEEN = 12
"""Times that a token type must be recorded, over at least `MIN_STEPS_SEEN` steps."""
MIN_STEPS_SEEN = 5
RESAMPLES = 200
_CHUNK = 2_000_000
"""Steps × token types that are held at once."""


class TokenTypes:
    """Token types over steps: how often each is in positive and negative answers, and its entropy."""

    def __init__(self, table: LensTable, end: float) -> None:
        tokens = table.tokens
        entropy = tokens["entropy"]
        keys = tokens["token_ids"] if "token_ids" in tokens else number_keys(tokens["tokens"])
        kept = np.isfinite(entropy) & (tokens.step <= end) & (keys >= 0)
        self.steps, step = np.unique(tokens.step[kept], return_inverse=True)
        if len(self.steps) < MIN_STEPS:
            raise NotRecorded(
                f"tokens are recorded at {len(self.steps)} steps of the rising stage; their courses need {MIN_STEPS}"
            )
        self.keys, kind, counts = np.unique(keys[kept], return_inverse=True, return_counts=True)
        pairs = np.unique(kind * len(self.steps) + step) // len(self.steps)
        self.often = (counts >= MIN_SEEN) & (np.bincount(pairs, minlength=len(self.keys)) >= MIN_STEPS_SEEN)
        if self.often.sum() < 5:
            raise NotRecorded(
                f"{self.often.sum()} token types are recorded {MIN_SEEN} times or more; their courses need 5 types"
            )
        sign = completion_signs(table)[tokens.completion][kept]
        places = np.cumsum(self.often) - 1
        chosen = self.often[kind]
        self._kind, self._step = places[kind[chosen]], step[chosen]
        self._sums = {
            "n": np.ones(chosen.sum()),
            "y": entropy[kept][chosen],
            "positive": (sign[chosen] > 0).astype(float),
            "negative": (sign[chosen] < 0).astype(float),
        }
        self.count = int(self.often.sum())
        texts = np.full(len(self.keys), "", dtype=object)
        texts[kind] = tokens["tokens"][kept] if "tokens" in tokens else [str(key) for key in keys[kept]]
        self.texts = texts[self.often]
        self.totals = np.bincount(step, minlength=len(self.steps)).astype(float)
        """Recorded tokens of each step, the rare types included."""

    def weighted(self, weights: Floats, moments: dict[str, tuple[str, Floats]]) -> dict[str, Floats]:
        """draws × types: of each moment, Σ_step weight · factor(step) · Σ of a column over the type's tokens."""
        found = {name: np.empty((len(weights), self.count)) for name in moments}
        width = max(1, _CHUNK // len(self.steps))
        for start in range(0, self.count, width):
            inside = (self._kind >= start) & (self._kind < start + width)
            size = min(width, self.count - start)
            place = self._step[inside] * size + self._kind[inside] - start
            cells = {
                name: np.bincount(place, values[inside], minlength=len(self.steps) * size).reshape(-1, size)
                for name, values in self._sums.items()
                if name in {column for column, _ in moments.values()}
            }
            for name, (column, factor) in moments.items():
                found[name][:, start : start + size] = (weights * factor) @ cells[column]
        return found

    def drawn(self, seed: int, resamples: int) -> Floats:
        """1 for every step in the first row; how often each was drawn in the others, within thirds of the steps.

        Neighbours are drawn clusters: a third of T steps in blocks of √T, on a circle.
        """
        rng = np.random.default_rng(seed)
        drawn = np.zeros((1 + resamples, len(self.steps)))
        drawn[0] = 1
        for third in np.array_split(np.arange(len(self.steps)), 3):
            drawn[1:, third] = block_resamples(len(third), round(len(third) ** 0.5), resamples, rng)
        return drawn

    @property
    def blocks(self) -> float:
        """How many blocks of steps a third has."""
        third = len(self.steps) / 3
        return third / round(third**0.5)


def block_resamples(count: int, length: int, resamples: int, rng: np.random.Generator) -> Floats:
    """resamples × count: how often each step is drawn, in blocks of neighbours on a circle (Politis, Romano 1992)."""
    starts = rng.integers(0, count, (resamples, -(-count // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :count] % count
    return np.array([np.bincount(row, minlength=count) for row in places], dtype=np.float64)


def resampled_effect(draws: Floats, blocks: float) -> Effect:
    """The first value, with the spread of the others as its error: of two thirds with so many blocks each."""
    error = float(draws[1:].std(ddof=1)) * math.sqrt(blocks / (blocks - 1))
    return Effect.of(float(draws[0]), error, 2 * (blocks - 1))


def token_types(table: LensTable, context: Context) -> TokenTypes:
    """Those of the rising stage, or of the whole run where no breakpoint is seen; computed once."""
    found: TokenTypes = context.cached("types", lambda: TokenTypes(table, rising_end(table, context)))
    return found
