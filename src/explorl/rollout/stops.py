"""Search the text of completions for stop strings.

A completion ends with the token that completes one of its strings, wherever the string begins and ends inside tokens.
Both the text with special tokens and the text without them are searched, to find ``<|im_end|>`` as well as a string
that a special token interrupts. A character that is split over several tokens is complete with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from explorl.rollout.readback import Download
from explorl.rollout.state import RUNNING, STOPPED, upload

EVERY = 8
"""New tokens after which a slot's text is searched again: decoding it costs more than a few tokens too many."""
HALF = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that holds only a part of a character."""
BLOCK = 32
"""Tokens of a whole completion that are searched at once."""
_UNKNOWN = -1


def first_stop(text: str, strings: Sequence[str]) -> tuple[int, str] | None:
    """Return where in a text the first complete string ends, and the string; None if there is none."""
    ends = [(at + len(string), string) for string in strings if (at := text.find(string)) >= 0]
    return min(ends, key=lambda end: (end[0], -len(end[1])), default=None)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens, including those without a role, such as most of Llama 3's."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset({*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)})


class StopStrings:
    """Finds the strings that end a completion. ``strings`` are those of each request."""

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any, slots: int = 0) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        self.request, self.checked, self.floor = np.zeros((3, slots), dtype=np.int64)
        """Of each slot: its request, the tokens that have been searched, and the tokens in which no string may begin,
        which are those up to the last forced one."""

    @cached_property
    def special(self) -> frozenset[int]:
        """Special tokens."""
        return special_ids(self.tokenizer)

    @cached_property
    def swallows(self) -> bool:
        """True if an incomplete character hides the bytes before it, newlines included, as in SentencePiece."""
        pair = self.tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>"])
        newline = "" if None in pair else self.tokenizer.decode(pair[:1])
        return "\n" in newline and "\n" not in self.tokenizer.decode(pair)

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens that have a text; a model may have more."""
        return len(self.tokenizer)

    def start(self, slots: np.ndarray, requests: Any, checked: Any = 0, floor: Any = 0) -> None:
        """Set what has been searched in slots that have a new sequence."""
        self.request[slots], self.checked[slots], self.floor[slots] = requests, checked, floor

    def find(
        self, busy: np.ndarray, steps: np.ndarray, status: np.ndarray, tokens: Tensor, every: int = EVERY
    ) -> dict[int, tuple[int, str]]:
        """Mark slots whose text contains a stop string as stopped, and return where it ends, and the string, for each.

        A running slot is searched if it has ``every`` new tokens.
        """
        stopped: dict[int, tuple[int, str]] = {}
        due = busy[(status[busy] != RUNNING) | (steps[busy] - self.checked[busy] >= every)]
        if len(due) == 0:
            return stopped
        sampled = Download(tokens[upload(due, tokens.device), : int(steps[due].max())]).wait()[0].numpy()
        for slot, row in zip(due.tolist(), sampled, strict=True):
            end = self.cut(int(self.request[slot]), row[: steps[slot]], int(self.checked[slot]), int(self.floor[slot]))
            self.checked[slot] = steps[slot]
            if end is not None:
                stopped[slot] = end
                status[slot] = STOPPED
        return stopped

    def cut(self, request: int, tokens: np.ndarray, checked: int = 0, floor: int = 0) -> tuple[int, str] | None:
        """Return the number of tokens up to the one that completes a stop string, and the string; None if none does.

        The first ``checked`` tokens contain none, so only the last of them are searched again. A string may not begin
        in the first ``floor`` tokens.
        """
        checked = max(checked, floor)
        strings = self.strings[request]
        if not strings or len(tokens) <= checked:
            return None
        size = max(len(string.encode()) for string in strings)

        def texts(end: int) -> Iterator[str]:
            start = max(floor, self._begin(tokens[:checked], size))
            return self._texts(tokens[start:end].tolist())

        def complete_string(end: int) -> str | None:
            stops = (first_stop(text, strings) for text in texts(end))
            return next((stop[1] for stop in stops if stop is not None), None)

        def may_contain(end: int) -> bool:
            return any(first_stop(text, strings) or (HALF in text and self.swallows) for text in texts(end))

        if not may_contain(len(tokens)):
            return None
        while checked < len(tokens):  # search token by token only in the block where the string ends
            until = min(checked + BLOCK, len(tokens))
            if may_contain(until):
                ends = ((end, complete_string(end)) for end in range(checked + 1, until + 1))
                first = next(((end, string) for end, string in ends if string is not None), None)
                if first is not None:
                    return first
            checked = until
        return None

    def _begin(self, tokens: np.ndarray, size: int) -> int:
        """Return the earliest token in which a string of ``size`` bytes that ends after these tokens can begin.

        Every token has at least one byte, except special ones and those that the tokenizer does not have. The result is
        a little earlier than needed, as the text of a part may lack a leading space or begin with half a character.
        """

        def has_text(token: int) -> bool:
            return token < self.vocabulary and token not in self.special

        start = max(0, len(tokens) - size - EVERY)
        while start > 0 and sum(map(has_text, tokens[start:].tolist())) < size + EVERY:
            start = max(0, 2 * start - len(tokens))
        return start

    def _texts(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield the text of these tokens with special tokens, and if there are any, also without them."""
        yield self.tokenizer.decode(tokens)
        if not self.special.isdisjoint(tokens):
            yield self.tokenizer.decode(tokens, skip_special_tokens=True)


class StopTokens:
    """Knows which of ``vocab`` tokens may complete a stop string; ``strings`` are those of each request.

    A text is searched when such a token is sampled instead of after every token. The result does not depend on it:
    `StopStrings` searches every text after a few tokens anyway, for strings that end in another way, such as with a
    space that a tokenizer puts between two tokens. This only saves the tokens that would be sampled until then.
    """

    def __init__(self, strings: Sequence[Sequence[str]], tokenizer: Any, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        sets: dict[tuple[str, ...], int] = {}
        self._set_of = np.array([sets.setdefault(tuple(texts), len(sets)) for texts in strings])
        """The set of stop strings of each request."""
        self._last_characters = [{text[-1] for text in texts} for texts in sets]
        self._table = np.full((len(sets), vocab), _UNKNOWN, dtype=np.int8)

    def among(self, requests: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens may complete a stop string of the request that sampled them.

        False for tokens beyond ``vocab``, which some models can read but not sample.
        """
        valid = tokens < self._vocab
        sets, tokens = self._set_of[requests], np.where(valid, tokens, 0)
        unknown = self._table[sets, tokens] == _UNKNOWN
        for index, token in zip(sets[unknown].tolist(), tokens[unknown].tolist(), strict=True):
            self._table[index, token] = self._may_complete(self._last_characters[index], token)
        return valid & (self._table[sets, tokens] == 1)

    def _may_complete(self, last_characters: set[str], token: int) -> bool:
        text = self._tokenizer.decode([token]) if last_characters else ""
        return HALF in text or not last_characters.isdisjoint(text)
