"""The packed pass gives what a padded one gives: log-probabilities, entropies and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import add_fused_lm_head

from explorl.modeling.llama import llama_like
from explorl.modeling.packed import PackedRows, packed_logps
from tests.rollout.models import BUILDERS, build


def ragged(lengths: list[tuple[int, int]], vocab: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts padded on the left, completions on the right, as TRL lays them out."""
    generator = torch.Generator().manual_seed(0)
    prompt, completion = (max(pair[i] for pair in lengths) for i in (0, 1))
    ids = torch.randint(3, vocab, (len(lengths), prompt + completion), generator=generator)
    places = torch.arange(prompt + completion)
    mask = torch.stack([(places >= prompt - p) & (places < prompt + c) for p, c in lengths]).long()
    return ids, mask, completion


def padded_logps(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, completion: int, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -completion - 1 : -1]
    distribution = torch.log_softmax(logits.float() / temperature[:, None, None], dim=-1)
    logps = distribution.gather(-1, ids[:, -completion:, None]).squeeze(-1)
    counted = mask[:, -completion:].bool()
    entropy = -(distribution.exp() * distribution).sum(-1)
    return logps.where(counted, 0.0), entropy.where(counted, 0.0)


LENGTHS = [(3, 7), (9, 1), (5, 12), (1, 4)]
GROUPS = [(3, 7), (3, 2), (9, 1), (9, 5), (9, 12), (1, 4), (1, 6)]


def shared(lengths: list[tuple[int, int]], vocab: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As `ragged`, but rows with prompts of one length have the same prompt."""
    ids, mask, completion = ragged(lengths, vocab)
    prompt = ids.size(1) - completion
    for row in range(1, len(lengths)):
        if lengths[row][0] == lengths[row - 1][0]:
            ids[row, :prompt] = ids[row - 1, :prompt]
    return ids, mask, completion


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("rows", ["one temperature", "own temperatures"])
@pytest.mark.parametrize("prompts", ["own prompts", "shared prompts"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("unrolled", [False, True], ids=["modules", "unrolled"])
def test_log_probabilities_entropies_and_gradients(
    name: str, rows: str, prompts: str, checkpointing: bool, unrolled: bool
) -> None:
    model = build(name)
    if unrolled and llama_like(model) is None:
        pytest.skip("its layers are not unrolled")
    if checkpointing:
        model.train()  # there is no dropout
        model.gradient_checkpointing_enable({"use_reentrant": False})
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    vocab = model.config.get_text_config().vocab_size
    ids, mask, completion = ragged(LENGTHS, vocab) if prompts == "own prompts" else shared(GROUPS, vocab)
    own = rows == "own temperatures"
    temperature = torch.linspace(0.5, 2.0, len(ids)) if own else torch.full((len(ids),), 0.7)
    expected, expected_entropy = padded_logps(model, ids, mask, completion, temperature)
    expected.sum().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logps, entropy = packed_logps(
        model,
        ids,
        mask,
        completion,
        temperature=temperature if own else None,
        head_temperature=0.7,
        unrolled=unrolled,
    )
    torch.testing.assert_close(logps, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-4, atol=1e-4)
    logps.sum().backward()
    for key, expected_gradient in gradients.items():
        gradient = dict(model.named_parameters())[key].grad
        assert gradient is not None, key
        assert (gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm() + 1e-6, key


def test_a_prompt_is_computed_once() -> None:
    model = build("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask, completion = shared([(9, 2), (9, 3), (9, 4)], model.config.vocab_size)
    lengths: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, inputs, output: lengths.append(output.size(1)))
    packed_logps(model, ids, mask, completion)
    hook.remove()
    assert lengths == [8 + 3 * 1 + 2 + 3 + 4]  # its last token predicts another one in each row, so it stands in each


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    before = model.config._attn_implementation
    forwards = [module.forward for module in model.modules()]
    ids, mask, completion = ragged(LENGTHS, model.config.vocab_size)
    packed_logps(model, ids, mask, completion)
    assert model.config._attn_implementation == before
    assert [module.forward for module in model.modules()] == forwards


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([None, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_attention_stays_within_each_sequence(lengths: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, heads, size = sum(lengths), 2, 4
    query = torch.randn(1, heads, tokens, size, generator=generator)
    key, value = torch.randn(2, 1, 1, tokens, size, generator=generator)
    counted = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = PackedRows(counted, torch.zeros_like(counted))
    out = rows.attend(query, key, value, 0.5, window, None)
    start = 0
    for length in lengths:
        for position in range(length):
            first = 0 if window is None else max(0, position + 1 - window)
            visible = slice(start + first, start + position + 1)
            scores = 0.5 * query[0, :, start + position] @ key[0, 0, visible].T
            expected = torch.softmax(scores, dim=-1) @ value[0, 0, visible]
            torch.testing.assert_close(out[0, start + position], expected, rtol=1e-4, atol=1e-5)
        start += length
