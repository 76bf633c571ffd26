"""Filters and selectors of rejection-sampling fine-tuning, on pools whose answers are known."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.core.config import load_config, read_yaml
from explorl.tasks import Problem, Task, Verdict, get_task
from explorl.training.rft import filters, selectors
from explorl.training.rft.answer_spans import answer_mark, first_answer_end
from explorl.training.rft.registry import build_filters, build_selector
from explorl.training.rft.samples import Sample, from_columns, to_columns
from explorl.training.rft.selectors import select

WHOLE = "3+4=7 <answer>7</answer> and <answer>8</answer>"
CUT = Sample("a", 0, WHOLE[:24], False, "7", tokens=5, entropy=0.5, branching=1.0, answer_end=24)
POOL = [
    Sample("a", 0, WHOLE, True, "8", tokens=9, entropy=0.9, branching=2.0, finished=False, answer_end=24, cut=CUT),
    Sample("a", 1, "<answer>8</answer>", True, "8", tokens=3, entropy=0.1, branching=1.2, answer_end=18),
    Sample("a", 2, " <answer>8</answer>\n", True, "8", tokens=4, entropy=0.2, branching=1.1, answer_end=19),
    Sample("b", 0, "no idea", False, None, tokens=2, entropy=0.8, branching=3.0, finished=False),
    Sample("b", 1, "so " * 9 + "<answer>9</answer>", False, "9", tokens=20, entropy=0.3, branching=1.5, answer_end=45),
    Sample("b", 2, "<answer>six</answer>", True, "6", tokens=3, entropy=0.4, branching=1.3, answer_end=20),
]


def keys(samples: Any) -> list[tuple[str, int]]:
    return [sample.key for sample in samples]


@pytest.mark.parametrize(
    ("spec", "dropped"),
    [
        ("has_answer", [("b", 0)]),
        ("has_digit", [("b", 0), ("b", 2)]),
        ("cut_after_answer", []),
        ("max_redundancy", [("b", 1)]),
        ({"max_redundancy": 0.95}, []),
        ({"max_length": {"tokens": 4}}, [("a", 0), ("b", 1)]),
        ("finished", [("a", 0), ("b", 0)]),
        ("dedupe", [("a", 2)]),
    ],
)
def test_each_filter_on_a_pool_with_known_answers(spec: Any, dropped: list[tuple[str, int]]) -> None:
    kept, (done,) = filters.apply_filters(build_filters([spec]), POOL)
    assert keys(done.dropped) == dropped
    assert keys(kept) == [key for key in keys(POOL) if key not in dropped]
    assert done.before == len(POOL)


def test_cutting_judges_the_first_answer_and_averages_over_what_is_left() -> None:
    kept, passes = filters.apply_filters(build_filters(["cut_after_answer", {"max_length": 5}, "finished"]), POOL)
    assert kept[0] == CUT
    assert not kept[0].correct, "its first answer is wrong"
    assert (passes[0].changed, len(passes[0].dropped)) == (1, 0)
    assert keys(passes[1].dropped) == [("b", 1)], "the length is that of the response as it was cut"
    assert keys(passes[2].dropped) == [("b", 0)], "a response that was cut has an end"


def test_filters_compose_and_each_is_counted() -> None:
    kept, passes = filters.apply_filters(build_filters(["has_answer", "has_digit", "max_redundancy", "dedupe"]), POOL)
    assert {one.name: len(one.dropped) for one in passes} == {
        "has_answer": 1, "has_digit": 1, "max_redundancy": 1, "dedupe": 1,
    }  # fmt: skip
    assert [one.dropped_correct for one in passes] == [0, 1, 0, 1]
    assert keys(kept) == [("a", 0), ("a", 1)]


def test_the_redundancy_is_that_of_trigrams() -> None:
    # NumPy's count of distinct 3-grams: "x y z x y z x" has five, three of them distinct
    words = np.array(["x", "y", "z", "x", "y", "z", "x"])
    grams = np.stack([words[:-2], words[1:-1], words[2:]], axis=1)
    share = 1 - len(np.unique(grams, axis=0)) / len(grams)
    pool = [Sample("p", 0, " ".join(words), True)]
    assert share == pytest.approx(0.4)
    assert filters.max_redundancy(pool, limit=share) == pool
    assert filters.max_redundancy(pool, limit=share - 1e-9) == []


@pytest.mark.parametrize(
    ("text", "mark", "end"),
    [
        ("a <answer>1</answer> b", "<answer>", 20),
        ("<answer></answer><answer>1</answer>", "<answer>", 35),
        ("<answer><answer>1</answer>", "<answer>", 26),
        ("<answer>1", "<answer>", None),
        ("</answer> none", "<answer>", None),
        (r"so \boxed{\frac{1}{2}}. Again \boxed{3}", r"\boxed{", 22),
        (r"so \boxed{} and \boxed{4}", r"\boxed{", 25),
        (r"so \boxed 5 and", r"\boxed{", 11),
        (r"open \boxed{3", r"\boxed{", None),
        ("work\n#### 42\nmore", "####", 12),
        ("work\n####\n#### 7", "####", 16),
        ("Answer: B. Next", "Answer:", 15),
        ("", "<answer>", None),
    ],
)
def test_the_first_answer_ends(text: str, mark: str, end: int | None) -> None:
    assert first_answer_end(text, mark) == end


def test_a_text_of_a_million_marks_takes_no_longer_than_a_few_passes() -> None:
    # quadratic time would be 10^12 steps: the test's own time limit tells
    assert first_answer_end("<answer>" * 200_000 + "</answer>", "<answer>") is None
    assert first_answer_end("####\n" * 200_000, "####") is None


class Bare(Task):
    """A task that says nothing about how an answer is marked."""

    def problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        return [Problem("1", {})]

    def prompt(self, problem: Problem, template: str | None = None) -> str:
        return "What is 1 + 1?"

    def verify(self, completion: str | bytes, problem: Problem, *, opened: bool = False) -> Verdict:
        return Verdict("2" in str(completion))


def test_the_mark_is_the_tasks_own_or_what_its_prompt_asks_for() -> None:
    mini = get_task("countdown-mini")
    assert answer_mark(mini, mini.prompt(mini.problems("train", limit=1)[0], "terse")) == "<answer>"
    assert answer_mark(Bare(), "What is 1 + 1?") is None
    assert answer_mark(Bare(), r"Put it into \boxed{}.") == r"\boxed{"
    assert answer_mark(Bare(), [{"role": "user", "content": "End with #### 4"}]) == "####"
    own = Bare()
    own.answer_mark = "Answer:"  # type: ignore[attr-defined]
    assert answer_mark(own, r"Put it into \boxed{}.") == "Answer:"


def test_a_pool_comes_back_from_its_columns() -> None:
    assert from_columns(to_columns(POOL)) == POOL


# ---------------------------------------------------------------------------- selectors
def pick(name: str, **options: Any) -> list[tuple[str, int]]:
    return keys(select(POOL, build_selector(name)[1], **{"budget": 2, **options}).samples)


def test_each_selector_on_a_pool_with_known_answers() -> None:
    assert pick("entropy") == [("a", 0), ("b", 2)]
    assert pick("branching") == [("a", 0), ("b", 2)]
    assert pick("branching", budget=3) == [("a", 0), ("b", 2), ("a", 1)]
    assert set(pick("shortest")) == {("a", 1), ("b", 2)}
    assert {problem for problem, _ in pick("diverse")} == {"a", "b"}
    assert len(set(pick("random", budget=9))) == 4, "the right ones, and no more"


def test_diverse_takes_every_problem_and_every_answer_before_any_comes_again() -> None:
    pool = [Sample(problem, place, "t", True, answer) for problem in "abc" for place, answer in enumerate("xxxyz")]
    for seed in range(5):
        for budget in (3, 6, 9):
            chosen = select(pool, selectors.diverse, budget=budget, seed=seed).samples
            assert set(Counter(sample.problem for sample in chosen).values()) == {budget // 3}
            assert len({(sample.problem, sample.answer) for sample in chosen}) == budget


def test_answers_that_are_all_equal_are_selected_all_the_same() -> None:
    pool = [Sample("p", place, "2", True, "2", entropy=0.0, branching=1.0) for place in range(6)]
    for name in selectors.SELECTORS:
        assert len(select(pool, build_selector(name)[1], budget=4, per_prompt=3).samples) == 3


def test_equal_scores_are_drawn_not_taken_in_the_pools_order() -> None:
    pool = [Sample(f"p{place}", 0, "2", True, entropy=0.5) for place in range(40)]
    drawn = {tuple(keys(select(pool, selectors.entropy, budget=4, seed=seed).samples)) for seed in range(6)}
    assert len(drawn) > 1


def test_records_that_are_missing_are_said() -> None:
    with pytest.raises(ValueError, match=r"selector is entropy, which model.generate does not record.*random"):
        select([Sample("p", 0, "2", True)], selectors.entropy, budget=1)


pools = st.lists(
    st.tuples(st.integers(0, 5), st.booleans(), st.floats(0, 3), st.sampled_from("xyz")), min_size=0, max_size=60
).map(
    lambda rows: [
        Sample(f"p{problem}", place, "text", correct, answer, tokens=place, entropy=score, branching=1 + score)
        for place, (problem, correct, score, answer) in enumerate(rows)
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    pool=pools,
    name=st.sampled_from(list(selectors.SELECTORS)),
    budget=st.integers(1, 40),
    cap=st.none() | st.integers(1, 12),
    noise=st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9]),
    seed=st.integers(0, 2**32),
)
def test_budget_caps_and_noise_hold_for_any_pool(
    pool: list[Sample], name: str, budget: int, cap: int | None, noise: float, seed: int
) -> None:
    selector = build_selector(name)[1]
    found = select(pool, selector, budget=budget, per_prompt=cap, noise=noise, seed=seed)
    chosen = found.samples
    assert len(chosen) <= budget
    assert len(set(keys(chosen))) == len(chosen)
    assert set(chosen) <= set(pool)
    counts = Counter(sample.problem for sample in chosen)
    assert cap is None or max(counts.values(), default=0) <= cap

    share = noise * len(chosen)
    assert found.noise <= share + 1
    room = [
        sample for sample in pool
        if not sample.correct and sample not in chosen and (cap is None or counts[sample.problem] < cap)
    ]  # fmt: skip
    takeable = {sample.problem for sample in chosen if sample.correct} | {sample.problem for sample in room}
    if any(not sample.correct and sample not in chosen and sample.problem in takeable for sample in pool):
        assert found.noise >= share - 1, "there were more wrong ones to take, if need be in place of right ones"
    if any(sample.correct for sample in pool):
        assert any(sample.correct for sample in chosen), "wrong ones are never learnt alone"
    for kind in (True, False):
        scores = [score for sample, score in zip(chosen, found.scores, strict=True) if sample.correct is kind]
        assert scores == sorted(scores, reverse=True)
    right = [
        sample for sample in pool
        if sample.correct and sample not in chosen and (cap is None or counts[sample.problem] < cap)
    ]  # fmt: skip
    if right:
        assert len(chosen) == budget, "there were more right ones to take"
    again = select(pool, selector, budget=budget, per_prompt=cap, noise=noise, seed=seed)
    assert again == found, "the same seed selects the same set"


@pytest.mark.parametrize(("share", "wrong"), [(0.05, 5), (0.1, 10), (0.0, 0)])
def test_the_share_of_noise_is_of_the_selected_set(share: float, wrong: int) -> None:
    pool = [Sample(f"p{place}", 0, "t", place % 2 == 0) for place in range(1000)]
    found = select(pool, selectors.random, budget=100, noise=share)
    assert (len(found.samples), found.noise, found.wanted_noise) == (100, wrong, wrong)


def test_noise_is_what_there_is_and_right_ones_take_the_place_of_what_is_not() -> None:
    pool = [Sample(f"p{place}", 0, "t", place > 0) for place in range(50)]
    found = select(pool, selectors.random, budget=20, noise=0.5)
    assert (len(found.samples), found.noise, found.wanted_noise) == (20, 1, 10)


def test_caps_that_right_ones_fill_leave_room_for_noise() -> None:
    pool = [Sample(f"p{problem}", place, "t", place < 4) for problem in range(10) for place in range(8)]
    found = select(pool, selectors.random, budget=100, per_prompt=4, noise=0.2)
    assert (len(found.samples), found.noise, found.wanted_noise) == (40, 8, 8)
    assert set(Counter(sample.problem for sample in found.samples).values()) == {4}


def test_a_budget_of_one_is_a_right_response() -> None:
    pool = [Sample("p", 0, "t", False), Sample("p", 1, "t", True)]
    assert keys(select(pool, selectors.random, budget=1, noise=0.9).samples) == [("p", 1)]


# ---------------------------------------------------------------------------- names and import paths
@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rules.py").write_text(
        "from explorl.training.rft.filters import rft_filter\n"
        "from explorl.training.rft.selectors import rft_selector\n"
        "def plain(samples, rng):\n    return [1.0 for _ in samples]\n"
        "@rft_filter\n"
        "def polite(samples, *, word='please'):\n"
        "    return [sample for sample in samples if word in sample.text]\n"
        "@rft_selector\n"
        "def longest(samples, rng):\n"
        "    return [sample.tokens for sample in samples]\n"
        "@rft_filter\n"
        "def twice(samples):\n    return [*samples, *samples]\n"
        "@rft_filter\n"
        "def nothing(samples):\n    return None\n"
        "@rft_selector\n"
        "def short(samples, rng):\n    return [1.0]\n"
        "@rft_selector\n"
        "def endless(samples, rng):\n    return [float('inf')] * len(samples)\n"
        "@rft_filter\n"
        "def broken(samples):\n    return [{}[sample.text] for sample in samples]\n"
        "@rft_selector\n"
        "def torn(samples, rng):\n    return 1 / 0\n"
        "@rft_selector\n"
        "def huge(samples, rng):\n    return [10**400 for _ in samples]\n"
        "@rft_selector\n"
        "def tensor(samples, rng):\n    import torch\n"
        "    return torch.ones(len(samples), requires_grad=True).bfloat16()\n"
        "@rft_filter\n"
        "def wordless(samples):\n    from dataclasses import replace\n"
        "    return [replace(sample, text=None) for sample in samples]\n"
        "@rft_filter\n"
        "def judging(samples):\n    from dataclasses import replace\n"
        "    return [replace(sample, correct='yes') for sample in samples]\n"
        "@rft_filter\n"
        "def compared(samples):\n    import numpy as np\n    from dataclasses import replace\n"
        "    return [replace(sample, correct=np.float64(sample.tokens) > 3) for sample in samples]\n"
        "@rft_filter\n"
        "def misread(samples):\n    return [sample for sample in samples if int(sample.text)]\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_rules", None)


@pytest.mark.usefixtures("own_module")
def test_filters_and_selectors_of_others_load_by_import_path() -> None:
    kept, (done,) = filters.apply_filters(build_filters([{"own_rules:polite": {"word": "idea"}}]), POOL)
    assert keys(kept) == [("b", 0)]
    assert done.name == "own_rules:polite"
    assert pick("own_rules:longest") == [("a", 0), ("a", 2)]
    assert len(pick("own_rules:tensor")) == 2
    judged, (done,) = filters.apply_filters(build_filters(["own_rules:compared"]), POOL)
    assert [sample.correct for sample in judged] == [sample.tokens > 3 for sample in POOL]
    assert json.dumps([sample.correct for sample in judged])  # numpy's own truth values have no place in a file
    assert done.changed == 3


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build_filters(["has_anser"]), "unknown filter 'has_anser'; did you mean 'has_answer'"),
        (lambda: build_filters(["own_rules:none"]), "own_rules has no 'none' to use; it has polite, twice"),
        (lambda: build_filters(["nowhere.rules:none"]), "filter 'nowhere.rules:none': there is no module 'nowhere'"),
        (lambda: build_filters(["own_rules:number"]), "is 3, not a function with @rft_filter"),
        (lambda: build_filters(["own_rules:longest"]), "not a function with @rft_filter"),
        (lambda: build_selector("own_rules:polite"), "not a function with @rft_selector"),
        (lambda: build_selector("own_rules:plain"), "not a function with @rft_selector"),
        (lambda: build_filters("has_digit"), r"must be a list, such as \[has_answer"),
        (lambda: build_filters([3]), "a filter is a name such as max_redundancy.*got 3"),
        (lambda: build_filters([{"max_redundancy": {"limt": 1}}]), "no hyperparameter 'limt'; it has limit"),
        (lambda: build_filters([{"max_redundancy": 1.5}]), "limit of max_redundancy is 1.5.*0.31"),
        (lambda: build_filters([{"max_redundancy": "much"}]), "limit of max_redundancy is 'much'.*0.31"),
        (lambda: build_filters([{"max_length": "long"}]), "tokens of max_length is 'long'; use 1 or more"),
        (lambda: build_filters([{"max_length": 2.5}]), "tokens of max_length is 2.5; use 1 or more"),
        (lambda: build_filters(["max_length"]), "max_length needs tokens"),
        (lambda: build_filters([{"max_length": 0}]), "tokens of max_length is 0"),
        (lambda: build_filters([{"has_digit": 3}]), "has_digit takes none, not just 3"),
        (lambda: build_selector("entropi"), "unknown selector 'entropi'; did you mean 'entropy'"),
        (lambda: filters.apply_filters(build_filters(["own_rules:twice"]), POOL), "returned a sample twice"),
        (lambda: filters.apply_filters(build_filters(["own_rules:nothing"]), POOL), "returned None; return a list"),
        (
            lambda: filters.apply_filters(build_filters(["own_rules:broken"]), POOL),
            r"'own_rules:broken' failed: KeyError.*line",
        ),
        (
            lambda: filters.apply_filters(build_filters(["own_rules:judging"]), POOL),
            "'own_rules:judging' returned .*correct='yes'",
        ),
        (
            lambda: filters.apply_filters(build_filters(["own_rules:wordless"]), POOL),
            "'own_rules:wordless' returned .*text=None",
        ),
        (
            lambda: filters.apply_filters(build_filters(["own_rules:misread"]), POOL),
            r"'own_rules:misread' failed: ValueError: invalid literal.*own_rules.py, line",
        ),
        (lambda: pick("own_rules:endless"), "for 6 samples; return one finite number"),
        (lambda: pick("own_rules:huge"), "for 6 samples; return one finite number"),
        (lambda: pick("own_rules:torn"), r"'torn' failed: ZeroDivisionError: .*own_rules.py, line"),
        (lambda: pick("own_rules:short"), "for 6 samples; return one finite number"),
        (lambda: pick("random", noise=1.0), "noise is 1.0; use a share from 0 to less than 1"),
        (lambda: pick("random", noise=-0.1), "noise is -0.1"),
        (lambda: pick("random", budget=0), "budget is 0"),
        (lambda: pick("random", per_prompt=0), "per_prompt is 0"),
    ],
)
def test_what_cannot_be_meant_is_said(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------------------- presets and the page
PAGE = (Path(__file__).parents[2] / "docs" / "rft.md").read_text(encoding="utf-8")


def test_the_preset_of_table_3_has_what_the_paper_states() -> None:
    config = load_config(preset="deng-table3")
    rft = config.rft
    assert (rft.budget, rft.batch_size, rft.learning_rate, rft.noise, rft.from_) == (1100, 32, 1e-5, 0.05, "current")
    assert rft.filters == ["has_answer", "has_digit", "cut_after_answer", {"max_redundancy": {"limit": 0.31}}]
    assert rft.selector == "branching"
    assert config.sft.max_length == 20_000
    assert config.evaluation.protocol == "deng-table3"


def test_the_configuration_and_the_rules_on_the_page_work() -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert load_config(values=read_yaml(shown, "rft.md")).rft.selector == "branching"
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    own: dict[str, Any] = {}
    exec(code, own)
    assert keys(own["polite"](POOL, word="idea")) == [("b", 0)]
    assert keys(select(POOL, own["rare"], budget=1).samples) == [("b", 2)]


def test_the_page_lists_every_filter_and_selector() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == [*filters.FILTERS, *selectors.SELECTORS]
