"""What a strategy sees and what it may say: `Batch` and `Strategy`.

A strategy is a frozen dataclass of hyperparameters with any of the hooks below. The trainer calls each hook of each
strategy in the order in which the user listed them, once per generation batch and on the *whole* batch of all
processes, before it is split into micro-batches; the loss then only multiplies. So a result never depends on the
micro-batch size or on the number of processes. `penalty` alone is called again for each micro-batch, because it
carries gradient.

A strategy that takes its statistics through `Batch.world` need not see the whole batch, and says so
(`Strategy.acts_on_parts`). Where all strategies of a list do, each process keeps to its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.strategies._lib.collectives import ALONE, World


@dataclass(frozen=True)
class Batch:
    """A generation batch, gathered over all processes: B sequences of up to T completion tokens, right-padded.

    Where all strategies act on parts, B are this process's own rows, T is still that of the whole batch, and `world` is
    how to ask for the others. When the strategies see it, the policy has not moved since it sampled: ``logps`` equals
    ``old_logps``.
    """

    logps: Float[Tensor, "batch time"]
    """log π_θ of each sampled token at its row's training temperature (which is the one that it was sampled at, unless
    a strategy says otherwise, see `Sampling`); in `Strategy.penalty` it carries gradient."""
    old_logps: Float[Tensor, "batch time"]
    """log π_θ at the time of sampling, at the same temperature."""
    ref_logps: Float[Tensor, "batch time"] | None
    """log π_ref, None where β = 0."""
    sampling_logps: Float[Tensor, "batch time"] | None
    """log q, of the distribution that was really sampled from; None where it was not recorded."""
    entropy: Float[Tensor, "batch time"]
    """H_t = −Σ π log π in nats at temperature 1, detached."""
    branching: Float[Tensor, "batch time"] | None
    """Size of the smallest set of top tokens with mass ≥ 0.95; None where it was not recorded."""
    mask: Float[Tensor, "batch time"]
    """1 on completion tokens that count: neither padding nor a tool's output."""
    advantages: Float[Tensor, "batch time"]
    rewards: Float[Tensor, " batch"]
    """The total reward, over all reward functions; NaN where none could score the answer. Once the `Strategy.rewards`
    hooks have spoken, what they left of it; `correct` and `correctness` stay the task's own."""
    correct: Bool[Tensor, " batch"]
    """True where the answer is correct, as the run defines it: a named reward function and a threshold."""
    correctness: Float[Tensor, " batch"]
    """The reward that decides whether an answer is correct; NaN where it could not be scored."""
    group: Int[Tensor, " batch"]
    """Which prompt a sequence answers."""
    truncated: Bool[Tensor, " batch"]
    """True where the sequence hit the length limit."""
    temperature: Float[Tensor, " batch"]
    """What each row was sampled at; its mean over the row's tokens where it changes with the position."""
    step: int
    """Optimizer steps taken so far."""
    prompts: Sequence[str] = ()
    """Text of each row's prompt: the key under which a strategy may remember it."""
    answers: Sequence[str | None] = ()
    """Each row's final answer in the task's normal form, equal for answers that say the same; None where there is none.
    Needed because rewards tell right from wrong, but not one wrong answer from another. Empty unless a strategy asks
    (`Strategy.needs_answers`). A policy wrote them: they may be of any length and hold any character."""
    max_length: int | None = None
    """The most tokens that an answer may have; None where there is no bound."""
    min_p_mass: Float[Tensor, "batch time"] | None = None
    """Mass of the tokens that are at least `Strategy.needs_min_p_mass` times as likely as the likeliest one, at the
    temperature of sampling; 0 where the sampled token is none of them. Needed because the mass is a sum over the
    vocabulary, which nobody keeps. None unless a strategy asks."""
    drawn_by: Int[Tensor, "batch time"] | None = None
    """Where answers branch off others: how far from a row that row stands which drew its token, 0 for its own; so rows
    i and j have the same token at t where i + drawn_by[i, t] = j + drawn_by[j, t]. It is a distance because groups
    change places. None unless a strategy lets them branch (`Strategy.branching`)."""
    world: World = field(default=ALONE, repr=False, compare=False)
    """Sums, row scalars and the like over the rows of all processes; where all of them are here, it is just those."""

    def with_(self, **changes: Any) -> Batch:
        """A copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class StepState:
    """What `Strategy.after_step` sees once an optimizer step is done, and what it may do."""

    step: int
    """Optimizer steps taken, the one just ended included."""
    reward: float
    """Mean reward of the latest generation batch."""
    reset_reference: Callable[[], None]
    """π_ref ← π_θ."""
    reset_optimizer: Callable[[], None]
    """Empties the optimizer's state (the moments), not its learning-rate schedule."""


Sampling = Mapping[str, Sequence[float] | Sequence[Sequence[float]]]
"""Sampling parameters by name, one value per row: ``temperature``, ``top_p``, ``top_k``, ``min_p``,
``repetition_penalty``, ``bottom_p``, ``bottom_p_frequency``, ``bottom_p_per_sequence`` (0 or 1); and
``training_temperature``: temperature of the training log-probabilities; the row's temperature where absent.

``temperature_by_position`` has one sequence per row: the temperature of its first token, of its second, and so on; the
last one holds on. It is a key of its own because what holds for a row alone cannot say that an answer begins hot and
ends cool. It takes the place of ``temperature``, in sampling and in the training log-probabilities.

``tool_calls``: how often a row may call the trainer's interpreter, from 0 to the tool's own limit."""


@dataclass(frozen=True)
class Strategy:
    """Base of all strategies. Every hook is optional; a subclass overrides those it needs.

    Order of the calls for one generation batch: `order` (once, on the data set), `sampling`, `branching`, `rewards`,
    `advantages`, `select`, `weights`, `clip`, `keep`; then `penalty` for each micro-batch, and `after_step` after each
    optimizer step.
    """

    name: ClassVar[str] = ""
    """Name in configs and logs."""
    paper: ClassVar[str] = ""
    """Where it comes from, in one line."""
    replaces_advantage: ClassVar[bool] = False
    """True where `advantages` ignores what stood there before. Two such strategies in one list are an error."""
    weighs_kl: ClassVar[bool] = False
    """True where `weights` multiplies the KL term as well as the policy term."""
    needs_reuse: ClassVar[bool] = False
    """True where it does nothing on a batch that is used for a single optimizer step."""
    needs_sampling_logps: ClassVar[bool] = False
    """True where it reads `Batch.sampling_logps`, which the engine and vLLM record and `model.generate` does not."""
    needs_correct: ClassVar[bool] = False
    """True where the strategy asks what is correct; where that depends on its hyperparameters, a property."""
    needs_answers: ClassVar[bool] = False
    """True where it reads `Batch.answers`: from the task, or from a function that the user gives the trainer."""
    needs_min_p_mass: ClassVar[float | None] = None
    """Where it reads `Batch.min_p_mass`: the least share of the likeliest token's probability, such as 0.02; a property
    where that is a hyperparameter. The engine alone records it."""
    needs_interpreter: ClassVar[bool] = False
    """True where it says how often answers may call a tool (``tool_calls`` of `Sampling`), which needs one."""
    acts_on_parts: ClassVar[bool] = False
    """True where every hook gives for its rows what it would give for them in the whole batch, whichever rows a `Batch`
    holds, because it asks `Batch.world` for whatever goes beyond a row. It is not inherited: a subclass says it anew,
    since what it changes may not know of parts. A list with a single strategy that is silent about it gets the whole
    batch."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Hyperparameters that it no longer has, and what to write instead: the end of an error message."""

    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What the strategy remembers from step to step: JSON-serialisable, saved in checkpoints and restored. Each trainer
    starts from a copy of the strategy with an empty one."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.acts_on_parts = vars(cls).get("acts_on_parts", False)

    def arguments(self) -> Mapping[str, Any]:
        """Arguments of TRL's `GRPOConfig` that this strategy sets before the trainer is built."""
        return {}

    def order(self, prompts: Sequence[str]) -> Sequence[int] | None:
        """Indices of the prompts to train on, in their order; None leaves the data set as it is."""
        return None

    def sampling(self, prompts: Sequence[str], step: int) -> Sampling:
        """Sampling parameters that this strategy sets for these rows; the later strategy wins.

        step: optimizer steps taken so far.
        """
        return {}

    def branching(self, step: int) -> Mapping[str, Any] | None:
        """Arguments of `explorl.rollout.branching.Branching` where the answers to a prompt are to branch off each
        other; of several strategies that give some, the last one counts. Needed because `sampling` speaks of single
        rows, and this decides which rows there are."""
        return None

    def rewards(self, batch: Batch) -> Float[Tensor, " batch"] | None:
        """New total rewards, before they are normalised: the trainer computes the advantages anew from them, as it does
        from the task's own. Needed because what is added after normalisation is not divided by the deviation, and moves
        no baseline. Each strategy sees what the one before it left; logs show the task's own rewards."""
        return None

    def select(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """1 on tokens that stay in the loss. It takes tokens out of the loss and out of no statistic."""
        return None

    def advantages(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """New advantages."""
        return None

    def weights(self, batch: Batch) -> Float[Tensor, "batch time"] | None:
        """Factors on the token losses; those of several strategies multiply."""
        return None

    def clip(
        self, batch: Batch
    ) -> tuple[Float[Tensor, "batch time"] | float, Float[Tensor, "batch time"] | float] | None:
        """(low, high): the ratio is clipped to [1 − low, 1 + high]. ``inf`` is no clip; the later strategy wins."""
        return None

    def keep(self, batch: Batch) -> Mapping[str, Float[Tensor, "batch time"]]:
        """Per-token tensors that `penalty` will need: they travel with their rows into the micro-batches."""
        return {}

    def penalty(
        self, batch: Batch, kept: Mapping[str, Float[Tensor, "batch time"]]
    ) -> Float[Tensor, "batch time"] | None:
        """A term with gradient that is added to the token losses of a micro-batch."""
        return None

    def after_step(self, state: StepState) -> None:
        """Called after each optimizer step."""

    def metrics(self, batch: Batch) -> Mapping[str, float]:
        """Numbers to log for this batch, beyond the changes of advantages, weights and mask that the trainer logs."""
        return {}

    def check(self, *, num_generations: int) -> None:
        """Raises `ValueError` where the hyperparameters cannot work with this many samples per prompt."""

    def check_calls(self, *, max_calls: int) -> None:
        """Raises `ValueError` where the hyperparameters cannot work with a tool that an answer may call so often."""

    def check_length(self, *, max_completion_length: int | None) -> None:
        """Raises `ValueError` where the hyperparameters cannot work with answers of at most so many tokens."""


def overrides(strategy: Strategy, hook: str) -> bool:
    """Whether the strategy has a hook of its own."""
    return getattr(type(strategy), hook) is not getattr(Strategy, hook)


BATCH_HOOKS = ("rewards", "advantages", "select", "weights", "clip", "keep", "metrics")
"""Those that see a generation batch."""


def act_on_parts(strategies: Sequence[Strategy]) -> bool:
    """Whether none of the strategies needs to see more than its own process's rows."""
    return all(
        strategy.acts_on_parts or not any(overrides(strategy, hook) for hook in BATCH_HOOKS) for strategy in strategies
    )


def per_token(values: Float[Tensor, " batch"], mask: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    """One value per sequence, spread over its tokens."""
    return values.to(mask.dtype).unsqueeze(1).expand_as(mask)


def masked_mean(
    values: Float[Tensor, "batch time"], mask: Float[Tensor, "batch time"], dim: int | None = None
) -> Tensor:
    """Mean over the counted tokens; 0 where there are none. Padding may hold anything, NaN included."""
    kept = torch.where(mask > 0, values, torch.zeros_like(values))
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
