"""The closed form of a token's gradient against autograd's, on small models of several kinds."""

from __future__ import annotations

import numpy as np
import pytest

from explorl.analysis.gradient_check import check_gradients, describe, gradient_check
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import build_table
from explorl.models import Policy


def small(kind="Llama", **more):
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


SEQUENCES = [([3, 4, 5], [6, 7, 8, 9, 10]), ([11], [12]), ([3], [4, 5])]


@pytest.mark.parametrize("tied", [True, False])
def test_both_agree(tied):
    model = small(tie_word_embeddings=tied)
    before = [p.detach().clone() for p in model.parameters()]
    found = check_gradients(model, SEQUENCES, 3)
    assert len(found.closed) == 3 + 1 + 2
    assert found.largest < 1e-4
    assert found.agrees
    assert "agree; largest difference" in describe(found).sentence
    assert describe(found).tables["gradient_check"].rows[0][0] == found.closed[0]
    for old, new in zip(before, model.parameters(), strict=True):
        assert old.equal(new)
        assert new.grad is None


def test_autograds_value_is_the_norm_of_the_whole_gradient():
    import torch

    model = small(tie_word_embeddings=False)
    found = check_gradients(model, [([3, 4], [5])], 1)
    logits = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    logits[0, 1].log_softmax(-1)[5].backward()
    assert found.autograd[0] == pytest.approx(float(model.lm_head.weight.grad.norm()), rel=1e-5)


def test_certain_tokens_do_not_count_as_a_difference():
    import torch

    model = small(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(300)
        ids = [3]
        for _ in range(4):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    found = check_gradients(model, [(ids[:1], ids[1:]), ([3], [4])], 4)
    assert min(found.autograd) < 1e-3 * max(found.autograd)
    assert found.agrees


def test_capped_logits_are_noticed():
    found = check_gradients(small("Gemma2", final_logit_softcapping=0.05), SEQUENCES, 2)
    assert not found.agrees
    assert "differ" in describe(found).sentence


def test_a_run_and_what_it_may_lack():
    model = small()
    policy = Policy("small", model, lambda text: {"input_ids": [3 + len(text) % 5]})
    columns = {
        "prompt": ["p"] * 6, "completion": ["c"] * 6, "entropy": [[1.0, 1.0]] * 6, "token_ids": [[5, 6]] * 5 + [[5, 99]]
    }  # fmt: skip
    context = Context(load_policy=lambda: policy)
    found = gradient_check(build_table("run", {1: columns}), context)
    assert len(found["closed"]) == 8
    assert "agree;" in found.sentence
    assert np.isfinite(found["closed"]).all()
    alien = gradient_check(build_table("run", {1: columns | {"token_ids": [[99, 5]] * 6}}), context)
    assert "small" in alien.reason
    with pytest.raises(ValueError, match="no policy"):
        gradient_check(build_table("run", {1: columns}), Context())
    with pytest.raises(ValueError, match="token_ids"):
        gradient_check(build_table("run", {1: {"prompt": ["p"], "completion": ["c"], "entropy": [[1.0]]}}), context)
