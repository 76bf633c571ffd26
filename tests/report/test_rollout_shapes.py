"""Calls, outputs and trees of branched answers: what the page is given, and what it draws in a real browser."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from explorl.report.rollout_shapes import blocks, lineage
from explorl.report.study_page import write_report
from explorl.report.study_rollouts import compact, token_measures

from .test_browser import CONTRAST, HOSTILE, chromium, opened, pytestmark  # noqa: F401

TOKENS = ["Let", " me", "\n", "```", "python\n", "6", "*7", "\n", "```", "\n```output\n", "42", "\n```\n", "So", " 42"]
CALLS = [{"source": "6*7", "status": "ok", "text": "42\n", "begin": 9, "end": 12, "seconds": 0.1}]


def answer(row: int, parent: int | None = None, shared: int | None = None, **changes: Any) -> dict[str, Any]:
    entropy = [None if 9 <= place < 12 else 0.1 * place for place in range(len(TOKENS))]
    found = {"tokens": list(TOKENS), "recorded": True, "entropy": entropy, "correct": row % 2 == 0, "reward": 1.0}
    found |= {"row": row, "parent": parent, "forked_at": shared, "calls": copy.deepcopy(CALLS)}
    return found | changes


def answers() -> list[dict[str, Any]]:
    """Two beginnings; the first has two branches, one of which branches again; the parent of the last is not there."""
    return [answer(0), answer(1), answer(2, 0, 12), answer(3, 0, 3), answer(4, 2, 13), answer(5, 99, 2)]


def write(path: Path, given: list[dict[str, Any]]) -> Path:
    rollout = {"arm": "run", "seed": 0, "step": 1, "prompt": "6 * 7", "answers": given}
    write_report(path, {"title": "A run", "kind": "runs", "arms": [{"name": "run"}], "rollouts": [rollout]})
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shapes") / "report.html", answers())


# What the page is given


def test_a_call_and_its_output_are_blocks() -> None:
    assert blocks(TOKENS, CALLS) == [(5, 9, "call", "call"), (9, 12, "output", "output")]
    twice = [*CALLS, {**CALLS[0], "status": "error", "begin": 13, "end": 14, "source": "So"}]
    assert blocks(TOKENS, twice)[2:] == [(12, 13, "call", "call"), (13, 14, "output", "output: error")]


@pytest.mark.parametrize(
    "wrong",
    [
        None, 5, "text", [None], [5], [{}], [{"begin": 9}], [{"begin": "9", "end": 12}], [{"begin": 12, "end": 9}],
        [{"begin": 9, "end": 99}], [{"begin": -1, "end": 3}], [{"begin": float("nan"), "end": 3}],
        [{"begin": 9.5, "end": 12}], [{"begin": True, "end": 3}], [{"begin": 0, "end": float("inf")}],
    ],
)  # fmt: skip
def test_calls_that_cannot_be_are_left_out(wrong: Any) -> None:
    assert blocks(TOKENS, wrong) == []


def test_blocks_neither_overlap_nor_go_back() -> None:
    calls = [*CALLS, {**CALLS[0], "begin": 10, "end": 13}, {**CALLS[0], "begin": 2, "end": 4}]
    assert blocks(TOKENS, calls) == blocks(TOKENS, CALLS)
    assert blocks(TOKENS, [{**CALLS[0], "source": "not there"}]) == [(9, 12, "output", "output")]
    assert blocks([], CALLS) == []


def test_where_an_answer_comes_from() -> None:
    assert lineage(answer(2, 0, 12), 14) == {"row": 2, "parent": 0, "forked_at": 12}
    assert lineage(answer(2), 14) == {"row": 2}
    assert lineage(answer(2, 2, 3), 14) == {"row": 2}
    assert lineage(answer(2, 0, 15), 14) == {"row": 2}
    assert lineage(answer(2, 0, 0), 14) == {"row": 2}
    assert lineage({"parent": 1, "forked_at": 2}, 14) == {}
    assert lineage({"row": "0", "parent": HOSTILE, "forked_at": 2}, 14) == {}


def test_none_of_it_is_a_measure() -> None:
    rollout = {"arm": "run", "seed": 0, "step": 1, "prompt": "x", "answers": answers()}
    (small,) = compact([rollout])
    assert {measure.key for measure in token_measures([small])} <= {"entropy", "category"}
    assert small["answers"][0]["blocks"] == [(5, 9, "call", "call"), (9, 12, "output", "output")]
    assert "calls" not in small["answers"][0]
    assert "blocks" not in compact([rollout | {"answers": [answer(0, calls=None)]}])[0]["answers"][0]


def test_a_run_s_files_say_it(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from explorl.analysis.study_answers import sampled_rollouts

    (tmp_path / "rollouts").mkdir()
    columns = {
        "prompt": ["other", "6 * 7", "6 * 7"], "completion": ["x", "own", "own"], "transcript": ["x", "all", "all"],
        "tokens": [None, TOKENS, TOKENS], "calls": [[], CALLS, CALLS], "reward/correctness": [0.0, 1.0, 0.0],
        "parent": [None, None, 1], "forked_at": [None, None, 12],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "rollouts" / "step-00001.parquet")
    (rollout,) = sampled_rollouts({"run": tmp_path}, seed=0, limit=100, iterations={"run": 1})
    (small,) = compact([rollout])
    assert [(a["row"], a.get("parent"), a.get("forked_at")) for a in small["answers"]] == [(1, None, None), (2, 1, 12)]
    assert [kind for _, _, kind, _ in small["answers"][1]["blocks"]] == ["call", "output"]


# What it draws


def test_calls_and_outputs_are_drawn_as_blocks(opened):  # noqa: F811
    page = opened().page
    box = page.locator(".completion").first
    assert box.locator(".block.call").inner_text().startswith("call\n6*7")
    assert "42" in box.locator(".block.output").inner_text()
    assert box.locator(".token").count() == len(TOKENS)
    places = box.locator(".token").evaluate_all("all => all.map(t => t.position)")
    assert places == list(range(len(TOKENS)))
    box.focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert "token 10 of 14" in page.locator("#readout").inner_text()
    assert "entropy not recorded" in page.locator("#readout").inner_text()


def test_the_tree_is_drawn_and_leads_to_its_answers(opened):  # noqa: F811
    page = opened().page
    assert page.locator("#tree").is_visible()
    labels = page.locator(".branch").evaluate_all("all => all.map(g => g.getAttribute('aria-label'))")
    assert labels == [
        "Completion 1, correct",
        "Completion 3, correct, branches off completion 1 after 12 tokens",
        "Completion 5, correct, branches off completion 3 after 13 tokens",
        "Completion 4, wrong, branches off completion 1 after 3 tokens",
        "Completion 2, wrong",
        "Completion 6, wrong, branches off a completion that is not shown after 2 tokens",
    ]
    caption = page.locator("#tree-caption").inner_text()
    assert caption.startswith(
        "4 of 6 completions branch off another one, at the dots; 30 of their 84 tokens were not sampled"
    )
    assert page.locator(".branch circle").count() == 3
    page.locator(".branch text").nth(3).click()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Completion 4, wrong"
    page.locator(".branch").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Completion 3, correct"
    shared = page.locator(".completion:focus .token").evaluate_all(
        "all => all.filter(t => t.matches('.shared')).length"
    )
    assert shared == 12


def test_answers_without_branches_have_no_tree(opened, tmp_path):  # noqa: F811
    page = opened(write(tmp_path / "plain.html", [answer(0), answer(1), answer(2) | {"row": None}])).page
    assert not page.locator("#tree").is_visible()
    assert page.locator(".completion").count() == 3


@pytest.mark.parametrize(
    "given",
    [
        [answer(0, 1, 2), answer(1, 0, 2)],  # each branches off the other
        [answer(0, 2, 2), answer(1, 0, 2), answer(2, 1, 2)],
        [answer(0), answer(0, 1, 2), answer(1, 0, 3), answer(2, 0, 2) | {"row": None}],
    ],
)
def test_a_tree_that_cannot_be_breaks_nothing(opened, tmp_path, given):  # noqa: F811
    page = opened(write(tmp_path / "strange.html", given)).page
    assert page.locator(".branch").count() == len(given)
    assert page.locator(".completion").count() == len(given)


def test_hostile_calls_are_shown_and_do_nothing(opened, tmp_path):  # noqa: F811
    tokens = [HOSTILE, "6*7", HOSTILE, HOSTILE]
    calls = [{"source": "6*7", "status": HOSTILE, "text": HOSTILE, "begin": 2, "end": 3}]
    given = [answer(0, tokens=tokens, entropy=[0.1] * 4, calls=calls)]
    given.append(answer(1, 0, 3, tokens=tokens, entropy=[0.1] * 4, calls=calls, finish=HOSTILE))
    given.append(answer(2, HOSTILE, HOSTILE, calls=HOSTILE))  # type: ignore[arg-type]
    path = write(tmp_path / "hostile.html", given)
    text = path.read_text(encoding="utf-8")
    start = text.index("<meta http-equiv")  # so that the escaping alone is tried
    path.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    page = opened(path).page
    assert page.evaluate("window.hit") is None
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator(".block.output").first.inner_text()
    assert page.locator(".branch").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_width(opened, scheme):  # noqa: F811
    page = opened(color_scheme=scheme, width=400).page
    assert min(page.evaluate(CONTRAST, "#tree text, .block-label, #tree-caption, .completion header")) >= 4.5
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 400
