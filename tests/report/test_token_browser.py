"""The rollout browser's token measures and alternatives, in a real browser and in what it is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from explorl.analysis.categories import CATEGORIES
from explorl.analysis.impact import Continuation, Side, TokenImpact, newcombe
from explorl.analysis.lens_table import plain_values, read_run
from explorl.core.store import RunStore, write_json
from explorl.report.lens_rollouts import with_impacts
from explorl.report.study_page import write_report
from explorl.report.study_rollouts import compact, token_measures
from explorl.stats.distributions import fisher

from .test_browser import CONTRAST, HOSTILE, chromium, opened, pytestmark  # noqa: F401

WORDS = ["so", " 12", "+", " wait", " the", "\n", " 3", "=", " 15"]


def impact_at(position: int, answer: int = 0, text: str = " 3 = 15", p: float = 0.0123) -> TokenImpact:
    def side(token: str, right: int) -> Side:
        return Side(5, token, 0.5, tuple(Continuation(text if i else "", i < right, "stop") for i in range(12)))

    counts = (10, 12, 2, 12)
    return TokenImpact(answer, position, len(WORDS), 2, 1, 0.9, 1.5, ("entropy",), side("+", 10), side(HOSTILE, 2),
                       newcombe(*counts), fisher(*counts), p)  # fmt: skip


def shown(folder: Path, impacts: list[TokenImpact], *, hostile: bool = False) -> list[dict[str, Any]]:
    """The rollouts of a run whose tokens were replaced; two steps of four answers."""
    columns = columns_of(4, hostile)
    store = RunStore.create(folder, {})
    for step in (1, 2):
        store.write_rollouts(step, columns)
    write_impacts(store, impacts)
    answers = [{"tokens": columns["tokens"][0]}] * 4
    old = [{"arm": "run", "seed": 0, "step": 1, "prompt": columns["prompt"][0], "answers": answers}]
    return with_impacts(old, store.folder)


def write_impacts(store: RunStore, impacts: list[TokenImpact]) -> Path:
    path = store.folder / "analysis" / "analysis.json"
    write_json(path, {"analyses": {"impact": {"result": plain_values({"tokens": impacts})}}})
    return path


def columns_of(answers: int, hostile: bool = False) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    words = [HOSTILE, *WORDS[1:]] if hostile else WORDS
    size = len(words)
    numbers = {
        name: [rng.normal(size=size).tolist() for _ in range(answers)] for name in ("token_advantage", "update_size")
    }
    return {
        "prompt": ["3 12 = 15"] * answers, "completion": ["".join(words)] * answers,
        "token_ids": [[5] * size] * answers,
        "correct": [index % 2 == 0 for index in range(answers)], "reward/correctness": [1.0] * answers,
        "tokens": [words] * answers, "entropy": [rng.random(size).tolist() for _ in range(answers)],
        "logp": [[-0.5] * size for _ in range(answers)], "logp_after": [[-0.4] * size for _ in range(answers)],
        "other": [[*"abcdefgh", ""]] * answers, "other_logp": [[-1.5] * size] * answers, **numbers,
    }  # fmt: skip


def write(path: Path, rollouts: list[dict[str, Any]]) -> Path:
    write_report(path, {"title": "A run", "kind": "runs", "arms": [{"name": "run"}], "rollouts": rollouts})
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    impacts = [impact_at(2, answer=4), impact_at(7, answer=4, p=1e-9), impact_at(2, answer=5)]
    return write(folder / "tokens.html", shown(folder / "run", impacts))


# ---------------------------------------------------------------------------- what it is given
def test_every_measure_of_a_token_is_there(tmp_path):
    rollouts = compact(shown(tmp_path / "run", [impact_at(2, answer=4)]))
    answer = next(one for rollout in rollouts for one in rollout["answers"] if "impacts" in one)
    found = {measure.key: measure for measure in token_measures(rollouts)}
    assert list(found) == ["entropy", "logp", "advantage", "update_size", "delta_p", "impact", "category"]
    assert found["category"].names == CATEGORIES
    assert (found["impact"].low, found["impact"].high) == (-1.0, 1.0)
    assert answer["impact"] == [None, None, 0.667, *[None] * 6]
    assert answer["delta_p"] == pytest.approx(np.exp(-0.4) - np.exp(-0.5), abs=6e-4)
    assert answer["category"] == [1, 0, 0, 2, 3, 3, 0, 0, 0]
    assert answer["other"][:2] == ["a", "b"]
    side = answer["impacts"]["2"]["other"]
    assert (side["correct"], side["count"], len(side["texts"])) == (2, 12, 8)
    assert sum(right for _, right in side["texts"]) == 2  # both kinds are among those shown


# ---------------------------------------------------------------------------- in the browser
def test_shading_by_category_has_a_legend(opened):  # noqa: F811
    page = opened(hash="#arm=run&seed=0&step=2&prompt=0&by=category").page
    assert page.locator("#scale-names li").all_inner_texts() == list(CATEGORIES)
    assert not page.locator("#scale").is_visible()
    kinds = page.locator(".completion").first.locator(".token").evaluate_all("all => all.map(t => t.dataset.kind)")
    assert kinds == ["1", "0", "0", "2", "3", "3", "0", "0", "0"]
    looks = page.locator("#scale-names [data-kind]").evaluate_all(
        "all => all.map(s => [getComputedStyle(s).backgroundColor, getComputedStyle(s).textDecorationStyle,"
        " getComputedStyle(s).textDecorationLine])"
    )
    assert len({tuple(look) for look in looks}) == 4
    assert len({look[1] + look[2] for look in looks}) == 4  # told apart without colour
    page.locator(".token").nth(3).hover()
    assert "category metacognitive" in page.locator("#readout").inner_text()
    page.keyboard.press("1")
    page.check("input[value=entropy]")
    assert page.locator(".token[data-kind]").count() == 0
    assert page.locator("#scale").is_visible()
    assert not page.locator("#scale-names").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_categories_and_alternatives_can_be_read(opened, scheme):  # noqa: F811
    page = opened(hash="#arm=run&seed=0&step=2&prompt=0&by=category", color_scheme=scheme).page
    page.locator("#correct .token").nth(2).click()
    texts = ".token, #scale-names [data-kind], .alternative p, .alternative h4, .alternative code, .alternative li"
    ratios = page.evaluate(CONTRAST, texts)
    assert len(ratios) > 30
    assert min(ratios) >= 4.5
    assert min(page.evaluate(CONTRAST, ".alternative li b")) >= 3


def test_a_click_shows_the_alternative_and_both_continuations(opened):  # noqa: F811
    page = opened(hash="#arm=run&seed=0&step=2&prompt=0").page
    replaced = page.locator("#correct .completion").first.locator(".token").nth(2)
    replaced.click()
    panel = page.locator(".alternative")
    said = panel.inner_text()
    assert "Impact 0.667" in said
    assert "p 0.012 after correction" in said
    assert 'From "+": 10 of 12 correct' in said
    assert "2 of 12 correct" in said
    assert panel.locator("ul").count() == 2
    assert panel.locator("li.wrong").count() >= 6
    assert "and 4 more" in said
    assert "the completion ends here" in said
    page.locator("#wrong .token").first.click()  # another answer: one panel at a time
    assert panel.count() == 1
    assert 'best alternative "a", probability 0.223' in panel.inner_text()
    assert "Impact" not in panel.inner_text()
    page.locator("#wrong .token").first.click()
    assert panel.count() == 0
    page.locator("#correct .token").nth(7).click()
    assert "p below 0.001 after correction" in panel.inner_text()
    page.locator("#wrong .token").nth(8).click()
    assert "no alternative was recorded" in panel.inner_text()


def test_the_keyboard_opens_and_closes_it(opened):  # noqa: F811
    page = opened(hash="#arm=run&seed=0&step=2&prompt=0").page
    page.keyboard.press("j")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "Enter or a click" in page.locator("#readout").inner_text()
    page.keyboard.press("Enter")
    assert "Impact" in page.locator(".alternative").inner_text()
    page.keyboard.press("Enter")
    assert page.locator(".alternative").count() == 0
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator(".alternative").count() == 0
    page.keyboard.press("?")
    assert "best alternative" in page.locator("#help").inner_text()


@pytest.mark.parametrize("width", [400, 1200])
def test_the_panel_fits(opened, width):  # noqa: F811
    page = opened(hash="#arm=run&seed=0&step=2&prompt=0", width=width).page
    page.locator("#correct .token").nth(2).click()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    box, card = page.locator(".alternative").bounding_box(), page.locator("#correct .completion").first.bounding_box()
    assert box["x"] >= card["x"]
    assert box["x"] + box["width"] <= card["x"] + card["width"]


def test_hostile_tokens_alternatives_and_continuations_do_nothing(opened, tmp_path):  # noqa: F811
    rollouts = shown(tmp_path / "run", [impact_at(2, answer=4, text=HOSTILE), impact_at(2, answer=5)], hostile=True)[1:]
    for rollout in rollouts:
        for answer in rollout["answers"]:
            answer["other"] = [HOSTILE, "\u202e\x1b[31m", *answer["other"][2:]]
    path = write(tmp_path / "hostile.html", rollouts)
    text = path.read_text(encoding="utf-8")
    assert "\x1b" not in text
    assert "\u202e" not in text
    start = text.index("<meta http-equiv")  # without the policy, so that the escaping alone is tried
    path.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    page = opened(path, hash="#arm=run&seed=0&step=2&prompt=0&by=category").page
    for place in (0, 1, 2):
        page.locator("#correct .completion").first.locator(".token").nth(place).click()
        assert page.locator(".alternative").count() == 1
    assert HOSTILE in page.locator(".alternative li code").first.inner_text()
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0


def test_a_run_page_has_what_training_looked_at_closely(tmp_path):
    from explorl.analysis.study_answers import sampled_rollouts
    from explorl.core.store import write_parquet

    columns = {
        "prompt": ["p", "p"], "completion": ["ab", "cd"], "correct": [True, False], "tokens": [["a", "b"], ["c", "d"]],
        "logp": [[-1.0, -2.0], [-1.0, -1.0]], "logp_after": [[-0.5, None], None], "update_size": [[0.5, 2.0], None],
        "other": [["x", None], None], "other_logp": [[-1.5, None], None],
    }  # fmt: skip
    write_parquet(tmp_path / "rollouts" / "step-000001.parquet", columns)
    (rollout,) = sampled_rollouts({"run": tmp_path}, seed=0, limit=9, iterations={"run": 1})
    (small,) = compact([rollout])
    close, other = small["answers"]
    assert close["delta_p"] == [pytest.approx(np.exp(-0.5) - np.exp(-1.0), abs=6e-4), None]
    assert close["update_size"] == [0.5, 2]
    assert (close["other"], close["other_logp"]) == (["x", ""], [-1.5, None])
    assert "delta_p" not in other
    assert "other" not in other
    assert "category" in other


def test_a_run_page_has_the_impacts_that_were_written(tmp_path):
    store = RunStore.create(tmp_path / "run", {"training": {"iterations": 2}})
    ids = list(range(len(WORDS)))
    ids[2] = 5  # the token that was replaced
    columns = {"prompt": ["p", "p"], "completion": ["c"] * 2, "tokens": [WORDS, WORDS], "token_ids": [ids, ids]}
    store.write_rollouts(4, columns)
    old = [{"arm": "mine", "seed": 3, "step": 2, "prompt": "p", "answers": [{"tokens": WORDS}, {"tokens": ["z"]}]}]
    assert with_impacts(old, store.folder) == old
    tokens = [impact_at(2, answer=0), impact_at(2, answer=1), impact_at(1, answer=0), impact_at(2, answer=9)]
    path = write_impacts(store, tokens)
    (found,) = with_impacts(old, store.folder)
    assert [list(answer.get("impacts", {})) for answer in found["answers"]] == [[2], [], [2]]  # 1:… is another token
    assert found["answers"][0]["impacts"][2]["sampled"]["count"] == 12
    assert "impacts" not in old[0]["answers"][0]
    (alone,) = with_impacts([], store.folder)
    assert (alone["arm"], alone["step"], len(alone["answers"])) == ("run", 2, 2)
    assert len(read_run(store.folder).completions) == 2
    for damaged in ("{", "[]", json.dumps({"analyses": {"impact": {"result": {"tokens": [{"answer": 0}]}}}})):
        path.write_text(damaged, encoding="utf-8")
        assert with_impacts(old, store.folder) == old
