"""Log-probabilities of completions without computing padding or repeated prompts.

All tokens of a micro-batch are packed into one row, so that no layer and no logit is computed for padding, and
neighbouring rows with the same prompt share its tokens. Only attention is computed on padded rows, where a causal
kernel needs no mask because all padding is on the right. The result equals that of a padded pass, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from explorl.modeling.attention import attending, configs_of, our_attention, replaced, scaled_attention
from explorl.modeling.fused import Fusion
from explorl.modeling.llama_pass import LlamaPass, llama_pass


class PackedRows:
    """Attention within each of several sequences that are packed into one row, some with shared beginnings.

    Args:
        counted: 1 on the tokens of each sequence.
        shared: 1 on the tokens that a sequence shares with the one above it, in the same columns.
    """

    def __init__(self, counted: Bool[Tensor, "rows length"], shared: Bool[Tensor, "rows length"]) -> None:
        self.included = counted & ~shared
        lengths = counted.sum(1)
        self.rows, self.longest = len(lengths), int(lengths.max())
        first = torch.cummax(torch.where(shared.any(1), 0, torch.arange(self.rows, device=lengths.device)), 0).values
        number = self.included.flatten().cumsum(0).view_as(counted) - 1  # a token's index in the packed row
        number = torch.where(shared, number[first], number)
        position = counted.cumsum(1) - 1
        slot = torch.arange(self.rows, device=lengths.device).unsqueeze(1) * self.longest + position
        self.positions = position[self.included]
        self.slots = slot[self.included]
        self.repeated, self.repeats = slot[counted & shared], number[counted & shared]
        self.source = self.slots.new_zeros(self.rows * self.longest)  # any token will do for padding
        self._places = number[counted], slot[counted]
        self.source[self._places[1]] = self._places[0]

    @cached_property
    def by_token(self) -> tuple[Int[Tensor, " places"], Int[Tensor, " tokens_and_one"]]:
        """The slots of the first token, of the second, and so on; and where those of each token start in that list."""
        token, slot = self._places
        counts = torch.bincount(token, minlength=len(self.slots))
        return slot[token.argsort(stable=True)], F.pad(counts.cumsum(0), (1, 0))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attend with packed tokens (1, heads, tokens, size) → (1, tokens, heads, size)."""
        return self.attend_spread(self._spread(query), self._spread(key), self._spread(value), scale, window, cap)

    def attend_spread(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attend with padded rows (rows, heads, longest, size) → (1, tokens, heads, size)."""
        mask = None
        if window is not None and window < self.longest:
            position = torch.arange(self.longest, device=query.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < window)
        if cap is None:
            out = scaled_attention(query, key, value, scale, mask=mask, causal=mask is None)
        else:
            out = _capped_attention(query, key, value, mask, scale, cap)
        flat = out.transpose(1, 2).reshape(self.rows * self.longest, out.size(1), out.size(3))
        return _Collected.apply(flat, self).unsqueeze(0)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return key and value: nothing is cached."""
        return key, value

    def _spread(self, tensor: Tensor) -> Tensor:
        """Distribute packed tokens (1, heads, tokens, size) over padded rows (rows, heads, longest, size)."""
        flat = _Spread.apply(tensor[0].transpose(0, 1), self)
        return flat.reshape(self.rows, self.longest, *flat.shape[1:]).transpose(1, 2)


class _Spread(torch.autograd.Function):
    """Packed tokens to padded rows; the gradients of a shared token are summed."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        return tokens.index_select(0, rows.source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows, gradient = ctx.rows, gradients[0]
        total = gradient.index_select(0, rows.slots)
        return total.index_add_(0, rows.repeats, gradient.index_select(0, rows.repeated)), None


class _Collected(torch.autograd.Function):
    """Padded rows to packed tokens; a shared token is read from its first row."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, rows: PackedRows) -> Tensor:
        ctx.rows = rows
        return padded.index_select(0, rows.slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows, gradient = ctx.rows, gradients[0]
        padded = gradient.new_zeros(rows.rows * rows.longest, *gradient.shape[1:])
        return padded.index_copy_(0, rows.slots, gradient), None


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """Compute softmax(cap · tanh(scores / cap)) · value, for which torch has no fused kernel."""
    key, value = (tensor.repeat_interleave(query.size(1) // tensor.size(1), dim=1) for tensor in (key, value))
    scores = cap * torch.tanh(query @ key.transpose(2, 3) * scale / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf).float(), dim=-1).to(value.dtype) @ value


_PASSES: WeakKeyDictionary[nn.Module, LlamaPass | None] = WeakKeyDictionary()
_NORMS: WeakKeyDictionary[nn.Module, Fusion] = WeakKeyDictionary()


@contextmanager
def packed_rows(model: Any, rows: PackedRows, unrolled: bool, use_kernels: bool | None) -> Iterator[None]:
    """Run the model on packed rows, with unrolled layers or its own."""
    if unrolled:
        with _unrolled(causal(model), rows, use_kernels):
            yield
        return
    configs = configs_of(model)

    @contextmanager
    def inside() -> Iterator[None]:
        with our_attention(configs), attending(rows), _fused_norms(causal(model)):
            yield

    with inside(), _computed_again(model, inside):
        yield


@contextmanager
def _unrolled(model: Any, rows: PackedRows, use_kernels: bool | None) -> Iterator[None]:
    forward_pass = _PASSES.get(model) if use_kernels is None else None
    if forward_pass is None:
        forward_pass = llama_pass(model, use_kernels)
        assert forward_pass is not None
        if use_kernels is None:
            _PASSES[model] = forward_pass
    with replaced([(forward_pass.body.__dict__, "forward", forward_pass.forward), (vars(forward_pass), "rows", rows)]):
        yield


def _fused_norms(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which RMS norms are one operation instead of six."""
    if model not in _NORMS:
        fusion = Fusion(model, next(model.parameters()).dtype, use_kernels=False)
        norms = [entry for entry in fusion.replacements if type(entry[0]).__name__.endswith("RMSNorm")]
        fusion.replacements = norms
        _NORMS[model] = fusion
    return _NORMS[model]()


def _computed_again(
    model: nn.Module, inside: Callable[[], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    """Return a context that enters ``inside`` also when gradient checkpointing recomputes layers in the backward pass.

    Without gradients nothing is recomputed, and torch's reentrant checkpointing would warn, so layers run directly.
    """

    def directly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def within(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def again(*args: Any, **kwargs: Any) -> Any:
                with inside():
                    return function(*args, **kwargs)

            return checkpoint(again, *args, **kwargs)

        return checkpointed

    name, with_gradients = "_gradient_checkpointing_func", torch.is_grad_enabled()
    modules = [module.__dict__ for module in model.modules() if name in module.__dict__]
    return replaced([(values, name, within(values[name] if with_gradients else directly)) for values in modules])


def packed_logps(
    model: Any,
    input_ids: Int[Tensor, "batch length"],
    attention_mask: Int[Tensor, "batch length"],
    completion: int,
    *,
    temperature: Float[Tensor, " batch"] | Float[Tensor, "batch time"] | None = None,
    head_temperature: float = 1.0,
    unrolled: bool = False,
    use_kernels: bool | None = None,
) -> tuple[Float[Tensor, "batch time"], Float[Tensor, "batch time"]]:
    """Return log π and entropy of the last `completion` positions; 0 where the mask is 0.

    `model` has TRL's fused head, which divides logits by `head_temperature`. With `temperature`, one per row or one per
    token, the hidden states are scaled accordingly; if the head is not linear, logits are computed here instead.
    `explorl.modeling.passes` decides whether a model may run like this, and `unrolled`.
    """
    counted = attention_mask.bool()
    rows = PackedRows(counted, shared_prompts(input_ids, counted, completion))
    labels = input_ids.masked_fill(~counted, -100)
    labels[:, : input_ids.size(1) - completion] = -100
    following = torch.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]  # each position predicts the next token
    packed = {"input_ids": input_ids[rows.included].unsqueeze(0), "position_ids": rows.positions.unsqueeze(0)}
    targets = following[rows.included]
    row_temperature = None if temperature is None else by_place(temperature, input_ids)[rows.included]
    with packed_rows(model, rows, unrolled, use_kernels):
        if row_temperature is None or is_linear(model):
            scale = None if row_temperature is None else head_temperature / row_temperature
            with scaled_states(model, None if scale is None else scale.view(1, -1, 1)):
                output = model(**packed, shift_labels=targets.unsqueeze(0), fused_lm_head=True)
            logps, entropy = output.log_probs[0], output.entropy
            entropy = torch.zeros_like(logps) if entropy is None else entropy[0]
        else:
            logits = model(**packed, use_cache=False).logits[0].float() / row_temperature.unsqueeze(1)
            distribution = torch.log_softmax(logits, dim=-1)
            logps = distribution.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
    # A token's log-probability is at the position that predicted it, one before the token.
    places = rows.included.flatten().nonzero().squeeze(1)
    scored = targets != -100
    into = places[scored] + 1

    def unpack(values: Tensor) -> Tensor:
        flat = values.new_zeros(input_ids.numel()).index_copy(0, into, values[scored])
        return flat.view_as(input_ids)[:, -completion:]

    return unpack(logps), unpack(entropy)


def by_place(
    temperature: Float[Tensor, " batch"] | Float[Tensor, "batch time"], input_ids: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    """Return the temperature of each position, given one per row or one per completion token.

    A token is predicted at the position before it.
    """
    if temperature.dim() == 1:
        return temperature.unsqueeze(1).expand_as(input_ids)
    places = temperature.new_ones(input_ids.shape)
    places[:, -temperature.size(1) - 1 : -1] = temperature
    return places


def causal(model: Any) -> Any:
    """Return the model with the head, without the wrappers of peft and of distributed training."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def is_linear(model: Any) -> bool:
    """Return whether scaling the hidden states scales the logits."""
    inner = causal(model)
    text = inner.config.get_text_config(decoder=True)
    return inner.get_output_embeddings().bias is None and getattr(text, "final_logit_softcapping", None) is None


@contextmanager
def scaled_states(model: Any, scale: Float[Tensor, "#rows #tokens 1"] | None) -> Iterator[None]:
    """Multiply the hidden states that the head reads by a scale."""
    if scale is None:
        yield
        return

    def multiply(module: nn.Module, inputs: Any, output: Any) -> None:
        states = output.last_hidden_state
        output.last_hidden_state = states * scale.to(states.dtype)

    hook = causal(model).base_model.register_forward_hook(multiply)
    try:
        yield
    finally:
        hook.remove()


def shared_prompts(
    input_ids: Int[Tensor, "batch length"], counted: Bool[Tensor, "batch length"], completion: int
) -> Bool[Tensor, "batch length"]:
    """Return 1 on prompt tokens of rows with the same prompt as the row above, except the last, which predicts."""
    prompts = counted[:, : input_ids.size(1) - completion]
    length = prompts.size(1)
    same = (input_ids[1:, :length] == input_ids[:-1, :length]) | ~prompts[1:]
    same = (same & (prompts[1:] == prompts[:-1])).all(1, keepdim=True)
    number = prompts.cumsum(1)
    shared = torch.zeros_like(counted)
    shared[1:, :length] = same & prompts[1:] & (number < number[:, -1:])[1:]
    return shared
