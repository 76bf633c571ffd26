"""Entropy by sign, the fastest-dropping tokens, words and changes of probability: what was planted is recovered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from explorl.analysis.defects import defects
from explorl.analysis.entropy_by_sign import sign_split
from explorl.analysis.entropy_drop import fastest_drop, words
from explorl.analysis.lens import Context, Findings, Unavailable
from explorl.analysis.lens_table import LensTable, NotRecorded, build_table
from explorl.analysis.probability_shift import updates
from explorl.stats.interval import LEVEL

from .planted_runs import FAST, TYPES, lines, noise, rollouts, token_table

DRAWS = [20, pytest.param(100, marks=pytest.mark.slow)]
T = np.arange(1.0, 101.0)


def one_kind(texts: Any) -> list[str]:
    return ["all"] * len(texts)


def parity(texts: Any) -> list[str]:
    return ["formal" if text.isdecimal() else "other" for text in texts]


def split_of(rng: np.random.Generator, negative: float, apart: float, seed: int) -> Findings:
    """A run whose negatives have ``apart`` nats more and fall by ``negative`` per 100 steps, positives by 0.1."""
    curves = lines(
        lens__entropy_positive=1 - 0.1 * T / 100 + noise(100, 0.05, rng),
        lens__entropy_negative=1 + apart - negative * T / 100 + noise(100, 0.05, rng),
        reward=[0.5] * 100,
    )
    found = sign_split(build_table("run", {}, lines=curves), Context(seed))
    assert isinstance(found, Findings)
    return found


@pytest.mark.parametrize("draws", DRAWS)
def test_entropy_by_sign(draws: int) -> None:
    rng = np.random.default_rng(0)
    found = [split_of(rng, 0.4, 0.3, seed) for seed in range(draws)]
    assert sum(one["slope_difference"].low <= -0.3 <= one["slope_difference"].high for one in found) >= 0.9 * draws
    assert all(one["slope_difference"].sign == -1 and one["difference"].sign == 1 for one in found)
    assert "falls faster" in found[0].sentence
    assert len(found[0].tables["signs-curve"].rows) == 100


@pytest.mark.parametrize("draws", DRAWS)
def test_signs_that_do_not_differ(draws: int) -> None:
    rng = np.random.default_rng(1)
    found = [split_of(rng, 0.1, 0.0, seed) for seed in range(draws)]
    assert sum(one["slope_difference"].sign == 0 for one in found) >= 0.95 * draws
    assert sum(one["difference"].sign == 0 for one in found) >= 0.95 * draws


def test_entropy_by_sign_of_recorded_tokens() -> None:
    table = token_table(np.random.default_rng(2), fast_slope=-2.0, fast_negative=0.95)
    found = sign_split(table, Context())
    assert isinstance(found, Findings)
    tokens, sign = table.tokens, table.completions.sign[table.tokens.completion]
    at = (tokens.step == 7) & (sign < 0)
    assert found["negative"][6] == pytest.approx(tokens["entropy"][at].mean())
    assert found["slope_difference"].sign == -1


@pytest.mark.parametrize("draws", DRAWS)
def test_fastest_tokens_come_from_negatives(draws: int) -> None:
    rng = np.random.default_rng(3)
    found = [fastest_drop(token_table(rng, fast_slope=-2.0, fast_negative=0.8), Context(s)) for s in range(draws)]
    kept = [one for one in found if isinstance(one, Findings)]
    assert len(kept) == draws
    assert sum(one["negative_share"].low <= 0.8 <= one["negative_share"].high for one in kept) >= 0.9 * draws
    assert all(one["excess"].sign == 1 for one in kept)
    one = kept[0]
    assert one["types"] == TYPES
    assert one["fastest"] == FAST
    assert set(one["texts"]) == {str(i) if i % 2 else f" t{i}" for i in range(FAST)}
    assert np.mean(one["slopes"]) == pytest.approx(-2.0, abs=0.3)
    assert "more than of all types" in one.sentence
    assert "fastest-tokens" in one.tables


@pytest.mark.parametrize("draws", DRAWS)
def test_no_sign_has_more_of_the_fastest_tokens(draws: int) -> None:
    rng = np.random.default_rng(4)
    found = [fastest_drop(token_table(rng), Context(seed)) for seed in range(draws)]
    assert sum(isinstance(one, Findings) and one["excess"].sign == 0 for one in found) >= 0.95 * draws


def test_slopes_are_least_squares_over_occurrences() -> None:
    table = token_table(np.random.default_rng(5), fast_slope=-1.0)
    found = fastest_drop(table, Context())
    assert isinstance(found, Findings)
    of = dict(zip(found["texts"], found["slopes"], strict=True))
    for text, slope in of.items():
        inside = table.tokens["tokens"] == text
        expected = np.polyfit(table.tokens.step[inside] / 100, table.tokens["entropy"][inside], 1)[0]
        assert slope == pytest.approx(expected)
    assert sorted(of.values()) == list(of.values())


def test_tokens_in_negatives_alone() -> None:
    table = token_table(np.random.default_rng(6), fast_slope=-2.0, fast_negative=1.0)
    found = fastest_drop(table, Context())
    assert isinstance(found, Findings)
    assert found["only_negative"] == FAST
    assert found["only_negative_slope"] is not None
    assert found["only_negative_slope"].sign == -1
    assert found["only_negative_slope"].low <= -2.0 <= found["only_negative_slope"].high


@pytest.mark.parametrize("draws", DRAWS)
def test_words(draws: int) -> None:
    rng = np.random.default_rng(7)
    planted = words(token_table(rng, steps=80, fast_slope=-2.0), Context())
    assert isinstance(planted, Findings)
    sure = {one.text for one in planted["fallen"] if one.corrected is not None and one.corrected < LEVEL}
    assert sure == {str(i) if i % 2 else f" t{i}" for i in range(FAST)}
    assert "no significant change. Entropy" in planted.sentence
    assert len(planted.tables) == 2
    nothing = [words(token_table(rng), Context(seed)) for seed in range(draws)]
    quiet = [
        isinstance(one, Findings) and not any((w.corrected or 0) < LEVEL for w in (*one["risen"], *one["fallen"]))
        for one in nothing
    ]
    assert sum(quiet) >= 0.95 * draws


def test_a_word_that_takes_over() -> None:
    data = rollouts(np.random.default_rng(8))
    for step, columns in data.items():
        for ids, texts in zip(columns["token_ids"], columns["tokens"], strict=True):
            for place in range(len(ids) if step > 20 else 0):
                if place % 4 == 0:
                    ids[place], texts[place] = 99, "wait"
    found = words(build_table("run", data), Context())
    assert isinstance(found, Findings)
    assert found["risen"][0].text == "wait"
    assert found["risen"][0].before == 0
    assert found["risen"][0].after == pytest.approx(0.25)


@pytest.mark.parametrize("draws", DRAWS)
def test_planted_updates(draws: int) -> None:
    rng = np.random.default_rng(9)
    found = [updates(token_table(rng, link=True), Context(seed), categories=one_kind) for seed in range(draws)]
    kept = [one for one in found if isinstance(one, Findings)]
    assert len(kept) == draws
    for one in kept:
        assert one["below"].mean == pytest.approx(0.95)
        assert one["below"].low <= 0.95 <= one["below"].high
        assert {bins.name: bins.correlation.sign for bins in one["bins"]} == {"entropy": 1, "update size": 1}
        assert one["positive"] is not None
        assert one["positive"].sign == 1
        assert one["negative"] is not None
        assert one["negative"].sign == -1
    gains = [one["positive"] for one in kept]
    assert sum(gain is not None and gain.low <= 0.01 <= gain.high for gain in gains) >= 0.9 * draws
    assert "increases with entropy" in kept[0].sentence
    assert "updates-bins" in kept[0].tables


@pytest.mark.parametrize("draws", DRAWS)
def test_updates_without_a_pattern(draws: int) -> None:
    rng = np.random.default_rng(10)
    found = [updates(token_table(rng), Context(seed), categories=parity) for seed in range(draws)]
    for get in (
        lambda one: one["bins"][0].correlation,
        lambda one: one["bins"][1].correlation,
        lambda one: one["positive"],
        lambda one: one["categories"][0].excess,
    ):
        assert sum(get(one).sign == 0 for one in found) >= 0.95 * draws


@pytest.mark.parametrize("draws", DRAWS)
def test_the_share_of_small_changes_is_in_its_interval(draws: int) -> None:
    """Where every step has its own share, around 0.9."""
    rng = np.random.default_rng(11)
    hits = 0
    for seed in range(draws):
        table = token_table(rng)
        rate = np.repeat(rng.beta(9, 1, 40), 8 * 20)
        table.tokens["logp_after"][:] = np.log(0.5 + np.where(rng.random(len(rate)) < rate, 0.001, 0.3))
        found = updates(table, Context(seed), categories=one_kind)
        assert isinstance(found, Findings)
        hits += found["below"].low <= 0.9 <= found["below"].high
    assert hits >= 0.9 * draws


def test_updates_of_the_plateau_alone() -> None:
    rng = np.random.default_rng(12)
    curve = 0.2 + 0.4 * np.minimum(np.arange(1, 41), 20) / 20 + noise(40, 0.02, rng)
    found = updates(token_table(rng, with_lines=lines(reward=curve)), Context())
    assert isinstance(found, Findings)
    assert found["plateau"]
    assert 15 < found["steps"][0] < 25
    assert found["steps"][1] == 40
    assert "On the plateau" in found.sentence


def test_categories_see_the_whole_answer() -> None:
    seen: list[list[str]] = []

    def kinds(texts: Any) -> list[str]:
        seen.append(list(texts))
        return ["formal" if text.strip().isdecimal() else "other" for text in texts]

    found = updates(token_table(np.random.default_rng(13)), Context(), categories=kinds)
    assert isinstance(found, Findings)
    assert {one.category for one in found["categories"]} == {"formal", "other"}
    assert {len(texts) for texts in seen} == {20}
    assert len(seen) == 320
    assert sum(one.tokens for one in found["categories"]) == 40 * 8 * 20
    weighted = sum(one.tokens * one.in_top.mean for one in found["categories"]) / found["tokens"]
    assert weighted == pytest.approx(0.2, abs=0.02)


def test_defects() -> None:
    data = rollouts(np.random.default_rng(14), steps=40)
    for step, columns in data.items():
        bad = round(8 * (0.5 - step / 80)) + step % 2
        columns["completion"] = ["no mark"] * bad + ["<answer>1</answer>"] * (8 - bad)
    found = defects(build_table("run", data), Context())
    assert not isinstance(found, Unavailable)
    by_name = {kind["name"]: kind for kind in found["kinds"]}
    assert by_name["format violations"]["shares"][0] == 5 / 8
    assert by_name["format violations"]["change"] is not None
    assert by_name["format violations"]["change"].sign == -1
    assert by_name["language mixing"]["change"] is None
    assert "Format violations fall" in found.sentence
    assert "no repetitive response" in found.sentence
    assert len(found.tables["defects-curve"].rows) == 40
    logged = lines(
        lens__quality_format_violations=[0.25] * 20 + [0.75] * 20,
        lens__quality_repetitive=[0.0] * 40,
        lens__quality_language_mixing=[0.0] * 40,
    )
    again = defects(build_table("run", data, lines=logged), Context())
    assert not isinstance(again, Unavailable)
    assert again["kinds"][0]["shares"][0] == 0.25


def without(table_rollouts: dict[int, dict[str, list[Any]]], *names: str) -> LensTable:
    return build_table("run", {s: {k: v for k, v in c.items() if k not in names} for s, c in table_rollouts.items()})


def test_what_is_missing_is_said() -> None:
    data = rollouts(np.random.default_rng(15))
    cases: list[tuple[Any, LensTable, str]] = [
        (updates, without(data, "logp_after"), "no record of 'logp_after'"),
        (fastest_drop, without(data, "entropy"), "no record of 'entropy'"),
        (fastest_drop, without(data, *("token_ids", "tokens", "entropy", "logp", "logp_after", "update_size")),
         "no token is recorded"),
        (words, build_table("run", {1: data[1]}), "at 1 steps"),
        (defects, build_table("run", {1: data[1]}), "of 1 steps"),
        (updates, build_table("run", {1: {k: v[:1] for k, v in data[1].items()}}), "20 tokens"),
        (defects, build_table("run", {}), "no rollouts"),
    ]  # fmt: skip
    for function, table, message in cases:
        try:
            found = function(table, Context())
            assert isinstance(found, Unavailable), function
            reason = found.reason
        except NotRecorded as error:
            reason = str(error)
        assert message in reason, (function, reason)


def test_equal_rewards_have_no_signs() -> None:
    data = rollouts(np.random.default_rng(16))
    for columns in data.values():
        columns["advantage"] = [0.0] * 8
    table = build_table("run", data)
    for function in (fastest_drop, sign_split):
        with_reason = function(table, Context()) if function is fastest_drop else None
        if with_reason is None:
            with pytest.raises(NotRecorded, match="rewards are equal"):
                function(table, Context())
        else:
            assert isinstance(with_reason, Unavailable)
            assert "rewards are equal" in with_reason.reason
    found = updates(table, Context())
    assert isinstance(found, Findings)
    assert found["positive"] is None
    assert found["negative"] is None
    assert found.sentence


def test_old_runs_have_texts_and_no_ids() -> None:
    data = rollouts(np.random.default_rng(17), fast_slope=-2.0)
    found = fastest_drop(without(data, "token_ids"), Context())
    whole = fastest_drop(build_table("run", data), Context())
    assert isinstance(found, Findings)
    assert isinstance(whole, Findings)
    assert set(found["texts"]) == set(whole["texts"])
