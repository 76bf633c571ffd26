"""What a model's head reads to predict the tokens of answers, and how its logits follow from that.

A model's forward is run with its head standing aside: it hands over what it would have read and computes nothing. Which
pass is used, and whether the logits are those of the head, scaled or capped, is tried on the model itself (see
`explorl.modeling.proof`). Where nothing fits, `reading` says so, and the caller has to take the model's own logits.
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
"""Names under which configurations of transformers keep a factor, or a divisor, of the logits."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names under which they keep a cap."""


@dataclass(frozen=True)
class LogitsPath:
    """How a model's logits are got at."""

    kind: Kind
    scale: float = 1.0
    softcap: float | None = None
    points: frozenset[int] = frozenset()
    """Turning points that were tried."""
    why: str = ""
    """Why logits are the model's own."""


class AlignedRows:
    """Rows with their padding on the right, wherever it was, and which tokens of theirs are scored.

    A token is scored if it is one of the last `completion` columns, counts, and has a token before it.
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
        place = torch.arange(self.longest, device=order.device)
        self.scored = self.counted & (place >= self.prompts.clamp(min=1))
        self.targets = self.ids[self.scored]
        self.places = self.scored.nonzero()[:, 0], order[self.scored] - prompt
        """Row and column, in the completion, of each scored token."""

    @property
    def predicts(self) -> Bool[Tensor, "rows length_less_1"]:
        """1 where what is read predicts a scored token."""
        return self.scored[:, 1:]

    def shared(self) -> Bool[Tensor, "rows length"]:
        """1 on prompt tokens of rows that have the prompt of the row above; but for the last, which predicts."""
        place = torch.arange(self.longest, device=self.ids.device)
        inside = place < self.prompts
        same = (self.ids[1:] == self.ids[:-1]) | ~inside[1:]
        same = same.all(1, keepdim=True) & (self.prompts[1:] == self.prompts[:-1])
        shared = torch.zeros_like(self.counted)
        shared[1:] = same & (place < self.prompts[1:] - 1)
        return shared


def unwrapped(model: Any) -> Any:
    """Without what torch.compile and data parallelism put around a model: nothing of theirs may see the head aside."""
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
def _head_aside(model: Any, say: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """What the head would read goes to the list; `say` gives what it returns instead."""
    head, read = head_of(model), []

    def forward(states: Tensor, *_: Any, **__: Any) -> Tensor:
        read.append(states)
        return states.new_zeros(*states.shape[:-1], 1) if say is None else say(states)

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
    """What the head reads to predict each scored token, row by row."""
    with _head_aside(model) as read:
        if kind == "padded":
            model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False)
            return read[-1][:, :-1][rows.predicts]
        packed = PackedRows(rows.counted, rows.shared())
        number = packed.kept.flatten().cumsum(0).view_as(packed.kept) - 1
        with packed_rows(model, packed, kind == "unrolled", use_kernels):
            model(
                input_ids=rows.ids[packed.kept].unsqueeze(0),
                position_ids=packed.positions.unsqueeze(0),
                use_cache=False,
            )
        return read[-1][0].index_select(0, number[:, :-1][rows.predicts])


def adjusted(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """softcap · tanh(scale · logits / softcap), in the logits' type and memory, as transformers' models round it."""
    if scale != 1:
        logits = logits.mul_(scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


_LOGITS_PATHS: WeakKeyDictionary[Any, dict[Any, LogitsPath]] = WeakKeyDictionary()


def logits_path(model: Any, reach: int, dtype: torch.dtype | None) -> LogitsPath:
    """The fastest that is right on sequences of up to ``reach`` tokens; ``dtype`` is that of autocast."""
    if is_sharded(model):
        return LogitsPath("own logits", why="its weights are spread over processes")
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in {model, proof.inner_model(model)}):
        return LogitsPath("own logits", why="it is compiled, in place")
    if not isinstance(head_of(model), nn.Module):
        return LogitsPath("own logits", why="it has no module as its head")
    points = proof.reached(proof.inner_model(model).config, reach)
    known = _LOGITS_PATHS.setdefault(proof.inner_model(model), {})
    key = proof.build_of(model), dtype, model.training
    found = known.get(key)
    if found is None or not points <= found.points:
        found = known[key] = _try_out(model, points | (found.points if found else frozenset()), dtype)
    return found


def _try_out(model: Any, points: frozenset[int], dtype: torch.dtype | None) -> LogitsPath:
    rule = _rule(model)
    found = None if rule is None else LogitsPath("padded", *rule, points)
    if found is None or not _same_logits(model, found, dtype):
        why = "its logits are not its head's, scaled or capped"
        logger.info("token records need all logits of a few rows of %s at once: %s", type(model).__name__, why)
        return LogitsPath("own logits", points=points, why=why)
    kinds: list[Kind] = ["packed"] if llama_pass(model) is None else ["unrolled", "packed"]
    for kind in kinds:
        faster = replace(found, kind=kind)
        if not (model.training and _drops_attention(model, kind)) and not _difference(model, faster, dtype):
            return faster
    return found


def _rule(model: Any) -> tuple[float, float | None] | None:
    """Scale and cap that the model puts on what its head says, found by making it say large random values."""
    config, head, said = proof.text_config(model), head_of(model), []
    values = {float(value) for name in SCALES if (value := getattr(config, name, None))}
    scales = [1.0, *(factor for value in values - {1.0} for factor in (value, 1 / value))]
    caps = [None, *(getattr(config, name, None) for name in CAPS)]
    ids = torch.tensor([proof.sequences(model, [])[0][:4]], device=next(model.parameters()).device)
    own = head.forward

    def say(states: Tensor) -> Tensor:
        shape = *states.shape[:-1], own(states[:, :1]).shape[-1]
        said.append((30 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(states))
        return said[-1].clone()

    try:
        with evaluating(model), _head_aside(model, say):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except _FAILURES:
        return None
    if len(said) != 1:
        return None
    rules = product(scales, dict.fromkeys(caps))
    return next((rule for rule in rules if _close(adjusted(said[0].clone(), *rule), logits)), None)


_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, IndexError, KeyError)


def _close(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    near = 1e-5 if found.dtype in (torch.float32, torch.float64) else 2e-2
    apart = (found.to(wanted) - wanted).abs()
    return bool((apart <= near * (1 + float(wanted.abs().max()))).all())


def _same_logits(model: Any, found: LogitsPath, dtype: torch.dtype | None) -> bool:
    """Whether what is read gives the logits that the model itself gives on the same padded rows."""
    rows = _proof_rows(model, proof.sequences(model, []))
    try:
        with evaluating(model), proof.computing_in(model, dtype):
            own = model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False).logits
            read = states(model, rows, "padded")
            return _close(adjusted(head_of(model)(read), found.scale, found.softcap), own[:, :-1][rows.predicts])
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return False


def _drops_attention(model: Any, kind: Kind) -> bool:
    """Whether attention has dropout in training, where the proof does not look."""
    with torch.no_grad(), torch.random.fork_rng():
        try:
            states(model, _proof_rows(model, proof.sequences(model, [])[:1]), kind, use_kernels=False)
        except AttentionDropout:
            return True
        except Exception:  # whatever else is wrong, the proof says
            return False
    return False


def _proof_rows(model: Any, ids: list[list[int]]) -> AlignedRows:
    """Padded on the left; one sequence beside a copy of itself, which shares its prompt."""
    device = next(model.parameters()).device
    rows = [ids[0], *ids]
    longest = max(len(row) for row in rows)
    padded = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return AlignedRows(padded, mask, proof.TAIL)


def _difference(model: Any, found: LogitsPath, dtype: torch.dtype | None) -> str:
    """What is wrong with this reading of the model; empty where nothing is."""
    ids = proof.sequences(model, sorted(found.points))

    def fast(in_float32: bool) -> tuple[list[list[int]], Tensor]:
        with nullcontext() if in_float32 else proof.computing_in(model, dtype):
            rows = _proof_rows(model, ids)
            read = states(model, rows, found.kind, use_kernels=False if in_float32 else None)
            logits = adjusted(head_of(model)(read), found.scale, found.softcap).float()
        logps = torch.log_softmax(logits, -1).gather(-1, rows.targets.unsqueeze(-1).to(logits.device))
        return ids, logps.view(len(ids) + 1, proof.TAIL)[1:].cpu()

    return proof.difference(model, dtype, fast)


def is_sharded(model: nn.Module) -> bool:
    """Whether other processes hold parts of the weights, so that all have to call the model equally often."""
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return wrapped or any(
        hasattr(parameter, "ds_id") or "DTensor" in type(parameter.data).__name__ for parameter in model.parameters()
    )


def own_logits(
    model: Any, rows: AlignedRows
) -> tuple[Float[Tensor, "rows kept vocab"], Float[Tensor, "rows kept"], Bool[Tensor, "rows kept_less_1"]]:
    """The model's own logits from the first place that predicts a scored token on, norms of what its head read there,
    and 1 on the places that predict."""
    first = max(int(rows.prompts.min()) - 1, 0)
    keep = rows.longest - first
    asked: dict[str, Any] = {"logits_to_keep": keep} if proof.keeps_logits(model) else {}
    head, read = head_of(model), []
    hook = None
    if isinstance(head, nn.Module):
        hook = head.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    else:
        asked["output_hidden_states"] = True
    try:
        output = model(input_ids=rows.ids, attention_mask=rows.counted.long(), use_cache=False, **asked)
    finally:
        if hook is not None:
            hook.remove()
    last = read[-1] if read else output.hidden_states[-1]
    if last.shape[:-1] == output.logits.shape[:-1]:
        norms = torch.linalg.vector_norm(last[:, -keep:], dim=-1, dtype=torch.float32)
    else:  # a head that reads more than one state a token
        norms = output.logits.new_full((len(rows.ids), keep), torch.nan, dtype=torch.float32)
    return output.logits[:, -keep:], norms, rows.predicts[:, first:]
