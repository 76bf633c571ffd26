"""Try the engine on a model before it is used: its log-probabilities must agree with the model's own.

This is done once per model and set of adapters, and again for sequences beyond another length at which the model's
configuration says that something changes (`explorl.modeling.proof`). A small engine samples a few tokens after prompts
of several lengths, and its log-probabilities are compared with those of the model's own forward pass.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from explorl.core.errors import ExplorlError
from explorl.modeling import proof
from explorl.modeling.fast_paths import PathChoice, fastest
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


def execution_mode(engine: Engine, points: frozenset[int]) -> ExecutionMode:
    """Return how the engine may compute this model for sequences that reach these turning points.

    If need be, layers are not unrolled, and kernels are not used unless they were requested. Raise `UnsupportedModel`
    if no mode agrees with the model. It may still be used for sequences that reach fewer turning points.
    """
    model: Any = engine.model
    device = next(model.parameters()).device
    kernels = engine.wants_kernels(device)

    def candidates() -> list[ExecutionMode | None]:
        unrolled = (False,) if llama_like(model) is None else (True, False)
        optional = kernels and engine.use_kernels is None
        return [*(ExecutionMode(u, k) for k in ([True, False] if optional else [kernels]) for u in unrolled), None]

    def logps(mode: ExecutionMode | None, ids: list[list[int]], in_float32: bool) -> tuple[list[list[int]], Tensor]:
        assert mode is not None
        within = [row[: engine.context()] for row in ids]  # longer ones are never sampled
        dtype, use_kernels = (torch.float32, False) if in_float32 else (engine.dtype, mode.kernels)
        return _sample(engine, within, mode.unrolled, dtype, use_kernels)

    def warn(choice: PathChoice[ExecutionMode | None]) -> None:
        if choice.kind is not None and choice.kind.kernels != kernels:
            first = next(iter(choice.reasons.values()))
            logger.warning("sampling without Triton kernels, with torch's own operations: with kernels %s", first)

    # A model that is refused at some length may be used below it, so each set of turning points has its own result.
    options = points, engine.use_kernels, kernels, device.type
    choice = fastest(
        model, "the engine", candidates, logps, points=points, dtype=engine.dtype, options=options, announce=warn
    )
    if choice.kind is None:
        raise UnsupportedModel(model, [*choice.reasons.values()][-1])
    return choice.kind


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
