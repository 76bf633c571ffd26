"""The hidden states that a model's head reads to predict completion tokens, and how its logits follow from them.

A model's forward runs with its head bypassed: the head stores its input and computes nothing. Which pass is used, and
whether the logits are those of the head, scaled or capped, is tried on the model itself (see `explorl.modeling.proof`).
If nothing fits, `logits_path` returns "own logits", and the caller has to use the model's own logits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from explorl.modeling import proof
from explorl.modeling.attention import evaluating, replaced
from explorl.modeling.fast_paths import TOLERANCE, fastest, padded_rows, relative_difference
from explorl.modeling.llama_pass import llama_pass
from explorl.modeling.packed import PackedRows, packed_rows, shared_prompts

logger = logging.getLogger(__name__)

Kind = Literal["unrolled", "packed", "padded", "own logits"]

SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
"""Names of a factor, or a divisor, of the logits in configurations of transformers."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of a cap of the logits in configurations of transformers."""


@dataclass(frozen=True)
class LogitsPath:
    """How a model's logits are computed."""

    kind: Kind
    scale: float = 1.0
    softcap: float | None = None
    why: str = ""
    """Why the model's own logits have to be used."""


class AlignedRows:
    """Rows with all padding moved to the right, and the tokens that are scored.

    A token is scored if it is in the last `completion` columns, is not masked, and has a token before it.
    """

    def __init__(
        self, input_ids: Int[Tensor, "rows length"], attention_mask: Int[Tensor, "rows length"], completion: int
    ) -> None:
        mask = attention_mask > 0
        prompt = input_ids.size(1) - completion
        self.longest = max(int(mask.sum(1).max()), 1)
        order = torch.argsort((~mask).int(), dim=1, stable=True)[:, : self.longest]
        self.ids, self.counted = input_ids.gather(1, order), mask.gather(1, order)
        self.shared = shared_prompts(input_ids, mask, completion).gather(1, order)
        """1 on tokens that a row shares with the row above."""
        self.prompts = mask[:, :prompt].sum(1, keepdim=True)
        position = torch.arange(self.longest, device=order.device)
        self.scored = self.counted & (position >= self.prompts.clamp(min=1))
        self.targets = self.ids[self.scored]
        self.places = self.scored.nonzero()[:, 0], order[self.scored] - prompt
        """Row and column, in the completion, of each scored token."""

    @property
    def predicts(self) -> Bool[Tensor, "rows length_less_1"]:
        """1 at positions that predict a scored token."""
        return self.scored[:, 1:]


def unwrapped(model: Any) -> Any:
    """Return the model without the wrappers of torch.compile and data parallelism, which must not see the bypass."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def head_of(model: Any) -> Any:
    return proof.inner_model(model).get_output_embeddings()


@contextmanager
def _bypassed_head(model: Any, respond: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Yield a list that collects the inputs of the head; `respond` returns its output instead, by default zeros."""
    head, read = head_of(model), []

    def forward(states: Tensor, *_: Any, **__: Any) -> Tensor:
        read.append(states)
        return states.new_zeros(*states.shape[:-1], 1) if respond is None else respond(states)

    with replaced([(head.__dict__, "forward", forward)]):
        yield read


def states(model: Any, rows: AlignedRows, kind: Kind, use_kernels: bool | None = None) -> Float[Tensor, "scored width"]:
    """Return the hidden states that predict each scored token, row by row."""
    with _bypassed_head(model) as read:
        if kind == "padded":
            model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False)
            return read[-1][:, :-1][rows.predicts]
        packed = PackedRows(rows.counted, rows.shared)
        number = packed.included.flatten().cumsum(0).view_as(packed.included) - 1
        with packed_rows(model, packed, kind == "unrolled", use_kernels):
            model(
                input_ids=rows.ids[packed.included].unsqueeze(0),
                position_ids=packed.positions.unsqueeze(0),
                use_cache=False,
            )
        return read[-1][0].index_select(0, number[:, :-1][rows.predicts])


def adjusted(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute softcap · tanh(scale · logits / softcap) in place and in the logits' type, as transformers does."""
    if scale != 1:
        logits = logits.mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def logits_path(model: Any, reach: int, dtype: torch.dtype | None) -> LogitsPath:
    """Return the fastest correct path for sequences of up to ``reach`` tokens; ``dtype`` is that of autocast."""
    if is_sharded(model):
        return LogitsPath("own logits", why="its weights are sharded over processes")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in {model, proof.inner_model(model)}):
        return LogitsPath("own logits", why="it is compiled in place")
    if not isinstance(head_of(model), nn.Module):
        return LogitsPath("own logits", why="its head is not a module")

    def logps(path: LogitsPath, ids: list[list[int]], in_float32: bool) -> tuple[list[list[int]], Tensor]:
        with nullcontext() if in_float32 else proof.computing_in(model, dtype):
            rows = AlignedRows(*padded_rows(model, ids), proof.TAIL)
            read = states(model, rows, path.kind, use_kernels=False if in_float32 else None)
            logits = adjusted(head_of(model)(read), path.scale, path.softcap).float()
        logps = torch.log_softmax(logits, -1).gather(-1, rows.targets.unsqueeze(-1).to(logits.device))
        return ids, logps.view(len(ids) + 1, proof.TAIL)[1:].cpu()

    return fastest(
        model,
        "the pass for token records",
        lambda: _candidates(model, dtype),
        logps,
        points=proof.reached(proof.inner_model(model).config, reach),
        dtype=dtype,
        in_training=True,
    ).kind


def _candidates(model: Any, dtype: torch.dtype | None) -> list[LogitsPath]:
    """Return the paths to try; the last one is known to be correct."""
    rule = _rule(model)
    path = None if rule is None else LogitsPath("padded", *rule)
    if path is None or not _same_logits(model, path, dtype):
        why = "its logits are not those of its head, scaled or capped"
        logger.info("token records of %s need all logits of a few rows at once: %s", type(model).__name__, why)
        return [LogitsPath("own logits", why=why)]
    packed = replace(path, kind="packed")
    return [packed, path] if llama_pass(model) is None else [replace(path, kind="unrolled"), packed, path]


def _rule(model: Any) -> tuple[float, float | None] | None:
    """Return the scale and cap that the model applies to its head's output, found with large random outputs."""
    config, head, responses = proof.text_config(model), head_of(model), []
    values = {float(value) for name in SCALES if (value := getattr(config, name, None))}
    scales = [1.0, *(factor for value in values - {1.0} for factor in (value, 1 / value))]
    caps = [None, *(getattr(config, name, None) for name in CAPS)]
    ids = torch.tensor([proof.sequences(model, [])[0][:4]], device=next(model.parameters()).device)
    original = head.forward

    def respond(states: Tensor) -> Tensor:
        shape = *states.shape[:-1], original(states[:, :1]).shape[-1]
        responses.append((30 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(states))
        return responses[-1].clone()

    try:
        with evaluating(model), _bypassed_head(model, respond):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except _FAILURES:
        return None
    if len(responses) != 1:
        return None
    rules = product(scales, dict.fromkeys(caps))
    return next((rule for rule in rules if _close(adjusted(responses[0].clone(), *rule), logits)), None)


_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError)


def _close(computed: Tensor, expected: Tensor) -> bool:
    return relative_difference(computed.to(expected), expected, math.inf) <= TOLERANCE.get(computed.dtype, 2e-2)


def _same_logits(model: Any, path: LogitsPath, dtype: torch.dtype | None) -> bool:
    """Return whether the collected states give the logits that the model gives on the same padded rows."""
    rows = AlignedRows(*padded_rows(model, proof.sequences(model, [])), proof.TAIL)
    try:
        with evaluating(model), proof.computing_in(model, dtype):
            original = model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False).logits
            read = states(model, rows, "padded")
            return _close(adjusted(head_of(model)(read), path.scale, path.softcap), original[:, :-1][rows.predicts])
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return False


def is_sharded(model: nn.Module) -> bool:
    """Return whether the weights are sharded, so that all processes have to call the model equally often."""
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return wrapped or any(
        hasattr(parameter, "ds_id") or "DTensor" in type(parameter.data).__name__ for parameter in model.parameters()
    )


def own_logits(
    model: Any, rows: AlignedRows
) -> tuple[
    Float[Tensor, "rows positions vocab"], Float[Tensor, "rows positions"], Bool[Tensor, "rows positions_less_1"]
]:
    """Return the model's own logits, from the first position that predicts a scored token on.

    Also return the norms of the hidden states that its head read there, and 1 at the positions that predict.
    """
    first = max(int(rows.prompts.min()) - 1, 0)
    keep = rows.longest - first
    options: dict[str, Any] = {"logits_to_keep": keep} if proof.keeps_logits(model) else {}
    head, read = head_of(model), []
    hook = None
    if isinstance(head, nn.Module):
        hook = head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    else:
        options["output_hidden_states"] = True
    try:
        output = model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False, **options)
    finally:
        if hook is not None:
            hook.remove()
    last = read[-1] if read else output.hidden_states[-1]
    if last.shape[:-1] == output.logits.shape[:-1]:
        norms = torch.linalg.vector_norm(last[:, -keep:], dim=-1, dtype=torch.float32)
    else:  # the head reads several states per token
        norms = output.logits.new_full((len(rows.ids), keep), torch.nan, dtype=torch.float32)
    return output.logits[:, -keep:], norms, rows.predicts[:, first:]
