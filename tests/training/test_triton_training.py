"""The kernels of the training pass against autograd: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

language = pytest.importorskip("triton.language")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and type(language.sum).__name__ != "InterpretedFunction":
    pytest.skip("no GPU; set TRITON_INTERPRET=1 to run the kernels on the CPU", allow_module_level=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def compare(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> None:
    """Values, and gradients for random slopes."""
    slopes = [random(*value.shape, seed=9 + i) for i, value in enumerate(theirs)]
    for first, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(ours, inputs, slopes)
    for first, other in zip(gradients, torch.autograd.grad(theirs, inputs, slopes), strict=True):
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [(3, 1), (4, 4)])
def test_rotated_rows(heads: tuple[int, int]) -> None:
    """Three rows, of which the last two share their first three tokens."""
    from explorl.modeling.packed import PackedRows
    from explorl.modeling.triton_training import RotatedRows

    counted = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]], device=DEVICE).bool()
    shared = torch.zeros_like(counted)
    shared[2, :3] = True
    rows = PackedRows(counted, shared)
    tokens, size = 12, 6
    assert len(rows.slots) == tokens
    query, key, value = (
        random(1, tokens, n, size, seed=i).transpose(1, 2).requires_grad_() for i, n in enumerate((*heads, heads[1]))
    )
    angles = random(1, tokens, size, seed=5)
    cos, sin = angles.cos(), angles.sin()
    rotated = apply_rotary_pos_emb(query, key, cos, sin)
    expected = tuple(rows._spread(tensor) for tensor in (*rotated, value))
    actual = RotatedRows.apply(query, key, value, cos, sin, rows, None)
    mask = (rows.source != 0) | (torch.arange(len(rows.source), device=DEVICE) == rows.slots[0])  # padding is any token
    weights = mask.view(3, 1, 6, 1).float()
    compare(
        tuple(value * weights for value in actual), tuple(value * weights for value in expected), [query, key, value]
    )


@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_whole_pass(name: str) -> None:
    """With kernels and without, by a model with shared prompts."""
    from trl.trainer.utils import add_fused_lm_head

    from explorl.modeling import packed
    from tests.rollout.models import build
    from tests.training.test_packed import shared

    model = build(name).to(DEVICE)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask, completion = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in shared([(5, 3), (5, 4)], 90))
    results = []
    for use_kernels in (True, False):
        logps, _ = packed.packed_logps(model, ids, mask, completion, unrolled=True, use_kernels=use_kernels)
        model.zero_grad()
        logps.sum().backward()
        results.append([logps.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for first, other in zip(*results, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-4)


def test_gate() -> None:
    from explorl.modeling.triton_training import Gated

    gate, up = (random(3, 50, seed=i).requires_grad_() for i in (1, 2))
    compare((Gated.apply(gate, up),), (F.silu(gate) * up,), [gate, up])


@pytest.mark.parametrize("rows", [1, 40])
def test_norm_of_a_sum(rows: int) -> None:
    from explorl.modeling.triton_training import AddedNorm

    x, y = (random(1, rows, 24, seed=i).requires_grad_() for i in (1, 2))
    weight = random(24, seed=3).requires_grad_()
    total = x + y
    expected = total, F.rms_norm(total, (24,), weight, 1e-5)
    compare(AddedNorm.apply(x, y, weight, 1e-5, None), expected, [x, y, weight])


def test_a_frozen_norm_has_no_gradient() -> None:
    from explorl.modeling.triton_training import AddedNorm

    x, y, weight = random(2, 8).requires_grad_(), random(2, 8, seed=1), random(8, seed=2)
    total, out = AddedNorm.apply(x, y, weight, 1e-5, None)
    (out.sum() + total.sum()).backward()
    assert x.grad is not None
    assert weight.grad is None
