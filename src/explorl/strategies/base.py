"""The interface of a strategy: what it sees (`Batch`) and which hooks it can implement (`Strategy`).

A strategy is a frozen dataclass of hyperparameters with any of the hooks below. The trainer calls the hooks of each
strategy in the order of the user's list, once per generation batch and on the *whole* batch of all processes, before
it is split into micro-batches; the loss then only multiplies. Results therefore do not depend on the micro-batch size
or the number of processes. Only `penalty` is called again for each micro-batch, because it carries gradient.

A strategy that computes its statistics through `Batch.collectives` does not need the whole batch and sets
`Strategy.acts_on_parts`. If all strategies of a list do, each process keeps only its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import LOCAL, Collectives


@dataclass(frozen=True)
class Batch:
    """A generation batch, gathered over all processes: B sequences of up to T completion tokens, right-padded.

    If all strategies act on parts, the B rows are those of this process, T is still that of the whole batch, and
    `collectives` combines values over the processes. When strategies see the batch, the policy has not been updated
    since it sampled: ``logps`` equals ``old_logps``.
    """

    logps: Float[Tensor, "batch time"]
    """log π_θ of each sampled token at its row's training temperature, which is its sampling temperature unless a
    strategy sets another (see `Sampling`). Carries gradient in `Strategy.penalty`."""
    old_logps: Float[Tensor, "batch time"]
    """log π_θ at the time of sampling, at the same temperature."""
    ref_logps: Float[Tensor, "batch time"] | None
    """log π_ref; None if β = 0."""
    sampling_logps: Float[Tensor, "batch time"] | None
    """log q of each sampled token under the distribution it was sampled from; None if not recorded."""
    entropy: Float[Tensor, "batch time"]
    """H_t = −Σ π log π in nats at temperature 1, detached."""
    branching: Float[Tensor, "batch time"] | None
    """Size of the smallest set of top tokens with mass ≥ 0.95; None if not recorded."""
    mask: Float[Tensor, "batch time"]
    """1 on completion tokens that count: neither padding nor a tool's output."""
    advantages: Float[Tensor, "batch time"]
    rewards: Float[Tensor, " batch"]
    """Total reward over all reward functions; NaN if none could score the completion. After the `Strategy.rewards`
    hooks it holds their result, while `correct` and `correctness` keep the task's values."""
    correct: Bool[Tensor, " batch"]
    """True if the answer is correct as the run defines it: by a named reward function and a threshold."""
    correctness: Float[Tensor, " batch"]
    """The reward that decides whether an answer is correct; NaN if it could not be scored."""
    group: Int[Tensor, " batch"]
    """Index of the sequence's prompt."""
    truncated: Bool[Tensor, " batch"]
    """True if the sequence reached the length limit."""
    temperature: Float[Tensor, " batch"]
    """Sampling temperature of each row; the mean over the row's tokens if it changes with the position."""
    step: int
    """Optimizer steps taken so far."""
    prompts: Sequence[str] = ()
    """Text of each row's prompt, which serves as the key for what a strategy remembers about it."""
    answers: Sequence[str | None] = ()
    """Each row's final answer in the task's normal form, so that equivalent answers are equal; None if there is none.
    Needed because rewards tell right from wrong, but not one wrong answer from another. Empty unless a strategy
    requests it (`Strategy.needs_answers`). The policy wrote these texts: they can have any length and any character."""
    max_length: int | None = None
    """Maximum number of tokens of a completion; None if there is no limit."""
    min_p_mass: Float[Tensor, "batch time"] | None = None
    """Probability mass of the tokens that are at least `Strategy.needs_min_p_mass` times as likely as the most likely
    one, at the sampling temperature; 0 if the sampled token is not among them. Needed because the mass is a sum over
    the vocabulary, whose logits are not kept. None unless a strategy requests it."""
    drawn_by: Int[Tensor, "batch time"] | None = None
    """For completions that branch off others: offset from each row to the row that sampled its token, 0 for its own.
    Rows i and j share the token at t if i + drawn_by[i, t] = j + drawn_by[j, t]. It is an offset rather than an index
    because groups are moved within a batch. None unless a strategy lets completions branch (`Strategy.branching`)."""
    collectives: Collectives = field(default=LOCAL, repr=False, compare=False)
    """Sums, gathered rows and similar operations over all processes; trivial if this batch holds all rows."""

    def with_(self, **changes: Any) -> Batch:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepState:
    """What `Strategy.after_step` receives after an optimizer step: its state, and actions to take."""

    step: int
    """Optimizer steps taken, including the one just finished."""
    reward: float
    """Mean reward of the latest generation batch."""
    reset_reference: Callable[[], None]
    """Copy the policy into the reference: π_ref ← π_θ."""
    reset_optimizer: Callable[[], None]
    """Clear the optimizer's state (its moments), but not the learning-rate schedule."""


Sampling = Mapping[str, Sequence[float] | Sequence[Sequence[float]]]
"""Sampling parameters by name, with one value per row: ``temperature``, ``top_p``, ``top_k``, ``min_p``,
``repetition_penalty``, ``bottom_p``, ``bottom_p_frequency``, ``bottom_p_per_sequence`` (0 or 1), and
``training_temperature``, the temperature of the training log-probabilities (by default the row's ``temperature``).

``temperature_by_position`` has one sequence per row: the temperature of its first token, of its second, and so on. The
last value applies to all further tokens. It overrides ``temperature`` in sampling and in the training
log-probabilities. It is a separate key because one value per row cannot express a temperature that changes within a
completion.

``tool_calls``: how often a row may call the trainer's interpreter, from 0 to the tool's own limit."""


@dataclass(frozen=True)
class Strategy:
    """Base class of all strategies. Every hook is optional; a subclass overrides those it needs.

    Order of the calls for one generation batch: `order` (once, on the data set), `sampling`, `branching`, `rewards`,
    `advantages`, `select`, `weights`, `clip`, `keep`; then `penalty` for each micro-batch, and `after_step` after each
    optimizer step.
    """

    name: ClassVar[str] = ""
    """Name in configs and logs."""
    paper: ClassVar[str] = ""
    """Source, in one line."""
    replaces_advantage: ClassVar[bool] = False
    """True if `advantages` ignores the previous values. Two such strategies in one list are an error."""
    weighs_kl: ClassVar[bool] = False
    """True if `weights` multiplies the KL term as well as the policy term."""
    needs_reuse: ClassVar[bool] = False
    """True if the strategy has no effect on a batch that is used for a single optimizer step."""
    needs_sampling_logps: ClassVar[bool] = False
    """True if it reads `Batch.sampling_logps`, which the engine and vLLM record and `model.generate` does not."""
    needs_correct: ClassVar[bool] = False
    """True if it needs to know which answers are correct; a property if that depends on a hyperparameter."""
    needs_answers: ClassVar[bool] = False
    """True if it reads `Batch.answers`, which come from the task or from a function passed to the trainer."""
    needs_min_p_mass: ClassVar[float | None] = None
    """For a strategy that reads `Batch.min_p_mass`: the minimum ratio to the most likely token's probability, such as
    0.02; a property if it is a hyperparameter. Only the engine records this mass."""
    needs_interpreter: ClassVar[bool] = False
    """True if it limits tool calls (``tool_calls`` of `Sampling`), which requires a tool."""
    acts_on_parts: ClassVar[bool] = False
    """True if every hook returns for its rows what it would return for them in the whole batch, whichever rows a
    `Batch` holds, because it uses `Batch.collectives` for everything beyond a row. Not inherited: a subclass must set
    it again, since its changes may need the whole batch. One strategy without it gives the whole list whole batches."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Removed hyperparameters, each with the end of an error message that says what to write instead."""

    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """State that the strategy keeps from step to step: JSON-serialisable, saved in checkpoints and restored. Each
    trainer starts from a copy of the strategy with an empty memory."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.acts_on_parts = vars(cls).get("acts_on_parts", False)

    def arguments(self) -> Mapping[str, Any]:
        """Return arguments of TRL's `GRPOConfig` to set before the trainer is built."""
        return {}

    def order(self, prompts: Sequence[str]) -> Sequence[int] | None:
        """Return the indices of the prompts to train on, in order; None leaves the data set unchanged."""
        return None

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        """Return sampling parameters for these rows; if several strategies set the same one, the last wins.

        step: optimizer steps taken so far.
        """
        return {}

    def branching(self, step: int) -> Mapping[str, Any] | None:
        """Return the arguments of `explorl.rollout.branching.Branching` to let completions of a prompt branch.

        If several strategies return some, the last wins. This is separate from `sampling`, which describes single
        rows, because branching decides which rows there are.
        """
        return None

    def rewards(self, batch: Batch) -> Float[Tensor, " batch"] | None:
        """Return new total rewards, from which the trainer then computes the advantages as usual.

        Unlike a change to the advantages, a change to the rewards moves the baseline and is divided by the standard
        deviation. Each strategy sees the result of the one before it; logs show the task's own rewards.
        """
        return None

    def select(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """Return 1 for tokens that stay in the loss. Removed tokens still count in all statistics."""
        return None

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """Return new advantages."""
        return None

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """Return factors on the token losses; those of several strategies are multiplied."""
        return None

    def clip(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "batch time"] | float, Float[Tensor, "batch time"] | float] | None:
        """Return (low, high) to clip the ratio to [1 − low, 1 + high]; ``inf`` disables it. The last strategy wins."""
        return None

    def keep(self, batch: Batch) -> Mapping[str, Float[Tensor, "batch time"]]:
        """Return per-token tensors that `penalty` needs; they are split into micro-batches with their rows."""
        return {}

    def penalty(
        self, batch: Batch, kept: Mapping[str, Float[Tensor, "batch time"]]
    ) -> Float[Tensor, "batch time"] | None:
        """Return a term with gradient that is added to the token losses of a micro-batch."""
        return None

    def after_step(self, state: StepState) -> None:
        """Run after each optimizer step."""

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Return numbers to log for this batch, in addition to the changes that the trainer logs for every strategy."""
        return {}

    def check(self, *, num_generations: int) -> None:
        """Raise `ValueError` if the hyperparameters cannot work with this many completions per prompt."""

    def check_calls(self, *, max_calls: int) -> None:
        """Raise `ValueError` if the hyperparameters cannot work with this limit of tool calls per completion."""

    def check_length(self, *, max_completion_length: int | None) -> None:
        """Raise `ValueError` if the hyperparameters cannot work with this limit of tokens per completion."""


def overrides(strategy: Strategy, hook: str) -> bool:
    """Return whether the strategy implements a hook."""
    return getattr(type(strategy), hook) is not getattr(Strategy, hook)


BATCH_HOOKS = ("rewards", "advantages", "select", "weights", "clip", "keep", "metrics")
"""Hooks that receive a generation batch."""


def act_on_parts(strategies: Sequence[Strategy]) -> bool:
    """Return whether every strategy can work with only the rows of its own process."""
    return all(
        strategy.acts_on_parts or not any(overrides(strategy, hook) for hook in BATCH_HOOKS) for strategy in strategies
    )


def per_token(values: Float[Tensor, " batch"], mask: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """Expand one value per sequence to all its tokens."""
    return values.to(mask.dtype).unsqueeze(1).expand_as(mask)


def masked_mean(
    values: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], dim: int | None = None
) -> Tensor:
    """Return the mean over counted tokens, 0 if there are none. Padding may hold anything, including NaN."""
    masked = torch.where(mask > 0, values, torch.zeros_like(values))
    if dim is None:
        return masked.sum() / mask.sum().clamp(min=1)
    return masked.sum(dim) / mask.sum(dim).clamp(min=1)
