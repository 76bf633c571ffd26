"""Warpers against NumPy re-derivations and transformers, draws against exact probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from explorl.metrics.tokens import branching_factor
from explorl.rollout.backends.processors import BottomPLogitsProcessor
from explorl.rollout.sampling import (
    Active,
    SamplingParams,
    bottom_p_cut,
    ranking,
    rng,
    warp_bottom_p,
    warp_min_p,
    warp_repetition,
    warp_temperature,
    warp_top_k,
    warp_top_p,
)
from explorl.rollout.sampling.ranking import branching_count, head_mask, mass_head, search_head
from explorl.rollout.sampling.sample import Coin, SampledToken, draw, pick
from explorl.rollout.scheduler import STATE_REALS
from explorl.rollout.state import KEY, STATUS, STEP, TOP_K, SlotState

INF = float("inf")


def logits(rows: int, vocab: int, scale: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def kept(warped: torch.Tensor) -> np.ndarray:
    return (warped > -INF).numpy()


def bottom_p_by_hand(row: np.ndarray, p: float) -> set[int]:
    """FORMULAS §1, token by token."""
    probs = softmax(row.astype(np.float64))
    order = [j for j in np.argsort(-row, kind="stable") if row[j] > -INF]
    cumulative, stays = 0.0, set()
    for place, j in enumerate(order):
        cumulative += probs[j]
        if cumulative > (1 - p) * (1 + 2e-7) or place == len(order) - 1:
            stays.add(int(j))
    return stays


# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("bottom_p", 0.0),
        ("bottom_p", 2.0),
        ("bottom_p_frequency", 1.2),
        ("max_tokens", 0),
        ("temperature", [1.0, math.inf]),
        ("top_p", []),
        ("top_p", [[0.5]]),
        ("top_p", "0.9"),
        ("top_k", True),
    ],
)
def test_bad_values_are_errors_that_name_them(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*use .*such as"):
        SamplingParams(**{name: value})


def test_bad_choices_are_errors() -> None:
    with pytest.raises(ValueError, match="bottom_p_per"):
        SamplingParams(bottom_p_per="word")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty string"):
        SamplingParams(stop=["a", ""])
    with pytest.raises(ValueError, match="3 values; use one value, one for each of the 2 prompts"):
        SamplingParams(temperature=[1.0, 2.0, 3.0]).rows(2, 4)


def test_values_per_prompt_and_per_request() -> None:
    params = SamplingParams(temperature=[0.5, 1.5], top_k=[1, 2, 3, 4], stop="x")
    rows = params.rows(2, 2)
    assert rows["temperature"].tolist() == [0.5, 0.5, 1.5, 1.5]
    assert rows["top_k"].tolist() == [1, 2, 3, 4]
    assert rows["top_p"].tolist() == [1.0] * 4
    assert params.stop == ("x",)
    assert hash(params)


def test_only_what_is_asked_for_is_active() -> None:
    def active(**values: Any) -> Active:
        params = SamplingParams(**values)
        return Active.of(params, params.rows(2, 1))

    assert active() == Active()
    assert not active(temperature=[1.0, 0.7]).warps
    assert active(temperature=[0.0, 1.0]) == Active(greedy=True)
    assert active(bottom_p_frequency=0.5) == Active()
    assert active(bottom_p=0.9, bottom_p_frequency=0.5, bottom_p_per="sequence") == Active(
        bottom_p=True, bottom_p_chance=True, per_sequence=True
    )


# Warpers


@pytest.mark.parametrize("vocab", [11, 300])
def test_transformers_semantics(vocab: int) -> None:
    x = logits(16, vocab)
    ids = torch.randint(vocab, (16, 7), generator=torch.Generator().manual_seed(5))
    seen = torch.zeros(16, vocab, dtype=torch.bool).scatter_(1, ids, True)
    for p in (0.05, 0.3, 0.9, 0.999):
        assert torch.equal(warp_top_p(x, p), TopPLogitsWarper(p)(ids, x))
        assert torch.equal(warp_min_p(x, p), MinPLogitsWarper(p)(ids, x))
    for k in (1, 3, 10):
        assert torch.equal(warp_top_k(x, k), TopKLogitsWarper(k)(ids, x))
    assert torch.allclose(warp_repetition(x, seen, 1.3), RepetitionPenaltyLogitsProcessor(1.3)(ids, x))
    assert torch.equal(warp_temperature(x, 0.7), x / 0.7)
    assert torch.equal(warp_temperature(x, 0.0), x)


@pytest.mark.parametrize("vocab", [7, 200])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99, 1.0])
def test_bottom_p_follows_the_formula(vocab: int, p: float) -> None:
    x = logits(24, vocab)
    x[::3, vocab // 2 :] = -INF
    result = warp_bottom_p(x, p)
    for row, warped in zip(x.numpy(), result, strict=True):
        stays = bottom_p_by_hand(row, p)
        assert set(np.flatnonzero(warped.numpy() > -INF).tolist()) == stays
        assert torch.equal(warped[list(stays)], torch.from_numpy(row)[list(stays)])


def test_bottom_p_by_hand() -> None:
    x = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    assert kept(warp_bottom_p(x, 0.6)).tolist() == [[True, True, True, True]]  # 0.5 > 1 − 0.6
    assert kept(warp_bottom_p(x, 0.5)).tolist() == [[False, True, True, True]]  # 0.5 ≤ 1 − 0.5
    assert kept(warp_bottom_p(x, 0.3)).tolist() == [[False, False, True, True]]  # 0.7 ≤ 1 − 0.3: ties in order
    assert kept(warp_bottom_p(x, 0.01)).tolist() == [[False, False, False, True]]
    assert kept(warp_bottom_p(x, 1.0)).all()
    even = torch.zeros(1, 10)
    assert kept(warp_bottom_p(even, 0.9)).sum() == 9
    assert kept(warp_top_p(even, 0.9)).sum() == 9
    apply = torch.tensor([True, False])
    assert kept(warp_bottom_p(x.repeat(2, 1), 0.5, apply)).tolist() == [[False, True, True, True], [True] * 4]


def test_top_p_then_bottom_p_leaves_a_token() -> None:
    x = torch.zeros(3, 50)
    x[0, 7] = 30.0  # one token holds all the mass
    x[1, 7], x[1, 8] = 30.0, 28.0
    warped = warp_bottom_p(warp_top_p(x, 0.9), 0.9)
    assert kept(warped).sum(-1).tolist() == [1, 2, 41]
    assert np.flatnonzero(kept(warped)[0]).tolist() == [7]
    tiny = warp_bottom_p(x, 1e-7)
    assert (kept(tiny).sum(-1) == 1).all()


def test_a_value_a_row_does_what_the_scalar_does() -> None:
    x = logits(4, 60)
    values = torch.tensor([0.2, 0.5, 0.9, 1.0], dtype=torch.float64)
    ks = torch.tensor([1, 5, 0, 60])
    for warp in (warp_top_p, warp_bottom_p, warp_min_p, warp_temperature):
        rows = torch.cat([warp(x[i : i + 1], float(values[i])) for i in range(4)])
        torch.testing.assert_close(warp(x, values), rows)
    assert torch.equal(warp_top_k(x, ks), torch.cat([warp_top_k(x[i : i + 1], int(ks[i])) for i in range(4)]))


@pytest.mark.parametrize("vocab", [5, 333, 5000])
def test_search_finds_what_the_sort_finds(vocab: int) -> None:
    x = logits(12, vocab, scale=3.0)
    x[1::4] = x[1::4].bfloat16().float()  # many ties
    x[2::4, vocab // 3 :] = -INF
    x[3] = 0.25
    for mass in (0.01, 0.3, 0.95, 0.999):
        for over in (False, True):
            target = torch.full((12,), mass, dtype=torch.float64)
            by_sort, by_search = mass_head(x, target, over=over, slack=0), search_head(x, target, over=over)
            assert torch.equal(by_sort.size, by_search.size), (mass, over)
            assert torch.equal(head_mask(x, by_sort), head_mask(x, by_search)), (mass, over)
            held = torch.where(head_mask(x, by_sort), x.double().softmax(-1), 0.0).sum(-1)
            torch.testing.assert_close(by_sort.mass, held, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(by_search.mass, held, atol=1e-6, rtol=1e-6)
    for k in (1, 2, vocab - 1):
        found = ranking._bisect(x, torch.ones_like(x), torch.full((12,), k), strict=False)
        assert torch.equal(found, ranking.kth_largest(x, torch.full((12,), k)))


@pytest.mark.parametrize("vocab", [20, 97, 6000, 20000])
def test_branching_count(vocab: int) -> None:
    x = torch.cat([logits(8, vocab, scale) for scale in (0.1, 1.0, 4.0)])
    x[0], x[1, : vocab // 2] = 0.0, -INF
    x[2] = x[2].bfloat16().float()
    probs = x.softmax(-1).double()
    ranked = probs.sort(-1, descending=True).values.cumsum(-1)
    want = (ranked < 0.95 * (1 - 1e-12) * ranked[:, -1:]).sum(-1) + 1
    assert torch.equal(branching_count(x, x.softmax(-1)), want)
    assert torch.equal(want[3:], branching_factor(x)[3:])


# Draws


def test_random_numbers_depend_on_seed_request_and_position_alone() -> None:
    keys = torch.from_numpy(rng.request_keys(7, range(100)))
    positions = torch.arange(100)
    u = rng.uniform(keys, positions)
    again = torch.stack([rng.uniform(keys[i : i + 1], positions[i : i + 1])[0] for i in (3, 41, 99)])
    assert torch.equal(u[[3, 41, 99]], again)
    assert not torch.equal(u, rng.uniform(torch.from_numpy(rng.request_keys(8, range(100))), positions))
    assert not torch.equal(u, rng.uniform(keys, positions, rng.BERNOULLI))
    assert torch.equal(keys[50:60], torch.from_numpy(rng.request_keys(7, range(50, 60))))


def test_random_numbers_are_uniform_and_independent() -> None:
    keys = torch.from_numpy(rng.request_keys(0, range(400)))
    u = rng.uniform(keys.repeat_interleave(500), torch.arange(500).repeat(400)).view(400, 500)
    assert chi_square_p(torch.histc(u.float(), 100, 0, 1).numpy(), np.full(100, 1 / 100)) > 0.001
    centred = u - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(2, 1)):
        assert abs(float((centred * other).mean()) * 12) < 4 / math.sqrt(u.numel())


def chi_square_p(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of a chi-square test (Wilson–Hilferty), rare outcomes pooled."""
    order = np.argsort(probs)
    counts, probs = counts[order].astype(np.float64), probs[order]
    total = counts.sum()
    assert counts[probs == 0].sum() == 0, "drew a token with no probability"
    counts, probs = counts[probs > 0], probs[probs > 0]
    while len(probs) > 1 and probs[0] * total < 10:
        counts = np.concatenate([[counts[0] + counts[1]], counts[2:]])
        probs = np.concatenate([[probs[0] + probs[1]], probs[2:]])
    if len(probs) == 1:
        return 1.0
    statistic = float(((counts - total * probs) ** 2 / (total * probs)).sum())
    k = len(probs) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


def slots_with(
    params: SamplingParams, count: int, vocab: int, seen: list[int] | None = None, step: int = 0
) -> SlotState:
    """The state of requests with these parameters."""
    values = params.rows(count, 1)
    state = SlotState(count, step + 1, vocab, torch.device("cpu"))
    state.ints[KEY] = torch.from_numpy(rng.request_keys(params.seed or 0, range(count)))
    state.ints[TOP_K] = torch.from_numpy(values["top_k"])
    state.ints[STATUS], state.ints[STEP] = 0, step
    state.reals.copy_(torch.from_numpy(np.stack([values[name] for name in STATE_REALS])))
    if seen is not None:
        state.seen = torch.zeros(count, vocab, dtype=torch.bool)
        state.seen[:, seen] = True
    return state


def drawn(x: torch.Tensor, params: SamplingParams, seen: list[int] | None = None, step: int = 0) -> SampledToken:
    """One draw of each row."""
    state = slots_with(params, *x.shape, seen, step)
    return draw(x, state, Active.of(params, params.rows(len(x), 1)))


def sampled(row: torch.Tensor, params: SamplingParams, draws: int, seen: list[int] | None = None) -> SampledToken:
    """``draws`` independent draws of requests that all have these logits."""
    return drawn(row.expand(draws, -1), params, seen)


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda x: x),
    "temperature": ({"temperature": 1.7}, lambda x: x / 1.7),
    "top_k": ({"top_k": 5}, lambda x: warp_top_k(x, 5)),
    "top_p": ({"top_p": 0.8}, lambda x: warp_top_p(x, 0.8)),
    "min_p": ({"min_p": 0.2}, lambda x: warp_min_p(x, 0.2)),
    "bottom_p": ({"bottom_p": 0.7}, lambda x: warp_bottom_p(x, 0.7)),
    "repetition": (
        {"repetition_penalty": 1.5},
        lambda x: warp_repetition(x, torch.isin(torch.arange(x.shape[-1]), torch.tensor([0, 3]))[None], 1.5),
    ),
    "all": (
        {"temperature": 2.0, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "bottom_p": 0.9},
        lambda x: warp_bottom_p(warp_min_p(warp_top_p(warp_top_k(x / 2.0, 12), 0.9), 0.05), 0.9),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_200_000_draws_match_the_exact_probabilities(name: str) -> None:
    values, warp = CASES[name]
    row = logits(1, 20, scale=1.5, seed=4)[0]
    exact = warp(row[None])[0].double().softmax(-1)
    result = sampled(row, SamplingParams(seed=11, **values), 200_000, [0, 3] if name == "repetition" else None)
    counts = torch.bincount(result.token, minlength=20).numpy()
    assert chi_square_p(counts, exact.numpy()) > 0.001
    torch.testing.assert_close(result.logq, exact.log()[result.token].float())
    policy = (row / values.get("temperature", 1.0)).double().log_softmax(-1)
    torch.testing.assert_close(result.logp, policy[result.token].float())
    assert float(result.entropy[0]) == pytest.approx(float(-(row.softmax(-1) * row.log_softmax(-1)).sum()), abs=1e-5)


def test_a_large_vocabulary_is_sampled_in_blocks() -> None:
    weights = torch.zeros(1, 5003)
    weights[0, [0, 700, 701, 2600, 5002]] = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05])
    u = torch.from_numpy(np.random.default_rng(0).random(200_000))
    tokens = torch.cat([pick(weights.expand(len(part), -1), part) for part in u.split(2000)])
    assert chi_square_p(np.bincount(tokens.numpy(), minlength=5003), weights[0].double().numpy()) > 0.001
    edges = pick(weights.expand(3, -1), torch.tensor([0.0, 0.4, 1 - 2**-53], dtype=torch.float64))
    assert edges.tolist()[::2] == [0, 5002]


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_bottom_p_is_applied_with_its_frequency(per: Any) -> None:
    row = torch.tensor([0.6, 0.3, 0.1]).log()
    params = SamplingParams(bottom_p=0.4, bottom_p_frequency=0.25, bottom_p_per=per, seed=1)
    result = sampled(row, params, 100_000)
    exact = np.array([0.75 * 0.6, 0.75 * 0.3 + 0.25 * 0.75, 0.75 * 0.1 + 0.25 * 0.25])
    assert chi_square_p(torch.bincount(result.token, minlength=3).numpy(), exact) > 0.001
    if per == "token":  # whatever the coin showed, the token came from the mixture
        torch.testing.assert_close(result.logq, torch.from_numpy(exact).log().float()[result.token])
    else:
        cut = torch.isclose(result.logq, torch.tensor([0.0, 0.75, 0.25]).log()[result.token])
        assert float(cut.float().mean()) == pytest.approx(0.25, abs=0.01)


# The mixture: with a coin a token, the distribution sampled from is f · q_bottom + (1 − f) · q_rest


def rest_by_hand(
    row: np.ndarray, tau: float, k: int, p: float, least: float, penalty: float, seen: list[int]
) -> np.ndarray:
    """Logits after all warpers but bottom-p, in float64."""
    row = row.astype(np.float64)
    for j in seen:
        row[j] = row[j] * penalty if row[j] < 0 else row[j] / penalty
    row = row / tau
    if k:
        row = np.where(row >= np.sort(row)[-min(k, len(row))], row, -INF)
    order = np.argsort(-row, kind="stable")
    before = np.cumsum(softmax(row)[order]) - softmax(row)[order]
    row[order[before >= p]] = -INF
    return np.where(softmax(row) >= least * softmax(row).max(), row, -INF)


def mixture_by_hand(rest: np.ndarray, p: float, f: float) -> np.ndarray:
    bottom = np.full_like(rest, -INF)
    stays = list(bottom_p_by_hand(rest, p))
    bottom[stays] = rest[stays]
    return f * softmax(bottom) + (1 - f) * softmax(rest)


@pytest.mark.parametrize("coin", [True, False])
def test_the_mixture_by_hand(coin: bool) -> None:
    """0.5 + 0.2 ≤ 1 − 0.3, so bottom-p leaves (0, 0, 2/3, 1/3); q = ¼ of that + ¾ of the policy."""
    x = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().repeat(400, 1)
    params = SamplingParams(bottom_p=0.3, bottom_p_frequency=0.25, seed=2)
    result = drawn(x, params, step=1)
    applied = rng.uniform(slots_with(params, 400, 4).ints[KEY], torch.ones(400, dtype=torch.long), rng.BERNOULLI) < 0.25
    logq, token = result.logq[applied == coin], result.token[applied == coin]
    assert set(token.tolist()) == ({2, 3} if coin else {0, 1, 2, 3})
    q = torch.tensor([3 / 8, 3 / 20, 1 / 6 + 3 / 20, 1 / 12 + 3 / 40])
    assert float(q.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(logq, q.log()[token])


@pytest.mark.parametrize("vocab", [13, 3000])
@pytest.mark.parametrize("others", ["alone", "temperature", "all"])
def test_the_mixture_on_random_rows(vocab: int, others: str) -> None:
    """Against NumPy; rows with another f and p each, greedy ones and ones without bottom-p among them."""
    rows = 96
    generator = np.random.default_rng(vocab)
    values: dict[str, Any] = {
        "bottom_p": generator.choice([1.0, 0.99, 0.9, 0.6, 0.3, 0.05], rows),
        "bottom_p_frequency": generator.choice([0.0, 0.1, 0.5, 0.9, 1.0], rows),
    }
    values["bottom_p"][:2], values["bottom_p_frequency"][:2] = (0.5, 1.0), 0.5
    if others != "alone":
        values["temperature"] = generator.choice([0.0, 0.5, 1.0, 2.5], rows)
    if others == "all":
        values |= {
            "top_k": generator.choice([0, 2, 9], rows),
            "top_p": generator.choice([0.5, 0.95, 1.0], rows),
            "min_p": generator.choice([0.0, 0.1], rows),
            "repetition_penalty": generator.choice([1.0, 1.4], rows),
        }
    x, seen = logits(rows, vocab, seed=vocab), [0, 3, 7]
    x[5::7, 4:] = -INF
    params = SamplingParams(seed=5, **values)
    given_ = params.rows(rows, 1)
    outcomes = set()
    for step in range(3):
        result = drawn(x, params, seen, step)
        for i, row in enumerate(x.numpy()):
            tau, f, p = (float(given_[n][i]) for n in ("temperature", "bottom_p_frequency", "bottom_p"))
            if tau == 0:
                assert result.logq[i] == 0
                continue
            names = ("top_k", "top_p", "min_p", "repetition_penalty")
            rest = rest_by_hand(row, tau, *(given_[name][i] for name in names), seen)
            token = int(result.token[i])
            want = math.log(mixture_by_hand(rest, p, f)[token])
            assert float(result.logq[i]) == pytest.approx(want, abs=3e-5), (i, f, p)
            outcomes.add((f, token in bottom_p_by_hand(rest, p)))
    assert {(0.0, False), (0.5, False), (0.5, True), (1.0, True)} <= outcomes


def test_the_mixture_of_a_token_whose_share_was_rounded_away() -> None:
    """Of the only token that bottom-p leaves, q_bottom is 1, even where the others hold 1.0 in float64."""
    coin = Coin(
        frequency=torch.tensor([0.25, 0.25], dtype=torch.float64),
        applied=torch.tensor([True, False]),
        cut=torch.tensor([[True, False]] * 2),
        mass=torch.ones(2, dtype=torch.float64),
    )
    logq = coin.mixture(torch.tensor([0.0, -50.0]), torch.tensor([1, 1]))
    torch.testing.assert_close(logq, torch.tensor([0.25, 0.25]).log())


def test_the_mixture_of_shared_rows() -> None:
    x, row_of = logits(3, 40), torch.tensor([0, 2, 2, 1, 0, 2] * 20)
    params = SamplingParams(bottom_p=[0.9, 0.2] * 60, bottom_p_frequency=[0.3, 0.8, 0.5] * 40, seed=4)
    active = Active.of(params, params.rows(120, 1))
    shared = draw(x, slots_with(params, 120, 40), active, row_of)
    for one, other in zip(shared, drawn(x[row_of], params), strict=True):
        assert one is other is None or torch.equal(one, other)
    values = params.rows(120, 1)
    for i, row in enumerate(row_of.tolist()):
        q = mixture_by_hand(x[row].double().numpy(), values["bottom_p"][i], values["bottom_p_frequency"][i])
        assert float(shared.logq[i]) == pytest.approx(math.log(q[shared.token[i]]), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.0, 60.0),
    f=st.floats(0.0, 0.999),
    p=st.floats(1e-9, 1.0),
    top_p=st.sampled_from([1.0, 0.8]),
    temperature=st.sampled_from([1.0, 0.3, 4.0]),
)
def test_the_policy_is_at_most_so_many_times_likelier_than_the_mixture(
    seed: int, scale: float, f: float, p: float, top_p: float, temperature: float
) -> None:
    """π / q ≤ 1 / (1 − f), exactly that where bottom-p cuts the token, and at most 1 where it does not."""
    x = logits(64, 17, scale, seed)
    params = SamplingParams(bottom_p=p, bottom_p_frequency=f, top_p=top_p, temperature=temperature, seed=seed)
    result = drawn(x, params)
    ratio, most = result.logp - result.logq, -math.log1p(-f)
    assert bool((ratio <= most + 1e-5).all())
    assert bool((result.logq <= 1e-6).all())
    rate = torch.full((64,), 1 / temperature, dtype=torch.float64)  # tokens are ranked by their logits as they are
    cut, _ = bottom_p_cut(warp_top_p(x, top_p, rate), p, rate)
    removed = cut.gather(-1, result.token[:, None])[:, 0]
    assert bool((ratio[~removed] <= 1e-5).all())
    if top_p == 1:
        assert torch.allclose(ratio[removed], torch.tensor(most, dtype=torch.float32), atol=1e-5)


@pytest.mark.parametrize(
    "others", [{}, {"temperature": 1.8, "top_k": 9, "top_p": 0.95, "min_p": 0.02}], ids=["alone", "truncated"]
)
def test_200_000_draws_match_the_recorded_mixture(others: dict[str, Any]) -> None:
    row = logits(1, 12, scale=1.2, seed=9)[0]
    result = sampled(row, SamplingParams(bottom_p=0.6, bottom_p_frequency=0.4, seed=13, **others), 200_000)
    recorded = np.zeros(12)
    for token in result.token.unique().tolist():
        logq = result.logq[result.token == token].double()
        assert float(logq.max() - logq.min()) < 1e-6  # one value, whatever the coin showed
        recorded[token] = math.exp(float(logq.mean()))
    assert recorded.sum() == pytest.approx(1.0, abs=1e-6)
    assert chi_square_p(torch.bincount(result.token, minlength=12).numpy(), recorded) > 0.001


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_the_coin_changes_no_token_and_nothing_where_there_is_no_mixture(per: Any) -> None:
    """The same tokens as from the branches, and the same bits where q is one of them."""
    x = logits(300, 50)
    x[::4, 11] = 12.0  # bottom-p at 0.9 cuts nothing there
    frequency, p = np.tile([0.0, 0.5, 1.0], 100), np.tile([0.9, 0.9, 0.9, 1.0, 0.4], 60)
    params = SamplingParams(bottom_p=p.tolist(), bottom_p_frequency=frequency.tolist(), bottom_p_per=per, seed=8)
    state = slots_with(params, 300, 50, step=3)
    at = torch.zeros_like(state.ints[STEP]) if per == "sequence" else state.ints[STEP]
    apply = rng.uniform(state.ints[KEY], at, rng.BERNOULLI) < torch.from_numpy(frequency)
    cut = warp_bottom_p(x.log_softmax(-1), torch.from_numpy(p))
    branch = torch.where(apply[:, None], cut, x.log_softmax(-1)).log_softmax(-1)
    result = drawn(x, params, step=3)
    assert torch.equal(result.token, pick(branch.exp(), rng.uniform(state.ints[KEY], state.ints[STEP])))
    whole = torch.from_numpy((frequency == 0) | (frequency == 1)) | (cut > -INF).all(-1)
    same = result.logq == branch.gather(-1, result.token[:, None])[:, 0]
    assert bool(same[whole].all())
    assert bool(same.all()) == (per == "sequence")


# transformers


def test_processor_for_plain_generate() -> None:
    x = logits(5, 30)
    ids = torch.zeros(5, 3, dtype=torch.long)
    processor = BottomPLogitsProcessor(0.9, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01)
    want = warp_bottom_p(warp_min_p(warp_top_p(warp_top_k(x / 1.5, 20), 0.9), 0.01), 0.9)
    assert torch.equal(processor(ids, x), want)
    with pytest.raises(ValueError, match="do_sample=False"):
        BottomPLogitsProcessor(0.9, temperature=0.0)


def test_processor_frequency() -> None:
    x = torch.tensor([[0.6, 0.3, 0.1]]).log().repeat(4000, 1)

    def cut(processor: BottomPLogitsProcessor, length: int) -> torch.Tensor:
        return processor(torch.zeros(4000, length, dtype=torch.long), x)[:, 0] == -INF

    token = BottomPLogitsProcessor(0.4, frequency=0.3, generator=torch.Generator().manual_seed(0))
    first, second = cut(token, 5), cut(token, 6)
    assert float(first.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert not torch.equal(first, second)
    sequence = BottomPLogitsProcessor(0.4, frequency=0.3, per="sequence", generator=torch.Generator().manual_seed(0))
    first, second, other = cut(sequence, 5), cut(sequence, 6), cut(sequence, 5)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
