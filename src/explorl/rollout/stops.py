"""Stop strings, looked for in the text of what has been sampled.

A completion ends with the token that completes one of its strings, wherever the string begins and ends inside tokens.
It is looked for in the text with special tokens and in the text without them, so that both ``<|im_end|>`` and a string
that a special token interrupts are found. A character that is split over several tokens is there with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.state import RUNNING, STOPPED

EVERY = 8
"""New tokens after which a seat's text is searched again: decoding it costs more than a few tokens too many."""
HALF = "\N{REPLACEMENT CHARACTER}"
"""What a token that holds a part of a character is decoded to."""
BLOCK = 32
"""Tokens of a whole completion that are searched at once."""


def first_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Where in a text the first of the strings to be complete ends, and which it is; None where there is none."""
    ends = [(at + len(string), string) for string in strings if (at := text.find(string)) >= 0]
    return min(ends, key=lambda end: (end[0], -len(end[1])), default=None)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that a text without special tokens leaves out: also those that have no role, as most of Llama 3's."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(token for token, how in added.items() if how.special)})


class StopStrings:
    """Finds the strings that end a completion.

    ``strings`` are those of each request; there may be more of them later.
    """

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any, slots: int) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        self.checked = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat that were searched."""
        self.floor = np.zeros(slots, dtype=np.int64)
        """Tokens of each seat that are not: those up to the last one that was forced."""

    @cached_property
    def special(self) -> frozenset[int]:
        """Special tokens."""
        return special_ids(self.tokenizer)

    @cached_property
    def swallows(self) -> bool:
        """Whether a byte that is no text hides others before it, as SentencePiece's do, newlines among them."""
        pair = self.tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>"])
        alone = "" if None in pair else self.tokenizer.decode(pair[:1])
        return "\n" in alone and "\n" not in self.tokenizer.decode(pair)

    @cached_property
    def known(self) -> int:
        """Tokens that have a text; a model may have more."""
        return len(self.tokenizer)

    def start(self, seats: np.ndarray, checked: Any = 0, floor: Any = 0) -> None:
        """Other requests sit in these seats, which have such tokens already."""
        self.checked[seats], self.floor[seats] = checked, floor

    def find(
        self,
        busy: np.ndarray,
        owner: np.ndarray,
        steps: np.ndarray,
        status: np.ndarray,
        tokens: Tensor,
        every: int = EVERY,
    ) -> dict[int, tuple[int, str]]:
        """Marks seats whose text holds a stop string as stopped; their tokens up to its end, and the string, for each.

        ``owner`` is the request in each seat; one that goes on is searched where it has ``every`` new tokens.
        """
        found: dict[int, tuple[int, str]] = {}
        if not any(self.strings):
            return found
        due = busy[(status[busy] != RUNNING) | (steps[busy] - self.checked[busy] >= every)]
        if len(due) == 0:
            return found
        sampled = tokens[torch.from_numpy(due).to(tokens.device), : int(steps[due].max())].cpu().numpy()
        for seat, row in zip(due.tolist(), sampled, strict=True):
            end = self.cut(int(owner[seat]), row[: steps[seat]], int(self.checked[seat]), int(self.floor[seat]))
            self.checked[seat] = steps[seat]
            if end is not None:
                found[seat] = end
                status[seat] = STOPPED
        return found

    def cut(self, request: int, tokens: np.ndarray, checked: int = 0, floor: int = 0) -> tuple[int, str] | None:
        """How many tokens there are up to the one that completes a stop string, and the string; None where none is.

        The first ``checked`` tokens hold none, so only a part of them is looked at again; a string does not begin in
        the first ``floor`` tokens.
        """
        checked = max(checked, floor)
        strings = self.strings[request]
        if not strings or len(tokens) <= checked:
            return None
        size = max(len(string.encode()) for string in strings)

        def texts(end: int) -> Iterator[str]:
            start = max(floor, self._begin(tokens[:checked], size))
            return self._texts(tokens[start:end].tolist())

        def found(end: int) -> str | None:
            stops = (first_stop(text, strings) for text in texts(end))
            return next((stop[1] for stop in stops if stop is not None), None)

        def may_hold(end: int) -> bool:
            return any(first_stop(text, strings) or (HALF in text and self.swallows) for text in texts(end))

        if not may_hold(len(tokens)):
            return None
        while checked < len(tokens):  # token by token only where it ends, and never from the beginning
            until = min(checked + BLOCK, len(tokens))
            if may_hold(until):
                ends = ((end, found(end)) for end in range(checked + 1, until + 1))
                first = next(((end, string) for end, string in ends if string is not None), None)
                if first is not None:
                    return first
            checked = until
        return None

    def _begin(self, tokens: np.ndarray, size: int) -> int:
        """Where a string of so many bytes that ends after these tokens can have begun, and a little before that.

        A token has at least one byte, but for special ones and those that only the model knows; the text of a part may
        begin with a space too few or with half a character.
        """

        def says(token: int) -> bool:
            return token < self.known and token not in self.special

        start = max(0, len(tokens) - size - EVERY)
        while start > 0 and sum(map(says, tokens[start:].tolist())) < size + EVERY:
            start = max(0, 2 * start - len(tokens))
        return start

    def _texts(self, tokens: Sequence[int]) -> Iterator[str]:
        """What these tokens say: with special tokens, and without them where there are any."""
        yield self.tokenizer.decode(tokens)
        if not self.special.isdisjoint(tokens):
            yield self.tokenizer.decode(tokens, skip_special_tokens=True)
