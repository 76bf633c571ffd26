"""Whether a fast path computes what the model computes: tried on the model itself, on inputs long enough to tell.

A fast path knows layers by their shape, and a model may do something else inside that shape: a sliding window, chunked
attention, a rotary embedding that changes beyond a length, a state that runs on from one packed sequence into the next.
So it is compared with the model's own forward pass on each sequence alone, before it is used and again where sequences
grow beyond a length at which the configuration says that something changes.

In float32 both must agree to rounding. Half precision hides small faults, so there the comparison is made in float32
first, and then once more in half precision, where the fast path must be as near to the float32 result as the model's
own pass is. "Near" is relative to how much the model's log-probabilities vary over the vocabulary.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere

from explorl.modeling.attention import evaluating, replaced
from explorl.modeling.precision import CastWeights, weights_dtype

TAIL = 12
"""Tokens at the end of each sequence that are compared."""
BEYOND = 5
"""How many tokens a sequence reaches beyond a turning point before its compared tokens begin."""
EXACT = 1e-3
"""Largest difference in float32."""
SEEN = 0.5
"""Least change of a log-probability if the model depends on the context."""
ROUGH = 0.2
"""Largest mean of the differences in half precision, where float32 could not be tried."""

_NAMES = ("window", "chunk_size", "original_max_position")


def turning_points(config: Any) -> dict[str, int]:
    """Return lengths beyond which the model may compute something else, by the name in its configuration."""
    found: dict[str, int] = {}

    def look(values: Any, prefix: str) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                look(value, f"{prefix}{name}.")
                continue
            number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if number and any(part in str(name) for part in _NAMES) and "layers" not in str(name):
                found[f"{prefix}{name}"] = value

    text = config.get_text_config(decoder=True)
    look(text.to_dict(), "")
    if "dynamic" in str(text.to_dict().get("rope_parameters")):  # which changes with every token beyond its context
        found["max_position_embeddings"] = text.max_position_embeddings
    return found


def reached(config: Any, reach: int) -> frozenset[int]:
    """Return the turning points that sequences of up to ``reach`` tokens get beyond."""
    return frozenset(value for value in turning_points(config).values() if value < reach)


def sequences(model: Any, points: Sequence[int]) -> list[list[int]]:
    """Return random token ids: short sequences, and per turning point one beyond it and one that ends across it."""
    config = text_config(model)
    rows = int(inner_model(model).get_input_embeddings().weight.shape[0])
    vocab = min(rows, getattr(config, "vocab_size", None) or rows)
    lengths = [TAIL + 6, TAIL + 1, TAIL + 2]  # of the last two, tokens right behind a neighbour are compared
    for point in sorted(set(points)):
        lengths += [point + BEYOND + TAIL, max(point + TAIL // 2, TAIL + 1)]
    room = max((getattr(config, "max_position_embeddings", None) or math.inf, *(p + 2 * TAIL for p in points)))
    draw = random.Random(0)
    ends = getattr(config, "eos_token_id", None)
    special = {0, 1, 2, getattr(config, "pad_token_id", None), *(ends if isinstance(ends, list) else [ends])}
    plain = [token for token in range(min(vocab, 4096)) if token not in special] if vocab > 8 else list(range(vocab))
    return [[draw.choice(plain) for _ in range(int(min(length, room)))] for length in lengths]


def own_logps(
    model: Any, ids: Sequence[Sequence[int]], *, tail: int = TAIL, temperature: float = 1.0
) -> tuple[Tensor, float]:
    """Return log π of each sequence's last ``tail`` tokens by the model's own forward, and how much log π varies."""
    device = next(model.parameters()).device
    keep = {"logits_to_keep": tail + 1} if keeps_logits(model) else {}
    logps, spreads = [], []
    for sequence in ids:
        row = torch.tensor([list(sequence)], device=device)
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, **keep).logits
        logits = logits[0, -tail - 1 : -1].float() / temperature
        tokens = row[0, -tail:].to(logits.device)
        logps.append(torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0])
        spreads.append(logits.std(-1).mean())
    return torch.stack(logps).cpu(), float(torch.stack(spreads).mean())


Fast = Callable[[bool], tuple[Sequence[Sequence[int]], Tensor]]
"""A fast path: sequences and log π of their last tokens. True asks for float32 and plain torch, without kernels."""


def difference(model: Any, dtype: torch.dtype | None, fast: Fast, *, temperature: float = 1.0) -> str:
    """Return why a fast path can't be used for this model, or "". ``dtype`` is that of computation."""
    used = dtype or weights_dtype(model)
    if waits_for_tokens(model):
        return "its adapter has alora_invocation_tokens, which peft can find only in unpacked rows"
    try:
        with evaluating(model), torch.autocast(next(model.parameters()).device.type, enabled=False):
            with in_float32(model) as possible:
                if possible and used != torch.float32:
                    wrong = _compared(model, *fast(True), temperature)
                    if wrong:
                        return wrong
                if possible and _hardly_sees_context(model):
                    with _amplified(model):
                        wrong = _compared(model, *fast(True), temperature)
                    if wrong:
                        return wrong
            ids, got = fast(False)
            with computing_in(model, dtype):
                own, spread = own_logps(model, ids, temperature=temperature)
            exact: Tensor | None = None
            if used != torch.float32:
                with in_float32(model) as possible:
                    exact = own_logps(model, ids, temperature=temperature)[0] if possible else None
            return "" if excess(got, own, exact, spread, used) <= 1 else _said(got - own)
    except torch.OutOfMemoryError:
        raise
    except NothingToCompare:
        return ""
    except Exception as error:  # a model's own code, Triton and its compilers raise what they like
        if "can't allocate memory" in str(error):  # which says nothing of the path
            raise
        return f"it fails with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class NothingToCompare(Exception):
    """The model's own logits are not finite."""


def _compared(model: Any, ids: Sequence[Sequence[int]], got: Tensor, temperature: float) -> str:
    """Return how a fast path in float32 differs from the model, or ""."""
    own, spread = own_logps(model, ids, temperature=temperature)
    return "" if excess(got, own, None, spread, torch.float32) <= 1 else _said(got - own)


def _said(difference: Tensor) -> str:
    return f"log-probabilities differ by up to {float(difference.abs().max()):.2g} from the model's own"


def excess(fast: Tensor, own: Tensor, exact: Tensor | None, spread: float, dtype: torch.dtype) -> float:
    """Return how far the fast path is off, in units of the tolerance: at most 1 is correct.

    ``exact`` is the model's own result in float32, None where that could not be computed.
    """

    spread = max(spread, 1e-6) if math.isfinite(spread) else 1.0

    def mean(difference: Tensor) -> float:
        """Return the mean size, each at most ``spread``, as rounding may send a single token to another expert."""
        return float(difference.abs().clamp(max=spread).mean())

    if bool((torch.isfinite(fast) != torch.isfinite(own)).any()):
        return math.inf
    finite = torch.isfinite(own)
    fast, own, exact = fast[finite], own[finite], None if exact is None else exact[finite]
    if len(own) == 0:
        return 0.0
    if dtype in (torch.float32, torch.float64):
        return float((fast - own).abs().max()) / (EXACT * spread)
    if exact is None:
        return mean(fast - own) / (ROUGH * spread)
    return mean(fast - exact) / (3 * mean(own - exact) + 0.02 * spread)


def _hardly_sees_context(model: Any) -> bool:
    """Return whether log π hardly depends on the context, as in an untrained model, so that no fault would show."""
    ids = sequences(model, [])
    others = [[*reversed(row[:-4]), *row[-4:]] for row in ids]  # the same last tokens after another context
    own, spread = own_logps(model, ids, tail=3)
    return bool((own - own_logps(model, others, tail=3)[0]).abs().max() < SEEN * spread)


@contextmanager
def _amplified(model: Any) -> Iterator[None]:
    """Enlarge the weight matrices so that every layer has a visible effect on log π."""
    heads = {id(inner_model(model).get_input_embeddings()), id(inner_model(model).get_output_embeddings())}
    draw = torch.Generator().manual_seed(0)
    entries: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if id(module) in heads or isinstance(module, nn.Embedding):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or not parameter.is_floating_point():
                continue
            if id(parameter) not in known:
                noise = torch.randn(parameter.shape, generator=draw).to(parameter) / math.sqrt(parameter[0].numel())
                known[id(parameter)] = nn.Parameter(parameter.detach() + noise, requires_grad=False)
            entries.append((module._parameters, name, known[id(parameter)]))
    with replaced(entries):
        yield


@contextmanager
def in_float32(model: Any) -> Iterator[bool]:
    """Use float32 weights; yield False if they are quantised or do not fit into memory."""
    root = inner_model(model)
    if getattr(root, "is_quantized", False) or getattr(root, "hf_quantizer", None) is not None:
        yield False
        return
    if weights_dtype(model) == torch.float32:
        yield True
        return
    device = next(model.parameters()).device
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    if device.type == "cuda" and 2 * needed > torch.cuda.mem_get_info(device)[0]:
        yield False
        return
    with CastWeights(model, torch.float32).in_place():
        yield True


def computing_in(model: Any, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Return a context that computes in ``dtype``: autocast, or wider weights, which autocast cannot provide."""
    if dtype is None or dtype == weights_dtype(model):
        return nullcontext()
    if dtype.itemsize > weights_dtype(model).itemsize:
        return CastWeights(model, dtype).in_place()
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype=dtype)


def keeps_logits(model: nn.Module) -> bool:
    """Return whether the model can compute only the last positions' logits."""
    return "logits_to_keep" in inspect.signature(type(inner_model(model)).forward).parameters


def inner_model(model: Any) -> Any:
    """Return the transformers model inside peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def waits_for_tokens(model: Any) -> bool:
    """Return whether an active adapter acts only after certain tokens (aLoRA), which zero weights would not show."""
    if not hasattr(model, "get_base_model"):  # peft's wrapper looks for them
        return False
    return any(getattr(model.peft_config[name], "alora_invocation_tokens", None) for name in model.active_adapters)


def text_config(model: Any) -> Any:
    return inner_model(model).config.get_text_config(decoder=True)


def build_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what a model is built of: modules, hooks, replaced forwards and active adapters, but not its weights.

    If it changes, proofs have to be repeated.
    """
    modules: list[Any] = list(model.modules())
    acting = {
        (tuple(m.active_adapters), bool(m.disable_adapters), tuple(m.merged_adapters))
        for m in modules
        if hasattr(m, "merged_adapters")
    }
    hooks = tuple((id(m), *touched(m)) for m in modules)
    return tuple(sorted(acting)), hash(hooks), str(getattr(model, "active_adapter", None))


def touched(module: nn.Module) -> tuple[int, int, int]:
    """Count the pre-hooks and hooks of a module, including global ones, and identify a replaced forward.

    Hooks that only require gradients do not count: gradient checkpointing adds and removes them on embeddings.
    """
    behind = [hook for hook in module._forward_hooks.values() if "require_grad" not in getattr(hook, "__name__", "")]
    before = len(module._forward_pre_hooks) + len(everywhere._global_forward_pre_hooks)
    return before, len(behind) + len(everywhere._global_forward_hooks), id(module.__dict__.get("forward"))


def layer_types(model: nn.Module) -> str:
    """Return the classes of a model's layers, with their token mixers, for a message."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        return type(model).__name__
    layers = max(lists, key=lambda layer: sum(p.numel() for p in layer.parameters()))
    dull = ("Norm", "MLP", "Linear", "Dropout", "Identity", "ModuleList", "Expert", "Conv1D")
    kinds: dict[str, set[str]] = {}
    for layer in layers:
        names = {type(child).__name__ for child in layer.children()}
        mixers = {name for name in names if not any(part in name for part in dull)}
        kinds.setdefault(type(layer).__name__, set()).update(mixers)
    return ", ".join(f"{kind} ({', '.join(sorted(mix))})" if mix else kind for kind, mix in sorted(kinds.items()))
