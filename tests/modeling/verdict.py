"""What becomes of an architecture of the zoo: a fast path is right on it, or it is not used and says why.

Whatever else happens raises: a wrong result, a reason that names no layer, or an error.
"""

from __future__ import annotations

import copy
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from explorl.modeling.passes import choose
from explorl.rollout import UnsupportedModel

from . import harness, zoo


class Lengths(NamedTuple):
    """How long sequences are, and where the thresholds of a model lie among them."""

    threshold: int
    stretch: int
    max_tokens: int

    def cases(self, limit: int | None = None) -> tuple[list[harness.Ids], list[int]]:
        """Sequences and their prompts' lengths; in padded rows of no more than ``limit`` tokens."""
        sequences, prompts = harness.cases(zoo.VOCAB, stretch=self.stretch)
        if limit is None:
            return sequences, prompts
        shorter = [min(length, limit // 2) for length in prompts]
        return [ids[: length + limit // 2] for ids, length in zip(sequences, shorter, strict=True)], shorter


NEAR = Lengths(threshold=8, stretch=1, max_tokens=24)
FAR = Lengths(threshold=24, stretch=2, max_tokens=48)
"""Thresholds beyond the short sequences with which the project proves its paths on any model."""

Weights = Literal["float32", "bfloat16"]


class Verdict(NamedTuple):
    path: str
    """The fast path that is used, and right: "engine", "packed" or "unrolled"; empty where none is."""
    reason: str = ""
    """Why none is."""


@cache
def engine(name: str, lengths: Lengths, limit: int | None = None) -> Verdict:
    """In float32; with sequences of up to ``limit`` tokens."""
    model = _build(name, lengths)
    prompts, tokens = _prompts(lengths, limit)
    try:
        error = harness.engine_logps_of(model, prompts, max_tokens=tokens)
    except UnsupportedModel as refusal:
        return _refused(model, refusal)
    assert error <= harness.TOLERANCE, f"the engine is off by {error:.2g} on {name}"
    return Verdict("engine")


@cache
def training_pass(name: str, lengths: Lengths, limit: int | None = None) -> Verdict:
    """Values and gradients in float32; of sequences of up to ``limit`` tokens."""
    model = _build(name, lengths)
    sequences, prompts = lengths.cases(limit)
    try:
        error = harness.packed_logps_of(model, sequences, prompts)
    except harness.SteppedAside as reason:
        return _stepped_aside(model, reason)
    with harness.fused_head(model):
        kind = choose(model, max(len(ids) for ids in sequences)).kind
    assert error <= harness.TOLERANCE, f"the {kind} pass is off by {error:.2g} on {name}"
    error = harness.packed_gradients_of(model, sequences, prompts)
    assert error <= harness.TOLERANCE, f"the gradient of the {kind} pass is off by {error:.2g} of it on {name}"
    return Verdict(kind)


def engine_in_half(name: str, weights: Weights, lengths: Lengths = NEAR) -> Verdict:
    """In bfloat16, with weights of either type."""
    model = _build(name, lengths, weights)
    prompts, _ = _prompts(lengths, None)
    try:
        half = harness.engine_in_half(model, prompts, n=1, max_tokens=16)
    except UnsupportedModel as refusal:
        return _refused(model, refusal)
    assert half.right, f"the engine is off by {half} on {name}"
    return Verdict("engine")


def training_pass_in_half(name: str, weights: Weights, lengths: Lengths = NEAR) -> Verdict:
    """In bfloat16, with weights of either type."""
    model = _build(name, lengths, weights)
    try:
        half = harness.packed_in_half(model, *lengths.cases())
    except harness.SteppedAside as reason:
        return _stepped_aside(model, reason)
    assert half.right, f"the packed pass is off by {half} on {name}"
    return Verdict("packed")


def _build(name: str, lengths: Lengths, weights: Weights = "float32") -> Any:
    """A model of which nothing is known yet."""
    model = copy.deepcopy(_built(name, lengths.threshold))
    return model.bfloat16() if weights == "bfloat16" else model


@lru_cache(64)
def _built(name: str, threshold: int) -> Any:
    return zoo.build(name, threshold=threshold)


def _prompts(lengths: Lengths, limit: int | None) -> tuple[list[harness.Ids], int]:
    sequences, prompts = lengths.cases(limit)
    found = [ids[:length] for ids, length in zip(sequences[1:], prompts[1:], strict=True)]
    return found, lengths.max_tokens if limit is None else limit - max(len(prompt) for prompt in found)


def _refused(model: Any, refusal: UnsupportedModel) -> Verdict:
    said = str(refusal)
    assert refusal.reason in said
    assert "model.generate" in said, said
    assert _names_a_layer(refusal.reason, model), said
    return Verdict("", refusal.reason)


def _stepped_aside(model: Any, reason: harness.SteppedAside) -> Verdict:
    assert _names_a_layer(str(reason), model), str(reason)
    return Verdict("", str(reason))


def _names_a_layer(reason: str, model: Any) -> bool:
    return reason.replace(":", " ").split()[0] in {type(module).__name__ for module in model.modules()}
