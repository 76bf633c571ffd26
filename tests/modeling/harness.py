"""How far the fast paths are from the model itself, measured without any of the project's own checks.

The reference is the plain forward of the model's class on one sequence at a time, unpadded. Every measure is the
largest |Δ log π| against it, ∞ where something is not finite; in half precision, the mean one. A path that refuses a
model raises its own error; a packed pass that is not used for a model raises `SteppedAside`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

# Everything that is measured, and the only imports from the project.
from explorl.modeling.packed import packed_logps
from explorl.modeling.passes import Kind, choose
from explorl.rollout import Engine, Rollout, SamplingParams

TOLERANCE = 1e-3
"""|Δ log π| up to which a path counts as right in float32."""
FACTOR, FLOOR = 3.0, 0.005
"""In half precision, a path counts as right up to the first times the model's own rounding, and the second times how
much log π varies."""

Ids = list[int]

PROMPTS = (19, 19, 5, 30, 4)
COMPLETIONS = (12, 24, 17, 20, 9)
"""Lengths beyond all thresholds of the zoo; the last sequence stays below its context lengths."""


class SteppedAside(Exception):
    """The project computes this model's log-probabilities as TRL does, and says why."""


class OnlyFloat32(Exception):
    """The model itself does not run in half precision."""


def cases(vocab: int, seed: int = 0, stretch: int = 1) -> tuple[list[Ids], list[int]]:
    """Sequences of prompt and completion, and the prompts' lengths. The first two have the same prompt.

    All are ``stretch`` times as long as `PROMPTS` and `COMPLETIONS` say.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [stretch * length for length in PROMPTS]
    # Neither special tokens nor the last ones, which some models do not predict.
    sequences = [
        torch.randint(3, vocab - 8, (prompt + stretch * completion,), generator=generator).tolist()
        for prompt, completion in zip(lengths, COMPLETIONS, strict=True)
    ]
    sequences[1][: lengths[1]] = sequences[0][: lengths[0]]
    return sequences, lengths


def vocab_of(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def reference_logps(model: Any, sequences: Sequence[Ids], *, gradients: bool = False) -> list[Tensor]:
    """log π of every token of each sequence but the first."""
    found = []
    forward = model if _wrapped(model) else partial(type(model).forward, model)
    with torch.set_grad_enabled(gradients):
        for ids in sequences:
            _forget(model)
            row = torch.tensor([ids])
            logits = forward(input_ids=row).logits[0, -len(ids) : -1].float()
            found.append(logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0])
    _forget(model)
    return found


def packed_logps_of(
    model: Any,
    sequences: Sequence[Ids] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    *,
    kind: Kind | None = None,
) -> float:
    """Largest |Δ log π| of the completions in the packed pass, all sequences in one row.

    ``kind`` is run whether or not the project would.
    """
    sequences, prompt_lengths = _given(model, sequences, prompt_lengths)
    expected = _completions(reference_logps(model, sequences), prompt_lengths)
    with fused_head(model), torch.no_grad():
        found = _packed(model, sequences, prompt_lengths, kind)
    return _largest(found, expected)


def packed_gradients_of(
    model: Any,
    sequences: Sequence[Ids] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    *,
    kind: Kind | None = None,
) -> float:
    """Norm of the packed pass's error in the gradient, all parameters together, relative to the gradient's."""
    sequences, prompt_lengths = _given(model, sequences, prompt_lengths)
    expected = _gradients(model, _completions(reference_logps(model, sequences, gradients=True), prompt_lengths))
    with fused_head(model):
        found = _gradients(model, _packed(model, sequences, prompt_lengths, kind))
    nothing = torch.zeros(())
    names = expected.keys() | found.keys()
    error = sum(float((found.get(name, nothing) - expected.get(name, nothing)).square().sum()) for name in names)
    return math.sqrt(error / sum(float(gradient.square().sum()) for gradient in expected.values()))


def engine_logps_of(
    model: Any,
    prompts: Sequence[Ids] | None = None,
    *,
    n: int = 2,
    max_tokens: int = 24,
    seed: int = 1,
    unrolled: bool | None = None,
) -> float:
    """Largest |Δ log π| of what the engine recorded for the tokens that it sampled.

    With ``unrolled`` it samples whether or not the project would.
    """
    rollouts, whole = _sampled(model, Engine(model, unrolled=unrolled), prompts, n, max_tokens, seed)
    expected = [
        values[-len(rollout.logps) :] for values, rollout in zip(reference_logps(model, whole), rollouts, strict=True)
    ]
    return _largest([rollout.logps for rollout in rollouts], expected)


class Half(NamedTuple):
    """Mean |Δ log π| in half precision against float32.

    One token counts for no more than half the spread: rounding may send it to another expert.
    """

    fast: float
    own: float
    """Of the model's own forward in half precision."""
    spread: float
    """Standard deviation of log π over the tokens."""

    @property
    def right(self) -> bool:
        """Whether the fast path rounds about as much as the model itself does."""
        return self.fast <= FACTOR * self.own + FLOOR * self.spread


def packed_in_half(
    model: Any, sequences: Sequence[Ids] | None = None, prompt_lengths: Sequence[int] | None = None
) -> Half:
    """The packed pass in bfloat16: by autocast where the weights are float32."""
    sequences, prompt_lengths = _given(model, sequences, prompt_lengths)
    exact, own = (_completions(values, prompt_lengths) for values in _exact_and_own(model, sequences))
    with fused_head(model), torch.no_grad():
        found = _packed(model, sequences, prompt_lengths, None, half=True)
    return _half(found, own, exact)


def engine_in_half(
    model: Any, prompts: Sequence[Ids] | None = None, *, n: int = 2, max_tokens: int = 24, seed: int = 1
) -> Half:
    """The engine in bfloat16: with a copy of the weights where they are float32."""
    engine = Engine(model, dtype=torch.bfloat16 if _full(model) else None)
    rollouts, whole = _sampled(model, engine, prompts, n, max_tokens, seed)
    exact, own = ([values[-len(rollouts[0].logps) :] for values in kind] for kind in _exact_and_own(model, whole))
    return _half([rollout.logps for rollout in rollouts], own, exact)


def padded_logps_of(
    model: Any, sequences: Sequence[Ids] | None = None, prompt_lengths: Sequence[int] | None = None
) -> float:
    """Largest |Δ log π| of the model's own forward on padded rows, called as TRL calls it."""
    sequences, prompt_lengths = _given(model, sequences, prompt_lengths)
    expected = _completions(reference_logps(model, sequences), prompt_lengths)
    ids, mask, longest = as_trl(sequences, prompt_lengths)
    with torch.no_grad():
        logits = type(model).forward(model, input_ids=ids, attention_mask=mask).logits[:, -longest - 1 : -1].float()
    logps = logits.log_softmax(-1).gather(2, ids[:, -longest:, None])[..., 0]
    return _largest(_unpadded(logps, sequences, prompt_lengths), expected)


def head_logps_of(model: Any) -> float:
    """Largest |Δ log π| of TRL's fused head on sequences one at a time, unpadded."""
    sequences, _ = cases(vocab_of(model))
    expected = reference_logps(model, sequences)
    found = []
    with fused_head(model), torch.no_grad():
        for ids in sequences:
            _forget(model)
            row = torch.tensor([ids])
            found.append(model(input_ids=row, labels=row, fused_lm_head=True).log_probs[0][: len(ids) - 1])
    return _largest(found, expected)


def as_trl(sequences: Sequence[Ids], prompt_lengths: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Ids and mask with prompts padded on the left and completions on the right, and the longest completion."""
    before = max(prompt_lengths)
    longest = max(len(ids) - length for ids, length in zip(sequences, prompt_lengths, strict=True))
    padded = torch.zeros(len(sequences), before + longest, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for i, (ids, length) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        place = slice(before - length, before - length + len(ids))
        padded[i, place], mask[i, place] = torch.tensor(ids), 1
    return padded, mask, longest


@contextmanager
def fused_head(model: Any) -> Iterator[None]:
    """Gives the model TRL's fused head, and takes it away again."""
    root = model.get_base_model() if _wrapped(model) else model
    before = root.__dict__.get("forward")
    add_fused_lm_head(root, temperature=1.0, outputs=("log_probs", "entropy"))
    try:
        yield
    finally:
        del root.forward
        if before is not None:
            root.forward = before


def _packed(
    model: Any, sequences: Sequence[Ids], prompt_lengths: Sequence[int], kind: Kind | None, half: bool = False
) -> list[Tensor]:
    """log π of the completions as the project computes them."""
    ids, mask, longest = as_trl(sequences, prompt_lengths)
    if kind is None:
        choice = choose(model, ids.size(1), dtype=torch.bfloat16 if half and _full(model) else None)
        if choice.kind == "padded":
            raise SteppedAside(choice.why)
        kind = choice.kind
    with _autocast(model) if half else nullcontext():
        logps, _ = packed_logps(model, ids, mask, longest, unrolled=kind == "unrolled")
    return _unpadded(logps, sequences, prompt_lengths)


def _sampled(
    model: Any, engine: Engine, prompts: Sequence[Ids] | None, n: int, max_tokens: int, seed: int
) -> tuple[list[Rollout], list[Ids]]:
    """What the engine samples, and that with its prompts; all of it within the model's context."""
    if prompts is None:
        sequences, lengths = cases(vocab_of(model))
        prompts = [ids[:length] for ids, length in zip(sequences[1:], lengths[1:], strict=True)]
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    if max(len(prompt) for prompt in prompts) + max_tokens > context:
        prompts, max_tokens = [prompt[: int(context) // 2] for prompt in prompts], int(context) // 2
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=())
    rollouts = list(engine.generate(prompts, n=n, params=params))
    assert len(rollouts) == n * len(prompts)
    for rollout in rollouts:
        if rollout.finish_reason == "error":
            raise RuntimeError(rollout.error)
        assert len(rollout.token_ids) == max_tokens
    return rollouts, [[*prompts[rollout.prompt_index], *rollout.token_ids] for rollout in rollouts]


def _wrapped(model: Any) -> bool:
    """Whether peft stands around the model, with a forward of its own that may change."""
    return hasattr(model, "get_base_model")


def _full(model: Any) -> bool:
    """Whether the weights are float32; some models keep a few of them so in any case."""
    return all(parameter.dtype == torch.float32 for parameter in model.parameters())


def _autocast(model: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if _full(model) else nullcontext()


def _exact_and_own(model: Any, sequences: Sequence[Ids]) -> tuple[list[Tensor], list[Tensor]]:
    """log π in float32, and by the model itself in half precision."""
    exact = reference_logps(model if _full(model) else copy.deepcopy(model).float(), sequences)
    try:
        with _autocast(model):
            return exact, reference_logps(model, sequences)
    except RuntimeError as error:
        raise OnlyFloat32(str(error)) from error


def _half(found: Sequence[Tensor], own: Sequence[Tensor], exact: Sequence[Tensor]) -> Half:
    truth = torch.cat(list(exact))
    spread = float(truth.std())

    def error(values: Sequence[Tensor]) -> float:
        difference = (torch.cat(list(values)).float() - truth).abs().nan_to_num(nan=torch.inf)
        return float(difference.clamp(max=spread / 2).mean())

    return Half(error(found), error(own), spread)


def _gradients(model: Any, logps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of a sum of log-probabilities in which every token has another weight."""
    values = torch.cat(list(logps))
    model.zero_grad()
    (values * torch.arange(len(values)).cos()).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _given(
    model: Any, sequences: Sequence[Ids] | None, prompt_lengths: Sequence[int] | None
) -> tuple[Sequence[Ids], Sequence[int]]:
    if sequences is None or prompt_lengths is None:
        return cases(vocab_of(model))
    return sequences, prompt_lengths


def _completions(logps: Sequence[Tensor], prompt_lengths: Sequence[int]) -> list[Tensor]:
    return [values[length - 1 :] for values, length in zip(logps, prompt_lengths, strict=True)]


def _unpadded(logps: Tensor, sequences: Sequence[Ids], prompt_lengths: Sequence[int]) -> list[Tensor]:
    return [values[: len(ids) - length] for values, ids, length in zip(logps, sequences, prompt_lengths, strict=True)]


def _largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    assert [len(values) for values in found] == [len(values) for values in expected]
    difference = torch.cat([(a.float() - b.float()).abs() for a, b in zip(found, expected, strict=True)])
    return float(difference.nan_to_num(nan=torch.inf).max())


def _forget(model: Any) -> None:
    """Rotary embeddings of type "dynamic" keep the frequencies of the longest sequence that they have seen."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.register_buffer("inv_freq", module.original_inv_freq, persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len
