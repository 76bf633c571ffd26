"""The chain of a request that another sampler applies: against FORMULAS.md §1, written out in NumPy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from explorl.rollout.backends.chain import Chain, Chains
from explorl.rollout.sampling import rng


def allowed(logits: np.ndarray, tau: float, chain: Chain, applied: bool) -> np.ndarray:
    """The tokens that may be drawn, token by token from the definition."""
    p = np.exp(logits / tau - (logits / tau).max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -logits))
    keep = list(order)
    if chain.top_k:
        keep = keep[: chain.top_k]
    if chain.top_p < 1:
        mass = np.cumsum(p[keep]) / p[keep].sum()
        keep = keep[: int((mass < chain.top_p - 1e-9).sum()) + 1]
    if chain.min_p:
        keep = [token for token in keep if p[token] >= chain.min_p * p[keep].max() - 1e-12]
    if chain.bottom_p < 1 and applied:
        mass = np.cumsum(p[keep]) / p[keep].sum()
        gone = int((mass <= 1 - chain.bottom_p + 1e-9).sum())
        keep = keep[min(gone, len(keep) - 1) :]
    found = np.zeros(len(p), dtype=bool)
    found[keep] = True
    return found


CHAINS = [
    Chain(bottom_p=0.9),
    Chain(bottom_p=0.5, top_p=0.9),
    Chain(top_k=7, min_p=0.2),
    Chain(top_k=20, top_p=0.8, min_p=0.01, bottom_p=0.7),
    Chain(top_p=0.3),
    Chain(bottom_p=0.01),
    Chain(),
]


@pytest.mark.parametrize("tau", [0.6, 1.0, 5.0])
@pytest.mark.parametrize("before", [True, False], ids=["before temperature", "behind it"])
def test_what_may_be_drawn_is_what_the_formulas_say(tau: float, before: bool) -> None:
    logits = torch.randn(len(CHAINS), 50, generator=torch.Generator().manual_seed(0)) * 2
    rate = torch.full((len(CHAINS),), 1 / tau) if before else None
    removed = Chains.of(CHAINS).removed(
        logits if before else logits / tau, torch.zeros(len(CHAINS), dtype=torch.long), rate
    )
    for row, chain in enumerate(CHAINS):
        want = allowed(logits[row].double().numpy(), tau, chain, True)
        np.testing.assert_array_equal(~removed[row].numpy(), want, err_msg=str(chain))


def test_equal_logits_are_ranked_by_their_ids() -> None:
    removed = Chains.of([Chain(bottom_p=0.5), Chain(top_k=2)]).removed(torch.zeros(2, 4), torch.zeros(2).long())
    assert removed.tolist() == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize("per_sequence", [0, 1])
def test_log_q_is_the_mixture_over_the_coin(per_sequence: int) -> None:
    f, tau, logits = 0.3, 1.4, torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    chain = Chain(top_p=0.95, bottom_p=0.6, bottom_p_frequency=f, bottom_p_per_sequence=per_sequence)
    p = np.exp(logits.double().numpy() / tau)
    seen = set()
    for key in range(12):
        row = Chains.of([replace(chain, key=key)])
        for position in range(4):
            at = torch.tensor([position])
            applied = bool(row.applied(at)[0])
            place = 0 if per_sequence else position
            assert applied == bool(rng.uniform(torch.tensor([key]), torch.tensor([place]), rng.BERNOULLI)[0] < f)
            seen.add(applied)
            with_it, without = (
                np.where(kept := allowed(logits.double().numpy(), tau, chain, side), p, 0) / p[kept].sum()
                for side in (True, False)
            )
            side = with_it if applied else without
            for token in np.flatnonzero(side):
                found = row.log_q(logits[None], at, torch.tensor([token]), torch.tensor([1 / tau]))
                mixed = side[token] if per_sequence else f * with_it[token] + (1 - f) * without[token]
                assert float(found.sampled) == pytest.approx(np.log(side[token]), abs=1e-5)
                assert float(found.mixed) == pytest.approx(np.log(mixed), abs=1e-5)
    assert seen == {True, False}


def test_a_drawn_token_beyond_the_edge_of_a_cut_counts_as_one_that_stays() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    found = Chains.of([Chain(top_k=1)]).log_q(logits, torch.tensor([0]), torch.tensor([1]))
    assert float(found.sampled) == pytest.approx(np.log(0.3 / 0.8), abs=1e-6)


def test_a_chain_goes_through_json_and_back() -> None:
    for chain in [*CHAINS, Chain(temperatures=(1.2, 1.0)), Chain(bottom_p=0.9, bottom_p_frequency=0.5, key=-(2**62))]:
        travelled = json.loads(json.dumps(chain.extra_args() | {"other": "left alone"}))
        assert Chain.read(travelled) == (None if chain.idle else chain)
    assert Chain.read(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"explorl_bottom_p": 0}, "explorl_bottom_p is 0; use a number in"),
        ({"explorl_bottom_p": True}, "explorl_bottom_p is True"),
        ({"explorl_bottom_p": "0.9"}, "explorl_bottom_p is '0.9'"),
        ({"explorl_top_k": 1.5}, "use a whole number"),
        ({"explorl_top_p": float("nan")}, "explorl_top_p is nan"),
        ({"explorl_buttom_p": 0.9}, "unknown argument 'explorl_buttom_p'; use one of explorl_top_k"),
        ({"explorl_temperatures": 1.0}, "use temperatures from"),
        ({"explorl_temperatures": [1.0, -1]}, "use temperatures from"),
        ({"explorl_temperatures": []}, "use temperatures from"),
        ({"explorl_key": 2**70}, "use a whole number of 64 bits"),
    ],
)
def test_what_a_request_may_not_ask_for(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="explorl_") as error:
        Chain.read(given)
    assert message in str(error.value)


def test_temperatures_go_by_position_and_the_last_one_holds_on() -> None:
    rows = Chains.of([Chain(temperatures=(2.0, 1.5)), Chain(top_k=3), Chain(temperatures=(0.5,))])
    assert rows.temperatures(torch.tensor([0, 0, 9])).tolist() == [2.0, 1.0, 0.5]
    assert rows.temperatures(torch.tensor([7, 1, 0])).tolist() == [1.5, 1.0, 0.5]
