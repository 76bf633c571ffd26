"""The engine inside training: modes, adapters, moving weights, memory, and models it cannot decode."""

from __future__ import annotations

import logging
import math
import os
import threading
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from explorl.modeling.attention import model_lock
from explorl.modeling.fused import Fusion
from explorl.modeling.llama import FEW_ROWS, TorchOps
from explorl.rollout import Engine, SamplingParams, UnsupportedModel
from explorl.rollout.engine import MAX_IDLE_SHARE
from explorl.rollout.memory.cache import LayerShape
from explorl.rollout.memory.pages import PageCache
from explorl.rollout.memory_plan import MemoryNeeds, make_plan
from explorl.rollout.requests import STATS

from .models import GQA, build, prompts
from .test_engine import check_records, same_tokens

PARAMS = SamplingParams(max_tokens=10, seed=2)


def train_once(model: Any, rate: float = 0.05) -> float:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    ids = torch.tensor([prompts()[1]])
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_weights_are_read_where_they_are() -> None:
    model = build("llama")
    engine = Engine(model)
    before = engine.generate(prompts(), 2, PARAMS)
    runner = engine._runner
    train_once(model)
    after = engine.generate(prompts(), 2, PARAMS)
    assert engine._runner is runner  # updated in place: memory and graphs are kept
    assert not torch.equal(before[0].entropy[:1], after[0].entropy[:1])
    check_records(model, after)
    model.model.layers[0].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data.clone()
    check_records(model, engine.generate(prompts(), 2, PARAMS))
    assert engine._runner is not runner  # moved: graphs would read the old place


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    quiet = Engine(model).generate(prompts(), 2, PARAMS)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.model.layers[1].eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    forwards = [dict(module.__dict__).get("forward") for module in model.modules()]
    noisy = Engine(model).generate(prompts(), 2, PARAMS)
    assert same_tokens(quiet, noisy)
    assert [module.training for module in model.modules()] == modes
    assert [dict(module.__dict__).get("forward") for module in model.modules()] == forwards
    assert model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())
    train_once(model)
    assert all(p.grad is not None for p in model.parameters())


def test_two_threads_leave_a_model_as_it_was() -> None:
    """Each with an engine of its own; what one puts in place is not what the other puts back."""
    model = build("llama").train()
    alone = Engine(model, dtype=torch.bfloat16).generate(prompts(), 1, PARAMS)
    begun, ended = threading.Event(), threading.Event()
    engines = [Engine(model, dtype=torch.bfloat16) for _ in range(2)]
    results: list[Any] = []

    def second() -> None:
        def meanwhile(_: Any) -> None:
            begun.set()
            ended.wait(10)

        results.append(engines[1].generate(prompts(), 1, PARAMS, on_finish=meanwhile))

    thread = threading.Thread(target=second)

    def first(_: Any) -> None:
        if thread.ident is None:
            thread.start()
            begun.wait(0.2)

    results.append(engines[0].generate(prompts(), 1, PARAMS, on_finish=first))
    ended.set()
    thread.join()
    assert all(same_tokens(alone, rollouts) for rollouts in results)
    assert model.config._attn_implementation == "sdpa"
    assert all(module.training for module in model.modules())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    model = build("llama")
    begun, ended = threading.Event(), threading.Event()

    def sampling() -> None:
        with model_lock(model):
            begun.set()
            ended.wait(10)

    thread = threading.Thread(target=sampling)
    thread.start()
    begun.wait(10)
    child = os.fork()
    if child == 0:
        os._exit(0 if model_lock(model).acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)
    assert not model_lock(model).acquire(blocking=False), "here the thread is there"
    ended.set()
    thread.join()
    assert status == 0


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = build("llama").train()

    def fail(_: Any) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        Engine(model).generate(prompts(), 2, PARAMS, on_finish=fail)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    train_once(model)


def test_a_fused_head_of_the_trainer_changes_nothing() -> None:
    from trl.trainer.utils import add_fused_lm_head

    model = build("llama")
    plain = Engine(model).generate(prompts(), 2, PARAMS)
    add_fused_lm_head(model, temperature=0.7)
    assert same_tokens(plain, Engine(model).generate(prompts(), 2, PARAMS))


def test_adapters_are_active() -> None:
    from peft import LoraConfig, get_peft_model

    base = build("llama")
    plain = Engine(base).generate(prompts(), 2, PARAMS)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.3))
    engine = Engine(model)
    assert same_tokens(plain, engine.generate(prompts(), 2, PARAMS))  # B starts at 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    model.train()
    adapted = engine.generate(prompts(), 2, PARAMS)
    assert not same_tokens(plain, adapted)
    model.eval()
    check_records(model, adapted)
    with model.disable_adapter():
        assert same_tokens(plain, engine.generate(prompts(), 2, PARAMS))
    assert same_tokens(adapted, engine.generate(prompts(), 2, PARAMS))
    model.merge_adapter()
    check_records(model, engine.generate(prompts(), 2, PARAMS))


def test_half_precision_on_the_cpu() -> None:
    model = build("qwen3").bfloat16()
    rollouts = Engine(model).generate(prompts(), 2, PARAMS)
    assert rollouts[0].logps.dtype == torch.float32
    for rollout in rollouts:
        ids = rollouts.prompt_ids[rollout.prompt_index] + rollout.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -len(rollout) - 1 : -1].float()
        want = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert float((rollout.logps - want).abs().mean()) < 0.1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_precision_than_the_weights_have(dtype: torch.dtype) -> None:
    model = build("llama").bfloat16()
    rollouts = Engine(model, dtype=dtype).generate(prompts(), 1, PARAMS)
    check_records(deepcopy(model).to(dtype), rollouts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_replacements_are_found_and_give_the_same(name: str) -> None:
    model = build(name)
    fusion = Fusion(model, torch.float32, use_kernels=False)
    kinds = {type(owner).__name__ for owner, _, _ in fusion.replacements}
    assert any(kind.endswith("RMSNorm") for kind in kinds)
    assert any(kind.endswith("MLP") for kind in kinds)
    ids = torch.tensor([prompts()[4]])
    with torch.no_grad():
        plain = model(ids).logits
        with fusion():
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=1e-4)
        assert torch.equal(model(ids).logits, plain)


def test_a_module_that_only_looks_like_a_norm_is_left_alone() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    assert not Fusion(nn.Sequential(OddRMSNorm()), torch.float32, use_kernels=False).replacements


@pytest.mark.parametrize(("name", "used"), [("llama", True), ("qwen2", True), ("qwen3", True), ("gemma3", False)])
def test_the_unrolled_pass_is_used_where_it_agrees(name: str, used: bool) -> None:
    model = build(name)
    engine = Engine(model)
    fast = engine.generate(prompts(), 2, PARAMS)
    assert engine._runner is not None
    assert (engine._runner._unrolled is not None) is used
    seen: list[Any] = []
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    slow = engine.generate(prompts(), 2, PARAMS)
    assert engine._runner._unrolled is None
    assert seen  # a hook on a layer is called
    assert same_tokens(fast, slow)
    hook.remove()
    assert same_tokens(fast, engine.generate(prompts(), 2, PARAMS))
    assert (engine._runner._unrolled is not None) is used


def test_a_layer_with_other_mathematics_is_not_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    original = type(model.model.layers[0]).forward
    monkeypatch.setattr(
        type(model.model.layers[0]),
        "forward",
        lambda self, x, *args, **kwargs: 1.1 * original(self, x, *args, **kwargs),
    )
    engine = Engine(model)
    check_records(model, engine.generate(prompts(), 1, PARAMS))
    assert engine._runner is not None
    assert engine._runner._unrolled is None


# Models that cannot be decoded


@pytest.mark.parametrize("default", [torch.float64, torch.float16, "meta"])
def test_a_callers_default_type_and_device_change_no_bit(default: Any) -> None:
    """The device "meta" stands for any on which host tensors are of no use."""
    params = SamplingParams(
        max_tokens=8, seed=1, temperature=0.7, top_p=0.9, bottom_p=0.9, bottom_p_frequency=0.5, min_p_mass=0.1,
        repetition_penalty=1.1,
    )  # fmt: skip

    def sampled(model: Any) -> list[Any]:
        engine = Engine(model)
        with engine.open([[5, 6, 7], [8, 9]], 2, params) as session:
            session.step(2)
            session.extend(session.fork(1)[0], [5, 6], max_tokens=12)
            session.run()
            return [session.rollout(row) for row in range(5)]

    other = build("llama")  # of which nothing is known yet
    want, before = sampled(build("llama")), torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        else:
            torch.set_default_device(default)
        got = sampled(other)
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for one, same in zip(want, got, strict=True):
        assert one.token_ids == same.token_ids
        for name in (*STATS, "min_p_mass"):
            torch.testing.assert_close(getattr(same, name), getattr(one, name), rtol=0, atol=0, equal_nan=True)


def test_a_layer_that_is_a_copy_has_a_configuration_of_its_own() -> None:
    """As in models that were made deeper by copies of their layers."""
    model = build("llama")
    model.model.layers.insert(2, deepcopy(model.model.layers[1]))
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(model.model.layers)
    check_records(model, Engine(model).generate(prompts(), 1, PARAMS))
    assert all(layer.self_attn.config._attn_implementation == "sdpa" for layer in model.model.layers)


def test_a_model_that_is_refused_for_long_sequences_is_sampled_in_short_ones() -> None:
    from transformers import Phi3Config, Phi3ForCausalLM

    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [8.0] * 6}
    model = Phi3ForCausalLM(Phi3Config(**GQA, original_max_position_embeddings=64, rope_scaling=scaling)).eval()
    for engine in (Engine(model), Engine(model)):
        with pytest.raises(UnsupportedModel, match="Phi3Attention"):
            engine.generate(prompts((5, 9)), 1, SamplingParams(max_tokens=100))
        check_records(model, engine.generate(prompts((5, 9)), 1, PARAMS))


@pytest.mark.parametrize("window", [120, 128])
def test_a_window_at_the_end_of_the_context(window: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**GQA, sliding_window=window)).eval()
    engine = Engine(model)
    engine.check(1000)  # what is longer than the context does not happen
    check_records(model, engine.generate([[5, 6, 7] * 40, [8, 9]], 1, SamplingParams(max_tokens=60, seed=1)))
    with pytest.raises(ValueError, match="prompt 1 has 128 tokens, but the model's context is 128"):
        engine.generate([[8, 9], [5] * 128])


def test_a_model_outside_the_attention_interface_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(TypeError, match=r"use model\.generate"):
        Engine(model).generate([[5, 6]], 1, PARAMS)


# Memory


@pytest.mark.usefixtures("place")
def test_the_plan_is_what_is_allocated(llama: Any) -> None:
    engine = Engine(llama, batch_size=6)
    engine.generate(prompts(), 4, PARAMS)
    plan, runner = engine.plan, engine._runner
    assert plan is not None
    assert runner is not None
    token_bytes = GQA["num_hidden_layers"] * 2 * 2 * 12 * 4
    assert (plan.slots, plan.tokens, plan.prompt_tokens) == (6, 10, 29)
    held = sum(b.nbytes for b in runner.cache.blocks)
    if isinstance(runner.cache, PageCache):
        # every row its completion and a copy of a page, every prompt its pages, and the two that are nobody's
        assert plan.pages == 6 * (3 + 1) + 5 * 8 + 2
        assert plan.cache_bytes == plan.pages * 4 * token_bytes + runner.cache.table.nbytes
        assert plan.cache_bytes == held + runner.cache.table.nbytes
        assert plan.prompt_bytes == 0
    else:
        assert plan.cache_bytes == 6 * 10 * token_bytes == held
        prompts_held = sum(b.nbytes for b in runner.prefill_cache.cache.blocks)
        assert plan.prompt_bytes == plan.entries * 29 * token_bytes == prompts_held
    state = runner.state
    held = sum(t.nbytes for t in (state.ints, state.reals, state.out_ints, state.out_reals, state.stops))
    assert plan.work_bytes > held
    assert plan.bytes == plan.cache_bytes + plan.prompt_bytes + plan.work_bytes
    assert not plan.split


def test_too_large_a_call_is_split_and_says_so_once(llama: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = Engine(llama).generate(prompts(), 8, PARAMS)
    engine = Engine(llama, memory_budget=300_000)
    with caplog.at_level(logging.WARNING):
        first, second = (engine.generate(prompts(), 8, PARAMS) for _ in range(2))
    assert engine.plan is not None
    assert engine.plan.split
    assert engine.plan.pages  # where spans do not fit
    assert 1 <= engine.plan.slots < 40
    assert engine.plan.bytes <= 300_000
    assert same_tokens(whole, first)
    assert same_tokens(whole, second)
    assert len([r for r in caplog.records if "do not fit into memory together" in r.message]) == 1


def test_a_failed_allocation_halves_the_rows_once(
    llama: Any, place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from explorl.rollout.runner import Runner

    want = Engine(llama).generate(prompts(), 4, PARAMS)
    original, rows = Runner.run, []

    def run(self: Runner, layout: Any, even: bool, steps: int, active: Any) -> None:
        rows.append(layout.slots)
        if len(rows) in fails:
            raise torch.OutOfMemoryError("planted")
        original(self, layout, even, steps, active)

    monkeypatch.setattr(Runner, "run", run)
    fails = {4}
    engine = Engine(llama, batch_size=12)
    with caplog.at_level(logging.WARNING):
        rollouts = engine.generate(prompts(), 4, PARAMS)
    assert same_tokens(rollouts, want)
    check_records(llama, rollouts)
    assert "memory ran out with 12 sequences; continuing with 6" in caplog.text
    assert max(rows[:4]) > 6 >= max(rows[4:])
    rows.clear()
    fails = {4, 6}
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        engine.generate(prompts(), 4, PARAMS)
    rows.clear()
    fails = set()
    assert same_tokens(engine.generate(prompts(), 4, PARAMS), want)  # and nothing is left of it


def test_memory_that_cannot_be_had_halves_the_rows_too(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorl.rollout import runner as runner

    want = Engine(llama).generate(prompts(), 4, PARAMS)
    original, asked = runner.SlotState, []

    def state(slots: int, *args: Any) -> Any:
        asked.append(slots)
        if slots > 10:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return original(slots, *args)

    monkeypatch.setattr(runner, "SlotState", state)
    assert same_tokens(Engine(llama, batch_size=12).generate(prompts(), 4, PARAMS), want)
    assert asked == [12, 6]


def test_released_memory_is_gone(llama: Any) -> None:
    import gc
    import weakref

    engine = Engine(llama)
    session = engine.open(prompts(), 2, PARAMS)
    session.step(tokens=2)
    assert engine._runner is not None
    blocks = [weakref.ref(block) for block in engine._runner.cache.blocks]
    engine.release()
    gc.collect()
    assert all(block() is None for block in blocks)
    with pytest.raises(RuntimeError, match="the engine was released"):
        session.step()


def test_an_engine_at_rest_gives_back_what_is_much(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(llama)
    first = engine.generate(prompts(), 1, PARAMS)
    engine.release_if_large()
    assert engine._runner is not None  # next to nothing of what the machine has
    monkeypatch.setattr("explorl.rollout.engine.MAX_IDLE_SHARE", 0.0)
    engine.release_if_large()
    assert engine._runner is None
    assert same_tokens(engine.generate(prompts(), 1, PARAMS), first)


def test_a_copy_of_the_weights_counts_when_an_engine_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    engine = Engine(model, dtype=torch.bfloat16)
    engine.generate(prompts(), 1, PARAMS)
    assert engine._runner is not None
    held = engine._runner.bytes + sum(2 * parameter.numel() for parameter in model.parameters())
    for total, rests in ((held + 9, False), (held - 9, True)):
        monkeypatch.setattr("explorl.rollout.engine.total_memory", lambda _, total=total: total / MAX_IDLE_SHARE)
        engine.release_if_large()
        assert (engine._cast_weights is None) is rests


def test_too_small_a_budget_is_an_error(llama: Any) -> None:
    with pytest.raises(MemoryError, match="the memory budget is 1000"):
        Engine(llama, memory_budget=1000).generate(prompts(), 1, PARAMS)


def test_the_largest_batch_that_fits_is_planned() -> None:
    layers = [LayerShape(3, 64, 64, torch.bfloat16, torch.device("cpu"))] * 30
    needs = MemoryNeeds(requests=512, prompts=64, prompt_tokens=64, tokens=256)
    common = SimpleNamespace(vocab=49152, logit_bytes=2, prefill_bytes=30000)
    plans = [
        make_plan(layers, needs, batch_size=None, budget=budget << 20, device=torch.device("cpu"), **vars(common))
        for budget in (200, 400, 800, 100_000)
    ]
    assert [plan.split for plan in plans] == [True, True, True, False]
    assert plans[0].slots < plans[1].slots < plans[2].slots <= plans[3].slots == 256
    assert plans[0].pages < plans[1].pages < plans[2].pages
    assert plans[3].pages == 0  # where everything fits, rows have spans
    for plan, budget in zip(plans, (200, 400, 800), strict=False):
        assert 0.95 * (budget << 20) < plan.bytes <= budget << 20


@pytest.mark.parametrize("shape", [(20, 1), (4, 5), (24,), (64, 1), (3,)])
def test_a_projection_is_the_same_either_way_round(shape: tuple[int, ...]) -> None:
    """For some numbers of rows the weight is multiplied by the input, not the input by the weight."""
    generator = torch.Generator().manual_seed(0)
    projection = torch.nn.Linear(40, 24, bias=False)
    x = torch.randn(*shape, 40, generator=generator)
    ops = TorchOps()
    with torch.no_grad():
        ops.begin(x)
        want = projection(x)
        got = ops.project(x, projection)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)
        flipped = got.stride(-1) != 1
        assert flipped == (math.prod(shape) in FEW_ROWS and torch.backends.mkl.is_available())
        if len(shape) == 2:
            norm, back = LlamaRMSNorm(40), torch.nn.Linear(24, 40, bias=False)
            total, normed = ops.add(x, got, back, norm)
            torch.testing.assert_close(total, x + back(want))
            torch.testing.assert_close(normed, norm(x + back(want)))
