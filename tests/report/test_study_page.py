"""The page of a study: whole, by itself, safe from what it shows, and there whatever a study lacks."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorl.core.store import cleaned
from explorl.report.study_figures import MAX_POINTS, Series, line_styles, swatch
from explorl.report.study_numbers import difference_mark, format_interval, format_number
from explorl.report.study_page import write_report
from explorl.report.study_rollouts import compact, script_json, token_measures, trim_rollouts

from ..hostile import NAMES, raw
from .studies import ARMS, STEPS, make_results

THOROUGH = settings(max_examples=200, deadline=None)
HOSTILE = '</script><script>window.hit=1</script><img src=x onerror="window.hit=1">&amp;\u2028$\\frac'


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if tag == "script":
            self.data.setdefault(attributes.get("id") or "", data)
        elif tag != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(results: dict[str, Any], tmp_path: Path, **options: Any) -> tuple[str, Elements]:
    path = tmp_path / "report.html"
    write_report(path, results, **options)
    text = path.read_text(encoding="utf-8")
    return text, Elements(text)


@pytest.fixture(scope="module")
def written_page(report: Path) -> tuple[str, Elements]:
    text = report.read_text(encoding="utf-8")
    return text, Elements(text)


# ------------------------------------------------------------------ the whole page
def test_refers_to_nothing_outside(written_page):
    text, elements = written_page
    assert not re.search(r"https?:|//\w+\.|@import|\bfetch\(|XMLHttpRequest|import\(", text)
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    for tag, attributes in elements.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        for name in ("src", "srcset", "action", "data"):
            assert name not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert len(text.encode()) < 5_000_000


def test_sections_come_in_order(written_page):
    _, elements = written_page
    ids = [a["id"] for a in elements.all("section") if "id" in a]
    assert ids == [
        "summary", "over-training", "pass-at-k", "plane", "curves", "unsolvable", "errors", "logs", "rollouts",
        "configuration", "provenance",
    ]  # fmt: skip
    assert len(elements.all("h1")) == 1
    assert elements.all("html") == [{"lang": "en"}]


def test_ids_are_unique_and_references_lead_somewhere(written_page):
    text, elements = written_page
    ids = Counter(attributes["id"] for _, attributes in elements.elements if attributes.get("id"))
    assert [name for name, count in ids.items() if count > 1] == []
    referred = set(re.findall(r"url\(#([^)]+)\)", text))
    for _, attributes in elements.elements:
        referred |= {attributes[name].lstrip("#") for name in ("href", "aria-labelledby") if attributes.get(name)}
    assert referred <= set(ids)
    assert len(referred) > 50


def test_each_figure_says_what_it_shows_and_has_its_numbers(written_page):
    text, _ = written_page
    figures = re.findall(r"<figure>.*?</figure>", text, flags=re.DOTALL)
    assert len(figures) == 3 + 2 + 1 + 3 + 1 + 3 + 2
    for figure in figures:
        label = re.search(r'<svg role="img" aria-label="([^"]+)"', figure)
        assert label
        assert label[1].endswith(".")
        assert re.search(r"\d", label[1])
        assert "<figcaption>" in figure
        assert re.search(r"<details.*<tbody>.*<tr>.*</details>", figure, flags=re.DOTALL)
        assert "<style" not in figure  # matplotlib's would reach every element of the page
        assert "#0000" not in figure


def test_summary_has_numbers_intervals_and_marks(written_page):
    text, _ = written_page
    summary = re.sub(
        r"\s+", " ", re.sub(r"<[^>]*>", " ", text[text.index('id="summary"') : text.index('id="over-training"')])
    )
    assert "53.6 [51.4, 55.8] ▲ +5.0 better [+2.9, +7.1]" in summary
    assert "46.6 [44.4, 48.8] −2.0 [−4.1, +0.1]" in summary  # not distinguished from zero: no mark
    assert "▲ +3.0 worse" in summary  # seconds
    assert "▼ −10.0 better" in summary  # steps to target
    assert "A study of this size finds differences in pass@1 from about 3.1 points upwards." in summary
    assert "entropy-guided weighting" in summary


def test_tables_carry_every_number(written_page):
    text, _ = written_page
    assert "Band: range of the seeds." in text
    for value in ("&lt; 0.001", "0.002", "left unsolved by exactly", "libraries.torch", "training.learning_rate"):
        assert value in text


# ------------------------------------------------------------------ what training did
def texts(text: str, section: str, until: str) -> str:
    part = text[text.index(f'<section id="{section}"') : text.index(f'<section id="{until}"')]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", part))


def test_the_start_is_a_row_a_curve_and_a_point(written_page):
    text, _ = written_page
    assert "start before training, 2 seeds pass@1 (%) 21.1 [19.1, 23.1]" in texts(text, "summary", "over-training")
    curve = texts(text, "pass-at-k", "plane")
    assert "k start (%)" in curve
    assert "21.1 [19.1, 23.1]" in curve
    plane = text[text.index('<section id="plane"') : text.index('<section id="curves"')]
    assert plane.count('data-arm="3"') == 1  # the place after the three arms
    assert "Entropy and accuracy from before training to the end" in plane


def test_the_collapse_is_drawn(written_page, results):
    text, _ = written_page
    over = texts(text, "over-training", "pass-at-k")
    for k in (1, 4, 8):  # of 1, 2, 4, 8 the first, the last and one between
        own = over.split(f"pass@{k} over training: at step 90")[1].split(" over training ")[0]
        for arm in results["arms"]:
            for mean in arm["over_training"][str(k)]["mean"]:
                assert f" {100 * mean:.1f} [" in own, (k, arm["name"])
    gain = texts(text, "pass-at-k", "plane")
    assert "plain GRPO +27.5 points at k = 1 and −2.6 points at k = 8" in gain


def test_one_run_has_a_line_for_each_k(results, tmp_path):
    text, _ = page(results | {"arms": results["arms"][:1], "rollouts": [], "overlaps": None}, tmp_path)
    over = text[text.index('<section id="over-training"') : text.index('<section id="pass-at-k"')]
    assert over.count("<figure>") == 1
    assert re.findall(r">(pass@\d)</text>", over) == ["pass@1", "pass@2", "pass@4", "pass@8"]
    row = texts(text, "over-training", "pass-at-k").split(" 90 ")[-1]
    ends = [curve["mean"][-1] for curve in results["arms"][0]["over_training"].values()]
    assert [float(one) for one in re.findall(r"([\d.]+) \[", row)] == [round(100 * end, 1) for end in ends]
    assert "(baseline)" not in text  # there is nothing beside it


def test_many_steps_are_a_running_mean_over_points(written_page):
    text, _ = written_page
    curves = text[text.index('<section id="curves"') : text.index('<section id="unsolvable"')]
    assert curves.count('class="dots"') == 3 * len(ARMS)
    assert "running means over up to 13 steps" in curves
    held = text[text.index('<section id="over-training"') : text.index('<section id="pass-at-k"')]
    assert 'class="dots"' not in held  # a few evaluations, drawn as they are
    assert "running mean" not in held


def test_a_running_mean_is_the_mean_of_its_neighbours():
    values = [float(step % 2) + step for step in range(28)]
    values[5] = None
    curve = Series(range(28), values, values, values).smoothed()
    for place in range(28):  # five steps: 2 · (28 // 14) + 1
        near = [value for value in values[max(place - 2, 0) : place + 3] if value is not None]
        assert curve.mean[place] == pytest.approx(sum(near) / len(near))
    assert curve.low == curve.mean
    assert curve.raw == values
    assert Series(range(8), values[:8]).smoothed().raw == (), "a short curve is drawn as it is"


def test_bars_are_in_no_arms_colour(written_page):
    text, _ = written_page
    for section, until in (("unsolvable", "errors"), ("errors", "logs")):
        part = text[text.index(f'<section id="{section}"') : text.index(f'<section id="{until}"')]
        assert "var(--bar)" in part
        assert "var(--good)" not in part


@pytest.mark.parametrize(
    ("low", "high", "unit", "text"),
    [
        (0.5, 0.50001, "%", "[± < 0.1]"),
        (0.0611, 0.0611, "nats", "[± < 0.001]"),
        (0.5, 0.52, "%", "[50.0, 52.0]"),
        (-0.0001, 0.0002, "%", "[± < 0.1]"),
    ],
)
def test_an_interval_without_width_gets_a_floor(low, high, unit, text):
    assert format_interval({"low": low, "high": high}, unit) == text


def test_no_minus_before_zero_and_no_hyphen_for_a_minus(results, tmp_path):
    changed = copy.deepcopy(results) | {"rollouts": [], "overlaps": None}
    changed["arms"][1]["changes"] = {"training.learning_rate": 1e-7}
    changed["arms"][1]["differences"]["pass@1"] = {"mean": -0.0001, "low": -0.02, "high": 0.02}
    _, elements = page(changed, tmp_path)
    shown = " ".join(elements.text)
    assert "1e−07" in shown
    assert not re.search(r"[−-]0\.0+(?![\d])", shown)
    assert not re.search(r"(?<![\w-])-\d", shown)


# ------------------------------------------------------------------ size
def test_trims_rollouts_to_fit_and_says_so(results, tmp_path):
    results = results | {"arms": []}
    whole, _ = page(results, tmp_path)
    assert "are shown" not in whole
    limit = len(whole.encode()) - 200_000
    text, elements = page(results, tmp_path, max_bytes=limit)
    assert len(text.encode()) <= limit
    kept = json.loads(elements.data["rollout-data"])
    groups = Counter((r["arm"], r["seed"], r["step"]) for r in kept)
    assert len(groups) == len(ARMS) * 2 * len(STEPS)
    assert len(set(groups.values())) == 1
    assert f"{len(kept)} of {len(results['rollouts'])} prompts" in text


def test_a_limit_below_the_page_itself_is_an_error(results, tmp_path):
    with pytest.raises(ValueError, match=r"max_bytes=10,000; allow more, for instance max_bytes=\d"):
        page(results | {"arms": []}, tmp_path, max_bytes=10_000)


def test_long_runs_stay_small(results, tmp_path):
    steps = list(range(20_000))
    curve = {"step": steps, "mean": [0.5 + s / 1e5 for s in steps], "low": [0.4] * 20_000, "high": [0.8] * 20_000}
    way = {"entropy": [1 - s / 1e5 for s in steps], "accuracy": [0.5] * len(steps)}
    arms = [{"name": name, "curves": {"training accuracy": curve}, "plane": way} for name in ARMS]
    text, _ = page({"arms": arms}, tmp_path)
    assert len(text.encode()) < 300_000
    thinned = Series(steps, steps).thinned()
    assert len(thinned.x) <= MAX_POINTS
    assert (thinned.x[0], thinned.x[-1]) == (0, 19_999)


ROLLOUTS = st.lists(
    st.builds(
        lambda arm, seed, step, lengths: {
            "arm": arm,
            "seed": seed,
            "step": step,
            "prompt": "p" * step,
            "answers": [
                {"tokens": ["t"] * length, "entropy": [0.5] * length, "correct": length % 2 == 0, "reward": 1.0}
                for length in lengths
            ],
        },
        st.sampled_from(["a", "b"]),
        st.integers(0, 1),
        st.sampled_from([0, 30, 60, 90]),
        st.lists(st.integers(0, 40), max_size=5),
    ),
    max_size=25,
)


@THOROUGH
@given(ROLLOUTS, st.integers(2, 20_000))
def test_trimming_fits_is_even_and_keeps_the_last_step(rollouts, room):
    small = compact(rollouts)
    kept = trim_rollouts(small, room)
    assert len(script_json(kept).encode()) <= room
    if len(script_json(small)) + len(small) + sum(len(r["answers"]) for r in small) + 2 <= room:
        assert kept == small
    groups = Counter((r["arm"], r["seed"], r["step"]) for r in small)
    left = Counter((r["arm"], r["seed"], r["step"]) for r in kept)
    if kept:
        most = max(left.values())
        assert all(count == min(most, groups[key]) for key, count in left.items())
        assert max(r["step"] for r in kept) == max(r["step"] for r in small)
        assert {key[:2] for key in left} == {key[:2] for key in groups if key[2] in {r["step"] for r in kept}}
    order = [json.dumps(r["prompt"]) for r in small]
    assert [order.index(json.dumps(r["prompt"])) >= 0 for r in kept] == [True] * len(kept)


def test_when_answers_go_a_correct_and_a_wrong_one_stay():
    answers = [{"tokens": ["t"] * 50, "correct": right, "reward": 0.0} for right in (True, True, True, False)]
    small = compact([{"arm": "a", "seed": 0, "step": 1, "prompt": "p", "answers": answers}])
    size = len(script_json(small))
    (kept,) = trim_rollouts(small, size // 2 + 80)
    assert [answer["correct"] for answer in kept["answers"]] == [True, False]


# ------------------------------------------------------------------ what is shown cannot act
def test_hostile_text_stays_text(results, tmp_path):
    hostile = copy.deepcopy(results)
    for key in ("title", "description", "verdict", "task", "model", "commit", "config"):
        hostile[key] = HOSTILE
    hostile["provenance"] = {HOSTILE: HOSTILE}
    arm = hostile["arms"][1]
    arm |= {"name": HOSTILE, "strategies": [HOSTILE], "failed": {"1": HOSTILE}, "verdict": HOSTILE}
    arm["changes"] = {HOSTILE: HOSTILE}
    arm["errors"] = {HOSTILE: {HOSTILE: {"correct": 1, "wrong": 2}}, "by kind": {HOSTILE: 3}}
    arm["strategy_logs"] = {f"strategy/{HOSTILE}": {"step": [1, 2], "mean": [1.0, 2.0]}}
    arm["curves"][HOSTILE] = {"step": [1, 2], "mean": [1.0, 2.0]}
    hostile["overlaps"] = [{"arms": [HOSTILE], "count": 3}]
    hostile["measures"] = [{"key": "pass@1", "label": HOSTILE, "unit": HOSTILE, "higher_is_better": True}]
    rollout = hostile["rollouts"][0]
    rollout |= {"arm": HOSTILE, "prompt": HOSTILE}
    rollout["answers"][0]["tokens"][0] = HOSTILE
    rollout["answers"][0]["finish"] = HOSTILE
    rollout["answers"][0][HOSTILE] = rollout["answers"][0]["entropy"]
    _, elements = page(hostile, tmp_path)
    assert [a.get("type") for a in elements.all("script")] == ["application/json", "application/json", None]
    assert elements.all("img") == []
    assert not any(name.startswith("on") for _, attributes in elements.elements for name in attributes)
    first = json.loads(elements.data["rollout-data"])[0]
    assert (first["arm"], first["prompt"], first["answers"][0]["tokens"][0]) == (HOSTILE, HOSTILE, HOSTILE)
    assert "".join(elements.text).count("window.hit=1") > 20  # it is all shown


def test_lone_surrogates_are_written(results, tmp_path):
    broken = {"title": "a\ud800b", "rollouts": copy.deepcopy(results["rollouts"][:1])}
    broken["rollouts"][0]["answers"][0]["tokens"][0] = "\udfff"
    _, elements = page(broken, tmp_path)
    assert json.loads(elements.data["rollout-data"])[0]["answers"][0]["tokens"][0] == "\ufffd"


def test_arms_of_any_name_are_shown(results, tmp_path):
    arms = {}
    for place, name in enumerate(NAMES):
        arm = copy.deepcopy(results["arms"][1 + place % 2])
        arm |= {"name": name, "strategies": [name], "failed": {"1": name}, "verdict": name, "changes": {name: name}}
        arm["errors"] = {"by kind": {name: 3}} if place % 5 == 0 else {}
        arms[name] = arm
    hostile = copy.deepcopy(results) | {"arms": [*arms.values()], "baseline": NAMES[0], "verdict": "\n".join(NAMES)}
    hostile["overlaps"] = [{"arms": NAMES, "count": 3}]
    for rollout, name in zip(hostile["rollouts"], NAMES, strict=False):
        rollout |= {"arm": name, "prompt": name}
        rollout["answers"][0]["tokens"] = [name]
    text, elements = page(hostile, tmp_path)
    assert not raw(text)
    assert [a.get("type") for a in elements.all("script")] == ["application/json", "application/json", None]
    assert not any(name.startswith("on") for _, attributes in elements.elements for name in attributes)
    for name in NAMES:
        assert "".join(elements.text).count(cleaned(name)) > 5
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        ElementTree.fromstring(svg)


@THOROUGH
@given(st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists, max_leaves=10))
def test_script_json_is_json_and_cannot_end_its_element(value):
    text = script_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")


# ------------------------------------------------------------------ what a study may lack
def without(change) -> dict[str, Any]:
    results = make_results(prompts=1, answers=2)
    change(results)
    return results


def one_seed(results):
    results["arms"] = results["arms"][:1]
    results["arms"][0]["seeds"] = [0]
    results["overlaps"], results["minimum_detectable_effect"], results["target"] = [], None, None
    for curve in results["arms"][0]["curves"].values():
        curve["low"] = curve["high"] = [None] * len(curve["step"])
    for measure in results["arms"][0]["measures"].values():
        measure["low"] = measure["high"] = None


def all_seeds_failed(results):
    arm = results["arms"][1]
    kept = {key: arm[key] for key in ("name", "strategies", "changes", "seeds")}
    results["arms"][1] = kept | {
        "failed": {"0": "Traceback:\n  in step 3\nCUDA out of memory", "1": None},
        "measures": {},
        "curves": {},
    }


def nulls(results):
    for arm in results["arms"]:
        for key in arm:
            if key != "name":
                arm[key] = None
    for rollout in results["rollouts"]:
        for answer in rollout["answers"]:
            answer |= {"entropy": None, "logp": [None] * len(answer["tokens"]), "correct": None, "reward": None}
            del answer["advantage"]


def no_answers(results):
    results["arms"] = []
    for rollout in results["rollouts"]:
        rollout["answers"] = []


def no_tokens(results):
    results["arms"] = []
    for rollout in results["rollouts"]:
        for answer in rollout["answers"]:
            answer["tokens"] = []


def no_rollouts(results):
    results["arms"], results["rollouts"] = [], []


def nothing_but_names(results):
    arms = [{"name": arm["name"]} for arm in results["arms"]]
    results.clear()
    results["arms"] = arms


CASES = {
    "one arm, one seed": (one_seed, "1 seed"),
    "all seeds of an arm failed": (all_seeds_failed, "<strong>Seed 0 failed:</strong> CUDA out of memory"),
    "nulls": (nulls, "No learning curve was recorded."),
    "nothing but names": (nothing_but_names, "No rollouts were recorded."),
    "empty": (dict.clear, "The study has no arm."),
    "no baseline": (lambda r: r.update(baseline=None), "entropy-guided weighting"),
    "no rollouts": (no_rollouts, "No rollouts were recorded."),
    "unknown arm in an overlap": (lambda r: r["overlaps"].append({"arms": ["gone"], "count": 99}), "gone"),
    "rollouts without answers": (no_answers, "rollout-data"),
    "rollouts without tokens": (no_tokens, "rollout-data"),
}


@pytest.mark.parametrize("name", CASES)
def test_renders_what_is_there(name, tmp_path):
    change, expected = CASES[name]
    text, elements = page(without(change), tmp_path)
    assert expected in text
    assert len(elements.all("h2")) == 11
    json.loads(elements.data["rollout-data"])


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_renders_with_any_values_missing(chance, seed, tmp_path):
    random = Random(seed)
    results = make_results(prompts=1, answers=1)
    results["arms"] = results["arms"][:2]
    for arm in results["arms"]:
        arm["curves"] = dict([random.choice(list(arm["curves"].items()))])  # fewer figures, less time
        arm["errors"] = dict([random.choice(list(arm["errors"].items()))])

    def thin(node):
        if isinstance(node, dict):
            keep = ("name", "key", "arm", "tokens", "count")
            return {k: v if k in keep else None if random.random() < chance / 4 else thin(v) for k, v in node.items()}
        if isinstance(node, list) and node and isinstance(node[0], float):
            return [random.choice([None, math.nan, math.inf, v]) if random.random() < chance else v for v in node]
        return [thin(child) for child in node] if isinstance(node, list) else node

    _, elements = page(thin(results), tmp_path)
    assert len(elements.all("h2")) == 11
    assert not re.search(r"\b(nan|inf|none)\b", " ".join(elements.text), flags=re.IGNORECASE)


# ------------------------------------------------------------------ the parts
@pytest.mark.parametrize(
    ("low", "high", "p", "higher_is_better", "expected"),
    [
        (0.01, 0.05, 0.01, True, "better"),
        (0.01, 0.05, 0.01, False, "worse"),
        (-0.05, -0.01, 0.01, True, "worse"),
        (-0.05, -0.01, 0.01, False, "better"),
        (0.01, 0.05, None, True, None),
        (0.01, 0.05, 0.01, None, "higher"),
        (-0.05, -0.01, 0.01, None, "lower"),
        (-0.01, 0.05, 0.01, True, None),
        (0.0, 0.05, 0.01, True, None),
        (0.01, 0.05, 0.2, True, None),
        (None, None, 0.01, True, None),
    ],
)
def test_marks(low, high, p, higher_is_better, expected):
    found = difference_mark({"mean": 0.0, "low": low, "high": high, "p_corrected": p}, higher_is_better)
    assert (found and found.word) == expected
    if found:
        assert found.sign == ("▲" if low > 0 else "▼")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4861, "%", "48.6"),
        (-0.02, "%", "−2.0"),
        (-0.0004, "%", "0.0"),
        (0.1734, "nats", "0.173"),
        (1_412_345, "tokens", "1.41 M"),
        (12_345, "tokens", "12 k"),
        (1_234, "tokens", "1,234"),
        (31.27, "tokens", "31.3"),
        (0.00012, "", "0.00012"),
        (None, "%", "–"),
        (math.nan, "%", "–"),
        (True, "", "–"),
    ],
)
def test_numbers_by_unit(value, unit, text):
    assert format_number(value, unit) == text


@settings(deadline=None)
@given(st.integers(1, 60))
def test_line_styles_tell_arms_apart(count):
    names = [f"arm {index}" for index in range(count)]
    found = line_styles(names, "arm 0")
    drawn = [(style.colour, str(style.dash), style.marker) for name, style in found.items() if name != "start"]
    assert len(set(drawn)) == min(count, 57)  # seven colours times eight markers, and the baseline's ink


def test_swatches_have_no_ids():
    for style in line_styles(["a", "b", "c"], "a").values():
        assert "id=" not in swatch(style)


def test_measures_follow_the_data():
    answers = [{"tokens": ["a", "b"], "later_measure": [1, 3], "entropy": [0.0, 2.0], "weight": [1, 1]}]
    found = token_measures(compact([{"arm": "a", "answers": answers}]))
    assert [(m.key, m.label, m.scale, m.low, m.high) for m in found] == [
        ("entropy", "entropy", "sequential", 0.0, 2.0),
        ("weight", "strategy weight", "diverging", 0.0, 2.0),
        ("later_measure", "later measure", "sequential", 1, 3),
    ]


def test_records_are_shortened():
    answer = {"tokens": ["a", "b"], "advantage": [0.25, 0.25], "entropy": [1 / 3, math.nan], "reward": 12345.678}
    (small,) = compact([{"arm": "a", "answers": [answer]}])
    assert small["answers"][0] == {
        "tokens": ["a", "b"],
        "correct": None,
        "reward": 12350,
        "finish": None,
        "advantage": 0.25,
        "entropy": [0.333, None],
    }
