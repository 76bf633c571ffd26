"""The Triton kernels against their torch counterparts: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.sampling import Active, rng
from explorl.rollout.sampling.sample import sample_step
from explorl.rollout.state import (
    KEY,
    LIMIT,
    LOGQ,
    POSITION,
    RUNNING,
    STATE_REALS,
    STATUS,
    STEP,
    STOPPED,
    TOP_K,
    SlotState,
)

from .models import build, prompts

language = pytest.importorskip("triton.language")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and type(language.sum).__name__ != "InterpretedFunction":
    pytest.skip("no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "cap"),
    [(9, 3, 64, None, None), (4, 4, 24, 40, None), (4, 2, 32, None, 5.0)],
)
@pytest.mark.parametrize(("rotate", "launch"), [(False, "FEW"), (True, "MANY")])
def test_decode_attention(
    heads: int, kv_heads: int, size: int, window: Any, cap: Any, splits: int, rotate: bool, launch: str
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from explorl.rollout.memory import triton_attention

    positions, page, slot_pages = [3, 160, 33, 6, 127, 64], 64, 3
    tables = [[2, 0, 0], [3, 4, 5], [6, 0, 0], [7, 0, 0], [3, 8, 0], [3, 9, 0]]  # some rows share their first page
    rows = len(positions)
    state = SlotState(rows + 2, 4, 10, DEVICE)
    state.ints[STATUS, :rows] = RUNNING
    state.ints[STATUS, 3] = STOPPED
    state.ints[POSITION, :rows] = torch.tensor(positions, device=DEVICE)
    table = torch.zeros(rows + 2, slot_pages, dtype=torch.int32, device=DEVICE)
    table[:rows] = torch.tensor(tables, device=DEVICE)
    query = random(rows, heads, 1, size, seed=1)
    new_key, new_value = random(rows, kv_heads, 1, size, seed=2), random(rows, kv_heads, 1, size, seed=3)
    pages = [random(10, page, kv_heads, size, seed=seed) for seed in (4, 5)]
    for tensor in pages:
        tensor[:2] = torch.nan  # what lies beyond a row's length must not matter
        tensor[2, 4:] = tensor[5, 33:] = torch.nan
    before = [tensor.clone() for tensor in pages]
    rotary, given = None, (query, new_key)
    if rotate:
        rotary = random(rows, 1, size, seed=8), random(rows, 1, size, seed=9)
        query, new_key = apply_rotary_pos_emb(query, new_key, *rotary)
    out = triton_attention.decode_attention(
        *given, new_value, *pages, table, state.ints, size**-0.5, window, cap, splits=splits, rotary=rotary,
        launch=getattr(triton_attention, launch),
    )  # fmt: skip
    assert out.shape == (rows, 1, heads, size)
    assert all(torch.equal(new[7], old[7]) for new, old in zip(pages, before, strict=True))  # it has stopped
    for row, position in enumerate(positions):
        if row == 3:
            continue
        here = tables[row][position // page], position % page
        torch.testing.assert_close(pages[0][here], new_key[row, :, 0])
        assert torch.equal(pages[1][here], new_value[row, :, 0])
        seen = [part[tables[row]].flatten(0, 1)[: position + 1].transpose(0, 1).double() for part in pages]
        if window is not None:
            seen = [part[:, -window:] for part in seen]
        key, value = (part.repeat_interleave(heads // kv_heads, 0) for part in seen)
        scores = (key @ query[row].double().transpose(-1, -2))[..., 0] * size**-0.5
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        want = (scores.softmax(-1)[:, None] @ value)[:, 0]
        torch.testing.assert_close(out[row, 0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (1, None), (None, 3.0)])
def test_pages_in_torch_equal_pages_in_the_kernel(window: Any, cap: Any) -> None:
    from explorl.rollout.memory.cache import LayerShape
    from explorl.rollout.memory.pages import PageCache
    from explorl.rollout.memory.triton_attention import KernelPages

    layers = [LayerShape(2, 16, 16, torch.float32, DEVICE)] * 2
    state = SlotState(3, 4, 10, DEVICE)
    state.ints[STATUS], state.ints[POSITION] = RUNNING, torch.tensor([0, 37, 16], device=DEVICE)
    caches = [kind(layers, 3, 10, 3, 16, state) for kind in (PageCache, KernelPages)]
    outs = []
    for cache in caches:
        cache.table.copy_(torch.tensor([[2, 0, 0], [3, 4, 5], [6, 7, 0]], device=DEVICE))
        for seed, block in enumerate(cache.blocks):
            block.copy_(random(*block.shape, seed=seed))
        cache.begin_step(state.ints, 38)
        key, value = (random(3, 2, 1, 16, seed=seed) for seed in (20, 21))
        cache.update(key, value, 1)
        outs.append(cache.attend(random(3, 6, 1, 16, seed=22), key, value, 0.25, window, cap))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
    for one, other in zip(*(cache.blocks for cache in caches), strict=True):
        assert torch.equal(one, other)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": [0.0, 1.0, 0.6, 1.7, 3.0, 1.0]},
    "truncated": {"top_k": [0, 5, 50, 1, 7, 2000], "top_p": [1.0, 0.9, 0.5, 0.3, 0.99, 0.95], "min_p": 0.02},
    "bottom": {"top_p": 0.95, "bottom_p": [1.0, 0.9, 0.5, 0.2, 0.99, 0.01], "bottom_p_frequency": 0.7},
    "mass": {"min_p_mass": 0.05, "temperature": [1.0, 0.0, 0.6, 1.7, 3.0, 1.0], "repetition_penalty": 1.3},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.8, "bottom_p": 0.8, "bottom_p_per": "sequence"},
}
QUICK = ("temperature", "bottom")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [name if name in ("temperature", "bottom") else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_sample_step(name: str, dtype: torch.dtype) -> None:
    from explorl.rollout.sampling.kernel import sample_step_kernel

    vocab, rows = 2500, 6
    params = SamplingParams(seed=3, **CASES[name])
    values = params.rows(rows, 1)
    active = Active.of(params, values)
    logits = random(rows, vocab, seed=8) * 2
    logits[5, 100] = torch.nan
    states = []
    for step in (sample_step, sample_step_kernel):
        state = SlotState(rows, 4, vocab, DEVICE)
        state.ints[KEY] = torch.from_numpy(rng.request_keys(1, range(rows))).to(DEVICE)
        state.ints[TOP_K] = torch.from_numpy(values["top_k"]).to(DEVICE)
        state.ints[LIMIT] = torch.tensor([4, 2, 4, 4, 4, 4], device=DEVICE)
        state.ints[STEP, :], state.ints[STATUS] = 1, RUNNING
        state.ints[STATUS, 4] = 1
        state.reals.copy_(torch.from_numpy(np.stack([values[key] for key in STATE_REALS])))
        state.set_stops([range(0, 2500, 3) if name == "plain" else [7]])
        state.allocate(active)
        if active.repetition:
            state.mark_seen(torch.arange(rows, device=DEVICE), [[row, 900, 1700] for row in range(rows)])
        step(logits.to(dtype), state, active)
        states.append(state)
    want, got = states
    assert torch.equal(got.ints, want.ints)
    if active.min_p_mass:
        torch.testing.assert_close(got.out_mass, want.out_mass, atol=2e-5, rtol=2e-5)
        assert (want.out_mass[:4, 1] > 0).any()
    assert torch.equal(got.out_ints, want.out_ints)
    torch.testing.assert_close(got.out_reals, want.out_reals, atol=2e-5, rtol=2e-5)
    if active.repetition:
        assert torch.equal(got.seen, want.seen)


@pytest.mark.slow
def test_the_mixture_of_bottom_p() -> None:
    """Rows with another f and p each: torch against kernel, and where the mixture is the branch, the same bits."""
    from explorl.rollout.sampling.kernel import sample_step_kernel

    vocab, rows = 300, 16
    distinct = (torch.arange(vocab, device=DEVICE) + 0x3F80).to(torch.int16).view(torch.bfloat16)  # from 1 to 5.4
    logits = distinct[random(rows, vocab, seed=5).argsort(-1)]
    logits[6, 17] = 20.0  # bottom-p cuts nothing here
    frequency = np.array([0.5, 0.0, 1.0, 0.3] + [0.3, 0.4, 0.5, 0.6, 0.7, 0.8] * 2)
    p = np.array([1.0, 0.5, 0.5, 1.0] + [0.9] * 6 + [0.2] * 6)
    temperature = np.array([1.0, 0.7, 1.0, 2.0, 0.0] + [1.0] * 11)

    def sample(step: Any, per: Any) -> SlotState:
        params = SamplingParams(
            bottom_p=p.tolist(),
            bottom_p_frequency=frequency.tolist(),
            bottom_p_per=per,
            temperature=temperature.tolist(),
        )
        values = params.rows(rows, 1)
        state = SlotState(rows, 1, vocab, DEVICE)
        state.ints[KEY] = torch.from_numpy(rng.request_keys(1, range(rows))).to(DEVICE)
        state.ints[LIMIT], state.ints[STATUS] = 1, RUNNING
        state.reals.copy_(torch.from_numpy(np.stack([values[key] for key in STATE_REALS])))
        step(logits, state, Active.of(params, values))
        return state

    want, got = sample(sample_step, "token"), sample(sample_step_kernel, "token")
    assert torch.equal(got.out_ints, want.out_ints)
    torch.testing.assert_close(got.out_reals, want.out_reals, atol=2e-5, rtol=2e-5)
    branch = sample(sample_step_kernel, "sequence")  # the same coin at the first token
    assert torch.equal(got.out_ints, branch.out_ints)
    change = (got.out_reals[LOGQ] - branch.out_reals[LOGQ])[:, 0].cpu()
    mixed = torch.from_numpy((frequency > 0) & (frequency < 1) & (p < 1) & (temperature > 0))
    mixed[6] = False
    assert torch.equal(change != 0, mixed)
    assert bool((change > 0).any())  # would stay under bottom-p, which was not applied
    removed = torch.isclose(change.double(), torch.from_numpy(np.log1p(-frequency)), atol=1e-5) & mixed
    assert bool(removed.any())
    assert bool(((change < 0) & ~removed).any())  # bottom-p was applied


def test_fused_operations() -> None:
    from explorl.modeling.triton_fused import add_rms_norm, gated, rms_norm, rotary

    x, weight = random(5, 1, 48), random(48, seed=1)
    want = torch.rms_norm(x, (48,), weight + 1, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, 1.0, False), want)
    up = random(5, 1, 48, seed=2)
    total, normed = add_rms_norm(x, up, weight, 1e-5)
    torch.testing.assert_close(total, x + up)
    torch.testing.assert_close(normed, torch.rms_norm(x + up, (48,), weight, 1e-5))
    torch.testing.assert_close(gated(x, up, False), torch.nn.functional.silu(x) * up)
    torch.testing.assert_close(gated(x, up, True), torch.nn.functional.gelu(x, approximate="tanh") * up)
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = random(5, 1, 9, 24).transpose(1, 2), random(5, 1, 3, 24, seed=1).transpose(1, 2)
    cos, sin = random(5, 1, 24, seed=2), random(5, 1, 24, seed=3)
    for got, expected in zip(rotary(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.slow
def test_the_engine_with_kernels_gives_the_same_tokens(name: str) -> None:
    model = build(name).to(DEVICE)
    ids = prompts((3, 11, 1))
    params = SamplingParams(temperature=[1.0, 0.0, 1.3], top_p=0.9, max_tokens=3, seed=6)
    plain = Engine(model, use_kernels=False, use_graphs=False).generate(ids, 1, params)
    fast = Engine(model, use_kernels=True, use_graphs=False, batch_size=2).generate(ids, 1, params)
    for first, second in zip(plain, fast, strict=True):
        assert first.token_ids == second.token_ids
        assert torch.equal(first.branching, second.branching)
        for key in ("logps", "sampling_logps", "entropy"):
            torch.testing.assert_close(getattr(first, key), getattr(second, key), atol=1e-4, rtol=0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs CUDA graphs")
@pytest.mark.parametrize("kernels", [True, False])
def test_graphs_follow_temperatures_by_position(kernels: bool) -> None:
    model = build("llama").to(DEVICE)
    ids = prompts((3, 11, 1, 20, 7))
    plain, engine = Engine(model, use_kernels=False, use_graphs=False), Engine(model, use_kernels=kernels, batch_size=6)
    for curves in ([[1.5, 0.3, 1.0]] * 5, [[0.7], [2.0] * 9 + [0.2], [1.0], [0.5, 1.5], [3.0, 0.1]]):
        params = SamplingParams(temperature_by_position=curves, min_p_mass=0.1, max_tokens=30, seed=6)
        want, got = plain.generate(ids, 4, params), engine.generate(ids, 4, params)
        assert [r.token_ids for r in got] == [r.token_ids for r in want]
        for first, second in zip(want, got, strict=True):
            for key in ("logps", "sampling_logps", "min_p_mass"):
                torch.testing.assert_close(getattr(first, key), getattr(second, key), atol=1e-4, rtol=0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs CUDA graphs")
@pytest.mark.parametrize("kernels", [True, False])
def test_graphs_give_the_same_tokens_and_follow_the_weights(kernels: bool) -> None:
    model = build("llama").to(DEVICE)
    ids = prompts((3, 11, 1, 20, 7))
    params = SamplingParams(max_tokens=[5, 60, 9, 33, 21] * 4, stop_token_ids=(), seed=6)
    plain = Engine(model, use_kernels=False, use_graphs=False).generate(ids, 4, params)
    engine = Engine(model, use_kernels=kernels, batch_size=12)
    fast = engine.generate(ids, 4, params)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    runner = engine._runner
    assert runner is not None
    graphs = dict(runner.graphs)
    assert graphs
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    moved = engine.generate(ids, 4, params)
    assert engine._runner is runner
    assert all(runner.graphs[key] is graph for key, graph in graphs.items())
    again = Engine(model, use_kernels=False, use_graphs=False).generate(ids, 4, params)
    assert [r.token_ids for r in moved] == [r.token_ids for r in again]
