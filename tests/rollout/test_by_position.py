"""Temperatures that change with the position, and the recorded mass of the min-p set, against a pass over the model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from explorl.rollout import Engine, Rollouts, SamplingParams
from explorl.rollout.backends.generate import generate
from explorl.rollout.sampling import Active, rng

from .models import prompts, shared
from .test_engine import forced, same_tokens

CURVES = [[1.5, 0.3, 1.0], [0.7], [2.0, 1.9, 1.8, 1.7, 1.6, 0.2], [1.0, 1.0]]
TOKENS = 12


def temperatures(curve: list[float], count: int) -> torch.Tensor:
    return torch.tensor([curve[min(step, len(curve) - 1)] for step in range(count)], dtype=torch.float64)


def check(model: Any, rollouts: Rollouts, curves: list[list[float]]) -> None:
    """Each token is the one at which the cumulative softmax(logits / τ_t) passes its random number."""
    keys = torch.from_numpy(rng.request_keys(rollouts.seed, range(len(rollouts))))
    for rollout in rollouts:
        count = len(rollout)
        tau = temperatures(curves[rollout.request], count)[:, None]
        logp = (forced(model, rollouts.prompt_ids[rollout.prompt_index], rollout.token_ids) / tau).log_softmax(-1)
        picked = torch.tensor(rollout.token_ids)
        own = logp[torch.arange(count), picked]
        torch.testing.assert_close(rollout.logps.double(), own, atol=1e-4, rtol=0)
        torch.testing.assert_close(rollout.sampling_logps.double(), own, atol=1e-4, rtol=0)
        u = rng.uniform(keys[rollout.request].expand(count), torch.arange(count))
        ends = logp.exp().cumsum(-1)[torch.arange(count), picked]
        assert bool((u < ends + 1e-5).all())
        assert bool((u > ends - own.exp() - 1e-5).all())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_each_token_is_drawn_at_the_temperature_of_its_position(name: str, batch_size: int | None) -> None:
    model, ids = shared(name), prompts()
    curves = [CURVES[i % len(CURVES)] for i in range(len(ids))]
    params = SamplingParams(temperature_by_position=curves, max_tokens=TOKENS, seed=4)
    rollouts = Engine(model, batch_size=batch_size).generate(ids, 3, params)
    check(model, rollouts, [curve for curve in curves for _ in range(3)])


def test_one_curve_per_request(llama: Any) -> None:
    ids = prompts()[:2]
    curves = [CURVES[i] for i in (0, 2, 1, 2)]
    table: Any = np.array([[1.5, 0.3], [0.2, 9.0], [1.0, 1.0], [0.2, 9.0]])
    params = SamplingParams(temperature_by_position=table)
    assert params.curves == [(1.5, 0.3), (0.2, 9.0), (1.0, 1.0)]
    engine = Engine(llama)
    check(llama, engine.generate(ids, 2, SamplingParams(temperature_by_position=curves, max_tokens=9)), curves)
    again = [CURVES[3], [0.5, 2.0], [3.0], [0.1]]  # the next call of the same engine has others, and more of them
    check(llama, engine.generate(ids, 2, SamplingParams(temperature_by_position=again, max_tokens=9)), again)


def test_many_curves_are_not_each_compared_with_all_others() -> None:
    looks = 0

    class Curve(tuple[float, ...]):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return tuple.__eq__(self, other)

        __hash__ = tuple.__hash__

    curves = [Curve((1.0, 1.0 + row / 100)) for row in range(50)]
    for _ in range(2):
        params = SamplingParams(temperature_by_position=curves)
        assert params.rows(50, 1)["curve"].tolist() == list(range(50))
    assert params.curves == curves
    looks -= 50  # of the line before
    assert looks <= 100


def test_a_curve_of_one_value_is_that_temperature_to_the_last_bit(llama: Any) -> None:
    flat = SamplingParams(temperature=0.7, max_tokens=TOKENS, seed=1, top_p=0.9)
    engine = Engine(llama)
    want = engine.generate(prompts(), 2, flat)
    curved = SamplingParams(
        temperature_by_position=[[0.7]] * len(prompts()), temperature=0.0, max_tokens=TOKENS, seed=1, top_p=0.9
    )
    got = engine.generate(prompts(), 2, curved)
    assert same_tokens(got, want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.logps, other.logps)
        assert torch.equal(one.sampling_logps, other.sampling_logps)
    assert same_tokens(engine.generate(prompts(), 2, flat), want)  # and it leaves no trace


def test_nothing_is_active_that_nobody_asked_for() -> None:
    plain = SamplingParams()
    assert Active.of(plain, plain.rows(2, 1)) == Active()
    curved = SamplingParams(temperature_by_position=[[1.0], [2.0]], min_p_mass=0.1, temperature=0.0)
    rows = curved.rows(2, 2)
    assert Active.of(curved, rows) == Active(temperature=True, by_position=True, min_p_mass=0.1)
    assert rows["curve"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("tau", [1.0, 0.6])
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_the_mass_of_the_min_p_set_is_recorded(llama: Any, share: float, tau: float) -> None:
    params = SamplingParams(min_p_mass=share, temperature=tau, max_tokens=TOKENS, seed=4)
    ids = prompts()
    engine = Engine(llama, batch_size=4)
    rollouts = engine.generate(ids, 3, params)
    outside = 0
    for rollout in rollouts:
        probs = (forced(llama, ids[rollout.prompt_index], rollout.token_ids) / tau).softmax(-1)
        picked = torch.arange(len(rollout)), torch.tensor(rollout.token_ids)
        kept = probs >= share * probs.amax(-1, keepdim=True)
        expected = torch.where(kept[picked], (probs * kept).sum(-1), 0.0)
        assert rollout.min_p_mass is not None
        torch.testing.assert_close(rollout.min_p_mass.double(), expected, atol=1e-4, rtol=0)
        outside += int((~kept[picked]).sum())
    assert outside > 0 or share == 0.02
    padded = rollouts.padded()
    assert padded.min_p_mass is not None
    assert padded.min_p_mass.shape == padded.logps.shape
    assert not padded.min_p_mass[~padded.mask].any()
    plain = engine.generate(ids, 3, SamplingParams(temperature=tau, max_tokens=TOKENS, seed=4))
    assert same_tokens(plain, rollouts)
    assert plain[0].min_p_mass is None
    assert plain.padded().min_p_mass is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature_by_position": [1.0, 0.5]}, r"of row 0 is 1\.0; use one sequence of temperatures per row"),
        ({"temperature_by_position": []}, r"is \[\]; use one sequence"),
        ({"temperature_by_position": "hot"}, "is 'hot'"),
        ({"temperature_by_position": [[1.0], []]}, r"of row 1 is \[\]"),
        ({"temperature_by_position": [[1.0, 0.0]]}, r"of row 0 contains 0\.0"),
        ({"temperature_by_position": [[1.0], [math.nan]]}, "of row 1 contains nan"),
        ({"temperature_by_position": [[True]]}, "of row 0 contains True"),
        ({"min_p_mass": 0.0}, r"min_p_mass is 0\.0; use a number in \(0, 1\] such as 0\.02"),
        ({"min_p_mass": "0.1"}, "min_p_mass is '0.1'"),
    ],
)
def test_bad_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_a_curve_for_some_rows_only(llama: Any) -> None:
    with pytest.raises(ValueError, match="temperature_by_position has 2 values; use one value, one for each"):
        Engine(llama).generate(prompts()[:3], 1, SamplingParams(temperature_by_position=[[1.0], [0.5]]))
    with pytest.raises(ValueError, match="are not supported by model"):
        generate(llama, None, [[1]], 1, SamplingParams(temperature_by_position=[[1.0]]))
