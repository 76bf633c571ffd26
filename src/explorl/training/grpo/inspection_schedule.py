"""The lens: what observers see of a training step, which completions are inspected, and how often.

    class Lengths:
        def see(self, step: StepView) -> dict[str, float]:
            return {"mean_length": step.mask.sum(1).mean().item()}

    ExplorationTrainer(..., observers=[Lengths()])          # logged as lens/mean_length

An observer sees each generation batch once, after the last update on it, on the main process. It cannot change
training: the batch is used up by then, and the random state is restored afterwards. The state of an observer with
`state_dict` and `load_state_dict`, of tensors and plain values, is part of checkpoints.
"""

from __future__ import annotations

import inspect
import io
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.core.plugins import PluginKind, describe_error, is_class
from explorl.metrics.advantages import NO_ADVANTAGE

View = TypeVar("View", "StepView", "InspectedRows")


class ObserverError(ValueError):
    """An observer that cannot be loaded, or that failed; the message names it."""


@dataclass(frozen=True)
class Lens:
    """Selects the completions to inspect: by a pass before the first update on their batch, and one after the last."""

    every: int = 4
    """Inspect every N-th generation batch."""
    answers: int | None = None
    """Number of the main process's completions to inspect in such a batch; None means a share of ``rate``."""
    rate: float = 0.05
    """Share of the main process's completions to inspect."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; use 1 to inspect every batch, 10 for every tenth")
        if self.answers is not None and self.answers < 0:
            raise ValueError(f"answers is {self.answers}; use 0 for none, or a number such as 16")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate is {self.rate}; use a share from 0 to 1, such as 0.05")

    def due(self, number: int) -> bool:
        """Tell whether to inspect completions of the generation batch of this number, counted from 0."""
        return number % self.every == 0

    def chosen(self, rows: int, number: int) -> list[int]:
        """Return which of ``rows`` rows to inspect: evenly spaced, shifted by one from batch to batch.

        No random number is drawn, so inspection does not change the training.
        """
        count = min(rows, math.ceil(self.rate * rows - 1e-9) if self.answers is None else self.answers)
        return sorted((number + index * rows // count) % rows for index in range(count))


@dataclass(frozen=True)
class InspectedRows:
    """Token records of some completions from two passes: before the first update on their batch, and after the last.

    Both passes are alike, so that differences come from the updates and not from rounding.
    """

    rows: Int[Tensor, " some"]
    """Indices of the completions among those of the main process."""
    logps: Float[Tensor, "some time"]
    """log π of each token; like collision and other_logps at the temperature of the loss."""
    collision: Float[Tensor, "some time"]
    """Σ π²."""
    other_ids: Int[Tensor, "some time"]
    """The most likely token other than the sampled one."""
    other_logps: Float[Tensor, "some time"]
    state_norms: Float[Tensor, "some time"]
    """‖h‖ of the hidden state before the head."""
    update_size: Float[Tensor, "some time"]
    """G = |A·weight|·‖e − π‖·‖h‖/τ at the first update: how far the token moves the head (Deng et al. 2025, Eq. 4)."""
    logps_after: Float[Tensor, "some time"]
    """log π after the last update."""

    @property
    def probability_change(self) -> Float[Tensor, "some time"]:
        """π after the updates minus π before them."""
        return self.logps_after.exp() - self.logps.exp()

    def padded(self, time: int) -> InspectedRows:
        """Pad with zeros to ``time`` tokens: another process may have a longer completion."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        more = time - self.logps.size(1)
        return replace(self, **{name: torch.nn.functional.pad(value, (0, more)) for name, value in values.items()})


@dataclass(frozen=True)
class StepView:
    """A generation batch of all processes, as sampled and as shaped by the strategies."""

    step: int
    """The optimizer step that the batch is first used for, from 1: the number of its file of rollouts."""
    token_ids: Int[Tensor, "batch time"]
    mask: Float[Tensor, "batch time"]
    """1 on tokens that the policy sampled: no padding, no tool output."""
    logps: Float[Tensor, "batch time"]
    """log π at the temperature of sampling. Like entropy and branching NaN if not recorded: without the engine and
    without strategies only the inspected completions have records."""
    entropy: Float[Tensor, "batch time"]
    """In nats, at temperature 1."""
    branching: Float[Tensor, "batch time"]
    """Size of the smallest set of top tokens with mass ≥ 0.95."""
    advantages: Float[Tensor, "batch time"]
    """Advantages after the strategies."""
    weights: Float[Tensor, "batch time"]
    """Factor of the policy term, 0 on tokens that are not in the loss."""
    advantage: Float[Tensor, " batch"]
    """Advantage of each completion before the strategies."""
    rewards: Float[Tensor, " batch"]
    """NaN if no reward function could score the completion."""
    reward_parts: Mapping[str, Float[Tensor, " batch"]]
    """Rewards by the name of the reward function."""
    correct: Bool[Tensor, " batch"]
    """As the run defines it: `ExplorationTrainer(correct=…)`."""
    group: Int[Tensor, " batch"]
    """Index of each completion's prompt."""
    prompts: Sequence[str]
    completions: Sequence[str]
    sampled: InspectedRows | None = None
    """The inspected completions; None if there are none."""

    @property
    def known(self) -> Bool[Tensor, "batch time"]:
        """Mask of the policy's tokens whose entropy was recorded."""
        return (self.mask > 0) & self.entropy.isfinite()

    @property
    def sign(self) -> Int[Tensor, " batch"]:
        """Sign of each completion's advantage; 0 if the group's rewards are equal, up to rounding."""
        advantage = self.advantage.nan_to_num()
        return torch.where(advantage.abs() < NO_ADVANTAGE, 0.0, advantage.sign()).long()

    def of_sampled(self, values: Tensor) -> Tensor:
        """Return the rows of a field's values that `sampled` has."""
        assert self.sampled is not None
        return values[self.sampled.rows]


def dump(value: Any) -> Any:
    """Convert a view to tensors and plain values for a checkpoint; return anything else as it is."""
    if not isinstance(value, StepView | InspectedRows):
        return value
    return {field.name: dump(getattr(value, field.name)) for field in fields(value)}


def load(kind: type[View], dumped: Mapping[str, Any] | None) -> View | None:
    """Restore a view from the mapping that `dump` returned."""
    return None if dumped is None else kind(**dumped)


@runtime_checkable
class Observer(Protocol):
    """Anything that computes numbers from a step, which are logged under ``lens/<name>``; NaN is not logged."""

    def see(self, step: StepView) -> Mapping[str, float]: ...


ObserverLike = Observer | str


def observer_name(observer: Observer) -> str:
    """Return the name of an observer in messages and checkpoints."""
    return type(observer).__name__


def observer_state(observer: Any) -> Any:
    """Return the state of an observer; raise `ObserverError` if a checkpoint with it could not be read again."""
    state, written = observer.state_dict(), io.BytesIO()
    try:
        torch.save(state, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise ObserverError(
            f"the result of state_dict() of the observer {observer_name(observer)} cannot be stored in a checkpoint "
            f"({type(error).__name__}: {why}); return tensors and plain values, such as array.tolist() of a NumPy array"
        ) from error
    return state


def build_observers(specs: Sequence[ObserverLike]) -> list[Observer]:
    """Return the observers; of those named by an import path, a class is called without arguments.

    No constructor is called before all of them have been found and checked.
    """
    observers: list[Any] = []
    for observer in specs:
        if isinstance(observer, str):
            observers.append(_KIND.find(observer).value)
        elif isinstance(observer, type) or not isinstance(observer, Observer) or not callable(observer.see):
            raise ObserverError(f"the observer {observer!r} {_NO_METHOD}, or its import path, like {_KIND.example}")
        else:
            observers.append(observer)
    return [_construct(observer) if isinstance(observer, type) else observer for observer in observers]


_NO_METHOD = "has no method see(self, step) that returns numbers by name; give an object with this method"


def _refusal(value: Any) -> str | None:
    """Return why the object of an import path is neither an observer nor an observer class; None if it is."""
    see = inspect.getattr_static(value if is_class(value, object) else type(value), "see", None)
    with suppress(TypeError):
        if isinstance(see, FunctionType) and inspect.signature(see).bind(None, None):
            return None
    return f"{_NO_METHOD} or its class"


_KIND: PluginKind[Any] = PluginKind("observer", {}, "my_pkg.watching:Lengths", _refusal)


def _construct(kind: type[Observer]) -> Observer:
    try:
        return kind()
    except Exception as error:
        raise ObserverError(
            f"the observer {kind.__name__} cannot be constructed without arguments: {describe_error(error)}"
        ) from error


def run_observers(observers: Sequence[Observer], view: StepView) -> dict[str, float]:
    """Return the numbers of all observers for a step by their log key; an error names the observer."""
    numbers: dict[str, float] = {}
    with torch.no_grad(), preserved_random_state(view.mask.device):
        for observer in observers:
            try:
                numbers |= {f"lens/{name}": float(value) for name, value in observer.see(view).items()}
            except Exception as error:
                raise ObserverError(
                    f"the observer {observer_name(observer)} failed at step {view.step}: {type(error).__name__}: "
                    f"{error}; it has to return numbers by name, like {{'mean_length': 12.5}}"
                ) from error
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore all RNG states on exit."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global state)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
