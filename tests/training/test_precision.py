"""TRL's default precision, float32 weights under bfloat16 autocast with gradient checkpointing, is what we train in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from explorl.modeling import passes
from explorl.modeling.fast_paths import PathChoice
from explorl.modeling.precision import CastWeights, weights_dtype
from explorl.training.grpo import sampler
from explorl.training.grpo.loss import LOSSES
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training.test_grpo_equals_trl import random_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULTS: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "use_cpu": DEVICE == "cpu"}


def gradients_of(
    trainer: Any, inputs: dict[str, Any], checkpointing: bool, reentrant: bool = False
) -> tuple[float, torch.Tensor]:
    model = trainer.model
    model.zero_grad()
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    here = {name: value.to(model.device) for name, value in inputs.items()}
    loss = trainer._compute_loss(model, here)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradients_equal_those_of_trl_to_the_rounding_of_bfloat16(
    make_trainer: Callable[..., Any], loss_type: str
) -> None:
    """Ours, packed or padded, is as near to the float32 gradient as TRL's own mixed precision is."""
    inputs = random_inputs(beta=0.1, reused=False, tools=False)
    options = {"loss_type": loss_type, "beta": 0.1}
    exact_loss, exact = gradients_of(
        make_trainer(GRPOTrainer, **options, use_cpu=DEVICE == "cpu"), inputs, checkpointing=False
    )
    stock_loss, stock = gradients_of(make_trainer(GRPOTrainer, **options, **DEFAULTS), inputs, checkpointing=True)
    rounding = (stock - exact).norm()
    assert rounding > 1e-4 * exact.norm()  # it is mixed precision
    summed = 9 if loss_type == "luspo" else 1  # it adds up the tokens of a sequence instead of taking their mean
    for packed, kind in ((None, "unrolled"), (False, "padded")):
        ours = make_trainer(ExplorationTrainer, **options, **DEFAULTS, options={"packed": packed})
        loss, gradient = gradients_of(ours, inputs, checkpointing=True)
        assert ours.logprobs.pass_kind(ours.model, 16) == kind
        assert (gradient - exact).norm() < 1.5 * rounding, kind
        allowed = 1.5 * abs(stock_loss - exact_loss) + 2e-3 * abs(exact_loss) + 1e-4 * summed
        assert abs(loss - exact_loss) < allowed, kind


def test_the_engine_samples_from_a_shadow_of_what_the_optimizer_moves(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "has_arithmetic", lambda device, dtype: True)
    trainer = make_trainer(ExplorationTrainer, **DEFAULTS, max_steps=3, learning_rate=1e-2)
    engine = trainer.sampler.engine
    assert engine is not None
    weights_used: list[torch.Tensor] = []
    sample = trainer.sampler.sample

    def watched(*arguments: Any) -> Any:
        sampled = sample(*arguments)
        name, weight = "model.layers.0.mlp.up_proj.weight", trainer.model.model.layers[0].mlp.up_proj.weight
        with engine.weights():
            shadow = dict(trainer.model.named_parameters())[name]
            assert shadow.dtype == torch.bfloat16
            torch.testing.assert_close(shadow.float(), weight.to(torch.bfloat16).float(), rtol=0, atol=0)
            weights_used.append(shadow.clone())
        return sampled

    trainer.sampler.sample = watched
    trainer.train()
    assert len(weights_used) == 3
    assert not torch.equal(weights_used[0], weights_used[2])
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    states = [state["exp_avg"].dtype for state in trainer.optimizer.state.values()]
    assert set(states) == {torch.float32}


def test_a_processor_without_bfloat16_samples_in_float32(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "has_arithmetic", lambda device, dtype: False)
    trainer = make_trainer(ExplorationTrainer, **DEFAULTS)
    assert trainer.sampler.engine is not None
    assert trainer.sampler.engine.dtype is None


def test_small_steps_are_not_lost(make_trainer: Callable[..., Any]) -> None:
    """AdamW at learning rate 5e-6 moves nearly every weight in 50 steps; in bfloat16 weights most steps round away."""
    trainer = make_trainer(
        ExplorationTrainer, **DEFAULTS, max_steps=50, learning_rate=5e-6, max_completion_length=4,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = sum(int((p != before[name]).sum()) for name, p in trainer.model.named_parameters())
    assert moved >= 0.95 * sum(p.numel() for p in trainer.model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_saves_memory_and_changes_nothing(
    make_trainer: Callable[..., Any], reentrant: bool
) -> None:
    """Layers are computed twice, and the gradient is the same to the bit."""
    gradients, calls = [], []
    for checkpointing in (False, True):
        trainer = make_trainer(ExplorationTrainer, bf16=False, use_cpu=DEVICE == "cpu")
        count = [0]
        trainer.model.model.layers[0].mlp.up_proj.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        trainer.model.train()
        trainer.logprobs.pass_kind(trainer.model, 16)  # tries the pass out
        count[0] = 0
        inputs = random_inputs(beta=0.0, reused=False, tools=False)
        gradients.append(gradients_of(trainer, inputs, checkpointing, reentrant)[1])
        calls.append(count[0])
    assert calls == [1, 2]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_a_shadow_shares_tied_weights_and_leaves_everything_as_it_was() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )  # fmt: skip
    parameters = dict(model.named_parameters())
    shadow = CastWeights(model, torch.bfloat16)
    assert len(shadow.copies) == len(parameters)
    with pytest.raises(ZeroDivisionError), shadow.in_place():
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert weights_dtype(model) == torch.bfloat16
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        raise ZeroDivisionError
    assert all(dict(model.named_parameters())[name] is value for name, value in parameters.items())


def test_where_packed_is_insisted_on_and_wrong_it_is_an_error(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(ExplorationTrainer, options={"packed": True})
    monkeypatch.setattr(passes, "choose", lambda *_, **__: PathChoice("padded", why="LlamaDecoderLayer: differs"))
    with pytest.raises(ValueError, match="packed=True does not work for this model \\(LlamaDecoderLayer"):
        trainer.logprobs.pass_kind(trainer.model, 16)
