"""On every causal language model of transformers, a fast path is right, or it is not used and says why."""

from __future__ import annotations

import datetime

import pytest

from . import harness, table, zoo
from .verdict import (
    FAR,
    NEAR,
    Lengths,
    Weights,
    engine,
    engine_in_half,
    training_pass,
    training_pass_in_half,
)

COMMON = [
    "llama",
    "llama/dynamic",
    "llama/longrope",
    "llama4_text",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "glm4_moe_lite",
    "jetmoe",
    "lfm2",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "rwkv",
    "minimax",
    "recurrent_gemma",
]
"""Those that matter most, and those that a fast path got wrong once."""

UNROLLED = {"llama", "mistral", "qwen2", "qwen3"}
PACKED = UNROLLED | {"qwen3_moe", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "cohere2"}
ONLY_PACKED = {"deepseek_v3", "glm4_moe_lite", "jetmoe"}
"""Where the engine is not used."""

EXPERTS = {"qwen3_moe", "qwen3_next", "llama4_text", "deepseek_v3", "glm4_moe_lite", "jetmoe", "nemotron_h", "minimax"}
BRIEFLY = {"llama", "llama/longrope", "qwen2", "gemma2", "phi3", "gpt2", "deepseek_v3", "mamba", "lfm2", "gpt_oss"}
"""Tried in bfloat16 as well, as the others are where there is time."""

lengths = pytest.mark.parametrize("lengths", [NEAR, FAR], ids=["near", "far"])
weights = pytest.mark.parametrize("weights", ["float32", "bfloat16"])


@lengths
@pytest.mark.parametrize("name", COMMON)
def test_engine(name: str, lengths: Lengths) -> None:
    # "llama/dynamic" changes beyond its context, where the engine stops.
    assert engine(name, lengths).path == ("engine" if name in PACKED | {"llama/dynamic"} else "")


@lengths
@pytest.mark.parametrize("name", COMMON)
def test_training_pass(name: str, lengths: Lengths) -> None:
    path = "unrolled" if name in UNROLLED else "packed" if name in PACKED | ONLY_PACKED else ""
    assert training_pass(name, lengths).path == path


@pytest.mark.parametrize("name", ["phi3", "llama/longrope"])
def test_up_to_a_turning_point(name: str) -> None:
    """Before the rotary embedding changes, these are as fast as any."""
    assert engine(name, FAR, limit=2 * FAR.threshold).path == "engine"
    assert training_pass(name, FAR, limit=2 * FAR.threshold).path


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(name, weights, marks=() if name in brief else pytest.mark.slow)
        for weights, brief in (("float32", BRIEFLY), ("bfloat16", {"llama", "lfm2"}))
        for name in COMMON
    ],
)
def test_half_precision(name: str, weights: Weights) -> None:
    """bfloat16 does not hide what is wrong in float32; and where rounding moves no token to another expert, it refuses
    nothing that is right there."""
    sampled, passed = engine_in_half(name, weights).path, training_pass_in_half(name, weights).path
    assert not sampled or engine(name, NEAR).path
    assert not passed or training_pass(name, NEAR).path
    if name not in EXPERTS:
        assert bool(sampled) == bool(engine(name, NEAR).path)
        assert bool(passed) == bool(training_pass(name, NEAR).path)


OTHERS = [name for name in [*zoo.architectures(), *zoo.variants()] if name not in COMMON]


@pytest.mark.slow
@lengths
@pytest.mark.parametrize("name", OTHERS)
def test_every_engine(name: str, lengths: Lengths) -> None:
    engine(name, lengths)


@pytest.mark.slow
@lengths
@pytest.mark.parametrize("name", OTHERS)
def test_every_training_pass(name: str, lengths: Lengths) -> None:
    training_pass(name, lengths)


@pytest.mark.slow
@weights
@pytest.mark.parametrize("name", OTHERS)
def test_half_precision_everywhere(name: str, weights: Weights) -> None:
    if name in ("dbrx", "xmod") and weights == "float32":  # which fail under autocast
        with pytest.raises(harness.OnlyFloat32):
            training_pass_in_half(name, weights)
        return
    if engine_in_half(name, weights).path:
        assert engine(name, NEAR).path
    if training_pass_in_half(name, weights).path:
        assert training_pass(name, NEAR).path


def test_the_zoo_knows_every_model_type() -> None:
    """A name of the lists above that transformers no longer has would test nothing."""
    known = {*zoo.architectures(), *zoo.variants()}
    assert known >= set(COMMON)
    assert len(known) == len([*zoo.architectures(), *zoo.variants()])


@pytest.mark.slow
def test_the_table_is_what_the_zoo_says() -> None:
    rows = [table.row(name) for name in [*zoo.architectures(), *zoo.variants()]]

    def undated(text: str) -> list[str]:
        return [line for line in text.splitlines() if not line.startswith(table.DATE)]

    found = undated(table.PATH.read_text(encoding="utf-8"))
    assert found == undated(table.text(rows, datetime.date.today())), "run python -m tests.modeling.table"
