"""Tokens of the vocabulary over training steps: how often each occurs, in which completions, and its entropy.

Intervals come from resampling steps, because the completions of a step share their prompts and the policy. Neighbouring
steps have nearly the same policy, so blocks of steps are resampled (Politis and Romano 1992). If the entropy of 20
words fluctuates by 0.1 nats around a constant level, the runs of 40 in which some word has a significant change,
resampling single steps and blocks, are: 10 and 0 (60 steps, correlation 0.5 from step to step), 26 and 4 (60 steps,
0.8), 6 and 1 (300 steps, 0.5).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.lens import Context
from explorl.analysis.lens_table import LensTable, NotRecorded, number_keys
from explorl.analysis.positions import completion_signs
from explorl.analysis.reward_stages import MIN_STEPS, rising_end
from explorl.stats.interval import Effect
from explorl.stats.resample import resample, resampled_error

Floats = NDArray[np.float64]

MIN_COUNT = 12
"""Least occurrences of a frequent token type, over at least `MIN_STEPS_SEEN` steps."""
MIN_STEPS_SEEN = 5
RESAMPLES = 200
_CHUNK = 2_000_000
"""Steps × token types in memory at a time."""


class TokenTypes:
    """Occurrences of token types in positive and negative completions, and their entropy, over steps."""

    def __init__(self, table: LensTable, end: float) -> None:
        tokens = table.tokens
        entropy = tokens["entropy"]
        keys = tokens["token_ids"] if "token_ids" in tokens else number_keys(tokens["tokens"])
        included = np.isfinite(entropy) & (tokens.step <= end) & (keys >= 0)
        self.steps, step = np.unique(tokens.step[included], return_inverse=True)
        if len(self.steps) < MIN_STEPS:
            raise NotRecorded(
                f"tokens are recorded at {len(self.steps)} steps of the rising stage; the analysis needs {MIN_STEPS}"
            )
        self.keys, kind, counts = np.unique(keys[included], return_inverse=True, return_counts=True)
        pairs = np.unique(kind * len(self.steps) + step) // len(self.steps)
        self.frequent = (counts >= MIN_COUNT) & (np.bincount(pairs, minlength=len(self.keys)) >= MIN_STEPS_SEEN)
        if self.frequent.sum() < 5:
            raise NotRecorded(
                f"{self.frequent.sum()} token types are recorded {MIN_COUNT} times or more; the analysis needs 5 types"
            )
        sign = completion_signs(table)[tokens.completion][included]
        frequent_index = np.cumsum(self.frequent) - 1
        selected = self.frequent[kind]
        self._kind, self._step = frequent_index[kind[selected]], step[selected]
        self._sums = {
            "n": np.ones(selected.sum()),
            "y": entropy[included][selected],
            "positive": (sign[selected] > 0).astype(float),
            "negative": (sign[selected] < 0).astype(float),
        }
        self.count = int(self.frequent.sum())
        texts = np.full(len(self.keys), "", dtype=object)
        texts[kind] = tokens["tokens"][included] if "tokens" in tokens else [str(key) for key in keys[included]]
        self.texts = texts[self.frequent]
        self.totals = np.bincount(step, minlength=len(self.steps)).astype(float)
        """Recorded tokens of each step, including rare types."""

    def weighted(self, weights: Floats, moments: dict[str, tuple[str, Floats]]) -> dict[str, Floats]:
        """Return for each moment Σ_step weight · factor(step) · Σ column over a type's tokens, resamples × types."""
        result = {name: np.empty((len(weights), self.count)) for name in moments}
        width = max(1, _CHUNK // len(self.steps))
        for start in range(0, self.count, width):
            inside = (self._kind >= start) & (self._kind < start + width)
            size = min(width, self.count - start)
            cell = self._step[inside] * size + self._kind[inside] - start
            cells = {
                name: np.bincount(cell, values[inside], minlength=len(self.steps) * size).reshape(-1, size)
                for name, values in self._sums.items()
                if name in {column for column, _ in moments.values()}
            }
            for name, (column, factor) in moments.items():
                result[name][:, start : start + size] = (weights * factor) @ cells[column]
        return result

    def resampled_steps(self, seed: int, resamples: int) -> Floats:
        """Return how often each step occurs in the data (first row: once) and in resamples (other rows).

        Each third of the steps is resampled by itself: T steps in circular blocks of √T neighbours.
        """
        rng = np.random.default_rng(seed)
        weights = np.zeros((1 + resamples, len(self.steps)))
        weights[0] = 1
        for third in np.array_split(np.arange(len(self.steps)), 3):
            weights[1:, third] = np.vstack([*resample(len(third), resamples, rng, block=round(len(third) ** 0.5))])
        return weights

    @property
    def blocks(self) -> float:
        """Number of blocks in a third of the steps."""
        third = len(self.steps) / 3
        return third / round(third**0.5)


def resampled_effect(values: Floats, blocks: float) -> Effect:
    """Return the first value, with the spread of the others as its error: two thirds with this many blocks each."""
    return Effect.of(float(values[0]), resampled_error(values, blocks), 2 * (blocks - 1))


def token_types(table: LensTable, context: Context) -> TokenTypes:
    """Return the types of the rising stage, or of the whole run if there is no breakpoint; computed once."""
    types: TokenTypes = context.cached("types", lambda: TokenTypes(table, rising_end(table, context)))
    return types
