"""The engine on models wide enough that it reads copies of their weights on a CPU."""

from __future__ import annotations

import gc
import logging
import weakref
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from explorl.modeling import onednn_ops
from explorl.modeling.onednn_ops import WIDE, OneDnnOps
from explorl.rollout import Engine, SamplingParams
from explorl.rollout.engine import MIN_TOKENS_TO_COPY

pytestmark = pytest.mark.skipif(not onednn_ops.is_available(), reason="this processor or torch has no such products")

VOCAB = 2001
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "biases, tied head": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 48}),
}


def build(kind: str) -> Any:
    model_of, config_of, more = KINDS[kind]
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDE + 32, "intermediate_size": WIDE + 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = model_of(config_of(**sizes, **more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.mul_(2.0)
    return model


@cache
def shared(kind: str = "llama") -> Any:
    return build(kind)


PROMPTS = [[11, 12, 13, 14, 15], [5], [7 + i % 90 for i in range(40)]]
GREEDY = SamplingParams(max_tokens=MIN_TOKENS_TO_COPY + 6, temperature=0.0, stop_token_ids=())


def greedy(model: Any, tokens: int = MIN_TOKENS_TO_COPY + 6) -> list[list[int]]:
    """By transformers, one prompt at a time."""
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        out.append(model.generate(ids, max_new_tokens=tokens, **how)[0, len(prompt) :].tolist())
    return out


def copies(engine: Engine) -> int:
    """How many products the engine computed from copies when it was last used."""
    assert engine._runner is not None
    assert engine._runner._unrolled is not None
    ops = engine._runner._unrolled.ops
    assert isinstance(ops, OneDnnOps)
    return len(ops.copies) + len(ops._head)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    engine = Engine(shared(kind))
    found = engine.generate(PROMPTS, 2, GREEDY)
    assert copies(engine) == 10 + 2
    assert [found[2 * i].token_ids for i in range(len(PROMPTS))] == greedy(shared(kind))


@pytest.mark.parametrize("rows", [1, 7])
def test_records_are_those_of_the_model(rows: int) -> None:
    engine = Engine(shared())
    for rollout in engine.generate(PROMPTS, rows, SamplingParams(max_tokens=20, stop_token_ids=(), seed=3)):
        prompt = PROMPTS[rollout.prompt_index]
        with torch.no_grad():
            logits = shared()(torch.tensor([[*prompt, *rollout.token_ids]])).logits[0, len(prompt) - 1 : -1]
        policy = logits.double().log_softmax(-1)
        logps = policy.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(rollout.logps.double(), logps, atol=7e-6, rtol=0)
        entropy = -(policy.exp() * policy).sum(-1)
        torch.testing.assert_close(rollout.entropy.double(), entropy, atol=7e-6, rtol=0)


def test_the_batch_changes_no_bit() -> None:
    params = SamplingParams(max_tokens=20, stop_token_ids=(), seed=1)
    whole = Engine(shared()).generate(PROMPTS, 8, params)
    parts = Engine(shared(), batch_size=5).generate(PROMPTS, 8, params)
    for one, other in zip(whole, parts, strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(one.logps, other.logps, atol=1e-5, rtol=0)


def test_every_call_reads_the_weights_of_today() -> None:
    model = build("llama")
    engine = Engine(model)
    before = [rollout.token_ids for rollout in engine.generate(PROMPTS, 1, GREEDY)]
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.0)  # which torch does not count as a change
    model.lm_head.weight.data[:50] += 1.0
    after = [rollout.token_ids for rollout in engine.generate(PROMPTS, 1, GREEDY)]
    assert after == greedy(model)
    assert after != before


def test_a_short_call_copies_nothing_and_forgets_what_a_long_one_copied() -> None:
    model = build("llama")
    engine = Engine(model)
    engine.generate(PROMPTS, 1, GREEDY)
    assert copies(engine) > 0
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.0)
    few = SamplingParams(max_tokens=MIN_TOKENS_TO_COPY - 1, temperature=0.0, stop_token_ids=())
    assert [r.token_ids for r in engine.generate(PROMPTS, 1, few)] == greedy(model, MIN_TOKENS_TO_COPY - 1)
    assert copies(engine) == 0


def test_copies_are_planned_and_made_only_where_there_is_room() -> None:
    engine = Engine(shared())
    engine.generate(PROMPTS, 1, GREEDY)
    plan = engine.plan
    assert plan is not None
    embedding = shared().model.embed_tokens.weight.numel()
    weights = sum(parameter.numel() for parameter in shared().parameters() if parameter.ndim > 1)
    assert plan.weight_bytes == 4 * (weights - embedding)
    assert f"weights {plan.weight_bytes / 2**20:.1f} MiB" in str(plan)
    assert plan.bytes > plan.weight_bytes
    tight = Engine(shared(), memory_budget=plan.weight_bytes)
    found = tight.generate(PROMPTS, 1, GREEDY)
    assert copies(tight) == 0
    assert tight.plan is not None
    assert tight.plan.weight_bytes == 0
    assert [rollout.token_ids for rollout in found] == greedy(shared())


def test_rows_that_go_on_are_computed_from_copies_too() -> None:
    engine = Engine(shared())
    with engine.open(PROMPTS[:1], 1, GREEDY) as session:
        session.step(4)
        session.extend(0, [5, 6, 7])
        (fork,) = session.fork(0)
        while session.running:
            session.step()
        rows = [session.rollout(row) for row in (0, fork)]
        assert copies(engine) > 0
    assert rows[0].token_ids == rows[1].token_ids
    begun = rows[0].token_ids[:7]
    ids = torch.tensor([[*PROMPTS[0], *begun]])
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    rest = shared().generate(ids, max_new_tokens=MIN_TOKENS_TO_COPY + 6 - 7, **how)[0, ids.shape[1] :].tolist()
    assert rows[0].token_ids == begun + rest


def test_a_session_ends_with_its_last_owner() -> None:
    engine = Engine(shared())
    session = engine.open(PROMPTS, 1, GREEDY)
    session.run()
    session.close()
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


def test_a_model_that_was_tried_out_was_tried_with_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they are wrong in a way that no single product shows, the model's own layers run."""
    right = OneDnnOps.rotated_heads

    def turned(self: Any, *given: Any) -> Any:
        query, key, value = right(self, *given)
        return (query, key, value) if not self.copies else (query.flip(1), key, value)

    monkeypatch.setattr(OneDnnOps, "rotated_heads", turned)
    model = build("llama")
    engine = Engine(model)
    with caplog.at_level(logging.INFO, logger="explorl.modeling.fast_paths"):
        found = engine.generate(PROMPTS, 1, GREEDY)
    assert engine._runner is not None
    assert engine._runner._unrolled is None
    assert "the engine does not agree" in caplog.text
    assert [rollout.token_ids for rollout in found] == greedy(model)


# ---------------------------------------------------------------- what others do to a model and around it


def tokens_of(engine: Engine) -> list[list[int]]:
    return [rollout.token_ids for rollout in engine.generate(PROMPTS, 1, GREEDY)]


def fused_step(model: Any) -> None:
    """torch counts it as no change of the weights."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True).step()


def written_over(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0))


@pytest.mark.parametrize("change", [fused_step, written_over])
def test_a_session_notices_changes_that_torch_does_not(change: Any) -> None:
    model = build("llama")
    with Engine(model).open(PROMPTS[:1], 1, GREEDY) as session:
        session.step(4)
        change(model)
        with pytest.raises(RuntimeError, match="the model's weights changed while it was open"):
            session.step()


def test_without_memory_for_copies_it_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    engine = Engine(model)
    engine.generate(PROMPTS, 1, GREEDY)

    def full(*_: Any) -> Any:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(onednn_ops.ReorderedWeight, "of", full)
    for one in (engine, Engine(build("llama"))):  # one that was tried out with copies, and one that was not
        assert tokens_of(one) == greedy(model)
        assert copies(one) == 0
    assert "continuing without copies" in caplog.text


def test_a_model_is_tried_out_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(shared())
    engine.generate(PROMPTS, 1, GREEDY)
    assert engine.plan is not None
    made: list[Any] = []
    renew = OneDnnOps.renew
    monkeypatch.setattr(OneDnnOps, "renew", lambda self: made.append(self) or renew(self))
    assert tokens_of(Engine(build("llama"), memory_budget=engine.plan.weight_bytes - 1)) == greedy(shared())
    assert not made
    tokens_of(Engine(build("llama"), memory_budget=2 * engine.plan.bytes))
    assert len(made) > 1


def test_a_callers_autocast_changes_nothing() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        engine = Engine(model)
        found = [tokens_of(engine) for _ in range(2)]
    assert found == [greedy(shared())] * 2
    assert copies(engine) > 0


def test_a_callers_mode_is_left_behind() -> None:
    engine = Engine(build("llama"))
    with torch.inference_mode():
        tokens_of(engine)
    assert tokens_of(engine) == greedy(shared())


def test_a_callers_default_type_does_not_matter() -> None:
    before = torch.get_default_dtype()
    model, want = build("llama"), greedy(shared())
    try:
        torch.set_default_dtype(torch.float64)
        assert tokens_of(Engine(model)) == want
    finally:
        torch.set_default_dtype(before)


def test_a_head_of_another_size_than_it_says() -> None:
    model = build("llama")
    engine = Engine(model)
    tokens_of(engine)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[:1537].clone())
    model.config.vocab_size = 1537
    found = engine.generate(PROMPTS, 1, SamplingParams(max_tokens=20, stop_token_ids=(), seed=3))
    assert max(token for rollout in found for token in rollout.token_ids) < 1537
    for rollout in found:
        prompt = PROMPTS[rollout.prompt_index]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *rollout.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.double().log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(rollout.logps.double(), logps, atol=7e-6, rtol=0)


def test_rotary_frequencies_that_somebody_changed() -> None:
    model = build("llama")
    engine = Engine(model)
    before = tokens_of(engine)
    model.model.rotary_emb.inv_freq.data.mul_(0.3)
    assert tokens_of(engine) == greedy(model) != before
    before = tokens_of(engine)
    model.model.rotary_emb.attention_scaling = 1.7
    assert tokens_of(engine) == greedy(model) != before


def test_a_hook_on_all_modules_is_called() -> None:
    model = build("llama")
    engine = Engine(model)
    before = tokens_of(engine)

    def halved(module: Any, given: Any, out: Any) -> Any:
        return 0.5 * out if isinstance(module, torch.nn.Linear) and out.shape[-1] == WIDE + 64 else out

    handle = torch.nn.modules.module.register_module_forward_hook(halved)
    try:
        assert tokens_of(engine) == greedy(model) != before
        assert tokens_of(Engine(model)) == greedy(model)
    finally:
        handle.remove()
    assert tokens_of(engine) == before


def test_an_engine_that_was_used_can_be_copied() -> None:
    engine = Engine(build("llama"))
    tokens_of(engine)
    other = deepcopy(engine)
    assert other.model is not engine.model
    assert tokens_of(other) == greedy(shared())


def test_memory_of_copies_that_are_gone_is_not_counted() -> None:
    engine = Engine(shared())
    tokens_of(engine)
    assert engine._runner is not None
    held = engine._runner.bytes
    engine.generate(PROMPTS, 1, SamplingParams(max_tokens=MIN_TOKENS_TO_COPY - 1, stop_token_ids=()))
    assert engine._runner.bytes == held - engine._runner.plan.weight_bytes < held
