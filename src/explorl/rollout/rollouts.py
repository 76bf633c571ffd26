"""The results of `Engine.generate` and `Session`: completions with their token statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class ToolCall:
    """A tool call that a completion made, and its result."""

    source: str
    """The code."""
    status: str
    """The status of `explorl.sandbox.interpreter.CellResult`, or "refused" if no calls were left."""
    text: str
    """Its output."""
    begin: int
    """The first token that was forced for it: its output as the model sees it, in rare cases preceded by the end of the
    call, if a sampled token held the end of the call and more."""
    end: int
    """The end of these tokens, exclusive."""
    seconds: float = 0.0
    """Wall-clock time."""
    empty_output: str = ""
    """The text of these tokens if the call had no output."""


@dataclass(eq=False)
class Rollout:
    """One completion with the statistics of its tokens.

    Tokens that were forced (`Session.extend`), such as a tool's output, have no statistics: they are False in
    ``sampled``, NaN in ``logps``, ``sampling_logps`` and ``entropy``, and 0 in ``branching``.
    """

    request: int
    """Index of the request: all samples of the first prompt, then of the second, and so on. In a session, the
    number of the sequence."""
    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logps: Float[Tensor, " time"]
    """log π of each token at the request's temperature (at 1 if it is greedy), over the whole vocabulary."""
    sampling_logps: Float[Tensor, " time"]
    """log q of each token in the distribution that it was sampled from, after all warpers; 0 if the request is greedy.
    If bottom-p is applied at random per token, q is the mixture f · q_bottom + (1 − f) · q_rest over both outcomes."""
    entropy: Float[Tensor, " time"]
    """H(π) in nats at temperature 1."""
    branching: Int[Tensor, " time"]
    """Size of the smallest set of top tokens with mass ≥ 0.95 at temperature 1."""
    finish_reason: FinishReason | None
    """None if it has not ended, which only happens in a session."""
    error: str = ""
    """The error message if ``finish_reason`` is "error"; the tokens before it are kept."""
    tokenizer: Any = field(default=None, repr=False)
    min_p_mass: Float[Tensor, " time"] | None = None
    """Mass, at the request's temperature, of the tokens at least `SamplingParams.min_p_mass` times as likely as the
    most likely one; 0 if the sampled token is not among them. None if it was not requested."""
    stop: str | None = None
    """The stop string that ended the completion, if one did."""
    sampled: Bool[Tensor, " time"] = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    """True for sampled tokens, False for forced ones: TRL's ``env_mask``."""
    parent: int | None = None
    """The number of the sequence it was forked from."""
    forked_at: int | None = None
    """Number of tokens it shares with that sequence."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in order: see `explorl.rollout.tool_use`."""

    def __post_init__(self) -> None:
        if len(self.sampled) == 0:  # the default
            self.sampled = torch.ones(len(self.token_ids), dtype=torch.bool)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with copies of tensors: pickle would store the whole batch that they are views of."""
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.__dict__.items()}

    @cached_property
    def text(self) -> str:
        """The completion without special tokens, up to its stop string; empty if the engine has no tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self._decode(len(self))
        if self.stop is None:
            return text
        earlier = self._decode(len(self) - 1).rstrip("\ufffd")  # a part of a character
        begin = text.find(self.stop, max(0, len(earlier) - len(self.stop) + 1))  # a tool may have written it earlier
        return text if begin < 0 else text[: begin + len(self.stop)]

    @property
    def text_after_stop(self) -> str:
        """The text after the stop string in the token that completes it."""
        return "" if self.stop is None or self.tokenizer is None else self._decode(len(self))[len(self.text) :]

    @cached_property
    def own_text(self) -> str:
        """``text`` with empty tool outputs: the model's own words, in which the answer is looked for.

        A program could print anything, including an answer in its tags.
        """
        parts = self._parts_between_outputs()
        return parts[0] + "".join(call.empty_output + part for call, part in zip(self.calls, parts[1:], strict=True))

    @property
    def sampled_text(self) -> str:
        """``text`` without tool outputs and their delimiters: what text metrics measure."""
        return "\n".join(self._parts_between_outputs())

    def _parts_between_outputs(self) -> list[str]:
        """Return the text before, between and after the tool outputs."""
        ends = [0, *(len(self._decode(call.end)) for call in self.calls)]
        begins = [*(len(self._decode(call.begin)) for call in self.calls), len(self.text)]
        return [self.text[end:begin] for end, begin in zip(ends, begins, strict=True)]

    @property
    def model_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return int(self.sampled.sum())

    def _decode(self, length: int) -> str:
        return str(self.tokenizer.decode(self.token_ids[:length], skip_special_tokens=True))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class PaddedRollouts:
    """All completions of a call as right-padded tensors."""

    token_ids: Int[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    logps: Float[Tensor, "batch time"]
    sampling_logps: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    branching: Int[Tensor, "batch time"]
    prompt_index: Int[Tensor, " batch"]
    truncated: Bool[Tensor, " batch"]
    """True where the completion hit its length limit."""
    sampled: Bool[Tensor, "batch time"]
    """``mask`` without forced tokens: the tokens that are trained on (TRL's ``env_mask``)."""
    min_p_mass: Float[Tensor, "batch time"] | None = None
    drawn_by: Int[Tensor, "batch time"] | None = None
    """If rollouts branch: the distance from a row to the one that sampled its token (`explorl.rollout.branching`)."""


@dataclass(eq=False)
class Rollouts(Sequence[Rollout]):
    """All completions of a call, in the order of the requests."""

    rollouts: list[Rollout]
    prompt_ids: list[list[int]]
    """Tokens of each prompt, a forced prefix included."""
    n: int
    """Samples per prompt."""
    seed: int

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> list[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | list[Rollout]:
        return self.rollouts[index]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @property
    def texts(self) -> list[str]:
        return [rollout.text for rollout in self.rollouts]

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(len(rollout) for rollout in self.rollouts)

    @property
    def errors(self) -> list[Rollout]:
        """The completions that ended with an error, which is in their ``error``."""
        return [rollout for rollout in self.rollouts if rollout.finish_reason == "error"]

    def check(self) -> Rollouts:
        """Return self; raise `RuntimeError` if a completion ended with an error."""
        if self.errors:
            more = f" ({len(self.errors) - 1} more requests failed)" if len(self.errors) > 1 else ""
            raise RuntimeError(self.errors[0].error + more)
        return self

    def by_prompt(self) -> list[list[Rollout]]:
        """Return the completions of each prompt."""
        return [self.rollouts[i : i + self.n] for i in range(0, len(self.rollouts), self.n)]

    def padded(self, pad_token_id: int = 0, device: torch.device | str = "cpu") -> PaddedRollouts:
        """Return right-padded tensors; statistics are 0 on padding and on forced tokens."""
        lengths = torch.tensor([len(rollout) for rollout in self.rollouts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]

        def pad(rows: list[Tensor], value: float) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

        sampled = pad([r.sampled for r in self.rollouts], False)

        def pad_stats(rows: list[Tensor]) -> Tensor:
            return pad(rows, 0.0).masked_fill(~sampled, 0.0)

        masses = [r.min_p_mass for r in self.rollouts if r.min_p_mass is not None]
        return PaddedRollouts(
            token_ids=pad([torch.tensor(r.token_ids, dtype=torch.long) for r in self.rollouts], pad_token_id),
            mask=mask.to(device),
            logps=pad_stats([r.logps for r in self.rollouts]),
            sampling_logps=pad_stats([r.sampling_logps for r in self.rollouts]),
            entropy=pad_stats([r.entropy for r in self.rollouts]),
            branching=pad([r.branching for r in self.rollouts], 0),
            prompt_index=torch.tensor([r.prompt_index for r in self.rollouts]).to(device),
            truncated=torch.tensor([r.finish_reason == "length" for r in self.rollouts]).to(device),
            sampled=sampled,
            min_p_mass=pad_stats(masses) if len(masses) == len(self.rollouts) else None,
        )
