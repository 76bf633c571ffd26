"""What each strategy says when the trainer asks: its hooks on a whole batch."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import warnings
from pathlib import Path

import pytest
import torch

import explorl.strategies as xs
from explorl.strategies import Schedule, StepState, Strategy
from explorl.strategies._lib.solve_rates import text_key
from explorl.strategies.base import overrides

from .cases import make_batch

FALLING = Schedule(begin=1.0, to=0.0, start=0, steps=10)


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


class Resets:
    """A state of the training that counts what is reset."""

    def __init__(self):
        self.reference = self.optimizer = 0

    def at(self, step, reward=0.0):
        return StepState(step, reward, self._reference, self._optimizer)

    def _reference(self):
        self.reference += 1

    def _optimizer(self):
        self.optimizer += 1


# --- sampling -----------------------------------------------------------------------------------------------------


def test_bottom_p_sets_its_parameters_for_each_row():
    assert xs.BottomP(0.9, frequency=0.5).sampling(["a", "b"], 0) == {
        "bottom_p": [0.9, 0.9],
        "bottom_p_frequency": [0.5, 0.5],
        "bottom_p_per_sequence": [0.0, 0.0],
    }
    assert xs.BottomP(0.9, per="sequence").sampling(["a"], 0)["bottom_p_per_sequence"] == [1.0]


def test_sampling_follows_a_schedule_through_the_steps_taken():
    bottom = xs.BottomP(Schedule(0.5, 1.0, steps=10))
    heat = xs.ElementWiseTemperature(easy=1.0, hard=Schedule(2.0, 1.0, steps=10), solve_rates={"a": 0.0})
    assert bottom.sampling(["a"], 0)["bottom_p"] == [0.5]
    assert bottom.sampling(["a"], 5)["bottom_p"] == [0.75]
    assert heat.sampling(["a"], 0)["temperature"] == [2.0]
    assert heat.sampling(["a"], 5)["temperature"] == [1.5]
    assert bottom.metrics(make_batch(step=5)) == {"p": 0.75, "frequency": 1.0}


def test_the_step_is_told_and_not_remembered():
    for strategy in (xs.BottomP(), xs.ElementWiseTemperature(solve_rates={"a": 0.0})):
        strategy.after_step(Resets().at(5))
        strategy.sampling(["a"], 5)
        assert "step" not in strategy.memory
        assert not overrides(strategy, "after_step")


def test_importance_correction_weighs_by_what_was_sampled_from():
    batch = make_batch()
    batch = batch.with_(sampling_logps=batch.old_logps + math.log(2))
    equal(xs.ImportanceCorrection().weights(batch), 0.5 * batch.mask)
    assert xs.ImportanceCorrection().metrics(batch) == {"mean": pytest.approx(0.5), "capped": 0.0}
    low = batch.sampling_logps.clone()
    low[0, :4] -= 9
    batch = batch.with_(sampling_logps=low)  # 4 of the 16 counted tokens
    expected = 0.5 * batch.mask
    expected[0] = 2.0
    equal(xs.ImportanceCorrection().weights(batch), expected)
    assert xs.ImportanceCorrection().metrics(batch) == {"mean": pytest.approx(14 / 16), "capped": 0.25}
    expected[0] = 3.0
    rising = xs.ImportanceCorrection(cap=Schedule(2.0, 4.0, steps=10))
    equal(rising.weights(batch.with_(step=5)), expected)
    assert not xs.ImportanceCorrection.weighs_kl


def test_importance_correction_says_when_it_cannot_correct():
    with pytest.raises(
        ValueError, match=r"importance_correction needs the sampling log-probabilities.*engine='explorl'"
    ):
        xs.ImportanceCorrection().weights(make_batch())


def test_temperature_by_solve_rate_of_a_file(tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"solved": 1.0, "half": 0.5, "unsolved": 0}))
    expected = [0.6, 1.05, 1.5, 1.05]  # a prompt that is not in the file takes the mean rate
    for source in (path, str(path), {"solved": 1.0, "half": 0.5, "unsolved": 0}):
        heat = xs.ElementWiseTemperature(solve_rates=source)
        assert heat.sampling(["solved", "half", "unsolved", "new"], 0) == {"temperature": pytest.approx(expected)}


def test_training_log_probabilities_at_temperature_one_on_request():
    heat = xs.ElementWiseTemperature(solve_rates={"a": 1.0, "b": 0.0}, training_temperature="one")
    assert heat.sampling(["a", "b", "a"], 0) == {
        "temperature": pytest.approx([0.6, 1.5, 0.6]),
        "training_temperature": [1.0, 1.0, 1.0],
    }
    by_row = xs.ElementWiseTemperature(solve_rates={"a": 1.0, "b": 0.0}, training_temperature="row")
    assert by_row.sampling(["a"], 0).keys() == {"temperature"}
    assert by_row == xs.ElementWiseTemperature(solve_rates={"a": 1.0, "b": 0.0})


@pytest.mark.parametrize("source", ["checkpoint", "running"])
def test_solve_rates_of_other_prompts_are_warned_of_once(source):
    rates = {"What is  1 + 1?": 1.0, "z" * 500: 0.0}
    heat = xs.ElementWiseTemperature(solve_rates=rates, source=source)
    long = "In the beginning" + " and so on" * 50 + " to the end"
    with pytest.warns(UserWarning, match="none of the 2 solve rates") as warned:
        heat.sampling([long, long, "b"], 0)
    assert [str(warning.message) for warning in warned] == [
        "element_wise_temperature: none of the 2 solve rates matches any of the 2 prompts: the first prompt is "
        "'In the beginning and so on and so on and … and so on and so on and so on to the end', the first key of "
        "solve_rates is 'What is  1 + 1?'; the keys must be the complete texts of the prompts, as used in training; "
        "using the mean rate"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heat.sampling(["c"], 1)
        some = xs.ElementWiseTemperature(solve_rates=rates, source=source)
        some.sampling(["c", "What is  1 + 1?"], 0)
        some.sampling(["c"], 1)  # a file may cover a part of the prompts
        xs.ElementWiseTemperature(source="running").sampling(["c"], 0)
    json.dumps(heat.memory)


def test_running_temperature_learns_from_each_batch():
    heat = xs.ElementWiseTemperature(easy=0.0 + 0.5, hard=1.5, source="running", decay=0.5)
    assert heat.sampling(["a", "b"], 0)["temperature"] == [1.0, 1.0]  # nothing known: rate 0.5
    batch = make_batch(correctness=torch.tensor([1.0, 0.1, 1.1, 0.0, 0.9, math.nan]), rewards=torch.full((6,), 2.0))
    logged = heat.metrics(batch)
    assert logged["temperature_min"] == pytest.approx(0.6)
    assert logged["temperature_max"] == pytest.approx(1.5)
    # a: 2 of 3, b: 0 of 2 (one could not be scored), all: 2 of 5
    assert heat.sampling(["a", "b", "c"], 0)["temperature"] == pytest.approx([1.5 - 2 / 3, 1.5, 1.5 - 2 / 5])
    heat.metrics(make_batch(correctness=torch.ones(6)))
    assert [heat.rate(prompt) for prompt in "abc"] == pytest.approx([(2 / 3 + 1) / 2, 0.5, (2 / 5 + 1) / 2])


def test_running_temperature_may_start_from_a_file_and_survives_a_checkpoint():
    heat = xs.ElementWiseTemperature(source="running", solve_rates={"a": 1.0, "z": 0.0})
    assert [heat.rate(prompt) for prompt in ("a", "z", "new")] == [1.0, 0.0, 0.5]
    heat.metrics(make_batch(correctness=torch.zeros(6)))
    # a: 0.9 of the file's 1.0; z was not in the batch; what is new takes the mean of the batch
    assert [heat.rate(prompt) for prompt in ("a", "z", "new")] == [0.9, 0.0, 0.0]
    resumed = xs.ElementWiseTemperature(source="running", solve_rates={"a": 1.0, "z": 0.0})
    resumed.memory.update(json.loads(json.dumps(heat.memory)))
    assert resumed.sampling(list("abz"), 1) == heat.sampling(list("abz"), 1)
    assert text_key("a") in heat.memory["rates"]


def test_a_batch_without_any_score_teaches_nothing():
    heat = xs.ElementWiseTemperature(source="running")
    heat.metrics(make_batch(correctness=torch.full((6,), math.nan), correct=torch.ones(6, dtype=torch.bool)))
    assert heat.rate("a") == 0.5


def test_temperature_of_a_checkpoint_does_not_learn():
    heat = xs.ElementWiseTemperature(solve_rates={"a": 1.0})
    heat.metrics(make_batch(correctness=torch.zeros(6)))
    assert heat.rate("a") == 1.0


# --- which sequences and prompts ----------------------------------------------------------------------------------


def test_truncated_answers_leave_the_loss():
    batch = make_batch()
    expected = batch.mask.clone()
    expected[[1, 4]] = 0
    equal(xs.MaskTruncated().select(batch), expected)
    assert xs.MaskTruncated().metrics(batch) == {"truncated": pytest.approx(1 / 3)}


def test_pass_threshold_over_the_batch():
    batch = make_batch()  # mean reward 2.2/6 = 0.3667
    equal(xs.PassThreshold(0.3).select(batch), batch.mask)
    assert xs.PassThreshold(0.3).metrics(batch) == {"skipped": 0.0}
    assert not xs.PassThreshold(0.4).select(batch).any()
    assert xs.PassThreshold(0.4).metrics(batch) == {"skipped": 1.0}
    assert not xs.PassThreshold(Schedule(0.0, 1.0, steps=10)).select(batch.with_(step=9)).any()


def test_pass_threshold_over_groups():
    batch = make_batch()  # means 0.4 and 0.3333
    expected = batch.mask.clone()
    expected[3:] = 0
    equal(xs.PassThreshold(0.35, level="group").select(batch), expected)
    assert xs.PassThreshold(0.35, level="group").metrics(batch) == {"skipped": 0.5}


def test_pass_threshold_by_the_share_of_correct_answers():
    # of the first prompt's answers 2 of 3 are correct, of the second's 1 of 2, as one could not be scored: 3 of 5
    batch = make_batch(correctness=torch.tensor([1.0, 0.9, 1.0, 1.0, math.nan, 0.0]), rewards=torch.full((6,), 2.0))
    first = batch.mask.clone()
    first[3:] = 0
    equal(xs.PassThreshold(0.6, of="correct").select(batch), batch.mask)
    assert not xs.PassThreshold(0.61, of="correct").select(batch).any()
    equal(xs.PassThreshold(0.6, level="group", of="correct").select(batch), first)
    equal(xs.PassThreshold(0.5, level="group", of="correct").select(batch), batch.mask)
    assert xs.PassThreshold(0.6, level="group", of="correct").metrics(batch) == {"skipped": 0.5}
    equal(xs.PassThreshold(0.61).select(batch), batch.mask)  # the mean total reward is 2


def test_a_mean_at_the_threshold_passes():
    batch = make_batch(rewards=torch.full((6,), 0.7))  # 0.7 in float32 is 0.69999999
    assert xs.PassThreshold(0.7).select(batch).any()


def test_curriculum_keeps_what_was_solved():
    course = xs.Curriculum({"a": 1.0, "b": 0.0, "c": 0.25})
    assert course.order(["b", "c", "new", "a"]) == [1, 3]
    assert course.metrics(make_batch()) == {"prompts": 2}
    assert course.arguments() == {}
    assert xs.Curriculum({"a": 1.0, "c": 0.25}, above=0.5).order(["c", "a"]) == [1]


def test_curriculum_starts_with_the_easy_ones():
    course = xs.Curriculum({"a": 0.5, "b": 0.0, "c": 1.0}, mode="easy_first")
    assert course.order(["b", "new", "a", "c", "a"]) == [3, 1, 2, 4, 0]  # a new prompt takes the mean, 0.5
    assert course.arguments() == {"shuffle_dataset": False}


def test_a_curriculum_that_leaves_nothing_is_an_error():
    with pytest.raises(ValueError, match="curriculum: no prompt is left: 1 of 2 prompts have a solve rate, none"):
        xs.Curriculum({"a": 0.0}).order(["a", "b"])


@pytest.mark.parametrize("mode", ["solved", "easy_first"])
def test_a_curriculum_of_other_prompts_is_an_error(mode):
    course = xs.Curriculum({"a": 1.0, "c": 0.0}, mode=mode)
    with pytest.raises(ValueError, match="none of the 2 solve rates matches any of the 1 prompts: the first prompt"):
        course.order(["b", "b"])
    with pytest.raises(
        ValueError, match=r"curriculum: .* is 'b', the first key of solve_rates is 'a'; the keys must be"
    ):
        course.order(["b"])
    with pytest.raises(ValueError, match="any of the 0 prompts: the first key of solve_rates is 'a'"):
        course.order([])


@pytest.mark.parametrize("make", [xs.Curriculum, lambda rates: xs.ElementWiseTemperature(solve_rates=rates)])
def test_bad_solve_rates_are_named(make, tmp_path):
    path = tmp_path / "rates.json"
    with pytest.raises(ValueError, match=r"rates\.json' cannot be read \(No such file"):
        make(path)
    path.write_text("{'a': 1}")
    with pytest.raises(ValueError, match=r"rates\.json' is not JSON: .* such as \{\"What is"):
        make(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not JSON"):
        make(path)
    for content in ("[1, 2]", "{}"):
        path.write_text(content)
        with pytest.raises(ValueError, match="must be a non-empty mapping from prompts to rates"):
            make(path)
    for rate in ("1.5", "-0.1", "true", '"0.5"', "null", "NaN"):
        path.write_text(f'{{"2 + 2": {rate}}}')
        with pytest.raises(ValueError, match=r"rates\.json': the rate of '2 \+ 2' is .* between 0 and 1, such as 0.75"):
            make(path)
    with pytest.raises(ValueError, match=r"the rate of 3 is 0\.5"):
        make({3: 0.5})
    with pytest.raises(ValueError, match="solve_rates is missing; give a mapping such as"):
        make(None)


# --- advantages ---------------------------------------------------------------------------------------------------


def test_shaping_strategies_apply_their_function():
    batch = make_batch()
    tokens = batch.advantages, batch.mask
    equal(
        xs.PerplexityShaping(0.1, direction=-1, clamp=(0.9, 1.1)).advantages(batch),
        xs.ppl_shaped(
            batch.advantages, batch.old_logps, batch.mask, batch.group, alpha=0.1, direction=-1, clamp=(0.9, 1.1)
        ),
    )
    equal(
        xs.EntropyAdvantage(0.2, kappa=3).advantages(batch),
        xs.entropy_shaped(batch.advantages, batch.entropy, batch.mask, alpha=0.2, kappa=3),
    )
    equal(
        xs.PositionShaping(0.2, direction=-1, slope=3, shift=0.1, cap=None, start=0).advantages(batch),
        xs.position_shaped(*tokens, gamma=0.2, direction=-1, slope=3, shift=0.1, cap=None),
    )


def test_schedules_reach_the_functions():
    batch = make_batch(step=5)
    equal(xs.PerplexityShaping(FALLING).advantages(batch), xs.PerplexityShaping(0.5).advantages(batch))
    equal(xs.EntropyAdvantage(FALLING).advantages(batch), xs.EntropyAdvantage(0.5).advantages(batch))
    equal(xs.PositionShaping(FALLING, start=0).advantages(batch), xs.PositionShaping(0.5, start=0).advantages(batch))
    equal(xs.EntropyGuidedWeighting(FALLING).weights(batch), xs.EntropyGuidedWeighting(0.5).weights(batch))
    equal(xs.NegativeReinforcement(FALLING).advantages(batch), xs.NegativeReinforcement(0.5).advantages(batch))
    equal(xs.ForkingTokens(Schedule(1.0, 0.5, steps=5)).weights(batch), xs.ForkingTokens(0.5).weights(batch))
    assert xs.ClipHigher(high=Schedule(0.2, 0.3, steps=10)).clip(batch) == pytest.approx((0.2, 0.25))


def test_position_shaping_has_its_window():
    shaping = xs.PositionShaping()
    assert [shaping.advantages(make_batch(step=step)) is not None for step in (199, 200, 299, 300)] == [
        False,
        True,
        True,
        False,
    ]


def test_replacing_strategies_spread_one_advantage_over_each_answer():
    batch = make_batch()
    negative = xs.NegativeReinforcement(0.1).advantages(batch)
    equal(negative, torch.tensor([0.1, -1.0, -1.0, 0.1, -1.0, -1.0]).unsqueeze(1) * batch.mask)
    passk = xs.PassKTraining(2).advantages(batch)
    scored = torch.ones(6, dtype=torch.bool)
    equal(passk, xs.passk_advantages(batch.correct, scored, batch.group, k=2).unsqueeze(1) * batch.mask)
    assert xs.NegativeReinforcement.replaces_advantage
    assert xs.PassKTraining.replaces_advantage


@pytest.mark.parametrize(
    "strategy",
    [xs.NegativeReinforcement(0.1), xs.PassKTraining(2), xs.PassThreshold(0.4, "group", "correct")],
    ids=lambda strategy: strategy.name,
)
def test_a_well_formed_wrong_answer_is_wrong(strategy):
    # accuracy and format at weight 1 each: a total reward of 1 is no sign of a correct answer
    accuracy, form = torch.tensor([0.0, 0, 1, 0, 0, 1]), torch.tensor([1.0, 1, 1, 0, 1, 0])
    plain, dressed = (make_batch(correctness=accuracy, rewards=total) for total in (accuracy, accuracy + form))
    equal(strategy.advantages(plain), strategy.advantages(dressed))
    equal(strategy.select(plain), strategy.select(dressed))


def test_what_could_not_be_scored_is_neither_right_nor_wrong():
    correct = torch.tensor([True, True, False, True, True, False])
    batch = make_batch(correctness=torch.tensor([1.0, math.nan, 0, 1, 1, math.nan]), correct=correct)
    negative = xs.NegativeReinforcement(0.1).advantages(batch)
    equal(negative, torch.tensor([0.1, 0.0, -1.0, 0.1, 0.1, 0.0]).unsqueeze(1) * batch.mask)
    # n = 2 for both prompts, k = 1: ρ = ½ and σ = ½ for the first, nothing to learn from the second
    passk = xs.PassKTraining(1).advantages(batch)
    equal(passk, torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, 0.0]).unsqueeze(1) * batch.mask * 0.5 / (0.5 + 1e-6))


def test_who_asks_what_is_correct():
    rates = {"a": 1.0}
    asking = {
        xs.NegativeReinforcement(): True,
        xs.PassKTraining(2): True,
        xs.PassThreshold(): False,
        xs.PassThreshold(of="correct"): True,
        xs.ElementWiseTemperature(source="running"): True,
        xs.EntropyGuidedWeighting(): False,
        xs.ImportanceCorrection(): False,
    }
    assert {strategy: strategy.needs_correct for strategy in asking} == asking
    for source, asks in (("checkpoint", False), ("running", True)):
        assert xs.ElementWiseTemperature(solve_rates=rates, source=source).needs_correct is asks
    assert not Strategy.needs_correct


def test_passk_may_end_as_pass_at_one():
    training = xs.PassKTraining(Schedule(3, 1, start=10, steps=1, shape="step"))
    for step, k in ((0, 3), (11, 1)):
        batch = make_batch(step=step)
        equal(training.advantages(batch), xs.PassKTraining(k).advantages(batch))


def test_passk_needs_enough_generations():
    xs.PassKTraining(8).check(num_generations=8)
    with pytest.raises(
        ValueError, match=r"k is 8, but there are only num_generations=4 .* use k=2, or num_generations=16"
    ):
        xs.PassKTraining(8).check(num_generations=4)
    with pytest.raises(ValueError, match="k is 8"):
        xs.PassKTraining(Schedule(8, 1, steps=10)).check(num_generations=4)


@pytest.mark.parametrize(
    "strategy",
    [
        xs.PerplexityShaping(),
        xs.PositionShaping(start=0),
        xs.EntropyAdvantage(),
        xs.NegativeReinforcement(),
        xs.PassKTraining(2),
    ],
)
def test_advantages_keep_their_dtype_and_are_zero_in_the_padding(strategy):
    batch = make_batch()
    batch = batch.with_(advantages=batch.advantages.bfloat16())
    shaped = strategy.advantages(batch)
    assert shaped.dtype == torch.bfloat16
    assert not shaped[batch.mask == 0].any()


# --- weights, clip, penalty ---------------------------------------------------------------------------------------


def test_egsw_weighs_the_kl_term_too():
    batch = make_batch()
    weights = xs.EntropyGuidedWeighting(0.8, 1.8, level="sequence", entropy="raw", scale="softmax").weights(batch)
    expected = xs.egsw_weights(
        batch.advantages,
        batch.entropy,
        batch.mask,
        alpha=0.8,
        temperature=1.8,
        level="sequence",
        entropy_mode="raw",
        scale="softmax",
    )
    equal(weights, expected)
    assert xs.EntropyGuidedWeighting.weighs_kl


def test_forking_tokens_normalised_by_what_is_kept():
    batch = make_batch()
    every = xs.ForkingTokens(0.3).weights(batch)
    weights = xs.ForkingTokens(0.3, normalize="kept").weights(batch)
    assert set(every.flatten().tolist()) == {0.0, 1.0}
    assert weights.sum() == pytest.approx(float(batch.mask.sum()))
    equal(weights / weights.max(), every)
    assert xs.ForkingTokens(0.3).metrics(batch) == {"threshold": pytest.approx(batch.entropy[every > 0].min())}
    nothing = batch.with_(mask=torch.zeros_like(batch.mask))
    assert not xs.ForkingTokens(0.3, normalize="kept").weights(nothing).any()
    assert xs.ForkingTokens(0.3).metrics(nothing) == {"threshold": 0.0}


def test_clip_higher():
    assert xs.ClipHigher().clip(make_batch()) == (0.2, 0.28)
    assert xs.ClipHigher().metrics(make_batch()) == {"low": 0.2, "high": 0.28}


def test_clip_cov_silences_tokens_between_its_bounds():
    batch = make_batch()
    strategy = xs.ClipCov(fraction=0.2, low=0.0, high=9.0)
    weights = strategy.weights(batch)
    cov = xs.token_covariance(batch.advantages, batch.old_logps, batch.mask)
    silent = (batch.mask > 0) & (weights == 0)
    assert silent.sum() == 3  # ⌊0.2 · 16⌋
    assert (cov[silent] > 0).all()
    equal(weights, batch.mask - silent.float())


def test_clip_cov_draws_anew_each_step_and_alike_after_a_resume():
    strategy = xs.ClipCov(fraction=0.1, low=-9.0, high=9.0)
    draws = [strategy.weights(make_batch(step=step)) for step in range(20)]
    again = [copy.deepcopy(strategy).weights(make_batch(step=step)) for step in range(20)]
    assert all(map(torch.equal, draws, again))
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) > 10
    other = [xs.ClipCov(fraction=0.1, low=-9.0, high=9.0, seed=1).weights(make_batch(step=s)) for s in range(20)]
    assert not all(map(torch.equal, draws, other))


def test_kl_cov_holds_back_the_chosen_tokens_of_a_micro_batch():
    strategy, batch = xs.KLCov(fraction=0.2, coef=2.0), make_batch()
    keep = strategy.keep(batch)
    cov = xs.token_covariance(batch.advantages, batch.old_logps, batch.mask)
    equal(keep["chosen"], xs.top_cov_mask(cov, batch.mask, fraction=0.2))
    assert strategy.clip(batch) == (math.inf, math.inf)
    assert strategy.metrics(batch) == {"tokens": 3}

    rows = [5, 2, 0]
    moved = (batch.old_logps + 0.25 * (-1.0) ** torch.arange(4))[rows].clone().requires_grad_()
    micro = make_batch(logps=moved, old_logps=batch.old_logps[rows])
    chosen = keep["chosen"][rows]
    assert chosen.any()
    penalty = strategy.penalty(micro, {"chosen": chosen})
    equal(penalty, 0.5 * chosen)
    penalty.sum().backward()
    equal(moved.grad, 2.0 * chosen * (-1.0) ** torch.arange(4))


def test_kl_cov_has_no_gradient_before_the_policy_moves():
    strategy, batch = xs.KLCov(fraction=0.5), make_batch()
    logps = batch.old_logps.clone().requires_grad_()
    strategy.penalty(batch.with_(logps=logps), strategy.keep(batch)).sum().backward()
    assert not logps.grad.any()
    assert xs.KLCov.needs_reuse


def test_entropy_bonus_sets_arguments_that_trl_knows():
    fixed = xs.EntropyBonus(0.01).arguments()
    assert fixed == {"entropy_coef": 0.01, "use_adaptive_entropy": False}
    seeking = xs.EntropyBonus(0.0, target=0.3, delta=0.01, minimum=0.001, maximum=0.1).arguments()
    assert seeking == {
        "entropy_coef": 0.0,
        "use_adaptive_entropy": True,
        "entropy_target": 0.3,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.001,
        "entropy_coef_max": 0.1,
    }
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    config = (Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text()
    names = [*seeking, *xs.Curriculum({"a": 1.0}, mode="easy_first").arguments()]
    assert [name for name in names if f"\n    {name}: " not in config] == []


# --- resets -------------------------------------------------------------------------------------------------------


def test_reference_reset_every_so_many_steps():
    strategy, resets = xs.ReferenceReset(every=3), Resets()
    for step in range(1, 8):
        strategy.after_step(resets.at(step))
    assert resets.reference == resets.optimizer == 2
    assert strategy.metrics(make_batch()) == {"resets": 2}


def test_reference_reset_on_a_stall():
    strategy, resets = xs.ReferenceReset(on_stall=2), Resets()
    counts = []
    for step, reward in enumerate([0.1, 0.3, 0.2, 0.4, 0.4, 0.3, 0.35, 0.3, math.nan, 0.1, 0.0]):
        strategy.after_step(resets.at(step + 1, reward))
        counts.append(resets.reference)
    # 0.4, then two without a new maximum: reset; it counts on from 0.3: 0.35 is new, then two without: reset; NaN
    # left no maximum to beat, so 0.1 is new
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert resets.optimizer == 2
    json.dumps(strategy.memory)


def test_a_stall_is_counted_across_a_checkpoint():
    rewards = [0.5, 0.4, 0.3, 0.6, 0.1, 0.1, 0.1]
    whole, resets = xs.ReferenceReset(on_stall=2), Resets()
    for step, reward in enumerate(rewards):
        whole.after_step(resets.at(step + 1, reward))
    first, again = xs.ReferenceReset(on_stall=2), Resets()
    for step, reward in enumerate(rewards[:2]):
        first.after_step(again.at(step + 1, reward))
    second = xs.ReferenceReset(on_stall=2)
    second.memory.update(json.loads(json.dumps(first.memory)))
    for step, reward in enumerate(rewards[2:], start=2):
        second.after_step(again.at(step + 1, reward))
    assert again.reference == resets.reference == 2
    assert second.memory == whole.memory
