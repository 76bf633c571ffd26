"""What `Engine.generate` and a `Session` return."""

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
    """A call that a completion made, and what came of it."""

    source: str
    """The code."""
    status: str
    """What became of it, as `explorl.sandbox.interpreter.CellResult` says; "refused" where no calls were left."""
    text: str
    """What it showed."""
    begin: int
    """The first token that was forced for it: its output, as the model sees it, and in rare cases before that the end
    of the call, where a token held the end of the call and more."""
    end: int
    """Behind the last of these tokens."""
    seconds: float = 0.0
    """Time on the clock."""
    blank: str = ""
    """What these tokens would say had it shown nothing."""


@dataclass(eq=False)
class Rollout:
    """One completion and what was recorded about each of its tokens.

    Tokens that were forced (`Session.extend`), such as what a tool said, carry no record: they are False in
    ``sampled``, NaN in ``logps``, ``sampling_logps`` and ``entropy``, and 0 in ``branching``.
    """

    request: int
    """Index of the request: all samples of the first prompt, then of the second, and so on. In a session, the row."""
    prompt_index: int
    sample_index: int
    token_ids: list[int]
    logps: Float[Tensor, " time"]
    """log π of each token at the request's temperature (at 1 where it is greedy), over the whole vocabulary."""
    sampling_logps: Float[Tensor, " time"]
    """log q of each token in the distribution that it was drawn from, after all warpers; 0 where it is greedy. Where
    bottom-p is applied by chance per token, this is the mixture f · q_bottom + (1 − f) · q_rest over both outcomes."""
    entropy: Float[Tensor, " time"]
    """H(π) in nats at temperature 1."""
    branching: Int[Tensor, " time"]
    """Size of the smallest set of top tokens with mass ≥ 0.95 at temperature 1."""
    finish_reason: FinishReason | None
    """None where it has not ended, which only a session shows."""
    error: str = ""
    """What went wrong, where ``finish_reason`` is "error"; the tokens before it are kept."""
    tokenizer: Any = field(default=None, repr=False)
    min_p_mass: Float[Tensor, " time"] | None = None
    """Mass, at the request's temperature, of the tokens at least `SamplingParams.min_p_mass` times as likely as the
    likeliest one; 0 where the sampled token is none of them. None where it was not asked for."""
    top_ids: Int[Tensor, "time k"] | None = None
    """The k most likely tokens at each position, where ``SamplingParams.logprobs`` asks for them: by falling logit, of
    equal ones the lower id first, whatever bias, bans and warpers say."""
    top_logps: Float[Tensor, "time k"] | None = None
    """Their log π, as in ``logps``."""
    stop: str | None = None
    """The stop string that ended the completion; None where something else did."""
    sampled: Bool[Tensor, " time"] = field(default_factory=lambda: torch.ones(0, dtype=torch.bool))
    """True where a token was sampled, False where it was forced: TRL's ``env_mask``."""
    parent: int | None = None
    """The row that it was forked from."""
    forked_at: int | None = None
    """How many of its tokens it has from there."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of a tool, in order: see `explorl.rollout.tool_use`."""

    def __post_init__(self) -> None:
        if len(self.sampled) == 0:  # not given
            self.sampled = torch.ones(len(self.token_ids), dtype=torch.bool)

    def __getstate__(self) -> dict[str, Any]:
        """Its own part of tensors that it shares with a batch: pickle would store all of them with each rollout."""
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.__dict__.items()}

    @cached_property
    def text(self) -> str:
        """The completion without special tokens, up to its stop string; empty where the engine has no tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self._decoded(len(self))
        if self.stop is None:
            return text
        earlier = self._decoded(len(self) - 1).rstrip("\ufffd")  # a part of a character
        begin = text.find(self.stop, max(0, len(earlier) - len(self.stop) + 1))  # not one that a tool wrote before
        return text if begin < 0 else text[: begin + len(self.stop)]

    @property
    def behind_stop(self) -> str:
        """What the token that completes the stop string says behind it."""
        return "" if self.stop is None or self.tokenizer is None else self._decoded(len(self))[len(self.text) :]

    @cached_property
    def own_text(self) -> str:
        """``text`` with every output of a tool left blank: what the model itself said, and what answers are read from.

        A program can print anything, an answer in its tags too.
        """
        own = self._own_parts()
        return own[0] + "".join(call.blank + part for call, part in zip(self.calls, own[1:], strict=True))

    @property
    def sampled_text(self) -> str:
        """``text`` without the outputs of tools and all that belongs to them: what is measured."""
        return "\n".join(self._own_parts())

    def _own_parts(self) -> list[str]:
        """The text before, between and behind the outputs of tools."""
        ends = [0, *(len(self._decoded(call.end)) for call in self.calls)]
        begins = [*(len(self._decoded(call.begin)) for call in self.calls), len(self.text)]
        return [self.text[end:begin] for end, begin in zip(ends, begins, strict=True)]

    @property
    def model_tokens(self) -> int:
        """Tokens that the model sampled."""
        return int(self.sampled.sum())

    def _decoded(self, length: int) -> str:
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
    """``mask`` without the tokens that were forced: those that are learnt from (TRL's ``env_mask``)."""
    min_p_mass: Float[Tensor, "batch time"] | None = None
    drawn_by: Int[Tensor, "batch time"] | None = None
    """Where rollouts branch: how far from a row that one stands which drew its token (`explorl.rollout.branching`)."""


@dataclass(eq=False)
class Rollouts(Sequence[Rollout]):
    """All completions of a call, in the order of the requests."""

    rollouts: list[Rollout]
    prompt_ids: list[list[int]]
    """Tokens of each prompt, a forced prefix included."""
    n: int
    """Samples a prompt."""
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
        """Tokens in all."""
        return sum(len(rollout) for rollout in self.rollouts)

    @property
    def errors(self) -> list[Rollout]:
        """The completions that broke off; each says why in ``error``."""
        return [rollout for rollout in self.rollouts if rollout.finish_reason == "error"]

    def check(self) -> Rollouts:
        """Itself, or `RuntimeError` where a completion broke off."""
        if self.errors:
            more = f" (and so in {len(self.errors) - 1} more requests)" if len(self.errors) > 1 else ""
            raise RuntimeError(self.errors[0].error + more)
        return self

    def by_prompt(self) -> list[list[Rollout]]:
        """The samples of each prompt."""
        return [self.rollouts[i : i + self.n] for i in range(0, len(self.rollouts), self.n)]

    def padded(self, pad_token_id: int = 0, device: torch.device | str = "cpu") -> PaddedRollouts:
        """Right-padded tensors; statistics are 0 on padding and on forced tokens."""
        lengths = torch.tensor([len(rollout) for rollout in self.rollouts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]

        def pad(rows: list[Tensor], value: float) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value).to(device)

        sampled = pad([r.sampled for r in self.rollouts], False)

        def known(rows: list[Tensor]) -> Tensor:
            return pad(rows, 0.0).masked_fill(~sampled, 0.0)

        masses = [r.min_p_mass for r in self.rollouts if r.min_p_mass is not None]
        return PaddedRollouts(
            token_ids=pad([torch.tensor(r.token_ids, dtype=torch.long) for r in self.rollouts], pad_token_id),
            mask=mask.to(device),
            logps=known([r.logps for r in self.rollouts]),
            sampling_logps=known([r.sampling_logps for r in self.rollouts]),
            entropy=known([r.entropy for r in self.rollouts]),
            branching=pad([r.branching for r in self.rollouts], 0),
            prompt_index=torch.tensor([r.prompt_index for r in self.rollouts]).to(device),
            truncated=torch.tensor([r.finish_reason == "length" for r in self.rollouts]).to(device),
            sampled=sampled,
            min_p_mass=known(masses) if len(masses) == len(self.rollouts) else None,
        )
