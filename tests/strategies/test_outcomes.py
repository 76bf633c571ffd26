"""What an answer says and how long it is: outcome_exploration and overlong_penalty."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import explorl.strategies as xs
from explorl.strategies.outcome_exploration import MAX_ANSWERS

from . import reference
from .cases import THOROUGH, checked, close, make_batch

ROWS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-1, 3), min_size=n, max_size=n),
        st.lists(st.sampled_from([-3, 0, 7]), min_size=n, max_size=n),
        st.lists(st.integers(0, 50), min_size=n, max_size=n),
    )
)
ANSWERS = ["7", "7", None, "7", "8", "9"]


# --- overlong_penalty ---------------------------------------------------------------------------------------------


@THOROUGH
@given(st.lists(st.integers(0, 60), min_size=1), st.integers(1, 50), st.data())
def test_overlong(lengths, longest, data):
    cache = data.draw(st.integers(1, longest))
    actual = checked(xs.overlong_penalties)(torch.tensor(lengths).float(), longest=longest, cache=cache)
    close(actual, reference.overlong(lengths, longest, cache))


def test_overlong_by_hand():
    # L_max 10, L_cache 4: nothing up to 6 tokens, then a quarter for each
    lengths = torch.tensor([0.0, 6, 7, 8, 10, 11])
    close(xs.overlong_penalties(lengths, longest=10, cache=4), [0, 0, -0.25, -0.5, -1, -1])
    paper = xs.overlong_penalties(torch.tensor([16384.0, 18432, 20480]), longest=20480, cache=4096)
    close(paper, [0, -0.5, -1])


def test_overlong_changes_the_reward_of_scored_answers():
    rewards = torch.tensor([1.0, 1, 0, 1, 0, math.nan])  # of 4, 2, 3, 1, 4 and 2 tokens
    batch = make_batch(rewards=rewards, max_length=4)
    penalty = xs.OverlongPenalty(2, factor=0.5)
    expected = torch.tensor([0.5, 1, -0.25, 1, -0.5, math.nan])
    torch.testing.assert_close(penalty.rewards(batch), expected, equal_nan=True)
    assert penalty.metrics(batch) == {"penalty": pytest.approx(-2.5 / 6), "penalised": 0.5}
    # as long as a fifth of the limit, at least one token, unless told otherwise
    torch.testing.assert_close(
        xs.OverlongPenalty().rewards(batch), rewards + torch.tensor([-1.0, 0, 0, 0, -1, 0]), equal_nan=True
    )
    assert xs.OverlongPenalty(2, longest=40).metrics(batch)["penalised"] == 0
    rising = xs.OverlongPenalty(2, factor=xs.Schedule(0.0, 1.0, steps=10))
    torch.testing.assert_close(rising.rewards(batch.with_(step=5)), expected, equal_nan=True)


def test_an_answer_that_was_cut_off_and_hidden_is_as_long_as_can_be():
    mask = torch.tensor([[0.0] * 4, [1, 1, 0, 0], [0] * 4, [1, 0, 0, 0], [1] * 4, [1, 1, 0, 0]])
    cut = torch.tensor([True, False, False, False, True, False])
    batch = make_batch(mask=mask, truncated=cut, max_length=4)
    close(xs.OverlongPenalty(2).penalties(batch), [-1, 0, 0, 0, -1, 0])  # the third is empty


def test_unscored_answers_get_no_bonus():
    rewards = torch.tensor([1.1, math.nan, 0.0, 1.0, 0.0, math.nan])
    batch = make_batch(answers=ANSWERS, rewards=rewards)
    explore = xs.OutcomeExploration(0.2, baseline="none")
    change = explore.advantages(batch) - batch.advantages.nan_to_num()
    close(change[:, 0], [0.2, 0, 0, 0.2, 0.2, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: xs.OverlongPenalty(0), "cache is 0; it must be a whole number, 1 or more, for example 4096"),
        (lambda: xs.OverlongPenalty(1.5), r"cache is 1\.5; it must be a whole number"),
        (lambda: xs.OverlongPenalty(9, longest=8), "cache is 9; it must be at most longest, which is 8, for example 1"),
        (lambda: xs.OverlongPenalty(longest=0), "longest is 0"),
        (lambda: xs.OverlongPenalty(factor=-1), "factor is -1"),
        (
            lambda: xs.OverlongPenalty(300).check_length(max_completion_length=256),
            "cache is 300; it must be at most max_completion_length, which is 256, for example 51",
        ),
        (
            lambda: xs.OverlongPenalty().check_length(max_completion_length=None),
            "completions have no length limit .* set longest",
        ),
        (lambda: xs.OverlongPenalty().rewards(make_batch()), "the length limit is unknown"),
    ],
)
def test_a_penalty_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=f"overlong_penalty: {message}"):
        make()


def test_a_cache_of_the_whole_length_is_allowed():
    xs.OverlongPenalty(8, longest=8)
    xs.OverlongPenalty(256).check_length(max_completion_length=256)
    xs.OverlongPenalty(300, longest=400).check_length(max_completion_length=256)
    xs.OverlongPenalty(longest=20).check_length(max_completion_length=None)


# --- outcome_exploration ------------------------------------------------------------------------------------------


@THOROUGH
@given(ROWS, st.sampled_from(["none", "mean", "constant"]), st.floats(0, 1))
def test_ucb(rows, baseline, constant):
    outcome, group, counts = rows
    actual = checked(xs.ucb_bonuses)(
        torch.tensor(counts).float(), torch.tensor(outcome), torch.tensor(group), baseline=baseline, constant=constant
    )
    close(actual, reference.ucb(counts, outcome, group, baseline, constant))


@THOROUGH
@given(ROWS)
def test_repetition(rows):
    outcome, group, _ = rows
    actual = checked(xs.repetition_penalties)(torch.tensor(outcome), torch.tensor(group))
    close(actual, reference.repetition(outcome, group))


def test_outcomes_by_hand():
    group = torch.tensor([5, 5, 5, 5])
    counts, outcome = torch.tensor([0.0, 1, 4, 100]), torch.tensor([0, 1, 2, -1])
    rule = {"none": [1, 1, 0.5, 0], "constant": [0.5, 0.5, 0, 0], "mean": [1 / 6, 1 / 6, -1 / 3, 0]}
    for baseline, expected in rule.items():
        close(xs.ucb_bonuses(counts, outcome, group, baseline=baseline, constant=0.5), expected)
    close(xs.repetition_penalties(torch.tensor([3, 3, 3, 1]), group), [-0.5, -0.5, -0.5, 0])
    close(xs.repetition_penalties(torch.tensor([-1, -1, 3, 3]), group), [0, 0, -0.25, -0.25])
    close(xs.repetition_penalties(torch.tensor([3, 3]), torch.tensor([0, 1])), [0, 0])  # another prompt's answer


def test_answers_that_come_again_lose_their_bonus():
    explore = xs.OutcomeExploration(0.2, baseline="none")
    batch = make_batch(answers=ANSWERS)
    for bonus in (
        [1, 1, 0, 1, 1, 1],  # all are new
        [2**-0.5, 2**-0.5, 0, 1, 1, 1],  # "7" was given twice to the first prompt; the others once
        [0.5, 0.5, 0, 2**-0.5, 2**-0.5, 2**-0.5],
    ):
        expected = batch.advantages.nan_to_num() + 0.2 * torch.tensor(bonus).unsqueeze(1) * batch.mask
        torch.testing.assert_close(explore.advantages(batch), expected)
        torch.testing.assert_close(explore.advantages(batch), expected)  # asking counts nothing
        logged = explore.metrics(batch)
        assert logged == {"bonus": pytest.approx(sum(bonus) / 6), "answered": pytest.approx(5 / 6), "distinct": 2.0}


def test_batch_exploration_remembers_nothing():
    explore = xs.OutcomeExploration(1.0, kind="batch")
    batch = make_batch(answers=ANSWERS)
    explore.metrics(batch)
    third = torch.tensor([1, 1, 0, 0, 0, 0]) / 3
    torch.testing.assert_close(
        explore.advantages(batch), batch.advantages.nan_to_num() - third.unsqueeze(1) * batch.mask
    )
    assert explore.memory == {}


def test_counts_survive_a_checkpoint():
    explore, batch = xs.OutcomeExploration(), make_batch(answers=ANSWERS)
    explore.metrics(batch)
    resumed = xs.OutcomeExploration()
    resumed.memory.update(json.loads(json.dumps(explore.memory)))
    for _ in range(2):
        assert torch.equal(resumed.advantages(batch), explore.advantages(batch))
        assert resumed.metrics(batch) == explore.metrics(batch)
    assert resumed.memory == explore.memory


def test_hostile_answers_stay_small_in_memory():
    odd = ["x" * 1_000_000, "\ud800", "\0", "", "é", "e\u0301"]  # a lone surrogate; one letter in two forms
    explore = xs.OutcomeExploration()
    explore.metrics(make_batch(answers=odd, prompts=["p" * 1_000_000] * 6))
    assert len(json.dumps(explore.memory)) < 300
    (counts,) = explore.memory["counts"].values()
    assert sorted(counts.values()) == [1] * 6  # what the task takes for different is different


def test_a_prompt_with_too_many_answers_forgets_the_rarest():
    explore = xs.OutcomeExploration()
    explore.metrics(make_batch(answers=["often"] * 6, prompts=["a"] * 6))
    for start in range(0, MAX_ANSWERS + 60, 6):
        explore.metrics(make_batch(answers=[f"rare {start + row}" for row in range(6)], prompts=["a"] * 6))
    (counts,) = explore.memory["counts"].values()
    assert len(counts) == MAX_ANSWERS
    again = make_batch(answers=["often", "rare 0", f"rare {MAX_ANSWERS}", None, None, None], prompts=["a"] * 6)
    bonuses = xs.OutcomeExploration(baseline="none")
    bonuses.memory.update(explore.memory)
    np.testing.assert_allclose(bonuses.bonuses(again)[:3], [6**-0.5, 1, 1], rtol=1e-6)
    assert bonuses.memory["counts"] == explore.memory["counts"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: xs.OutcomeExploration(-0.1), r"coef is -0\.1"),
        (lambda: xs.OutcomeExploration(kind="ucb"), "kind is 'ucb'; it must be 'historical' or 'batch'"),
        (lambda: xs.OutcomeExploration(baseline="median"), "baseline is 'median'"),
        (lambda: xs.OutcomeExploration(constant=1.5), r"constant is 1\.5"),
    ],
)
def test_an_exploration_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=f"outcome_exploration: {message}"):
        make()


def test_a_batch_without_answers_is_an_error():
    with pytest.raises(ValueError, match=r"has 0 answers for 6 rows; fill in"):
        xs.OutcomeExploration().advantages(make_batch())
    assert xs.OutcomeExploration.needs_answers
    assert not xs.Strategy.needs_answers
