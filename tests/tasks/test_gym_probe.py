"""Data sets of reasoning-gym that can be won without solving anything are refused, and no others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from tools.docs.gym_table import ProbedDataset, kind_of_scorer, page, rows

from explorl.tasks import get_task
from explorl.tasks.gym import probe as gym_probe
from explorl.tasks.gym.probe import (
    ProbeFinding,
    canned_answers,
    find_weakness,
    is_same_answer,
    probe,
    probe_dataset,
    sample_entries,
    worst_finding,
)
from explorl.tasks.gym.worker import factory

PAGE = Path(__file__).parents[2] / "docs" / "gym.md"

BOUGHT = {
    "puzzle24": r"'6\+6\+6\+6' wins on",
    "complex_arithmetic": "'nan' wins on 16 of 16 problems",
    "game_of_life_halting": "'0' wins on 16 of 16 problems",
    "coin_flip": "'0' wins on 14 of 16 problems",
    "number_sorting": "the answer with nan for each number wins on 16 of 16 problems",
    "propositional_logic": r"a text of the question \(premises\) wins on 14 of 16 problems",
}


@pytest.mark.parametrize("name", BOUGHT)
def test_data_sets_that_can_be_bought(name: str) -> None:
    with pytest.raises(ValueError, match=rf"gym:{name} can be won .*{BOUGHT[name]}.*allow_exploitable=True"):
        get_task(f"gym:{name}")
    assert get_task(f"gym:{name}", allow_exploitable=True).name == f"gym:{name}"


@pytest.mark.parametrize(
    "name",
    [
        *("chain_sum", "leg_counting", "countdown", "knights_knaves", "n_queens", "graph_color", "shortest_path"),
        # One of two answers, or of few, is right: a constant is right by chance.
        *("syllogism", "circuit_logic", "isomorphic_strings", "course_schedule", "acre", "self_reference"),
        *("color_cube_rotation", "mahjong_puzzle", "ransom_note", "simple_equations"),
    ],
)
def test_data_sets_that_cannot(name: str) -> None:
    assert get_task(f"gym:{name}").name == f"gym:{name}"


def test_partial_credit_is_for_sale_too() -> None:
    with pytest.raises(
        ValueError, match=r"gym:graph_color can be won without solving anything: '\[\]' wins on 16 of 16"
    ):
        get_task("gym:graph_color", threshold=0.01)


def test_a_part_of_a_composite_that_can_be_bought() -> None:
    parts: list[dict[str, Any]] = [
        {"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "leg_counting", "coin_flip")
    ]
    with pytest.raises(ValueError, match="gym:coin_flip can be won without solving anything: '0' wins"):
        get_task("gym:composite", config={"datasets": parts})
    assert get_task("gym:composite", config={"datasets": parts[:2]}).name == "gym:composite"


def test_scorers_that_talk(capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    assert probe_dataset("tower_of_hanoi", {}) == probe_dataset("pool_matrix", {}) == []
    assert capsys.readouterr().out == ""
    assert list(recwarn) == []
    factory().DATASETS["tower_of_hanoi"][0]._validate_move(None, {}, "Move disk 1 from Peg 1 to Peg 4")
    assert "Error validating move" in capsys.readouterr().out


def test_options_count() -> None:
    finding = find_weakness("puzzle24", {"max_value": 5}, 1.0)
    assert finding is not None
    assert finding.answer == "'1*2*3*4'"


def test_a_data_set_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []

    def probe_dataset(name: str, config: dict[str, Any], threshold: float) -> list[ProbeFinding]:
        probed.append((name, config, threshold))
        return []

    monkeypatch.setattr(gym_probe, "probe_dataset", probe_dataset)
    gym_probe._weakness.cache_clear()
    for _ in range(2):
        get_task("gym:leg_counting", config={"max_animals": 3, "min_animals": 2})
        get_task("gym:leg_counting", config={"min_animals": 2, "max_animals": 3}, seed=1)
        get_task("gym:leg_counting", threshold=0.5)
    gym_probe._weakness.cache_clear()
    assert probed == [
        ("leg_counting", {"max_animals": 3, "min_animals": 2}, 1.0),
        ("leg_counting", {}, 0.5),
    ]


# The probe itself -----------------------------------------------------------------------------------------------------


def entries(golds: list[str | None], **metadata: Any) -> list[dict[str, Any]]:
    return [
        {"question": f"Is it so?\nCase {index}: yes or no?", "answer": gold, "metadata": metadata}
        for index, gold in enumerate(golds)
    ]


def exact(answer: str, entry: Any) -> float:
    return float(answer == entry["answer"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_prior_is_no_finding(share: float, thorough: bool) -> None:
    draw = random.Random(1)
    golds: list[str | None] = ["yes" if draw.random() < share else "no" for _ in range(16)]
    assert probe(exact, entries(golds), 1.0, thorough=thorough) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7])
def test_a_scorer_that_always_says_yes_to_yes(share: float) -> None:
    draw = random.Random(1)
    golds: list[str | None] = ["yes" if draw.random() < share else "no" for _ in range(16)]

    def score(answer: str, entry: Any) -> float:
        return float(answer in ("yes", entry["answer"]))

    result = worst_finding(probe(score, entries(golds), 1.0))
    assert result == ProbeFinding("'yes'", golds.count("no"), golds.count("no"))


def test_a_finding_is_most_of_the_problems() -> None:
    sample = entries([str(1000 + index) for index in range(16)])
    winning = set(range(8))

    def score(answer: str, entry: Any) -> float:
        return float(answer == "42" and int(entry["answer"]) - 1000 in winning)

    (finding,) = probe(score, sample, 1.0)
    assert finding == ProbeFinding("'42'", 8, 16)
    assert worst_finding([finding]) is None
    winning.add(8)
    (finding,) = probe(score, sample, 1.0)
    assert worst_finding([finding]) == ProbeFinding("'42'", 9, 16)
    assert str(finding) == "'42' wins on 9 of 16 problems that it does not answer"


def test_an_answer_that_loses_is_given_up() -> None:
    sample = entries([str(1000 + index) for index in range(16)])
    tried: list[str] = []

    def score(answer: str, entry: Any) -> float:
        tried.append(answer)
        return float(answer == "42" and int(entry["answer"]) > 1002)

    assert probe(score, sample, 1.0) == []
    assert tried.count("42") == 3
    assert worst_finding(probe(score, sample, 1.0, thorough=True)) == ProbeFinding("'42'", 13, 16)


def test_too_few_problems_tell_nothing() -> None:
    assert worst_finding(probe(lambda answer, entry: 1.0, entries(["7", "8"]), 1.0)) is None
    assert worst_finding(probe(lambda answer, entry: 1.0, entries(["7", "8", "9"]), 1.0)) is not None


def test_canned_answers() -> None:
    sample = entries(["[1, 2.5]", None, "yes"], numbers=[3, 4], target=7, words=["no?", "or"], solution="yes or no")
    answers = canned_answers(sample)
    assert answers["'0'"] == ["0"] * 3
    assert answers["the question"][1] == "Is it so?\nCase 1: yes or no?"
    assert answers["the last line of the question"][2] == "Case 2: yes or no?"
    assert answers["the answer to the next problem"] == [None, "yes", "[1, 2.5]"]
    assert answers["all answers of the sample"] == ["[1, 2.5] yes"] * 3
    assert answers["the answer with NaN for each number"] == ["[NaN, NaN]", None, None]
    assert answers["a text of the question (words)"] == ["no?"] * 3
    assert answers["the target and zero times the numbers"] == ["7e0 + 0e0*(3+4)"] * 3
    assert "a text of the question (solution)" not in answers
    assert "the integral itself" not in answers
    assert all(len(texts) == 3 for texts in answers.values())


def test_a_sample_that_takes_long_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("explorl.tasks.gym.probe.time.thread_time", lambda: now[0])

    def draw(index: int) -> dict[str, Any]:
        now[0] += 0.1
        return {"index": index}

    assert len(sample_entries(draw, seconds=0.55)) == 6
    assert len(sample_entries(draw, seconds=0.01)) == 3
    assert sample_entries(draw) == [{"index": index} for index in range(16)]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("Yes ", "yes"), ("0", "0.00"), ("1/2", "0.5"), ("0x10", "16"), ("1,000", "1000"), ("[1,2]", "[1, 2]")],
)
def test_answers_that_say_the_same(answer: str, gold: str) -> None:
    assert is_same_answer(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("yes", "no"),
        ("nan", "nan1"),
        ("nan", "3"),
        ("", "0"),
        ("0", None),
        ("0", "1/0"),
        ("[" * 9_999, "1"),
        ("1", "I"),
    ],
)
def test_answers_that_do_not(answer: str, gold: Any) -> None:
    assert not is_same_answer(answer, gold)


# The table ------------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    held = ProbedDataset("a", (ProbeFinding("'0'", 1, 16),), "text", 0.04)
    weak = ProbedDataset("b", (ProbeFinding("'|'", 2, 16),), "own", 1.0)
    refused = ProbedDataset("c", (ProbeFinding("'1'", 2, 2), ProbeFinding("'0'", 9, 16)), "eval", 2.0)
    text = page([held, weak, refused])
    assert "3 data sets: 1 are refused, 1 are weak, 1 held." in text
    assert text.endswith(
        "| a | held |  | text | 0.0 |\n"
        "| b | weak | '\\|': 2 of 16 | own | 1.0 |\n"
        "| c | **refused** | '0': 9 of 16 | eval | 2.0 |\n"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("leg_counting", "text"), ("puzzle24", "sympy"), ("n_queens", "eval"), ("propositional_logic", "own")],
)
def test_kinds_of_scorers(name: str, kind: str) -> None:
    assert kind_of_scorer(factory().DATASETS[name][0]) == kind


def written() -> dict[str, list[str]]:
    """The rows of the page, without their seconds."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    return {(cells := [cell.strip() for cell in line.split("|")])[1]: cells[1:-2] for line in lines}


def test_the_page_has_every_data_set() -> None:
    table = written()
    assert set(table) == set(factory().DATASETS) - {"composite"}
    assert {name for name, cells in table.items() if cells[1] == "**refused**"} == set(BOUGHT)


@pytest.mark.slow
def test_the_page_is_what_is_found() -> None:
    table = {row.name: list(row.cells) for row in rows()}
    assert table == written()
    for name, (_, verdict, *_rest) in table.items():
        assert (find_weakness(name, {}, 1.0) is not None) is (verdict == "**refused**"), name
