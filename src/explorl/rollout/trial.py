"""Try the engine on a model before it is used: its log-probabilities must agree with the model's own.

This is done once per model and set of adapters, and again for sequences beyond another length at which the model's
configuration says that something changes (`explorl.modeling.proof`). A small engine samples a few tokens after prompts
of several lengths, and its log-probabilities are compared with those of the model's own forward pass.
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
    """Raised for a model that the engine cannot sample from; names its layers and what to use instead."""

    def __init__(self, model: Any, reason: str) -> None:
        self.reason = f"{proof.layer_types(proof.inner_model(model))}: {reason}"
        name = type(proof.inner_model(model)).__name__
        super().__init__(
            f"{name} cannot be sampled by Engine ({self.reason}); use model.generate, in a trainer engine='generate'"
        )


class ExecutionMode(NamedTuple):
    """How the engine computes a model."""

    unrolled: bool
    """True if the model's layers are unrolled."""
    kernels: bool
    """True if Triton kernels are used."""


@dataclass(frozen=True)
class _TrialResult:
    mode: ExecutionMode
    reason: str = ""
    """Why the engine can't be used, or ""."""


_RESULTS: WeakKeyDictionary[Any, dict[Any, _TrialResult]] = WeakKeyDictionary()


def execution_mode(engine: Engine, points: frozenset[int]) -> ExecutionMode:
    """Return how the engine may compute this model for sequences that reach these turning points.

    Raise `UnsupportedModel` if it can't. It may still be used for sequences that reach fewer of them.
    """
    model: Any = engine.model
    results = _RESULTS.setdefault(proof.inner_model(model), {})
    device = next(model.parameters()).device
    kernels = engine.wants_kernels(device)
    key = (proof.build_of(model), engine.dtype, engine.use_kernels, kernels, device.type, points)
    result = results.get(key)
    if result is None:
        result = results[key] = _try_out(engine, kernels, sorted(points))
    if result.reason:
        raise UnsupportedModel(model, result.reason)
    return result.mode


def _try_out(engine: Engine, kernels: bool, points: list[int]) -> _TrialResult:
    """Return the fastest mode that agrees with the model.

    If need be, layers are not unrolled, and kernels are not used unless they were requested.
    """
    modes = [ExecutionMode(unrolled, kernels) for unrolled in (True, False)]
    if kernels and engine.use_kernels is None:
        modes += [ExecutionMode(unrolled, False) for unrolled in (True, False)]
    first = reason = ""
    for mode in modes:
        if mode.unrolled and llama_like(engine.model) is None:
            continue
        reason = _difference(engine, mode, points)
        if not reason:
            if mode.kernels != kernels:
                logger.warning("sampling without Triton kernels, with torch's own operations: with kernels %s", first)
            return _TrialResult(mode)
        first = first or reason
        logger.info("the engine does not agree with the model (%s): %s", mode, reason)
    return _TrialResult(modes[-1], reason)


def _difference(engine: Engine, mode: ExecutionMode, points: list[int]) -> str:
    """Return how the engine differs from the model, or ""."""
    ids = [row[: engine.context()] for row in proof.sequences(engine.model, points)]  # longer ones are never sampled

    def fast(in_float32: bool) -> tuple[list[list[int]], Tensor]:
        dtype, kernels = (torch.float32, False) if in_float32 else (engine.dtype, mode.kernels)
        return _sample(engine, ids, mode.unrolled, dtype, use_kernels=kernels)

    return proof.difference(engine.model, engine.dtype, fast)


def _sample(
    engine: Engine, ids: list[list[int]], unrolled: bool, dtype: torch.dtype | None, use_kernels: bool | None
) -> tuple[list[list[int]], Tensor]:
    """Return sequences whose last tokens a small engine has sampled, and their log-probabilities."""
    small = type(engine)(
        engine.model, batch_size=4, use_graphs=False, use_kernels=use_kernels, dtype=dtype, unrolled=unrolled
    )
    small.max_copy_bytes = engine.memory_budget
    params = SamplingParams(max_tokens=proof.TAIL, stop_token_ids=(), seed=0)
    prompts = [sequence[: -proof.TAIL] for sequence in ids]
    # If the model itself computes NaN there is nothing to compare; the engine reports it when it is used.
    rollouts = [rollout for rollout in small.generate(prompts, 2, params) if not rollout.error]
    if not rollouts:
        raise proof.NothingToCompare
    tokens = [[*prompts[rollout.prompt_index], *rollout.token_ids] for rollout in rollouts]
    return tokens, torch.stack([rollout.logps for rollout in rollouts]).float().cpu()
