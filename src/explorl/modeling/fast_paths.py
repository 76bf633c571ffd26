"""Prove fast paths before they are used, and remember the results.

A pass over the whole model (the engine, the packed pass, the pass for token records) is compared with the model's own
forward pass by `explorl.modeling.proof`: `fastest` returns the first candidate that agrees. One operation of a layer (a
fused norm, a product with reordered weights, a Triton kernel) is compared with the modules that it replaces on random
inputs: see `deviation` and `Verified`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from explorl.modeling import proof
from explorl.modeling.attention import AttentionDropout

logger = logging.getLogger(__name__)

# Passes over the whole model

Kind = TypeVar("Kind", bound=Hashable)

DROPOUT = "the packed pass does not support attention dropout (set disable_dropout, or the dropout to 0)"

Logps = Callable[[Kind, list[list[int]], bool], tuple[Sequence[Sequence[int]], Tensor]]
"""Computes log π of the last tokens of sequences by one kind of path, and returns it with the sequences, which may be
others. True asks for float32 and plain torch, without kernels."""


@dataclass(frozen=True)
class PathChoice(Generic[Kind]):
    """The path chosen for one model with one set of adapters."""

    kind: Kind
    points: frozenset[int] = frozenset()
    """Turning points covered by the proof."""
    reasons: dict[Kind, str] = field(default_factory=dict)
    """Why each faster kind was rejected."""
    why: str = ""
    """Why no fast path is used, with the model's layers, or ""."""


_CHOICES: WeakKeyDictionary[Any, dict[Any, PathChoice[Any]]] = WeakKeyDictionary()


def fastest(
    model: Any,
    path: str,
    candidates: Callable[[], Sequence[Kind]],
    logps: Logps[Kind],
    *,
    points: frozenset[int],
    dtype: torch.dtype | None,
    temperature: float = 1.0,
    options: Hashable = (),
    in_training: bool = False,
    announce: Callable[[PathChoice[Kind]], object] | None = None,
) -> PathChoice[Kind]:
    """Return the fastest kind of a path that agrees with the model, proven once per model and set of adapters.

    Args:
        path: Name of the path, in messages and for the cache.
        candidates: Returns the kinds, the fastest first. The last one needs no proof: it is used if all others fail.
        points: Turning points that the sequences reach; see `proof.turning_points`. If there are more than before, the
            proof is repeated with all of them.
        dtype: That of the computation; None is that of the weights.
        options: What else the result depends on.
        in_training: The path runs in the model's own mode, in which it may have attention dropout.
        announce: Called with each new choice.
    """
    choices = _CHOICES.setdefault(proof.inner_model(model), {})
    key = path, proof.build_of(model), dtype, temperature, options, in_training and model.training
    choice = choices.get(key)
    if choice is None or not points <= choice.points:
        covered = points | (choice.points if choice else frozenset())
        may_drop = in_training and model.training
        choice = choices[key] = _try_out(path, model, candidates(), logps, covered, dtype, temperature, may_drop)
        if announce is not None:
            announce(choice)
    return choice


def _try_out(
    path: str,
    model: Any,
    candidates: Sequence[Kind],
    logps: Logps[Kind],
    points: frozenset[int],
    dtype: torch.dtype | None,
    temperature: float,
    may_drop: bool,
) -> PathChoice[Kind]:
    *fast, last = candidates
    reasons: dict[Kind, str] = {}
    ids = proof.sequences(model, sorted(points))
    if may_drop and fast and _drops_attention(fast[-1], model, logps):
        fast, reasons = [], {fast[-1]: DROPOUT}
    for kind in fast:

        def one_kind(in_float32: bool, kind: Kind = kind) -> tuple[Sequence[Sequence[int]], Tensor]:
            return logps(kind, ids, in_float32)

        reason = proof.difference(model, dtype, one_kind, temperature=temperature)
        if not reason:
            return PathChoice(kind, points, reasons)
        reasons[kind] = reason
        logger.info("%s does not agree with the model (%s): %s", path, kind, reason)
    why = f"{proof.layer_types(proof.inner_model(model))}: {[*reasons.values()][-1]}" if reasons else ""
    return PathChoice(last, points, reasons, why)


def _drops_attention(kind: Kind, model: Any, logps: Logps[Kind]) -> bool:
    """Return whether attention has dropout in training, which the proof, in evaluation mode, would not notice."""
    with torch.no_grad(), torch.random.fork_rng():
        try:
            logps(kind, proof.sequences(model, [])[:1], True)
        except AttentionDropout:
            return True
        except Exception:  # the proof reports other failures
            return False
    return False


def padded_rows(model: Any, ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the sequences padded on the left, and their mask; the first comes twice, so that a prompt is shared."""
    device = next(model.parameters()).device
    rows = [ids[0], *ids]
    longest = max(len(row) for row in rows)
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return padded, mask


# Operations of a layer

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest `relative_difference` of an operation's results, by the maximum norm; 2e-2 for half precision types."""

Operation = Callable[..., Any]
"""A function of tensors that returns a tensor or several."""


class Verified(dict[Any, bool]):
    """Whether each fast operation agrees with the modules that it replaces, by a key, if compared."""

    def agrees(self, key: Any, fast: Operation, own: Operation, inputs: Sequence[Tensor], near: float) -> bool:
        """Return whether the results differ by at most ``near``, comparing them when the key is new."""
        if key not in self:
            apart = deviation(key, fast, own, inputs)
            self[key] = apart is not None and apart <= near
            if apart is not None and not self[key]:
                times = apart / near
                logger.warning("%s differs from the modules by %.1f times the tolerance; using the modules", key, times)
        return self[key]


def deviation(name: Any, fast: Operation, own: Operation, inputs: Sequence[Tensor], order: float = 2.0) -> float | None:
    """Return the `relative_difference` of two operations' results, inf if types or shapes differ; None if one fails."""
    try:
        with torch.no_grad():
            got, want = fast(*inputs), own(*inputs)
        pairs = [(got, want)] if isinstance(want, Tensor) else list(zip(got, want, strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # for example, the compiler does not support the device, or torch lacks an operation
        if "can't allocate memory" in str(error):  # which says nothing of the operation
            raise
        logger.info("%s does not run here (%s: %s); using the modules", name, type(error).__name__, error)
        return None
    if any(g.shape != w.shape or g.dtype != w.dtype for g, w in pairs):
        return math.inf
    return max(relative_difference(g, w, order) for g, w in pairs)


def relative_difference(got: Tensor, want: Tensor, order: float = 2.0) -> float:
    """Return ‖got − want‖ / ‖want‖ of the finite values; inf if others are finite.

    By the maximum norm, ``order`` inf, ‖want‖ is at least 1.
    """
    finite = torch.isfinite(want)
    if got.shape != want.shape or not torch.equal(finite, torch.isfinite(got)):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    dtype = torch.promote_types(want.dtype, torch.float32)
    got, want = got[finite].to(dtype), want[finite].to(dtype)
    size = float(torch.linalg.vector_norm(want, order))
    return float(torch.linalg.vector_norm(got - want, order)) / max(size, 1.0 if order == math.inf else 1e-30)


def random_inputs(*shapes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return normally distributed tensors, always the same."""
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype) for shape in shapes]
