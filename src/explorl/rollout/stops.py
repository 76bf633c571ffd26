"""Stop strings, looked for in the text of what has been sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from explorl.rollout.state import RUNNING, STOPPED

EVERY = 8
"""New tokens after which a seat's text is searched again: decoding it costs more than a few tokens too many."""


class StopStrings:
    """Finds the strings that end a completion."""

    def __init__(self, strings: Sequence[str], tokenizer: Any, slots: int) -> None:
        self.strings, self.tokenizer = tuple(strings), tokenizer
        self.checked = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat that were searched."""
        self.floor = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat that are not: those up to the last one that was forced."""

    def start(self, seats: np.ndarray, checked: Any = 0, floor: Any = 0) -> None:
        """Other requests sit in these seats, which have such tokens already."""
        self.checked[seats], self.floor[seats] = checked, floor

    def find(self, busy: np.ndarray, steps: np.ndarray, status: np.ndarray, tokens: Tensor) -> dict[int, int]:
        """Marks seats whose text holds a stop string as stopped; the number of tokens up to its end for each."""
        found: dict[int, int] = {}
        if not self.strings:
            return found
        due = busy[(status[busy] != RUNNING) | (steps[busy] - self.checked[busy] >= EVERY)]
        if len(due) == 0:
            return found
        sampled = tokens[: len(status), : int(steps.max())].cpu()
        # A string of c characters can have begun c tokens back, or more where tokens hold less than a character.
        overlap = max(len(text) for text in self.strings) + 8
        for seat in due:
            start, total = max(int(self.floor[seat]), int(self.checked[seat]) - overlap), int(steps[seat])
            self.checked[seat] = total
            recent = sampled[seat, start:total].tolist()
            if not self._in(recent):
                continue
            end = next(end for end in range(1, len(recent) + 1) if self._in(recent[:end]))
            found[int(seat)] = start + end
            status[seat] = STOPPED
        return found

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)
