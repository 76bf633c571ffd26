"""Completions to one prompt are alike: an interval that counts them one by one would be too narrow."""

from __future__ import annotations

from typing import Any

import numpy as np

from explorl.analysis.category_counts import category_counts
from explorl.analysis.impact import PAIRS, RULES
from explorl.analysis.impact import group_impacts as impact_groups
from explorl.analysis.instances import instances
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import Completions, LensTable, Tokens, build_table
from explorl.analysis.positions import positions
from explorl.analysis.probability_shift import updates
from explorl.analysis.token_types import TokenTypes
from tests.analysis.test_impact import made

STEPS, GROUPS, EACH, DRAWS = 20, 2, 8, 40


def grouped(rng: np.random.Generator) -> LensTable:
    """Completions whose length, late entropy and size of changes are their prompt's; no step differs from another."""
    prompts = STEPS * GROUPS
    prompt = np.repeat(np.arange(prompts), EACH)
    length = rng.integers(10, 50, prompts)[prompt] + rng.integers(0, 4, len(prompt))
    level = rng.normal(0, 0.3, prompts)[prompt]
    start = np.cumsum(length) - length
    answer = np.repeat(np.arange(len(prompt)), length)
    position = np.arange(length.sum()) - start[answer]
    late = position >= 0.8 * length[answer]
    columns: dict[str, Any] = {
        "tokens": np.full(len(answer), "and", dtype=object),
        "entropy": 1 + np.where(late, level[answer], 0.0) + 0.1 * rng.standard_normal(len(answer)),
    }
    step = np.repeat(np.arange(1, STEPS + 1), GROUPS * EACH)
    texts = [f"prompt {one}" for one in prompt]
    return LensTable(
        "run",
        Completions(step, texts, [""] * len(step), start, length, {}, [None] * len(step)),
        Tokens(answer, position, length[answer], step[answer], columns),
    )


def test_a_run_in_which_nothing_changes_is_told_as_one() -> None:
    found, covered, ends = 0, 0, 0
    for seed in range(DRAWS):
        table = grouped(np.random.default_rng(seed))
        counts = category_counts(table, Context(seed=seed))
        found += bool(counts["length"].change.sign)
        covered += counts["length"].all.low <= 31 <= counts["length"].all.high
        profile = positions(table, Context(seed=seed))
        ends += bool(profile["end_minus_middle"].sign)
        assert profile["answers"] == counts["answers"] == len(table.completions)
    assert found <= 2
    assert ends <= 2
    assert covered >= 34


def test_which_answers_are_drawn_together() -> None:
    def steps(prompts: list[str]) -> dict[int, dict[str, Any]]:
        return {step: {"prompt": prompts, "completion": ["a"] * len(prompts)} for step in (1, 2, 3, 4, 5)}

    many = [f"p{place // 2}" for place in range(20)]
    assert build_table("run", steps(many)).completions.cluster.tolist() == [place // 2 for place in range(20)] * 5
    few = build_table("run", steps(["p", "p", "q"])).completions.cluster
    assert few.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9]
    assert build_table("run", {1: steps(["p", "p", "q"])[1]}).completions.cluster.tolist() == [0, 1, 2]


def test_shifts_are_drawn_by_prompt() -> None:
    rng = np.random.default_rng(0)
    table = grouped(rng)
    tokens = table.tokens
    scale = rng.exponential(0.05, STEPS * GROUPS)[np.arange(len(table.completions)) // EACH][tokens.completion]
    logp = np.log(rng.uniform(0.3, 0.6, len(tokens)))
    after = np.log(np.exp(logp) + np.minimum(scale, 0.3))
    moved = Tokens(tokens.completion, tokens.position, tokens.length, tokens.step, {"logp": logp, "logp_after": after})
    by_prompt = instances(LensTable("run", table.completions, moved), Context())
    own = [f"own {place}" for place in range(len(table.completions))]
    answers = table.completions
    alone = instances(
        LensTable(
            "run", Completions(answers.step, own, own, answers.start, answers.count, {}, answers.prompt_ids), moved
        ),
        Context(),
    )
    width = by_prompt["shift_low"].high - by_prompt["shift_low"].low
    assert width > 1.3 * (alone["shift_low"].high - alone["shift_low"].low)
    assert by_prompt["answers"] == alone["answers"] == len(answers)


def test_a_very_long_token_costs_no_memory() -> None:
    """A run of a version without token ids: their texts are what tells types apart."""
    words = ["a", "b", "c", "d", "e", "long " * 20_000]
    columns = {
        step: {"prompt": ["p"] * 5, "completion": [""] * 5, "tokens": [words * 5] * 5, "entropy": [[0.5] * 30] * 5}
        for step in range(1, 17)
    }
    types = TokenTypes(build_table("run", columns), np.inf)
    assert types.texts.tolist() == words


def test_impacts_are_drawn_by_prompt() -> None:
    """Prompts differ in whether late tokens matter, as often one way as the other; on the whole they do not."""
    counts = []
    for seed in range(DRAWS // 2):
        rng = np.random.default_rng(seed)
        of = np.repeat(np.arange(12), EACH)
        level = rng.choice([2, 5, 8], 12)
        tokens = [
            one
            for answer, prompt in enumerate(of)
            for one in (made(answer, 5, 5, ("first",)), made(answer, int(level[prompt]), 5, ("last",)))
        ]
        _, (apart,) = impact_groups(tokens, RULES, PAIRS, seed=seed)
        _, (by_prompt,) = impact_groups(tokens, RULES, PAIRS, clusters=of, seed=seed)
        counts.append((bool(apart.mean.sign), bool(by_prompt.mean.sign)))
    apart, by_prompt = np.sum(counts, axis=0)
    assert apart > 5  # what is wrong with drawing answers apart
    assert by_prompt <= 1


def test_neighbouring_steps_are_drawn_together() -> None:
    """Δp of a step wanders around 0, as the policy does: over the whole run, tokens neither gain nor lose."""
    found = 0
    for seed in range(DRAWS):
        rng = np.random.default_rng(seed)
        steps, each = 100, 30
        wander = np.zeros(steps)
        for step in range(1, steps):
            wander[step] = 0.8 * wander[step - 1] + rng.normal(0, 0.01)
        step = np.repeat(np.arange(1, steps + 1), each)
        logp = np.log(rng.uniform(0.3, 0.6, len(step)))
        after = np.log(np.exp(logp) + np.repeat(wander, each) + rng.normal(0, 0.01, len(step)))
        answers = Completions(
            np.arange(1, steps + 1), [f"p{one}" for one in range(steps)], [""] * steps,
            each * np.arange(steps), np.full(steps, each), {"correct": np.ones(steps)}, [None] * steps,
        )  # fmt: skip
        tokens = Tokens(
            step - 1, np.tile(np.arange(each), steps), np.full(len(step), each), step,
            {"logp": logp, "logp_after": after},
        )  # fmt: skip
        result = updates(LensTable("run", answers, tokens), Context(seed=seed))
        found += bool(result["positive"].sign)
    assert found <= 2
