"""The hidden states that a model's head reads to predict completion tokens, and how its logits follow from them.

A model's forward runs with its head bypassed: the head stores its input and computes nothing. Which pass is used, and
whether the logits are those of the head, scaled or capped, is tried on the model itself (see `explorl.modeling.proof`).
If nothing fits, `logits_path` returns "own logits", and the caller has to use the model's own logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from explorl.modeling import proof
from explorl.modeling.attention import AttentionDropout, evaluating
from explorl.modeling.llama_pass import llama_pass
from explorl.modeling.packed import PackedRows, packed_rows

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
    points: frozenset[int] = frozenset()
    """Turning points covered by the proof."""
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

    def shared(self) -> Bool[Tensor, "rows length"]:
        """Return 1 on prompt tokens of rows with the same prompt as the row above, except the last, which predicts."""
        position = torch.arange(self.longest, device=self.ids.device)
        inside = position < self.prompts
        same = (self.ids[1:] == self.ids[:-1]) | ~inside[1:]
        same = same.all(1, keepdim=True) & (self.prompts[1:] == self.prompts[:-1])
        shared = torch.zeros_like(self.counted)
        shared[1:] = same & (position < self.prompts[1:] - 1)
        return shared


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

    before = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield read
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


def states(model: Any, rows: AlignedRows, kind: Kind, use_kernels: bool | None = None) -> Float[Tensor, "scored width"]:
    """Return the hidden states that predict each scored token, row by row."""
    with _bypassed_head(model) as read:
        if kind == "padded":
            model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False)
            return read[-1][:, :-1][rows.predicts]
        packed = PackedRows(rows.counted, rows.shared())
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


_LOGITS_PATHS: WeakKeyDictionary[Any, dict[Any, LogitsPath]] = WeakKeyDictionary()


def logits_path(model: Any, reach: int, dtype: torch.dtype | None) -> LogitsPath:
    """Return the fastest correct path for sequences of up to ``reach`` tokens; ``dtype`` is that of autocast."""
    if is_sharded(model):
        return LogitsPath("own logits", why="its weights are sharded over processes")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in {model, proof.inner_model(model)}):
        return LogitsPath("own logits", why="it is compiled in place")
    if not isinstance(head_of(model), nn.Module):
        return LogitsPath("own logits", why="its head is not a module")
    points = proof.reached(proof.inner_model(model).config, reach)
    paths = _LOGITS_PATHS.setdefault(proof.inner_model(model), {})
    key = proof.build_of(model), dtype, model.training
    path = paths.get(key)
    if path is None or not points <= path.points:
        path = paths[key] = _try_out(model, points | (path.points if path else frozenset()), dtype)
    return path


def _try_out(model: Any, points: frozenset[int], dtype: torch.dtype | None) -> LogitsPath:
    rule = _rule(model)
    path = None if rule is None else LogitsPath("padded", *rule, points)
    if path is None or not _same_logits(model, path, dtype):
        why = "its logits are not those of its head, scaled or capped"
        logger.info("token records of %s need all logits of a few rows at once: %s", type(model).__name__, why)
        return LogitsPath("own logits", points=points, why=why)
    kinds: list[Kind] = ["packed"] if llama_pass(model) is None else ["unrolled", "packed"]
    for kind in kinds:
        faster = replace(path, kind=kind)
        if not (model.training and _drops_attention(model, kind)) and not _difference(model, faster, dtype):
            return faster
    return path


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
    if computed.shape != expected.shape:
        return False
    near = 1e-5 if computed.dtype in (torch.float32, torch.float64) else 2e-2
    apart = (computed.to(expected) - expected).abs()
    return bool((apart <= near * (1 + float(expected.abs().max()))).all())


def _same_logits(model: Any, path: LogitsPath, dtype: torch.dtype | None) -> bool:
    """Return whether the collected states give the logits that the model gives on the same padded rows."""
    rows = _proof_rows(model, proof.sequences(model, []))
    try:
        with evaluating(model), proof.computing_in(model, dtype):
            original = model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False).logits
            read = states(model, rows, "padded")
            return _close(adjusted(head_of(model)(read), path.scale, path.softcap), original[:, :-1][rows.predicts])
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return False


def _drops_attention(model: Any, kind: Kind) -> bool:
    """Return whether attention has dropout in training, which the proof, in evaluation mode, would not notice."""
    with torch.no_grad(), torch.random.fork_rng():
        try:
            states(model, _proof_rows(model, proof.sequences(model, [])[:1]), kind, use_kernels=False)
        except AttentionDropout:
            return True
        except Exception:  # the proof reports other failures
            return False
    return False


def _proof_rows(model: Any, ids: list[list[int]]) -> AlignedRows:
    """Return the sequences padded on the left, the first one twice, so that prompts are shared."""
    device = next(model.parameters()).device
    rows = [ids[0], *ids]
    longest = max(len(row) for row in rows)
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return AlignedRows(padded, mask, proof.TAIL)


def _difference(model: Any, path: LogitsPath, dtype: torch.dtype | None) -> str:
    """Return why this path can't be used for this model, or ""."""
    ids = proof.sequences(model, sorted(path.points))

    def fast(in_float32: bool) -> tuple[list[list[int]], Tensor]:
        with nullcontext() if in_float32 else proof.computing_in(model, dtype):
            rows = _proof_rows(model, ids)
            read = states(model, rows, path.kind, use_kernels=False if in_float32 else None)
            logits = adjusted(head_of(model)(read), path.scale, path.softcap).float()
        logps = torch.log_softmax(logits, -1).gather(-1, rows.targets.unsqueeze(-1).to(logits.device))
        return ids, logps.view(len(ids) + 1, proof.TAIL)[1:].cpu()

    return proof.difference(model, dtype, fast)


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
