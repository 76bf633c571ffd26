"""The proof has teeth: models that do something else inside a known shape are found out, in every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding

from explorl.modeling import fast_paths, passes
from explorl.modeling.packed import packed_logps
from explorl.rollout import UnsupportedModel

from . import harness, zoo

Precision = Literal["float32", "autocast", "bfloat16"]


precisions = pytest.mark.parametrize(
    "precision", ["float32", "autocast", pytest.param("bfloat16", marks=pytest.mark.slow)]
)


def outcome(model: Any, precision: Precision = "float32") -> tuple[bool, passes.Kind]:
    """Whether the engine samples, and which pass is used; what is used has to be right."""
    return sampled(model, precision), passed(model, precision)


def sampled(model: Any, precision: Precision = "float32") -> bool:
    try:
        if precision != "float32":
            half = harness.engine_in_half(model, max_tokens=16)
            assert half.right, half
        else:
            error = harness.engine_logps_of(model, max_tokens=16)
            assert error <= harness.TOLERANCE, error
    except UnsupportedModel:
        return False
    return True


def passed(model: Any, precision: Precision = "float32") -> passes.Kind:
    try:
        if precision != "float32":
            half = harness.packed_in_half(model)
            assert half.right, half
        else:
            error = harness.packed_logps_of(model)
            assert error <= harness.TOLERANCE, error
            if any(parameter.requires_grad for parameter in model.parameters()):
                error = harness.packed_gradients_of(model)
                assert error <= harness.TOLERANCE, error
    except harness.SteppedAside:
        return "padded"
    with harness.fused_head(model):
        return passes.choose(model, 0, dtype=torch.bfloat16 if precision == "autocast" else None).kind


def in_precision(model: Any, precision: Precision) -> Any:
    return model.bfloat16() if precision == "bfloat16" else model


def forced_errors(model: Any) -> tuple[float, float]:
    """Of the unrolled layers in float32, whatever the proof says: in the engine and in the training pass."""
    return harness.engine_logps_of(model, unrolled=True), harness.packed_logps_of(model, kind="unrolled")


def windowed(window: int) -> Callable[..., Tensor]:
    """A causal mask in which nobody sees further than `window` tokens."""

    def mask(inputs_embeds: Tensor, **_: Any) -> Tensor:
        place = torch.arange(inputs_embeds.shape[1])
        distance = place[:, None] - place
        return ((distance >= 0) & (distance < window))[None, None]

    return mask


class BentRMSNorm(LlamaRMSNorm):
    """Off by less than a rounding of bfloat16."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.002


class OtherRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 0.3 * hidden_states.abs().mean(-1, keepdim=True)


class StretchedRope(LlamaRotaryEmbedding):
    """Turns at half the speed in sequences of more than 16 tokens."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        longer = position_ids.amax() >= 16
        return super().forward(x, position_ids / 2 if longer else position_ids)


class GatedAttention(LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        mixed, weights = super().forward(hidden_states, *args, **kwargs)
        return mixed * hidden_states.sigmoid(), weights


def become(model: Any, old: type[nn.Module], new: type[nn.Module]) -> Any:
    for module in model.modules():
        if type(module) is old:
            module.__class__ = new
    return model


@precisions
def test_a_window_that_only_the_mask_knows(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed(6))
    assert min(forced_errors(zoo.build("llama"))) > 0.1
    assert outcome(in_precision(zoo.build("llama"), precision), precision) == (False, "padded")


@precisions
def test_a_long_window_is_tried_once_sequences_get_beyond_it(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed(40))
    model = zoo.build("llama")
    model.config.attention_window = 40
    model = in_precision(model, precision)
    dtype = torch.bfloat16 if precision == "autocast" else None
    with harness.fused_head(model):
        assert passes.choose(model, 40, dtype=dtype).kind == "unrolled"
        assert passes.choose(model, 41, dtype=dtype).kind == "padded"
    assert outcome(model, precision) == (False, "padded")


@precisions
def test_a_rotary_embedding_that_changes_with_the_length(precision: Precision) -> None:
    assert min(forced_errors(become(zoo.build("llama"), LlamaRotaryEmbedding, StretchedRope))) > 0.1
    model = become(in_precision(zoo.build("llama"), precision), LlamaRotaryEmbedding, StretchedRope)
    assert outcome(model, precision) == (False, "padded")


@precisions
@pytest.mark.parametrize("norm", [OtherRMSNorm, BentRMSNorm])
def test_norms_with_other_maths_are_run_as_they_are(norm: type[nn.Module], precision: Precision) -> None:
    assert min(forced_errors(become(zoo.build("llama"), LlamaRMSNorm, norm))) > 2 * harness.TOLERANCE
    model = become(in_precision(zoo.build("llama"), precision), LlamaRMSNorm, norm)
    assert outcome(model, precision) == (True, "packed")


@precisions
def test_attention_with_other_maths_is_run_as_it_is(precision: Precision) -> None:
    assert min(forced_errors(become(zoo.build("llama"), LlamaAttention, GatedAttention))) > 0.1
    model = become(in_precision(zoo.build("llama"), precision), LlamaAttention, GatedAttention)
    assert outcome(model, precision) == (True, "packed")


@precisions
def test_what_is_read_from_the_modules_is_followed(precision: Precision) -> None:
    model = in_precision(zoo.build("llama"), precision)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
        layer.input_layernorm.variance_epsilon = 0.3
    assert outcome(model, precision) == (True, "unrolled")


def halve(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


@pytest.mark.parametrize("place", ["mlp", "input_layernorm", "self_attn.q_proj"])
def test_hooks_act(place: str) -> None:
    model = zoo.build("llama")
    model.model.layers[0].get_submodule(place).register_forward_hook(halve)
    assert outcome(model) == (True, "unrolled" if place == "self_attn.q_proj" else "packed")


@pytest.mark.parametrize(
    "place",
    [
        "mlp",
        "input_layernorm",
        "self_attn.q_proj",
    ],
)
def test_hooks_that_come_later_act(place: str) -> None:
    model = zoo.build("llama")
    assert outcome(model) == (True, "unrolled")
    hook = model.model.layers[0].get_submodule(place).register_forward_hook(halve)
    assert sampled(model)
    assert passed(model) != "padded"
    hook.remove()
    assert outcome(model) == (True, "unrolled")


def test_a_model_with_attention_dropout_has_a_pass() -> None:
    assert outcome(with_dropout("llama"))[0]


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_attention_dropout_acts_in_training(name: str) -> None:
    model = with_dropout(name).train()
    sequences, lengths = harness.cases(zoo.VOCAB)
    ids, mask, longest = harness.as_trl(sequences, lengths)
    with harness.fused_head(model), torch.no_grad():
        if passes.choose(model, ids.size(1)).kind != "padded":
            once, again = (packed_logps(model, ids, mask, longest)[0] for _ in range(2))
            assert not torch.equal(once, again)


def with_dropout(name: str) -> Any:
    """A model that drops attention weights in training, and nothing else."""
    model = zoo.build(name)
    model.config.attention_dropout = model.config.attn_pdrop = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
        if isinstance(getattr(module, "attn_dropout", None), nn.Dropout):
            module.attn_dropout.p = 0.5
    return model


# Adapters


def adapted(config: peft.PeftConfig, name: str = "llama") -> Any:
    """A model with an adapter that is not zero."""
    return shaken(peft.get_peft_model(zoo.build(name), config))


def shaken(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})


def virtual_tokens(kind: str) -> peft.PeftConfig:
    configs = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    return configs[kind](task_type="CAUSAL_LM", num_virtual_tokens=3)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of which path, in the order in which they happen."""
    found: list[str] = []
    own = fast_paths._try_out
    monkeypatch.setattr(fast_paths, "_try_out", lambda path, *given: (found.append(path), own(path, *given))[1])
    return found


@precisions
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_adapters_are_right(name: str, precision: Precision) -> None:
    model = in_precision(adapted(lora(target_modules=["q_proj", "down_proj"]), name), precision)
    assert outcome(model, precision) == (True, "unrolled" if name == "llama" else "packed")


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["input_layernorm", "norm"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},  # which TRL's head, and so the packed pass, does not see
    ],
    ids=["norms", "ends", "dora", "embedding", "head"],
)
def test_other_adapters_are_not_wrong(options: dict[str, Any]) -> None:
    engine, kind = outcome(adapted(lora(**options)))
    assert engine
    assert (kind == "padded") == (options.get("target_modules") == ["lm_head"])


def test_another_adapter_is_proven_anew(trials: list[str]) -> None:
    model = peft.get_peft_model(zoo.build("llama"), lora())
    model.add_adapter("second", lora(target_modules=["v_proj", "up_proj"]))

    def tried() -> set[str]:
        """What was tried by this outcome; each has a new head of TRL's, so the pass is tried at any rate."""
        trials.clear()
        assert outcome(model) == (True, "unrolled")
        return set(trials)

    shaken(model)
    assert tried() == {"the engine", "the training pass"}
    assert tried() == {"the training pass"}
    model.set_adapter("second")
    shaken(model)
    assert tried() == {"the engine", "the training pass"}
    with model.disable_adapter():
        assert tried() == {"the engine", "the training pass"}
    model.set_adapter("default")
    assert tried() == {"the training pass"}  # this one is known


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_are_left_to_the_model(kind: str) -> None:
    assert outcome(adapted(virtual_tokens(kind))) == (False, "padded")


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_virtual_tokens_on_a_model_that_was_proven_without(kind: str) -> None:
    base = zoo.build("llama")
    assert outcome(base) == (True, "unrolled")
    model = shaken(peft.get_peft_model(base, virtual_tokens(kind)))
    assert outcome(model) == (False, "padded")


@pytest.mark.parametrize(
    "kind",
    [
        "prompt",
        "prefix",
    ],
)
def test_virtual_tokens_that_were_disabled(kind: str) -> None:
    model = adapted(virtual_tokens(kind))
    with model.disable_adapter():
        sampled(model)
        passed(model)
    assert outcome(model) == (False, "padded")
