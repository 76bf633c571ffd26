"""What the engine does in another way on a CPU, because that is faster there, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from explorl.modeling.llama import HEAD_ROWS, TorchOps
from explorl.modeling.onednn_ops import WIDE, OneDnnOps
from explorl.rollout.memory.cache import LayerShape
from explorl.rollout.memory.spans import Grouping, PromptCache, SpanCache, shared_attention
from explorl.rollout.sampling import Active, ranking, rng
from explorl.rollout.sampling.ranking import LONG, TINY, branching_count
from explorl.rollout.sampling.sample import SampledToken, Scratch, _advance, _advance_on_host, draw
from explorl.rollout.state import (
    BROKEN,
    IDLE,
    KEY,
    LENGTH,
    LIMIT,
    OFFSET,
    POSITION,
    RUNNING,
    STATUS,
    STEP,
    STOP_SET,
    STOPPED,
    SlotState,
)


def a_state(slots: int, vocab: int, seed: int = 0) -> SlotState:
    state = SlotState(slots, 4, vocab, torch.device("cpu"))
    state.ints[STATUS] = RUNNING
    state.ints[KEY] = torch.from_numpy(rng.request_keys(seed, range(slots)))
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


@pytest.mark.parametrize("given", ["grouped", "ordered"])
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
    grouping = Grouping.of(entries, lengths[entries[entries >= 0]])
    assert grouping.ordered == (given == "ordered")
    got = shared_attention(
        torch.from_numpy(query),
        (torch.from_numpy(own[0]).flatten(1, 2), torch.from_numpy(own[1]).flatten(1, 2)),
        (torch.from_numpy(prompt[0]), torch.from_numpy(prompt[1])),
        grouping,
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


def _attention_module(width: int, heads: int, kv_heads: int, size: int) -> Any:
    module = nn.Module()
    module.q_proj = nn.Linear(width, heads * size, bias=False)
    module.k_proj, module.v_proj = (nn.Linear(width, kv_heads * size, bias=False) for _ in range(2))
    module.head_dim = size  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(("rows", "width"), [(3, 8), (20, 8), (20, WIDE), (60, WIDE)])
def test_heads_of_one_token_are_projected_and_rotated(rows: int, width: int) -> None:
    generator = np.random.default_rng(rows + width)
    heads, kv_heads, size = 4, 2, 6
    attn, norm = _attention_module(width, heads, kv_heads, size), LlamaRMSNorm(width, eps=1e-3)
    x = generator.normal(size=(rows, width))
    angle = np.tile(generator.normal(size=(rows, size // 2)), 2)
    ops = OneDnnOps(None)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(generator.normal(size=width)))
        given = torch.from_numpy(x).float()[:, None]
        ops.begin(given)
        rotary = ops.rotary_factors(*(torch.from_numpy(part(angle)).float()[:, None] for part in (np.cos, np.sin)))
        got = ops.rotated_heads(given, None, norm, attn, rotary)
        weights = [p.weight.double().numpy() for p in (attn.q_proj, attn.k_proj, attn.v_proj)]
        scale = norm.weight.double().numpy()
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale
    query, key, value = ((normed @ weight.T).reshape(rows, -1, size) for weight in weights)
    half = size // 2
    for mine, theirs in zip(got, (_turn(query, angle, half), _turn(key, angle, half), value), strict=True):
        np.testing.assert_allclose(mine[:, :, 0].numpy(), theirs, atol=2e-5)


def _turn(x: np.ndarray, angle: np.ndarray, half: int) -> np.ndarray:
    swapped = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * np.cos(angle)[:, None] + swapped * np.sin(angle)[:, None]


@pytest.mark.parametrize("rows", [2, 20])
def test_a_hook_on_a_projection_is_called(rows: int) -> None:
    called: list[int] = []
    attn = _attention_module(WIDE, 2, 2, 4)
    attn.k_proj.register_forward_hook(lambda *_: called.append(1))
    x, ops = torch.randn(rows, 1, WIDE), OneDnnOps(None)
    with torch.no_grad():
        ops.begin(x)
        ops.rotated_heads(x, x, None, attn, ops.rotary_factors(torch.ones(rows, 1, 4), torch.zeros(rows, 1, 4)))
        ops.project(x, attn.k_proj)
    assert len(called) == 2


@pytest.mark.parametrize("salt", [0, rng.BERNOULLI])
def test_random_numbers_are_those_of_splitmix64(salt: int) -> None:
    keys = rng.request_keys(5, range(40))
    positions = np.array([0, 1, 7, 2**31, 2**40] * 8)
    mask = 2**64 - 1
    for key, position, mine, theirs in zip(
        keys.tolist(),
        positions.tolist(),
        rng.uniform(torch.from_numpy(keys), torch.from_numpy(positions), salt).tolist(),
        rng._on_device(torch.from_numpy(keys), torch.from_numpy(positions), salt).tolist(),
        strict=True,
    ):
        want = rng._mix((((key & mask) ^ salt) + (position + 1) * rng.GOLDEN) & mask) >> 11
        assert mine == theirs == want * 2.0**-53


def test_slots_advance_and_end_as_on_other_devices() -> None:
    states = [a_state(6, 50) for _ in range(2)]
    running = torch.tensor([True, True, True, True, True, False])
    result = SampledToken(
        token=torch.tensor([3, 9, 4, 0, 9, 3]),
        logp=torch.zeros(6),
        logq=torch.zeros(6),
        entropy=torch.zeros(6),
        branching=torch.ones(6, dtype=torch.int64),
        broken=torch.tensor([False, False, False, True, False, False]),
    )
    for state, advance in zip(states, (_advance, _advance_on_host), strict=True):
        state.set_stops([[3], [9, 4]])
        state.ints[STATUS, 5], state.ints[STOP_SET, 3:] = IDLE, 1
        state.ints[LIMIT] = torch.tensor([9, 1, 9, 9, 9, 9])
        advance(state, state.ints, result, running, running & ~result.broken)
    assert torch.equal(states[0].ints, states[1].ints)
    ends = [STOPPED, LENGTH, RUNNING, BROKEN, STOPPED, IDLE]
    assert states[1].ints[STATUS].tolist() == ends
    assert states[1].ints[STEP].tolist() == [1, 1, 1, 0, 1, 0]


def test_what_is_hidden_is_found_anew_where_rows_or_prompts_are_others() -> None:
    """A bias that is kept from one step to the next gives what one made for this step gives."""
    shape = LayerShape(2, 4, 4, torch.float32, torch.device("cpu"))
    state = SlotState(4, 80, 50, torch.device("cpu"))
    prompts = PromptCache([shape], 4, 9)
    cache = SpanCache([shape], 4, 80, state, prompts)
    for offsets, length in ([3, 9, 9], 1), ([3, 9, 9], 2), ([9, 3, 9], 3), ([9, 9, 9], 4), ([9, 2], 40), ([9, 2], 70):
        ints = state.ints[:, : len(offsets)]
        ints[OFFSET] = torch.tensor(offsets)
        ints[POSITION] = ints[OFFSET] + length - 1
        cache.regroup(np.arange(len(offsets)), np.array(offsets))
        cache.begin_step(ints, length, even=True)
        kept = cache._bias(None, 2, 2)
        assert kept is not None
        cache.begin_step(ints, length, even=False)
        fresh = cache._bias(None, 2, 2)
        assert fresh is not None
        assert torch.equal(kept.expand_as(fresh), fresh)
        assert (fresh == 0).sum() == 4 * (sum(offsets) + length * len(offsets))


def ranked_head(scores: np.ndarray, target: float, over: bool, rate: float) -> tuple[list[int], float]:
    """Tokens of the head in order of rank, and its probability, in float64."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    weights = np.exp((scores.astype(np.float64) - scores.max()) * rate)[order]
    weights = np.where(weights < TINY, 0.0, weights) if over else weights
    sums = np.cumsum(weights)
    limit = target * sums[-1]
    count = min(int((sums <= limit).sum()), int((weights > 0).sum()) - 1) if over else int((sums < limit).sum()) + 1
    count = min(count, len(order))
    return order[:count], float(sums[count - 1] / sums[-1]) if count else 0.0


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("rate", [None, 0.5, 3.0])
@pytest.mark.parametrize(
    "kind", ["flat", "peaked", "one token", "two values", "all equal", "with −inf", "huge", "tiny distances"]
)
def test_heads_of_long_rows(kind: str, rate: float | None, over: bool) -> None:
    """Cut in the middle of a bucket, between two, before the first token and behind the last."""
    generator, vocab = np.random.default_rng(1), LONG + 501
    base = generator.normal(size=vocab).astype(np.float32)
    row = {
        "flat": base,
        "peaked": base * 12,
        "one token": np.where(np.arange(vocab) == 77, np.float32(60.0), base),
        "two values": np.where(base > 0, np.float32(1.0), np.float32(-1.0)),
        "all equal": np.zeros_like(base),
        "with −inf": np.where(base > 1, base, -np.inf).astype(np.float32),
        "huge": base * np.float32(1e30),
        "tiny distances": np.float32(1.0) + base * np.float32(1e-7),
    }[kind]
    targets = [0.0, 1e-7, 0.05, 0.1, 0.5, 0.7301, 0.9, 0.999, 0.9999999, *([1.0, 1.000001] if over else [])]
    scores = torch.from_numpy(np.stack([row] * len(targets)))
    rates = None if rate is None else torch.full((len(targets),), rate)
    target = torch.tensor(targets, dtype=torch.float64)
    head = ranking._bucketed_head(scores, target, over=over, rate=rates)
    by_sort = ranking._sorted_head(scores, target, over=over, rate=rates)
    mask = ranking.head_mask(scores, head)
    ranks = sorted(range(vocab), key=lambda j: (-row[j], j))
    for i, share in enumerate(targets):
        size, (tokens, mass) = int(head.size[i]), ranked_head(row, share, over, rate or 1.0)
        assert np.flatnonzero(mask[i].numpy()).tolist() == sorted(ranks[:size])
        # a token more or less where float32 weights cannot tell
        assert size == pytest.approx(len(tokens), abs=3 if kind == "tiny distances" else 1)
        assert size == pytest.approx(int(by_sort.size[i]), abs=1)
        if size == len(tokens):
            assert float(head.mass[i]) == pytest.approx(mass, abs=1e-6)
        if size == int(by_sort.size[i]):
            assert float(head.mass[i]) == pytest.approx(float(by_sort.mass[i]), abs=1e-9)
    if kind in ("two values", "all equal"):
        assert torch.equal(head.threshold, by_sort.threshold)


@pytest.mark.parametrize("k", [[1, 3, 0, 40], [LONG + 5, 2, 2000, 7]], ids=["few", "many"])
def test_the_kth_largest_of_long_rows(k: list[int]) -> None:
    scores = np.random.default_rng(0).integers(-40, 40, size=(4, LONG + 5)).astype(np.float32)
    found = ranking.kth_largest(torch.from_numpy(scores), torch.tensor(k))
    for row, count, got in zip(scores, k, found.tolist(), strict=True):
        assert got == (-np.inf if count in (0, LONG + 5, 2000) else np.sort(row)[-count])
