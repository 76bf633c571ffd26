"""Products from copies of the weights, against NumPy and against the modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from explorl.modeling import onednn_ops
from explorl.modeling.llama import HEAD_ROWS
from explorl.modeling.onednn_ops import WIDE, OneDnnOps, ReorderedWeight, copied_bytes, groups

pytestmark = pytest.mark.skipif(not onednn_ops.is_available(), reason="this processor or torch has no such products")

LAYERS = 2


def a_model(bias: bool = False, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": HEAD_ROWS + 7, "hidden_size": WIDE, "intermediate_size": WIDE + 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": bias, "mlp_bias": bias,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return model


def renewed(model: Any) -> OneDnnOps:
    ops = OneDnnOps(model)
    ops.renew()
    return ops


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def linear(x: np.ndarray, projection: Any) -> np.ndarray:
    return x @ array(projection.weight).T + (0.0 if projection.bias is None else array(projection.bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (33, 1), (2, 9)], ids=str)
@torch.no_grad()
def test_products_of_a_layer(shape: tuple[int, int], bias: bool) -> None:
    model = a_model(bias)
    ops, layer = renewed(model), model.model.layers[1]
    attn, mlp = layer.self_attn, layer.mlp
    generator = np.random.default_rng(shape[0])
    h, x, y, z = (generator.normal(size=(*shape, n)) for n in (WIDE, WIDE, WIDE, WIDE + 24))
    given = [torch.from_numpy(part).float() for part in (h, x, y, z)]
    ops.begin(given[0])
    for got, projection in zip(
        ops.heads(given[1], given[0], None, attn), (attn.q_proj, attn.k_proj, attn.v_proj), strict=True
    ):
        assert got.is_contiguous()
        np.testing.assert_allclose(got.numpy(), linear(h, projection), atol=2e-5)
    gate = linear(h, mlp.gate_proj)
    inner = gate / (1 + np.exp(-gate)) * linear(h, mlp.up_proj)
    np.testing.assert_allclose(ops.inner(given[1], given[0], None, mlp).numpy(), inner, atol=2e-5)
    norm = model.model.norm
    for own, projection in ((2, attn.o_proj), (3, mlp.down_proj)):
        total, normed = ops.add(given[1], given[own], projection, norm)
        np.testing.assert_allclose(total.numpy(), x + linear((h, x, y, z)[own], projection), atol=2e-5)
        torch.testing.assert_close(normed, norm(total))


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_heads_of_one_token_are_rotated_as_without_copies(qk_norm: bool) -> None:
    model = a_model()
    if qk_norm:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=50, hidden_size=WIDE, intermediate_size=WIDE, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32,
            )
        ).eval()  # fmt: skip
    ops, attn = renewed(model), model.model.layers[0].self_attn
    x, norm = torch.randn(5, 1, WIDE), model.model.norm
    angle = torch.randn(5, 1, attn.head_dim // 2).repeat(1, 1, 2)
    rotary = ops.rotary_factors(angle.cos(), angle.sin())
    for one in (ops, plain := OneDnnOps(model)):
        one.begin(x)
    for got, want in zip(
        ops.rotated_heads(x, None, norm, attn, rotary), plain.rotated_heads(x, None, norm, attn, rotary), strict=True
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 20])
@torch.no_grad()
def test_logits_and_that_the_next_ones_take_their_place(rows: int) -> None:
    model = a_model()
    ops = renewed(model)
    first, second = (torch.randn(rows, WIDE) for _ in range(2))
    logits = ops.logits(first, model.lm_head)
    np.testing.assert_allclose(logits.numpy(), linear(array(first), model.lm_head), atol=2e-5)
    fewer = ops.logits(second[:1], model.lm_head)
    assert fewer.data_ptr() == logits.data_ptr()
    np.testing.assert_allclose(fewer.numpy(), linear(array(second[:1]), model.lm_head), atol=2e-5)


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_company() -> None:
    model = a_model()
    ops, mlp = renewed(model), model.model.layers[0].mlp
    x = torch.randn(70, 1, WIDE)
    whole = ops.inner(x, x, None, mlp)
    for rows in (2, 8, 31, 64):
        assert torch.equal(ops.inner(x[:rows], x[:rows], None, mlp), whole[:rows])


@torch.no_grad()
def test_copies_follow_the_weights_when_they_are_renewed() -> None:
    model = a_model()
    ops, mlp = renewed(model), model.model.layers[0].mlp
    x = torch.randn(3, 1, WIDE)
    before = ops.inner(x, x, None, mlp)
    mlp.up_proj.weight.data.mul_(2.0)  # which torch does not count as a change
    torch.testing.assert_close(ops.inner(x, x, None, mlp), before)
    ops.renew()
    torch.testing.assert_close(ops.inner(x, x, None, mlp), 2 * before)
    mlp.up_proj.weight.data.mul_(2.0)
    ops.forget()
    ops.begin(x)
    torch.testing.assert_close(ops.inner(x, x, None, mlp), 4 * before, atol=1e-5, rtol=1e-5)


def test_what_has_no_copy() -> None:
    model = a_model()
    every = 5 * LAYERS + 1
    weights = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" not in name)
    assert len(list(groups(model))) == every
    assert copied_bytes(model) == 4 * (weights - model.model.embed_tokens.weight.numel())
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    model.model.layers[1].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)
    assert len(list(groups(model))) == every - 2
    assert copied_bytes(a_model().double()) == 0
    assert copied_bytes(a_model(hidden_size=WIDE // 2)) == 0
    adapted = get_peft_model(a_model(), LoraConfig(target_modules=["q_proj", "down_proj"]))
    assert len(list(groups(adapted.get_base_model()))) == every - 2 * LAYERS


@torch.no_grad()
def test_a_hook_is_called_where_others_have_copies() -> None:
    model = a_model()
    called: list[int] = []
    mlp = model.model.layers[0].mlp
    mlp.up_proj.register_forward_hook(lambda *_: called.append(1))
    ops, x = renewed(model), torch.randn(3, 1, WIDE)
    ops.begin(x)
    torch.testing.assert_close(ops.inner(x, x, None, mlp), mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert called == [1, 1]


@pytest.mark.parametrize("wrong", ["values", "an error", "NaN"])
@torch.no_grad()
def test_products_that_are_wrong_are_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReorderedWeight.combined

    def combined(self: ReorderedWeight, x: torch.Tensor, other: torch.Tensor, then: str) -> torch.Tensor:
        if wrong == "an error":
            raise RuntimeError("no such operation")
        return right(self, x, other, then) * (1.0001 if wrong == "values" else torch.nan)

    monkeypatch.setattr(ReorderedWeight, "combined", combined)
    model = a_model()
    ops = renewed(model)
    assert not ops.copies
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 1, WIDE)
    ops.begin(x)
    torch.testing.assert_close(ops.inner(x, x, None, mlp), mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    torch.testing.assert_close(ops.logits(x[:, 0], model.lm_head), model.lm_head(x[:, 0]))


def test_weights_that_are_not_finite_have_copies_too() -> None:
    """Whether a product is right does not depend on the weights: a broken row is reported as one."""
    model = a_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = torch.nan
    assert len(renewed(model).copies) == 5 * LAYERS
