"""Tries the engine on a model before it is used: what it samples must be as likely as the model itself says.

For each model and set of adapters once, and again for sequences beyond another length at which the model's
configuration says that something changes (`explorl.modeling.proof`): a small engine samples a few tokens after prompts
of several lengths, and the log-probabilities that it recorded are compared with the model's own forward pass.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from explorl.core.errors import ExplorlError
from explorl.modeling import proof
from explorl.modeling.llama import llama_like
from explorl.rollout.sampling import SamplingParams

if TYPE_CHECKING:
    from explorl.rollout.engine import Engine

logger = logging.getLogger(__name__)


class UnsupportedModel(ExplorlError, TypeError):
    """A model that the engine cannot sample from; the message names its layers and what to use instead."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = f"{proof.layer_types(proof.inner_model(model))}: {reason}"
        name = type(proof.inner_model(model)).__name__
        super().__init__(
            f"{name} cannot be sampled by Engine ({self.reason}); use model.generate, in a trainer engine='generate'"
        )


class Admitted(NamedTuple):
    """How the engine may run."""

    unrolled: bool
    """Whether the model's layers are unrolled."""
    kernels: bool
    """Whether Triton kernels compute."""


@dataclass(frozen=True)
class _Found:
    how: Admitted
    reason: str = ""
    """Why the engine is not to be used."""


_FOUND: WeakKeyDictionary[Any, dict[Any, _Found]] = WeakKeyDictionary()


def admitted(engine: Engine, points: frozenset[int]) -> Admitted:
    """How the engine may run on this model, with sequences that get beyond these turning points.

    `UnsupportedModel` where the engine may not run at all; it may still on sequences that get beyond fewer.
    """
    model: Any = engine.model
    known = _FOUND.setdefault(proof.inner_model(model), {})
    device = next(model.parameters()).device
    kernels = engine.kernels(device)
    key = (proof.build_of(model), engine.dtype, engine.use_kernels, kernels, device.type, points)
    found = known.get(key)
    if found is None:
        found = known[key] = _try_out(engine, kernels, sorted(points))
    if found.reason:
        raise UnsupportedModel(model, found.reason)
    return found.how


def _try_out(engine: Engine, kernels: bool, points: list[int]) -> _Found:
    """The fastest way that is right: without unrolled layers if need be, and without kernels if they may be left."""
    ways = [Admitted(unrolled, kernels) for unrolled in (True, False)]
    if kernels and engine.use_kernels is None:
        ways += [Admitted(unrolled, False) for unrolled in (True, False)]
    first = reason = ""
    for how in ways:
        if how.unrolled and llama_like(engine.model) is None:
            continue
        reason = _difference(engine, how, points)
        if not reason:
            if how.kernels != kernels:
                logger.warning("sampling without Triton kernels, with torch's own operations: with kernels %s", first)
            return _Found(how)
        first = first or reason
        logger.info("the engine does not agree with the model (%s): %s", how, reason)
    return _Found(ways[-1], reason)


def _difference(engine: Engine, how: Admitted, points: list[int]) -> str:
    """What is wrong with the engine on this model; empty where nothing is."""
    ids = [row[: engine.context()] for row in proof.sequences(engine.model, points)]  # more is never sampled

    def fast(in_float32: bool) -> tuple[list[list[int]], Tensor]:
        dtype, kernels = (torch.float32, False) if in_float32 else (engine.dtype, how.kernels)
        return _sampled(engine, ids, how.unrolled, dtype, use_kernels=kernels)

    return proof.difference(engine.model, engine.dtype, fast)


def _sampled(
    engine: Engine, ids: list[list[int]], unrolled: bool, dtype: torch.dtype | None, use_kernels: bool | None
) -> tuple[list[list[int]], Tensor]:
    """Sequences whose ends a small engine has sampled, and the log-probabilities that it recorded."""
    small = type(engine)(
        engine.model, batch_size=4, use_graphs=False, use_kernels=use_kernels, dtype=dtype, unrolled=unrolled
    )
    small.copies_within = engine.memory_budget
    params = SamplingParams(max_tokens=proof.TAIL, stop_token_ids=(), seed=0)
    prompts = [sequence[: -proof.TAIL] for sequence in ids]
    # Where the model itself gives NaN, there is nothing to compare, and the engine reports it when it is used.
    rollouts = [rollout for rollout in small.generate(prompts, 2, params) if not rollout.error]
    if not rollouts:
        raise proof.NothingToCompare
    tokens = [[*prompts[rollout.prompt_index], *rollout.token_ids] for rollout in rollouts]
    return tokens, torch.stack([rollout.logps for rollout in rollouts]).float().cpu()
