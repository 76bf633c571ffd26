"""The unrolled pass with whole products as kernels gives what the modules give, and steps aside for others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from explorl.modeling import fast_paths, triton_layers
from explorl.modeling.fused_ops_triton import FusedTritonOps
from explorl.modeling.llama import LlamaForward, TorchOps
from explorl.modeling.rotary_table import RotaryTable
from explorl.modeling.triton_layers import Tile

from .models import build, prompts

KINDS = [triton_layers.HEADS, triton_layers.ADDED, triton_layers.GATED]


@pytest.fixture(autouse=True)
def in_float32(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for float32 too, where a difference is a fault, and small tiles."""
    monkeypatch.setattr(triton_layers, "DTYPES", (torch.float32, torch.float16, torch.bfloat16))
    for kind in KINDS:
        monkeypatch.setitem(triton_layers.TILES, kind, ((64, Tile(16, 64, 64, 4, 2)),))


class Eager:
    """A cache that keeps nothing: each sequence is seen whole."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def attend(self, query: Any, key: Any, value: Any, scale: float, window: Any, cap: Any) -> torch.Tensor:
        from explorl.rollout.memory.cache import causal_attention

        return causal_attention(query, key, value, scale, window, cap)


def run(model: Any, ops: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return LlamaForward(model, ops).hidden(ids, positions, Eager())


@pytest.fixture
def small(kernel_device: torch.device) -> Any:
    """Builds a model of one layer, and tokens for it."""

    def make(name: str = "llama") -> tuple[Any, torch.Tensor]:
        model = build(name)
        del model.model.layers[1:]
        return model.to(kernel_device), torch.tensor(prompts((3, 3))).to(kernel_device)

    return make


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels ran, with the norm inside or not."""
    seen: list[str] = []

    def spy(name: str) -> None:
        original = getattr(triton_layers, name)

        def spied(x: Any, *args: Any, **more: Any) -> Any:
            norm = any(isinstance(arg, triton_layers.Norm) for arg in args)
            seen.append(f"{'norm ' if norm else ''}{name}")
            return original(x, *args, **more)

        monkeypatch.setattr(triton_layers, name, spied)

    spy("products")
    spy("gated_products")
    return seen


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2", "qwen3"))])
def test_a_layer_is_four_products(name: str, small: Any, calls: list[str]) -> None:
    model, ids = small(name)
    ops = FusedTritonOps()
    first = run(model, ops, ids)
    torch.testing.assert_close(first, run(model, TorchOps(), ids), atol=2e-5, rtol=2e-5)
    assert list(ops.verified.values()) == [True] * 4  # output and down have other shapes
    del calls[:]
    assert torch.equal(run(model, ops, ids), first)
    assert calls == ["norm products", "products", "norm gated_products", "products"]


def test_many_rows_are_normed_before(small: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_layers, "FEW", 5)
    monkeypatch.setitem(triton_layers.TILES, triton_layers.ADDED, ())
    model, ids = small()
    torch.testing.assert_close(run(model, FusedTritonOps(), ids), run(model, TorchOps(), ids), atol=2e-5, rtol=2e-5)
    assert set(calls) == {"products", "gated_products"}


def test_updates_of_the_weights_are_seen(small: Any) -> None:
    """In place, in place unseen by torch, and with a tensor of its own."""
    (model, ids), ops = small(), FusedTritonOps()
    before = run(model, ops, ids)
    projection = model.model.layers[0].self_attn.k_proj
    for change in (
        lambda: projection.weight.mul_(1.5),
        lambda: projection.weight.data.mul_(1.5),
        lambda: setattr(projection.weight, "data", 1.5 * projection.weight.data),
        lambda: model.load_state_dict({k: 0.9 * v for k, v in model.state_dict().items()}),
    ):
        with torch.no_grad():
            change()
        after = run(model, ops, ids)
        assert not torch.allclose(after, before)
        torch.testing.assert_close(after, run(model, TorchOps(), ids), atol=2e-5, rtol=2e-5)
        before = after


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _adapted(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False), model)


def _hooked(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, out: out + 1)


def _subclassed(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.__class__ = Doubled


def _transposed(model: Any) -> None:
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


def _one_bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.ones(24, device=model.device))


@pytest.mark.parametrize(
    "change",
    [
        _adapted,
        _hooked,
        *(pytest.param(change, marks=pytest.mark.slow) for change in (_subclassed, _transposed, _one_bias)),
    ],
)
def test_other_projections_are_called_as_they_are(change: Any, small: Any, calls: list[str]) -> None:
    model, ids = small()
    plain = run(model, TorchOps(), ids)
    change(model)
    want = run(model, TorchOps(), ids)
    assert (change is _transposed) == torch.allclose(want, plain, atol=1e-4, rtol=1e-3)
    ops = FusedTritonOps()
    torch.testing.assert_close(run(model, ops, ids), want, atol=2e-5, rtol=2e-5)
    assert "norm products" not in calls
    assert "norm gated_products" in calls


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_does_not_agree_is_not_used(
    fault: str, small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, tried = triton_layers.gated_products, []

    def planted(*args: Any, **more: Any) -> torch.Tensor:
        tried.append(fault)
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        return original(*args, **more) * 1.001

    monkeypatch.setattr(triton_layers, "gated_products", planted)
    (model, ids), ops = small(), FusedTritonOps()
    with caplog.at_level(logging.INFO, fast_paths.__name__):
        torch.testing.assert_close(run(model, ops, ids), run(model, TorchOps(), ids), atol=2e-5, rtol=2e-5)
    assert sorted(ops.verified.values()) == [False, True, True, True]
    assert ("times the tolerance" if fault == "wrong" else "shared memory") in caplog.text
    run(model, ops, ids)
    assert len(tried) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_of_every_position_are_those_of_the_model(dtype: torch.dtype) -> None:
    rotary = build("llama").model.rotary_emb
    x, positions = torch.zeros(3, 1, 48, dtype=dtype), torch.tensor([[0], [37], [5]])
    table, wants = RotaryTable(rotary), rotary(x, position_ids=positions)
    first: Any = table.up_to(40, x)
    for part, want in zip(first, wants, strict=True):
        assert torch.equal(part[positions], want)
    again: Any = table.up_to(20, x)
    rotary.inv_freq.mul_(0.5)
    table.refresh()
    assert all(one is two for one, two in zip(first, again, strict=True))  # and stays where it is
    assert not torch.equal(wants[1], rotary(x, position_ids=positions)[1])
    assert torch.equal(again[1][positions], rotary(x, position_ids=positions)[1])
    longer: Any = table.up_to(41, x)
    assert len(longer[0]) == 41


def test_angles_that_change_with_the_length_or_a_hook_have_no_table() -> None:
    x = torch.zeros(1, 1, 48)
    for kind in ("dynamic", "longrope", "proportional", None):
        rotary = build("llama").model.rotary_emb
        rotary.rope_type = kind
        assert RotaryTable(rotary).up_to(8, x) is None
    rotary = build("llama").model.rotary_emb
    rotary.register_forward_hook(lambda module, args, out: out)
    assert RotaryTable(rotary).up_to(8, x) is None


def test_attention_finds_the_angles_of_its_position(kernel_device: torch.device) -> None:
    from explorl.rollout.memory import triton_attention
    from explorl.rollout.state import POSITION, RUNNING, STATUS, SlotState

    def draw(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(kernel_device)

    state = SlotState(4, 4, 10, kernel_device)
    positions = torch.tensor([3, 20, 0], device=kernel_device)
    state.ints[STATUS, :3], state.ints[POSITION, :3] = RUNNING, positions
    table = torch.tensor([[2, 0], [3, 4], [5, 0], [0, 0]], dtype=torch.int32, device=kernel_device)
    query, new, value = draw(3, 4, 1, 16, seed=1), draw(3, 2, 1, 16, seed=2), draw(3, 2, 1, 16, seed=3)
    cos, sin = draw(32, 16, seed=4), draw(32, 16, seed=5)
    outs = []
    for given in ((cos, sin), (cos[positions][:, None], sin[positions][:, None])):
        pages = draw(6, 16, 2, 16, seed=6), draw(6, 16, 2, 16, seed=7)
        out = triton_attention.decode_attention(query, new, value, *pages, table, state.ints, 0.25, rotary=given)
        outs.append((out, *pages))
    assert all(torch.equal(first, second) for first, second in zip(*outs, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_stopped_rows_that_hold_anything_are_not_compared(small: Any) -> None:
    (model, ids), ops = small(), FusedTritonOps()
    with torch.no_grad():
        model.model.embed_tokens.weight[ids[0, 0]] = float("inf")
    before = torch.random.get_rng_state()
    run(model, ops, ids)
    assert list(ops.verified.values()) == [True] * 4
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wide_models_and_other_types_use_the_modules() -> None:
    assert triton_layers.tile_for(triton_layers.HEADS, 8, 4096, torch.bfloat16) is None
    assert triton_layers.tile_for(triton_layers.HEADS, 8, 576, torch.float64) is None
    assert triton_layers.tile_for(triton_layers.HEADS, 10_000, 576, torch.bfloat16) is None
    assert triton_layers.tile_for(triton_layers.HEADS, 8, 576, torch.bfloat16) is not None
