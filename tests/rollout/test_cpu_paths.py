"""What the engine does in another way on a CPU, because that is faster there, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from explorl.modeling.llama import HEAD_ROWS, TorchOps
from explorl.rollout.memory.attention import Grouping, shared_attention
from explorl.rollout.sampling import Active, rng
from explorl.rollout.sampling.draw import Scratch, draw
from explorl.rollout.sampling.ranking import branching_count
from explorl.rollout.state import KEY, RUNNING, STATUS, State


def a_state(seats: int, vocab: int, seed: int = 0) -> State:
    state = State(seats, 4, vocab, torch.device("cpu"))
    state.ints[STATUS] = RUNNING
    state.ints[KEY] = torch.from_numpy(rng.request_keys(seed, range(seats)))
    return state


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("vocab", [5, HEAD_ROWS, 2 * HEAD_ROWS + 7])
@pytest.mark.parametrize("rows", [4, 20])
def test_logits_of_a_few_rows_are_put_together_from_blocks(rows: int, vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    head = nn.Linear(24, vocab, bias=False)
    weight, states = generator.normal(size=(vocab, 24)), generator.normal(size=(rows, 24))
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(weight))
        x = torch.from_numpy(states).float()
        ops = TorchOps()
        ops.begin(x)
        logits = ops.logits(x, head)
    assert logits.is_contiguous()
    np.testing.assert_allclose(logits.numpy(), states @ weight.T, atol=1e-4)


@pytest.mark.parametrize("vocab", [1025, 6000, 20000])
@pytest.mark.parametrize("scale", [0.3, 4.0, 8.0, 30.0])
def test_branching_of_flat_and_of_peaked_rows(vocab: int, scale: float) -> None:
    scores = np.random.default_rng(vocab).normal(size=(10, vocab)).astype(np.float32) * np.float32(scale)
    scores[0, 3] = 500.0  # alone
    scores[1] = np.where(np.arange(vocab) < 40, 0.0, -np.inf)  # 38 of 40 equal ones hold 0.95
    probs = torch.from_numpy(scores).softmax(-1)
    falling = -np.sort(-probs.numpy().astype(np.float64), -1)
    sums = falling.cumsum(-1)
    want = (sums < 0.95 * (1 - 1e-12) * sums[:, -1:]).sum(-1) + 1
    assert branching_count(torch.from_numpy(scores), probs).tolist() == want.tolist()
    assert want[:2].tolist() == [1, 38]


def test_what_a_step_recorded_stays_when_the_next_uses_its_memory() -> None:
    scratch, vocab = Scratch(), 2000
    first, second = (torch.from_numpy(np.random.default_rng(i).normal(size=(6, vocab))).float() for i in range(2))
    kept = draw(first, a_state(6, vocab), Active(), scratch=scratch)
    before = [value.clone() for value in kept[:-1]]
    memory = scratch(first)[0]
    draw(second[:5], a_state(5, vocab), Active(), scratch=scratch)  # fewer rows fit too
    assert memory is not None
    assert scratch(second)[0].data_ptr() == memory.data_ptr()
    alone = draw(first, a_state(6, vocab), Active())
    for now, then, by_itself in zip(kept[:-1], before, alone[:-1], strict=True):
        assert torch.equal(now, then)
        assert torch.equal(now, by_itself)


@pytest.mark.parametrize("active", [Active(), Active(greedy=True), Active(top_p=True)])
def test_tokens_that_the_model_rules_out(active: Active) -> None:
    """A score of −inf has no probability, and makes neither its row nor the others broken; NaN does its own row."""
    scores = np.random.default_rng(0).normal(size=(4, 3000)).astype(np.float32)
    scores[1, 5:] = -np.inf
    scores[2, 7] = np.nan
    drawn = draw(torch.from_numpy(scores), a_state(4, 3000), active)
    assert drawn.broken.tolist() == [False, False, True, False]
    assert drawn.token[1] < 5
    for row in (0, 1, 3):
        probs = softmax(scores[row].astype(np.float64))
        held = probs[probs > 0]
        assert float(drawn.entropy[row]) == pytest.approx(-(held * np.log(held)).sum(), abs=5e-6)
        assert float(drawn.logp[row]) == pytest.approx(np.log(probs[drawn.token[row]]), abs=5e-6)


@pytest.mark.parametrize("given", ["grouped", "ordered", "one by one"])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_rows_attend_to_a_prompt_that_they_share_head_by_head(given: str, cap: float | None) -> None:
    generator = np.random.default_rng(3)
    entries = np.array([0, 0, 1, 1] if given == "ordered" else [1, 0, 1, 1, -1, 0])
    rows, lengths, heads, kv_heads, size, columns = len(entries), np.array([3, 5]), 6, 3, 4, 7
    query = generator.normal(size=(rows, heads, size))
    own = generator.normal(size=(2, rows, columns, kv_heads, size))
    prompt = generator.normal(size=(2, 2, 5, kv_heads, size))
    taken = np.maximum(entries, 0)
    hidden = np.arange(5) >= lengths[taken][:, None]
    foreign = np.arange(heads)[:, None] // 2 != np.arange(kv_heads)
    blocked = np.broadcast_to(foreign[None, :, None], (rows, heads, columns, kv_heads)).reshape(rows, heads, -1)
    bias = np.concatenate([np.broadcast_to(hidden[:, None], (rows, heads, 5)), blocked], -1)
    rows_of: Any = torch.from_numpy(taken)
    if given != "one by one":
        rows_of = Grouping.of(entries, lengths[entries[entries >= 0]], torch.device("cpu"))
        assert rows_of.ordered == (given == "ordered")
    got = shared_attention(
        torch.from_numpy(query),
        (torch.from_numpy(own[0]).flatten(1, 2), torch.from_numpy(own[1]).flatten(1, 2)),
        (torch.from_numpy(prompt[0]), torch.from_numpy(prompt[1])),
        rows_of,
        torch.zeros(bias.shape, dtype=torch.float64).masked_fill(torch.from_numpy(bias), -torch.inf),
        cap,
    )
    for row in np.flatnonzero(entries >= 0):
        for head in range(heads):
            keys, values = (
                np.concatenate([prompt[i, entries[row], : lengths[entries[row]], head // 2], own[i, row, :, head // 2]])
                for i in range(2)
            )
            scores = keys @ query[row, head]
            want = softmax(scores if cap is None else np.tanh(scores / cap) * cap) @ values
            np.testing.assert_allclose(got[row, head].numpy(), want, atol=1e-6)
