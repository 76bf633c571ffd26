"""Measures on logits and token log-probabilities: entropy, branching factor, perplexity.

Tensors give tensors on the same device, NumPy arrays give NumPy arrays. Rows are processed in chunks, so that no second
copy of batch × time × vocabulary is made. Only `masked_mean` and `perplexity` carry a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray)

CHUNK = 2**23
"""Logits processed at once: 32 MiB in float32, 64 in float64."""
FIRST_TOP = 64
"""Top tokens considered first for the branching factor; rows that need more get 16 times as many, and so on."""


def token_entropy(logits: Array, *, chunk: int = CHUNK) -> Array:
    """Return the entropy in nats of each row's distribution, at temperature 1: (…, V) → (…).

        H = −Σ_v π(v) log π(v),  π = softmax(logits)

    Deng et al. 2025 Eq. 3. Computed in float32 for every type of logits; a logit of −inf is a token without mass. A row
    with NaN, +inf or only −inf gives NaN.
    """
    return _per_row(logits, _entropy, chunk, torch.float32)


def branching_factor(logits: Array, mass: float = 0.95, *, chunk: int = CHUNK) -> Array:
    """Return the size of the smallest set of top tokens with probability at least `mass`: (…, V) → (…), int64.

        BF = min{ j : Σ_{i ≤ j} π_(i) ≥ mass },  π_(1) ≥ π_(2) ≥ …

    Deng et al. 2025 §2.2 (rollout branching factor), mass 0.95. Sums run in float64 over exp(logit − max), so 20 equal
    logits need exactly 19 tokens, in bfloat16 too. ``mass=1`` counts the tokens whose logit is not −inf.
    """
    _check_mass(mass)

    def count(rows: Tensor) -> Tensor:
        peak = rows.amax(-1, keepdim=True).double()
        return _smallest_set(rows, mass, lambda some, of: (some.double() - peak[of]).exp(), -torch.inf)

    return _per_row(logits, count, chunk, torch.int64)


def branching_factor_of_probs(probs: Array, mass: float = 0.95, *, chunk: int = CHUNK) -> Array:
    """Return the `branching_factor` of probabilities, which are divided by their sum."""
    _check_mass(mass)

    def count(rows: Tensor) -> Tensor:
        if bool((rows < 0).any()):
            raise ValueError(f"probabilities cannot be negative, got {rows.min().item():g}; logits: branching_factor")
        return _smallest_set(rows, mass, lambda some, of: some.double(), 0.0)

    return _per_row(probs, count, chunk, torch.int64)


def masked_mean(values: Array, mask: Array) -> Array:
    """Return the mean over the last dimension of the entries where mask ≠ 0; NaN if there are none.

    Masked entries have no influence, even NaN or inf.
    """
    tensor, keep = _tensor(values), _tensor(mask) != 0
    if tensor.shape != keep.shape:
        raise ValueError(f"values {tuple(tensor.shape)} and mask {tuple(keep.shape)} must have one shape")
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 4:
        tensor = tensor.float()
    return _like(torch.where(keep, tensor, 0).sum(-1) / keep.sum(-1), values)


def perplexity(logps: Array, mask: Array) -> Array:
    """Return the perplexity of each sequence over its counted tokens: (…, T) → (…).

        PPL = exp(−mean_t log π(o_t))

    Deng et al. 2025 Eq. 7. NaN for a sequence without counted tokens.
    """
    return _like(torch.exp(-_tensor(masked_mean(logps, mask))), logps)


def _entropy(rows: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
    logp = torch.log_softmax(rows.float(), dim=-1)
    # 0 · −inf is NaN, 0 · −1e38 is 0
    return -(logp.exp() * logp.clamp_(min=torch.finfo(logp.dtype).min)).sum(-1)


def _smallest_set(
    rows: Float[Tensor, "rows vocab"], mass: float, weigh: Callable[[Tensor, Tensor], Tensor], nothing: float
) -> Int[Tensor, " rows"]:
    """Count how many of each row's top entries hold `mass` of its weight. `weigh(values, rows)` returns float64."""
    pending = torch.arange(len(rows), device=rows.device)
    total = weigh(rows, pending).sum(-1)
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise ValueError("every row needs some probability mass and no NaN; one has NaN, +inf or no mass")
    if mass == 1:
        return (rows > nothing).sum(-1)
    sizes = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    vocab, top = rows.shape[-1], min(FIRST_TOP, rows.shape[-1])
    while True:
        held = weigh(rows[pending].topk(top, dim=-1).values, pending).cumsum(-1)
        need = mass * total[pending]
        sizes[pending] = ((held < need[:, None]).sum(-1) + 1).clamp(max=vocab)
        pending = pending[held[:, -1] < need]
        if top == vocab or not len(pending):
            return sizes
        top = min(16 * top, vocab)


def _check_mass(mass: float) -> None:
    if not 0 < mass <= 1:
        raise ValueError(f"mass must be above 0 and at most 1, such as 0.95; got {mass}")


def _per_row(values: Array, function: Callable[[Tensor], Tensor], chunk: int, dtype: torch.dtype) -> Array:
    tensor = _tensor(values)
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"the last dimension must be a vocabulary, got shape {tuple(tensor.shape)}")
    with torch.no_grad():
        return _like(_chunked(tensor, function, chunk, dtype), values)


def _chunked(tensor: Tensor, function: Callable[[Tensor], Tensor], chunk: int, dtype: torch.dtype) -> Tensor:
    vocab = tensor.shape[-1]
    if tensor.ndim != 2:
        try:
            flat = tensor.view(-1, vocab)
        except RuntimeError:  # a slice such as logits[:, :-1]: flattening would copy it all
            return torch.stack([_chunked(part, function, chunk, dtype) for part in tensor])
        return _chunked(flat, function, chunk, dtype).view(tensor.shape[:-1])
    result = torch.empty(len(tensor), dtype=dtype, device=tensor.device)
    step = max(1, chunk // vocab)
    for start in range(0, len(tensor), step):
        result[start : start + step] = function(tensor[start : start + step])
    return result


def _tensor(values: Tensor | NDArray) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def _like(result: Tensor, values: Array) -> Array:
    return result if isinstance(values, Tensor) else result.numpy()
