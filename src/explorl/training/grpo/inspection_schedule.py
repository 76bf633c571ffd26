"""The lens: what observers are told of a training step, which answers are looked at closely, and how often.

    class Lengths:
        def see(self, step: StepView) -> dict[str, float]:
            return {"mean_length": step.mask.sum(1).mean().item()}

    ExplorationTrainer(..., observers=[Lengths()])          # logged as lens/mean_length

An observer sees each generation batch once, when the last update on it is done, on the main process. It cannot change
training: the batch is used up by then, and random numbers that an observer draws are given back. What an observer
remembers is part of a checkpoint where it has `state_dict` and `load_state_dict`, of tensors and plain values.
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
    """Which answers are looked at closely: by a pass before the first update on their batch, and one after the last."""

    every: int = 4
    """Generation batches from one with such answers to the next."""
    answers: int | None = None
    """How many of the main process's answers in such a batch; None is ``rate`` of them."""
    rate: float = 0.05

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; look at every batch with 1, at every tenth with 10")
        if self.answers is not None and self.answers < 0:
            raise ValueError(f"answers is {self.answers}; use 0 for none, or a number such as 16")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate is {self.rate}; use a share of the answers from 0 to 1, such as 0.05")

    def due(self, number: int) -> bool:
        """Whether answers of the generation batch of this number, from 0, are looked at."""
        return number % self.every == 0

    def chosen(self, rows: int, number: int) -> list[int]:
        """Which of so many rows are looked at closely: at even distances, from batch to batch one further on.

        No random number is drawn for it, so that training goes on as it would without.
        """
        count = min(rows, math.ceil(self.rate * rows - 1e-9) if self.answers is None else self.answers)
        return sorted((number + place * rows // count) % rows for place in range(count))


@dataclass(frozen=True)
class InspectedRows:
    """What two passes over some answers found: one before the first update on their batch, one after the last.

    Both are made alike, so that a difference between them is the policy's and not one of rounding.
    """

    rows: Int[Tensor, " some"]
    """Which answers of the batch these are: of the main process's own."""
    logps: Float[Tensor, "some time"]
    """log π of each token, as collision and other at the temperature that the loss looks at the answer with."""
    collision: Float[Tensor, "some time"]
    """Σ π²."""
    other_ids: Int[Tensor, "some time"]
    """The likeliest token besides the one that was sampled."""
    other_logps: Float[Tensor, "some time"]
    state_norms: Float[Tensor, "some time"]
    """‖h‖ of the state that the head reads."""
    update_size: Float[Tensor, "some time"]
    """G = |A·weight|·‖e − π‖·‖h‖/τ at the first update: how far the token moves the head (Deng et al. 2025, Eq. 4)."""
    logps_after: Float[Tensor, "some time"]
    """log π after the last update."""

    @property
    def probability_change(self) -> Float[Tensor, "some time"]:
        """π after the updates − π before them."""
        return self.logps_after.exp() - self.logps.exp()

    def padded(self, time: int) -> InspectedRows:
        """With zeros on the right: another process may have a longer answer."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "rows"}
        more = time - self.logps.size(1)
        return replace(self, **{name: torch.nn.functional.pad(value, (0, more)) for name, value in values.items()})


@dataclass(frozen=True)
class StepView:
    """A generation batch of all processes, as it was sampled and as the strategies have shaped it."""

    step: int
    """The optimizer step that the batch is first used for, from 1: the number of its file of rollouts."""
    token_ids: Int[Tensor, "batch time"]
    mask: Float[Tensor, "batch time"]
    """1 on tokens that the policy wrote: no padding, no tool output."""
    logps: Float[Tensor, "batch time"]
    """log π at the temperature of sampling. NaN, as entropy and branching are, where nothing recorded it: without the
    engine and without strategies only the answers that are looked at closely are known."""
    entropy: Float[Tensor, "batch time"]
    """In nats, at temperature 1."""
    branching: Float[Tensor, "batch time"]
    """Size of the smallest set of top tokens with mass ≥ 0.95."""
    advantages: Float[Tensor, "batch time"]
    """As the strategies have shaped them."""
    weights: Float[Tensor, "batch time"]
    """Factor of the policy's term, 0 where the token is not in the loss."""
    advantage: Float[Tensor, " batch"]
    """Of the answer, before the strategies."""
    rewards: Float[Tensor, " batch"]
    """NaN where no reward function could score the answer."""
    reward_parts: Mapping[str, Float[Tensor, " batch"]]
    """By the reward function's name."""
    correct: Bool[Tensor, " batch"]
    """As the run defines it: `ExplorationTrainer(correct=…)`."""
    group: Int[Tensor, " batch"]
    """Which prompt an answer is to."""
    prompts: Sequence[str]
    completions: Sequence[str]
    sampled: InspectedRows | None = None
    """The answers that were looked at closely; None where there are none."""

    @property
    def known(self) -> Bool[Tensor, "batch time"]:
        """The tokens that count and whose entropy was recorded."""
        return (self.mask > 0) & self.entropy.isfinite()

    @property
    def sign(self) -> Int[Tensor, " batch"]:
        """1 for positive answers, −1 for negative ones, by their advantage; 0 where a group's rewards are equal and the
        advantage is what rounding leaves."""
        advantage = self.advantage.nan_to_num()
        return torch.where(advantage.abs() < NO_ADVANTAGE, 0.0, advantage.sign()).long()

    def of_sampled(self, values: Tensor) -> Tensor:
        """The rows of a field that `sampled` has."""
        assert self.sampled is not None
        return values[self.sampled.rows]


def dump(value: Any) -> Any:
    """A view as tensors and plain values, for a checkpoint; anything else as it is."""
    if not isinstance(value, StepView | InspectedRows):
        return value
    return {one.name: dump(getattr(value, one.name)) for one in fields(value)}


def load(kind: type[View], dumped: Mapping[str, Any] | None) -> View | None:
    """What `dump` made a mapping of."""
    return None if dumped is None else kind(**dumped)


@runtime_checkable
class Observer(Protocol):
    """Anything that turns a step into numbers; they are logged under ``lens/<name>``. NaN is left out."""

    def see(self, step: StepView) -> Mapping[str, float]: ...


ObserverLike = Observer | str


def name_of(observer: Observer) -> str:
    """What an observer is called in messages and checkpoints."""
    return type(observer).__name__


def remembered(observer: Any) -> Any:
    """What an observer remembers; `ObserverError` where a checkpoint with it could not be read again."""
    state, written = observer.state_dict(), io.BytesIO()
    try:
        torch.save(state, written)
        written.seek(0)
        torch.load(written, weights_only=True)
    except Exception as error:
        why = (str(error).splitlines() or [""])[0]
        raise ObserverError(
            f"what state_dict() of the observer {name_of(observer)} returns cannot be kept in a checkpoint "
            f"({type(error).__name__}: {why}); return tensors and plain values, such as array.tolist() of a NumPy array"
        ) from error
    return state


def build_observers(given: Sequence[ObserverLike]) -> list[Observer]:
    """Return the observers; of those named by an import path, a class is called without arguments.

    Nothing is called before all of them have been found and looked at.
    """
    observers: list[Any] = []
    for observer in given:
        if isinstance(observer, str):
            observers.append(_KIND.find(observer).value)
        elif isinstance(observer, type) or not isinstance(observer, Observer) or not callable(observer.see):
            raise ObserverError(f"the observer {observer!r} {_NO_METHOD}, or its import path like {_KIND.example}")
        else:
            observers.append(observer)
    return [_constructed(observer) if isinstance(observer, type) else observer for observer in observers]


_NO_METHOD = "is no object with a method see(self, step) that returns numbers by name; give such an object"


def _refusal(value: Any) -> str | None:
    """Return why what an import path names is neither an observer nor a class of them; None where it is."""
    see = inspect.getattr_static(value if is_class(value, object) else type(value), "see", None)
    with suppress(TypeError):
        if isinstance(see, FunctionType) and inspect.signature(see).bind(None, None):
            return None
    return f"{_NO_METHOD} or its class"


_KIND: PluginKind[Any] = PluginKind("observer", {}, "my_pkg.watching:Lengths", _refusal)


def _constructed(kind: type[Observer]) -> Observer:
    try:
        return kind()
    except Exception as error:
        raise ObserverError(
            f"the observer {kind.__name__} cannot be made without arguments: {describe_error(error)}"
        ) from error


def run_observers(observers: Sequence[Observer], view: StepView) -> dict[str, float]:
    """What all observers say of a step, by the name that it is logged under; an error names the observer."""
    said: dict[str, float] = {}
    with torch.no_grad(), preserved_random_state(view.mask.device):
        for observer in observers:
            try:
                said |= {f"lens/{name}": float(value) for name, value in observer.see(view).items()}
            except Exception as error:
                raise ObserverError(
                    f"the observer {name_of(observer)} failed at step {view.step}: {type(error).__name__}: {error}; it "
                    "returns numbers by name, like {'mean_length': 12.5}"
                ) from error
    return {name: value for name, value in said.items() if not math.isnan(value)}


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Every random number that is drawn inside is given back."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that others use)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
