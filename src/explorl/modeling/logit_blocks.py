"""Token records of rows of logits, of which only a block is in memory at any time.

The functions in torch are the definitions; on a GPU, `explorl.modeling.triton_records` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from explorl.metrics.tokens import branching_factor, token_entropy
from explorl.modeling.gpu import kernels_run, on

BLOCK = {"cpu": 2**26, "cuda": 2**29}
"""Default size of the largest tensor over the vocabulary, in bytes: about a thousand rows keep a GPU busy."""


class TokenRecords(NamedTuple):
    """One value for each of N tokens."""

    logps: Float[Tensor, "*tokens"]
    """log π of the token, at the temperature."""
    entropy: Float[Tensor, "*tokens"]
    """In nats, at temperature 1."""
    branching: Int[Tensor, "*tokens"]
    """Size of the smallest set of top tokens with the given mass, at temperature 1."""
    collision: Float[Tensor, "*tokens"]
    """Σ_v π(v)², at the temperature."""
    others_squared: Float[Tensor, "*tokens"]
    """Σ π(v)² over all v except the token; Σ_v π(v)² − π(o)² would be rounding error for a nearly certain token."""
    other_ids: Int[Tensor, "*tokens"]
    """The most likely token other than this one; the lowest id among equals."""
    other_logps: Float[Tensor, "*tokens"]
    """log π of that token, at the temperature; −inf in a vocabulary of one."""


DTYPES = (torch.float32, torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.float32)
"""The dtypes of the seven fields of `TokenRecords`."""


def by_blocks(
    logits: Callable[[slice], Tensor],
    targets: Int[Tensor, " tokens"],
    vocab: int,
    dtype: torch.dtype,
    temperature: float | Float[Tensor, " tokens"],
    mass: float,
    block: int | None,
) -> TokenRecords:
    """Return the records of all rows; `logits` returns the (rows, vocab) logits of a slice, of type `dtype`."""
    targets, temperatures = targets.long().contiguous(), _per_row(temperature, targets)
    device = targets.device
    out = TokenRecords(*(torch.empty(len(targets), dtype=kind, device=device) for kind in DTYPES))
    kernel = has_kernel(device, dtype) and 0 < mass < 1
    for rows in slices(len(targets), vocab, dtype.itemsize if kernel else 8, block_bytes(device, block)):
        row_temperature = None if temperatures is None else temperatures[rows]
        into = TokenRecords(*(value[rows] for value in out))
        if kernel:
            from explorl.modeling.triton_records import record

            with on(device):
                record(logits(rows), targets[rows], row_temperature, mass, into)
        else:
            for target, value in zip(
                into, defined_records(logits(rows), targets[rows], row_temperature, mass), strict=True
            ):
                target.copy_(value)
    if kernel and bool(out.entropy.isnan().any()):
        raise ValueError("logits contain NaN, +inf, or a row with only -inf; every row needs a valid distribution")
    return out


def _per_row(temperature: float | Tensor, targets: Tensor) -> Float[Tensor, " tokens"] | None:
    """Return one temperature per row; None if all are 1."""
    temperatures = torch.as_tensor(temperature, dtype=torch.float32, device=targets.device)
    if temperatures.ndim and temperatures.shape != targets.shape:
        raise ValueError(
            f"temperature must be one number, or one for each of {len(targets)} tokens, "
            f"got shape {tuple(temperatures.shape)}"
        )
    least = float(temperatures.min()) if temperatures.numel() else 1.0
    if not least > 0:
        raise ValueError(f"temperature must be above 0, such as 1.0; got {least:g}")
    if temperatures.ndim == 0 and least == 1:
        return None
    return temperatures.expand(targets.shape).contiguous()


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    supported = (torch.bfloat16, torch.float16, torch.float32)
    return dtype in supported and kernels_run(device)


def block_bytes(device: torch.device, block: int | None) -> int:
    return BLOCK.get(device.type, BLOCK["cpu"]) if block is None else block


def slices(tokens: int, vocab: int, wide: int, block: int) -> Iterator[slice]:
    """Yield the fewest slices that fit into a block with `wide` bytes per logit, of nearly equal size.

    The definitions need 8 bytes per logit, because they sum in float64. Large slices are multiples of 64 rows.
    """
    most = max(block // (wide * vocab), 1)
    most = most if most < 128 else most // 64 * 64
    step = -(-tokens // max(-(-tokens // most), 1))
    step = min(step if step < 128 else -(-step // 64) * 64, most)
    for start in range(0, tokens, max(step, 1)):
        yield slice(start, start + step)


def defined_records(
    logits: Float[Tensor, "rows vocab"],
    targets: Int[Tensor, " rows"],
    temperature: Float[Tensor, " rows"] | None,
    mass: float,
) -> TokenRecords:
    """Compute the records by their definitions, on whole rows of logits."""
    whole = logits.numel() or logits.shape[-1]
    entropy, branching = token_entropy(logits, chunk=whole), branching_factor(logits, mass, chunk=whole)
    scaled = logits.float() if temperature is None else logits.float() / temperature.unsqueeze(-1)
    log_z = scaled.logsumexp(-1)
    target_logit = scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    others = scaled.scatter(-1, targets.unsqueeze(-1), -torch.inf)
    squared = ((2 * others).logsumexp(-1) - 2 * log_z).exp()
    collision = squared + (2 * (target_logit - log_z)).exp()
    best = others.max(-1)
    return TokenRecords(target_logit - log_z, entropy, branching, collision, squared, best.indices, best.values - log_z)
