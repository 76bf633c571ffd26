"""One rule for ties: by falling score, then by token id, on every device and for every type of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.rollout import SamplingParams
from explorl.rollout.sampling import Active, ranking, rng, warp_bottom_p, warp_min_p, warp_top_k, warp_top_p
from explorl.rollout.sampling.ranking import SLACK, count_head, head_mask, mass_head, search_head
from explorl.rollout.sampling.sample import sample_step
from explorl.rollout.scheduler import STATE_REALS
from explorl.rollout.state import KEY, LIMIT, LOGQ, RUNNING, STATUS, TOKENS, TOP_K, SlotState

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF = float("inf")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEVELS = np.array([-6.0, -1.5, -0.5, 0.0, 0.25, 1.0, 1.75, 3.0])
"""Values that every type holds exactly, and far enough apart that no rounding decides."""


def tied(rows: int, vocab: int, seed: int) -> np.ndarray:
    """Few different values, so that most tokens are tied with others; some rows with tokens of no probability."""
    generator = np.random.default_rng(seed)
    x = LEVELS[generator.integers(0, len(LEVELS), (rows, vocab))]
    x[1::3, generator.random(vocab) < 0.2] = -INF
    x[2::5] = 0.25
    return x


def kept_by_hand(row: np.ndarray, k: int, p: float, least: float, bottom: float, tau: float = 1.0) -> list[int]:
    """The tokens that stay, in order of rank: FORMULAS §1 on a ranking by (−score, id)."""
    order = sorted((i for i in range(len(row)) if row[i] > -INF), key=lambda i: (-row[i], i))
    if k:
        order = order[:k]

    def shares() -> np.ndarray:
        weights = np.exp((row[order] - row[order[0]]) / tau)
        return weights / weights.sum()

    if p < 1:
        before = np.cumsum(shares()) - shares()
        order = [i for i, mass in zip(order, before, strict=True) if mass < p * (1 - SLACK)]
    if least:
        order = [i for i in order if np.exp((row[i] - row[order[0]]) / tau) >= least * (1 - SLACK)]
    upto = np.cumsum(shares())
    return [i for i, mass in zip(order, upto, strict=True) if mass > (1 - bottom) * (1 + SLACK)] or order[-1:]


COMBINATIONS: list[tuple[int, float, float, float]] = [
    (5, 1.0, 0.0, 1.0),
    (0, 0.5, 0.0, 1.0),
    (0, 1.0, 0.3, 1.0),
    (0, 1.0, 0.0, 0.6),
    (17, 0.8, 0.0, 1.0),
    (0, 0.9, 0.0, 0.9),
    (11, 0.7, 0.01, 0.5),
    (0, 1.0, 0.0, 1e-9),
]
"""top-k, top-p, min-p, bottom-p."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", COMBINATIONS)
def test_warpers_keep_one_set(how: tuple[int, float, float, float], dtype: torch.dtype) -> None:
    k, p, least, bottom = how
    x = tied(12, 61, 1)
    warped = torch.from_numpy(x).to(dtype)
    if k:
        warped = warp_top_k(warped, k)
    if p < 1:
        warped = warp_top_p(warped, p)
    if least:
        warped = warp_min_p(warped, least)
    warped = warp_bottom_p(warped, bottom)
    assert warped.dtype == dtype
    for row, result in zip(x, warped, strict=True):
        assert torch.nonzero(result > -INF)[:, 0].tolist() == sorted(kept_by_hand(row, k, p, least, bottom))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 90),
    mass=st.floats(0.0, 1.0),
    over=st.booleans(),
    tau=st.sampled_from([1.0, 0.25, 3.0]),
    dtype=st.sampled_from(TYPES),
)
def test_the_bisection_finds_the_head_that_the_sort_finds(
    seed: int, vocab: int, mass: float, over: bool, tau: float, dtype: torch.dtype
) -> None:
    x = tied(6, vocab, seed)
    x[:, 0] = np.maximum(x[:, 0], -6.0)
    scores, rate = torch.from_numpy(x).to(dtype), torch.full((6,), 1 / tau, dtype=torch.float64)
    target = torch.full((6,), mass * (1 + SLACK if over else 1 - SLACK), dtype=torch.float64)
    by_sort, by_search = (
        mass_head(scores, mass, over=over, rate=rate),
        search_head(scores, target, over=over, rate=rate),
    )
    assert torch.equal(head_mask(scores, by_sort), head_mask(scores, by_search))
    torch.testing.assert_close(by_sort.mass, by_search.mass)


def test_float64_logits_are_not_rounded() -> None:
    """Bottom-p kept a token too many: its threshold was rounded to float32, the logits were not."""
    x = torch.randn(50, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for p in (0.9, 0.5, 0.1):
        kept = warp_bottom_p(x, p) > -INF
        for row, stays in zip(x.numpy(), kept, strict=True):
            assert torch.nonzero(stays)[:, 0].tolist() == sorted(kept_by_hand(row, 0, 1.0, 0.0, p))
    close = 1.0 + torch.tensor([[0.0, 2e-12, 1e-12, 3e-12]], dtype=torch.float64)  # all 1 in float32
    assert torch.nonzero(warp_top_k(close, 2)[0] > -INF)[:, 0].tolist() == [1, 3]
    assert torch.nonzero(warp_top_p(close, 0.6)[0] > -INF)[:, 0].tolist() == [1, 2, 3]
    assert torch.nonzero(warp_bottom_p(close, 0.7)[0] > -INF)[:, 0].tolist() == [0, 1, 2]
    found = ranking._bisect(close, torch.ones_like(close), torch.tensor([2]), strict=False)
    assert float(found) == float(close[0, 1])


def test_a_threshold_in_float16_and_bfloat16_is_not_rounded() -> None:
    """max + log(0.3012) is −1.2, which neither type has: rounded, it would let the next lower value pass."""
    for dtype, step in ((torch.bfloat16, 1 / 128), (torch.float16, 1 / 1024)):
        x = torch.arange(-2.0, step / 2, step).to(dtype)[None]
        assert (warp_min_p(x, 0.3012) > -INF).tolist() == (x.double() >= float(np.log(0.3012))).tolist()


@pytest.mark.parametrize("vocab", [10, 3000])
def test_no_rows_and_rows_that_ask_for_gradients(vocab: int) -> None:
    for warp, value in ((warp_top_k, 3), (warp_top_p, 0.5), (warp_bottom_p, 0.5), (warp_min_p, 0.1)):
        assert warp(torch.zeros(0, vocab), value).shape == (0, vocab)
        scores = torch.randn(2, vocab)
        assert torch.equal(warp(scores.clone().requires_grad_(), value).detach(), warp(scores, value))
    count = ranking.branching_count(torch.zeros(0, vocab), torch.zeros(0, vocab))
    assert (count.shape, count.dtype) == ((0,), torch.int64)


def test_a_mass_is_not_rounded() -> None:
    """Six of ten equal tokens hold 0.6, which float32 takes for a little more."""
    for vocab in (10, 2000):
        scores = torch.zeros(1, vocab)
        assert mass_head(scores, 0.6, slack=ranking.COUNT_SLACK).size.tolist() == [6 * vocab // 10]


def test_all_of_the_mass_but_the_last_token() -> None:
    """The last two weigh so little that the slack would hold more of them than there are whole numbers."""
    scores = torch.full((1, 2000), -1000.0)
    scores[0, :3] = torch.tensor([10.0, -75.0, -75.0])
    over = mass_head(scores, 1.0, over=True)
    found = search_head(scores, torch.full((1,), 1.0 + SLACK, dtype=torch.float64), over=True)
    assert over.size.tolist() == found.size.tolist() == [2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("vocab", [10, 3000])
def test_a_row_that_is_not_finite_warns_of_nothing(vocab: int) -> None:
    scores = torch.randn(4, vocab)
    scores[1, 0], scores[2, 0], scores[3] = torch.inf, torch.nan, -torch.inf
    for warp, value in ((warp_top_k, 3), (warp_top_p, 0.5), (warp_bottom_p, 0.5), (warp_min_p, 0.1)):
        assert torch.equal(warp(scores, value)[0], warp(scores[:1], value)[0])


def test_heads_of_a_size() -> None:
    x = torch.from_numpy(tied(8, 30, 2))
    k = torch.tensor([0, 1, 2, 15, 29, 30, 31, 7])
    mask = head_mask(x, count_head(x, k))
    assert mask.sum(-1).tolist() == [30, 1, 2, 15, 29, 30, 30, 7]
    for row, stays, size in zip(x.numpy(), mask, k.tolist(), strict=True):
        ranked = sorted(range(30), key=lambda i: (-row[i], i))
        assert torch.nonzero(stays)[:, 0].tolist() == sorted(ranked[: size if 0 < size < 30 else 30])


# Draws: the tokens that two ways of sampling can draw are the same ones


def stepped(step: Any, logits: torch.Tensor, params: SamplingParams) -> SlotState:
    rows, vocab = logits.shape
    values = params.rows(rows, 1)
    state = SlotState(rows, 1, vocab, logits.device)
    state.ints[KEY] = torch.from_numpy(rng.request_keys(params.seed or 0, range(rows)))
    state.ints[TOP_K] = torch.from_numpy(values["top_k"])
    state.ints[LIMIT], state.ints[STATUS] = 1, RUNNING
    state.reals.copy_(torch.from_numpy(np.stack([values[name] for name in STATE_REALS])))
    step(logits, state, Active.of(params, values))
    return state


def check(
    step: Any, row: np.ndarray, dtype: torch.dtype, how: Any, tau: float, draws: int, seed: int, device: Any = "cpu"
) -> None:
    """Drawn tokens are of the set by hand, and log q is that of exactly this set: so no other token could be drawn."""
    k, p, least, bottom = how
    params = SamplingParams(temperature=tau, top_k=k, top_p=p, min_p=least, bottom_p=bottom, seed=seed)
    state = stepped(step, torch.from_numpy(row).to(device, dtype).expand(draws, -1).contiguous(), params)
    tokens, logq = state.out_ints[TOKENS, :, 0].cpu().numpy(), state.out_reals[LOGQ, :, 0].double().cpu().numpy()
    kept = kept_by_hand(row, k, p, least, bottom, tau)
    exact = np.full(len(row), -INF)
    exact[kept] = row[kept] / tau - np.log(np.exp(row[kept] / tau).sum())
    np.testing.assert_allclose(logq, exact[tokens], atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", COMBINATIONS)
def test_the_sampler_draws_from_that_set(how: Any, dtype: torch.dtype) -> None:
    for i, row in enumerate(tied(6, 61, 7)):
        check(sample_step, row, dtype, how, (1.0, 0.5, 2.0)[i % 3], 12, i)


KERNEL = [
    pytest.param(how, dtype, marks=() if (how, dtype) == (COMBINATIONS[6], torch.bfloat16) else pytest.mark.slow)
    for how in COMBINATIONS
    for dtype in TYPES
]


@pytest.mark.parametrize(("how", "dtype"), KERNEL)
def test_the_kernel_draws_from_that_set(how: Any, dtype: torch.dtype, kernel_device: torch.device) -> None:
    from explorl.rollout.sampling.kernel import sample_step_kernel

    for i, row in enumerate(tied(2, 61, 7)):
        check(sample_step_kernel, row, dtype, how, (1.0, 0.5)[i], 2, i, kernel_device)


def test_a_cut_goes_through_ties_in_different_blocks(kernel_device: torch.device) -> None:
    """Top-p 0.5 of bfloat16 logits kept all ties: more than half of the mass."""
    from explorl.rollout.sampling.kernel import sample_step_kernel

    row = np.full(4500, 1.0)
    row[[17, 4400]] = 2.0
    row[::7] = 0.5
    for how in ((2050, 1.0, 0.0, 1.0), (0, 0.5, 0.0, 1.0), (0, 1.0, 0.0, 0.5)):
        check(sample_step_kernel, row, torch.bfloat16, how, 1.0, 2, 5, kernel_device)
