"""A completion in the making: its tokens, what was recorded of them, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.requests import Requests
from explorl.rollout.rollouts import FinishReason, Rollout

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of what is recorded of one token."""
RECORDS: Mapping[str, Kind] = {
    "logps": (torch.float32, ()),
    "sampling_logps": (torch.float32, ()),
    "entropy": (torch.float32, ()),
    "branching": (torch.int32, ()),
    "sampled": (torch.bool, ()),
}
"""What every rollout says of each token."""


def recorded(tops: int, mass: bool) -> Mapping[str, Kind]:
    """What is recorded where so many of the likeliest tokens are wanted, or the mass of the min-p set."""
    more: dict[str, Kind] = {"min_p_mass": (torch.float32, ())} if mass else {}
    if tops:
        more |= {"top_ids": (torch.int32, (tops,)), "top_logps": (torch.float32, (tops,))}
    return {**RECORDS, **more} if more else RECORDS


@dataclass(eq=False, frozen=True)
class PromptTokens:
    """A prompt that is computed once for all samples of it. Equal prompts of a session are the same object."""

    tokens: tuple[int, ...]

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are stored: all but the last, which is the first input of the decoding."""
        return len(self.tokens) - 1


@dataclass(eq=False, slots=True)
class Sample:
    """One row of a session: a prompt, the completion so far, and how to go on."""

    index: int
    """Its number in the session."""
    prompt: PromptTokens
    requests: Requests
    """Where its sampling numbers are found, under ``request``."""
    request: int
    prompt_index: int
    sample_index: int
    key: int
    """Of its stream of random numbers (`explorl.rollout.sampling.rng`)."""
    limit: int
    """Most tokens of the completion, forced ones included."""
    tokens: list[int] = field(default_factory=list)
    """The completion as far as the host knows it."""
    pieces: list[dict[str, Tensor]] = field(default_factory=list)
    """What was recorded of ``tokens``, in order."""
    curve: int = 0
    """Which of the session's temperatures by position it has."""
    stop_set: int = 0
    """Which of the session's sets of stop tokens."""
    bias_set: int = 0
    """Which of the session's rows of bias and bans."""
    kinds: Mapping[str, Kind] = field(default_factory=lambda: RECORDS)
    """What is recorded of each token."""
    quiet: list[tuple[int, int]] = field(default_factory=list)
    """Stretches of tokens that no stop string begins in: what was forced, and the last token of what stopped it."""
    searched: int = 0
    """Tokens in which stop strings were looked for."""
    parent: int | None = None
    forked_at: int | None = None
    forks: int = 0
    """Samples that were forked from it."""
    seat: int = -1
    """−1 while it is not being decoded."""
    stop: str | None = None
    """The stop string that ended it."""
    reason: FinishReason | None = None
    """Why it ended; None while it goes on or waits to."""
    error: str = ""
    cancelled: bool = False
    kept: Any = None
    """Keys and values that the memory keeps of it while it has no seat."""

    def forget(self) -> None:
        """Gives up what is kept of it: it will be computed again from its tokens."""
        if self.kept is not None:
            self.kept.drop()
        self.kept = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return (*self.prompt.tokens, *self.tokens)

    def number(self, name: str) -> Any:
        """A sampling number of it."""
        return self.requests.rows[name][self.request]

    @property
    def tops(self) -> int:
        """How many of the likeliest tokens are recorded."""
        return self.kinds["top_ids"][1][0] if "top_ids" in self.kinds else 0

    @property
    def priority(self) -> tuple[bool, int, int]:
        """Who goes first where not all have seats (`Scheduler`): the smallest."""
        return not self.tokens, -self.limit, self.index

    def append(self, tokens: Sequence[int], records: dict[str, Tensor]) -> None:
        """Sampled tokens and what was recorded of them."""
        self.tokens.extend(tokens)
        self.pieces.append(records)

    def force(self, tokens: Sequence[int]) -> None:
        """Tokens that were not sampled: nothing is known of them."""
        begin = len(self.tokens)
        if self.stop is not None:
            self.quiet.append((begin - 1, begin))
        if tokens:
            self.tokens.extend(tokens)
            self.pieces.append({name: _unknown(kind, len(tokens)) for name, kind in self.kinds.items()})
            self.quiet.append((begin, len(self.tokens)))

    def floor(self, length: int) -> int:
        """How many of the first ``length`` tokens a stop string cannot begin in."""
        return max((min(end, length) for begin, end in self.quiet if begin < length), default=0)

    def cut(self, length: int) -> None:
        """Gives up tokens at the end."""
        if length < len(self.tokens):
            self.pieces = [self.records(length)]
            del self.tokens[length:]

    def records(self, length: int | None = None) -> dict[str, Tensor]:
        """What was recorded of the first tokens."""
        pieces = self.pieces or [{name: _unknown(kind, 0) for name, kind in self.kinds.items()}]
        joined = pieces[0] if len(pieces) == 1 else {n: torch.cat([p[n] for p in pieces]) for n in pieces[0]}
        return joined if length is None else {name: values[:length] for name, values in joined.items()}

    def rollout(self, tokenizer: Any) -> Rollout:
        """The completion as it stands; ``finish_reason`` is None while it has not ended."""
        return Rollout(
            request=self.index,
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            token_ids=list(self.tokens),
            **self.records(),
            finish_reason=self.reason,
            stop=self.stop,
            error=self.error,
            tokenizer=tokenizer,
            parent=self.parent,
            forked_at=self.forked_at,
            calls=(),
        )


def numbers(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Sampling numbers of these samples."""
    requests = samples[0].requests
    if all(sample.requests is requests for sample in samples):
        which = [sample.request for sample in samples]
        return {name: requests.rows[name][which] for name in names}
    return {name: np.array([sample.number(name) for sample in samples]) for name in names}


def _unknown(kind: Kind, length: int) -> Tensor:
    dtype, shape = kind
    return torch.full((length, *shape), torch.nan if dtype.is_floating_point else 0, dtype=dtype)
