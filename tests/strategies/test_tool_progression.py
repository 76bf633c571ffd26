"""Who has the tool, and for how many calls."""

from __future__ import annotations

import numpy as np
import pytest

from explorl import strategies as xs

PROMPTS = [f"{a}*{b}" for a in range(20) for b in range(20)]


def test_the_share_of_prompts_is_the_one_asked_for_and_only_grows() -> None:
    before = np.zeros(len(PROMPTS), dtype=bool)
    for share in (0.0, 0.1, 0.25, 0.5, 0.9, 1.0):
        has = np.array(xs.allowed_calls(PROMPTS, share=share, calls=2, seed=1)) > 0
        spread = 4 * np.sqrt(share * (1 - share) / len(PROMPTS))
        assert abs(has.mean() - share) <= spread
        assert not (before & ~has).any()
        before = has
    assert before.all()


def test_another_seed_gives_it_to_others() -> None:
    first, second = (xs.allowed_calls(PROMPTS, share=0.5, calls=1, seed=seed) for seed in (0, 1))
    assert 0.35 < np.mean(np.array(first) == np.array(second)) < 0.65


def test_calls_are_rounded_down_and_rise_with_the_step() -> None:
    strategy = xs.ToolProgression(share=1.0, calls=xs.Schedule(1, 3, start=10, steps=20))
    allowed = [strategy.sampling(["a"], step)["tool_calls"] for step in (0, 10, 19, 20, 29, 30, 99)]
    assert allowed == [[1], [1], [1], [2], [2], [3], [3]]


def test_all_answers_to_a_prompt_are_sampled_alike() -> None:
    strategy = xs.ToolProgression(share=0.5, calls=2)
    rows = [prompt for prompt in PROMPTS for _ in range(3)]
    allowed = np.array(strategy.sampling(rows, 0)["tool_calls"]).reshape(-1, 3)
    assert (allowed == allowed[:, :1]).all()
    assert set(allowed.flatten().tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, "share is 1.5"),
        ({"share": xs.Schedule(0.5, -1)}, "share.*-1"),
        ({"calls": 0}, "calls is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xs.ToolProgression(**options)  # type: ignore[arg-type]


def test_more_calls_than_the_tool_allows_are_refused() -> None:
    xs.ToolProgression().check_calls(max_calls=3)
    with pytest.raises(ValueError, match="calls goes up to 3, but the tool allows 2; use at most 2"):
        xs.ToolProgression().check_calls(max_calls=2)
