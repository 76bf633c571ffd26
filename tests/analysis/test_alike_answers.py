"""Answers to one prompt are alike: an interval that counts them one by one would be too narrow."""

from __future__ import annotations

from typing import Any

import numpy as np

from explorl.analysis.category_counts import category_counts
from explorl.analysis.instances import instances
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import Answers, LensTable, Tokens, table_of
from explorl.analysis.positions import positions
from explorl.analysis.token_types import TokenTypes

STEPS, GROUPS, EACH, DRAWS = 20, 2, 8, 40


def grouped(rng: np.random.Generator) -> LensTable:
    """Answers whose length, late entropy and size of changes are their prompt's; no step differs from another."""
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
        Answers(step, texts, [""] * len(step), start, length, {}, [None] * len(step)),
        Tokens(answer, position, length[answer], step[answer], columns),
    )


def test_a_run_in_which_nothing_changes_is_told_as_one() -> None:
    found, covered, ends = 0, 0, 0
    for seed in range(DRAWS):
        table = grouped(np.random.default_rng(seed))
        counts = category_counts(table, Context(seed=seed))
        found += bool(counts.length.change.found)
        covered += counts.length.all.low <= 31 <= counts.length.all.high
        profile = positions(table, Context(seed=seed))
        ends += bool(profile.end_minus_middle.found)
        assert profile.answers == counts.answers == len(table.answers)
    assert found <= 2
    assert ends <= 2
    assert covered >= 34


def test_which_answers_are_drawn_together() -> None:
    def steps(prompts: list[str]) -> dict[int, dict[str, Any]]:
        return {step: {"prompt": prompts, "completion": ["a"] * len(prompts)} for step in (1, 2, 3, 4, 5)}

    many = [f"p{place // 2}" for place in range(20)]
    assert table_of("run", steps(many)).answers.together.tolist() == [place // 2 for place in range(20)] * 5
    few = table_of("run", steps(["p", "p", "q"])).answers.together
    assert few.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9]
    assert table_of("run", {1: steps(["p", "p", "q"])[1]}).answers.together.tolist() == [0, 1, 2]


def test_shifts_are_drawn_by_prompt() -> None:
    rng = np.random.default_rng(0)
    table = grouped(rng)
    tokens = table.tokens
    scale = rng.exponential(0.05, STEPS * GROUPS)[np.arange(len(table.answers)) // EACH][tokens.answer]
    logp = np.log(rng.uniform(0.3, 0.6, len(tokens)))
    after = np.log(np.exp(logp) + np.minimum(scale, 0.3))
    moved = Tokens(tokens.answer, tokens.position, tokens.length, tokens.step, {"logp": logp, "logp_after": after})
    by_prompt = instances(LensTable("run", table.answers, moved), Context())
    own = [f"own {place}" for place in range(len(table.answers))]
    answers = table.answers
    alone = instances(
        LensTable("run", Answers(answers.step, own, own, answers.start, answers.count, {}, answers.prompt_ids), moved),
        Context(),
    )
    width = by_prompt.shift_low.high - by_prompt.shift_low.low
    assert width > 1.3 * (alone.shift_low.high - alone.shift_low.low)
    assert by_prompt.answers == alone.answers == len(answers)


def test_a_very_long_token_costs_no_memory() -> None:
    """A run of a version without token ids: their texts are what tells types apart."""
    words = ["a", "b", "c", "d", "e", "long " * 20_000]
    columns = {
        step: {"prompt": ["p"] * 5, "completion": [""] * 5, "tokens": [words * 5] * 5, "entropy": [[0.5] * 30] * 5}
        for step in range(1, 17)
    }
    types = TokenTypes(table_of("run", columns), np.inf)
    assert types.texts.tolist() == words
