"""Tokens that may complete a stop string, so that a text is searched when one was drawn and not after every token.

Nothing depends on it: `StopStrings` searches every text after a few tokens anyway, for strings that end in another way,
as with a space that a tokenizer puts between two tokens. Where a token that ends a string is drawn, this only saves the
tokens that would be sampled before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from explorl.rollout.stops import HALF

_UNKNOWN, _NO, _YES = -1, 0, 1


class StopTokens:
    """What is known of each of ``vocab`` tokens.

    ``strings`` are the stop strings of each request; there may be more of them later.
    """

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any, vocab: int) -> None:
        self._strings, self._tokenizer, self._vocab = strings, tokenizer, vocab
        self._sets: dict[tuple[str, ...], int] = {}
        """The different stop strings, by their row in ``_known``."""
        self._set_of = np.zeros(0, dtype=np.int64)
        """Which of them each request has."""
        self._known = np.zeros((0, vocab), dtype=np.int8)

    def among(self, requests: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """True where a token may complete a stop string of the request that drew it.

        Not for tokens that cannot be drawn, which some models can read.
        """
        if len(self._set_of) < len(self._strings):
            self._learn_requests()
        drawn = tokens < self._vocab
        sets, tokens = self._set_of[requests], np.where(drawn, tokens, 0)
        known = self._known[sets, tokens]
        if (known == _UNKNOWN).any():
            for which, token in zip(sets[known == _UNKNOWN], tokens[known == _UNKNOWN], strict=True):
                self._known[which, token] = self._judged(int(which), int(token))
            known = self._known[sets, tokens]
        return drawn & (known == _YES)

    def _learn_requests(self) -> None:
        new = self._strings[len(self._set_of) :]
        sets = [self._sets.setdefault(tuple(strings), len(self._sets)) for strings in new]
        self._set_of = np.concatenate([self._set_of, np.array(sets, dtype=np.int64)])
        more = np.full((len(self._sets) - len(self._known), self._vocab), _UNKNOWN, dtype=np.int8)
        self._known = np.concatenate([self._known, more])

    def _judged(self, which: int, token: int) -> int:
        lasts = {string[-1] for string in list(self._sets)[which]}
        text = self._tokenizer.decode([token]) if lasts else ""
        return _YES if HALF in text or not lasts.isdisjoint(text) else _NO
