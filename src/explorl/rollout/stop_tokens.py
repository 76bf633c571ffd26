"""Which tokens may complete a stop string, so that a text is searched when one is sampled instead of after every token.

The result does not depend on it: `StopStrings` searches every text after a few tokens anyway, for strings that end in
another way, such as with a space that a tokenizer puts between two tokens. This only saves the tokens that would be
sampled until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from explorl.rollout.stops import HALF

_UNKNOWN, _NO, _YES = -1, 0, 1


class StopTokens:
    """A lazily filled table of which of ``vocab`` tokens may complete a stop string.

    ``strings`` are the stop strings of each request; the list may grow.
    """

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any, vocab: int) -> None:
        self._strings, self._tokenizer, self._vocab = strings, tokenizer, vocab
        self._sets: dict[tuple[str, ...], int] = {}
        """The distinct sets of stop strings, with their row in ``_table``."""
        self._set_of = np.zeros(0, dtype=np.int64)
        """The set of each request."""
        self._table = np.zeros((0, vocab), dtype=np.int8)

    def among(self, requests: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens may complete a stop string of the request that sampled them.

        False for tokens beyond ``vocab``, which some models can read but not sample.
        """
        if len(self._set_of) < len(self._strings):
            self._add_requests()
        valid = tokens < self._vocab
        sets, tokens = self._set_of[requests], np.where(valid, tokens, 0)
        entries = self._table[sets, tokens]
        if (entries == _UNKNOWN).any():
            for row, token in zip(sets[entries == _UNKNOWN], tokens[entries == _UNKNOWN], strict=True):
                self._table[row, token] = self._classify(int(row), int(token))
            entries = self._table[sets, tokens]
        return valid & (entries == _YES)

    def _add_requests(self) -> None:
        new = self._strings[len(self._set_of) :]
        sets = [self._sets.setdefault(tuple(strings), len(self._sets)) for strings in new]
        self._set_of = np.concatenate([self._set_of, np.array(sets, dtype=np.int64)])
        rows = np.full((len(self._sets) - len(self._table), self._vocab), _UNKNOWN, dtype=np.int8)
        self._table = np.concatenate([self._table, rows])

    def _classify(self, row: int, token: int) -> int:
        last_characters = {string[-1] for string in list(self._sets)[row]}
        text = self._tokenizer.decode([token]) if last_characters else ""
        return _YES if HALF in text or not last_characters.isdisjoint(text) else _NO
