"""The numbers of results.json against those recomputed from the run stores by other code."""

from __future__ import annotations

import json
from collections import Counter
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from explorl.analysis.study_answers import (
    error_breakdown,
    evenly_spaced,
    kind,
    operand_count,
    operation,
    sampled_rollouts,
)
from explorl.analysis.study_results import read_scores, results_table, strategy_text, study_results
from explorl.analysis.verdicts import arm_verdict, difference_in_words, study_verdict
from explorl.core.store import StoreError, write_parquet
from explorl.stats.distributions import student_quantile

ARMS = {"plain": "plain", "Shaped + hot": "shaped-hot"}


@pytest.fixture(scope="module")
def results(whole_study: Path) -> dict[str, Any]:
    return json.loads((whole_study / "results.json").read_text())


def marks(folder: Path, slug: str, seed: int, step: int) -> dict[str, list[bool]]:
    """problem → verdicts, straight from the parquet file."""
    found: dict[str, list[bool]] = {}
    path = folder / "arms" / slug / f"seed-{seed}" / "evaluations" / f"step-{step:06d}.parquet"
    for row in pq.read_table(path).to_pylist():
        found.setdefault(row["problem"], []).append(row["correct"])
    return found


def lines(folder: Path, slug: str, seed: int) -> list[dict[str, Any]]:
    text = (folder / "arms" / slug / f"seed-{seed}" / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == "train"]


def by_hand(verdicts: list[bool], k: int) -> float:
    n, c = len(verdicts), sum(verdicts)
    return 1 - comb(n - c, k) / comb(n, k)


def test_scores_and_differences_equal_the_stores(whole_study: Path, results: dict[str, Any]) -> None:
    tables = {}
    for name, slug in ARMS.items():
        for k in (1, 2):
            rows = [[by_hand(v, k) for v in marks(whole_study, slug, s, 2).values()] for s in (0, 1)]
            tables[name, k] = np.array(rows)
    for arm in results["arms"][:2]:
        for k in (1, 2):
            mine = tables[arm["name"], k]
            assert arm["measures"][f"pass@{k}"]["mean"] == pytest.approx(mine.mean())
            assert arm["pass_at_k"]["mean"][k - 1] == pytest.approx(mine.mean())
    difference = tables["Shaped + hot", 1] - tables["plain", 1]
    told = results["arms"][1]["differences"]["pass@1"]
    assert told["mean"] == pytest.approx(difference.mean())
    seeds, problems = difference.shape
    of_seeds = difference.mean(axis=1).var(ddof=1) / seeds
    residual = difference - difference.mean(1, keepdims=True) - difference.mean(0) + difference.mean()
    rest = (residual**2).sum() / ((seeds - 1) * (problems - 1))
    of_problems = max(0, seeds * difference.mean(axis=0).var(ddof=1) - rest) / (seeds * problems)
    reach = np.sqrt(
        student_quantile(0.975, 1) ** 2 * of_seeds + student_quantile(0.975, problems - 1) ** 2 * of_problems
    )
    assert told["high"] - told["mean"] == pytest.approx(reach)
    assert results["arms"][0]["differences"] is None
    assert results["arms"][2]["differences"] == {}


def test_curves_time_and_tokens_equal_the_stores(whole_study: Path, results: dict[str, Any]) -> None:
    for arm in results["arms"][:2]:
        slug = ARMS[arm["name"]]
        runs = [lines(whole_study, slug, seed) for seed in (0, 1)]
        keys = {
            "training accuracy": "rewards/correctness/mean",
            "entropy": "entropy",
            "length": "completions/mean_length",
        }
        for name, key in keys.items():
            curve = arm["curves"][name]
            assert curve["step"] == [1, 2]
            assert curve["mean"] == pytest.approx(np.mean([[line[key] for line in run] for run in runs], axis=0))
            assert curve["low"] == pytest.approx(np.min([[line[key] for line in run] for run in runs], axis=0))
        seconds = np.mean([sum(line["step_time"] for line in run) for run in runs])
        assert arm["measures"]["seconds"]["mean"] == pytest.approx(seconds)
        assert arm["measures"]["tokens"]["mean"] == np.mean([run[-1]["num_tokens"] for run in runs])
        held_out = [
            np.mean([[by_hand(v, 1) for v in marks(whole_study, slug, s, step).values()] for s in (0, 1)])
            for step in (0, 1, 2)
        ]
        assert arm["curves"]["holdout pass@1"]["mean"] == pytest.approx(held_out)
        assert arm["measures"]["area"]["mean"] == pytest.approx((held_out[0] / 2 + held_out[1] + held_out[2] / 2) / 2)
        assert arm["plane"]["entropy"] == arm["curves"]["entropy"]["mean"]
        path = whole_study / "arms" / slug
        ends = [json.loads((path / f"seed-{s}/evaluations/step-000002.json").read_text()) for s in (0, 1)]
        for measure in ("entropy", "branching"):
            assert arm["measures"][measure]["mean"] == pytest.approx(np.mean([end[measure] for end in ends]))
    logs = results["arms"][1]["strategy_logs"]
    assert "strategy/ppl_shaping/advantage_change" in logs
    assert results["arms"][0]["strategy_logs"] == {}


def test_unsolvable_sets_and_their_overlaps(whole_study: Path, results: dict[str, Any]) -> None:
    sets = {"start": {p for p, v in marks(whole_study, "plain", 0, 0).items() if not any(v)}}
    for arm in results["arms"][:2]:
        for seed in (0, 1):
            unsolved = {p for p, v in marks(whole_study, ARMS[arm["name"]], seed, 2).items() if not any(v)}
            assert set(arm["unsolvable"][str(seed)]) == unsolved
            if seed == 0:
                sets[arm["name"]] = unsolved
    regions = Counter(tuple(name for name in sets if p in sets[name]) for p in set().union(*sets.values()))
    assert {tuple(one["arms"]): one["count"] for one in results["overlaps"]} == dict(regions)


def test_what_stands_around_the_numbers(results: dict[str, Any]) -> None:
    assert (results["task"], results["model"], results["baseline"]) == ("countdown-mini", "tiny", "plain")
    assert (results["problems"], results["samples"], results["steps"], results["target"]) == (8, 2, 2, 0.05)
    shaped = results["arms"][1]
    assert shaped["changes"] == {"rollout.temperature": 1.5, "training.learning_rate": 1e-3}
    assert shaped["strategies"] == ["ppl_shaping"]
    assert results["provenance"]["seeds"] == [0, 1]
    assert {"torch", "trl"} <= results["provenance"]["libraries"].keys()
    assert not {"time", "command"} & results["provenance"].keys(), "what differs from start to start stays out"
    keys = [entry["key"] for entry in results["measures"]]
    assert keys[:2] == ["pass@1", "pass@2"]
    assert {"best pass@1", "area", "entropy", "branching", "seconds", "tokens"} <= set(keys)
    assert "preset" not in results["config"]
    json.dumps(results, allow_nan=False)


def test_rollouts_are_those_of_the_store(whole_study: Path, results: dict[str, Any]) -> None:
    assert {(r["arm"], r["step"]) for r in results["rollouts"]} == {(a, s) for a in ARMS for s in (1, 2)}
    for one in results["rollouts"]:
        path = whole_study / "arms" / ARMS[one["arm"]] / "seed-0" / "rollouts" / f"step-{one['step']:06d}.parquet"
        rows = [row for row in pq.read_table(path).to_pylist() if row["prompt"] == one["prompt"]]
        assert len(rows) == len(one["answers"]) == 2
        for row, answer in zip(rows, one["answers"], strict=True):
            assert answer["correct"] == (row["reward/correctness"] == 1)
            assert answer["reward"] == pytest.approx(row["reward/correctness"] + 0.1 * row["reward/format"])
            lengths = {len(answer[key]) for key in ("tokens", "entropy", "logp", "advantage", "weight")}
            assert len(lengths) == 1
    prompts = {arm: {r["prompt"] for r in results["rollouts"] if r["arm"] == arm} for arm in ARMS}
    assert prompts["plain"] == prompts["Shaped + hot"], "arms share seeds, and so prompts"


def test_the_table_has_every_arm(results: dict[str, Any]) -> None:
    table = results_table(results)
    assert [row[0] for row in table.rows] == ["plain", "Shaped + hot", "broken"]
    assert r"\toprule" in table.to_latex()
    assert "pass@1 low" in table.to_csv()


def test_a_study_without_runs_has_results_too(whole_study: Path, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text((whole_study / "study.json").read_text())
    empty = study_results(tmp_path)
    assert empty["verdict"] == "There is no arm to compare with plain yet."
    assert [arm["seeds"] for arm in empty["arms"]] == [[], [], []]
    assert empty["rollouts"] == empty["overlaps"] == []
    assert empty["minimum_detectable_effect"] == pytest.approx(0.02 * 11.55, abs=0.01)
    with pytest.raises(StoreError, match="holds no study"):
        study_results(tmp_path / "nothing")


def test_errors_are_broken_down(tmp_path: Path) -> None:
    rows = [
        ("countdown:1-2-3=6", "<answer>1+2+3</answer>", True, None),
        ("countdown:1-2-3=6", "<answer>3×2×1 = 6</answer>", True, None),
        ("countdown:1-2-3=5", "<answer>3*2-1</answer>", True, None),
        ("countdown:1-2-3-4=2", "<answer>4-3</answer>", False, "it gives 1, not 2"),
        ("countdown:1-2-3-4=2", "<answer>9-7</answer>", False, "9 is not given, or not that often"),
        ("countdown:1-2-3-4=2", "thinking", False, "no <answer>…</answer>"),
        ("countdown:1-2-3-4=2", "<answer>4</answer>", False, "it gives 4, not 2"),
        ("countdown:1-2-3-4=2", None, False, "its answers were not kept"),
    ]
    names = ("problem", "completion", "correct", "error")
    write_parquet(tmp_path / "e.parquet", {name: [row[i] for row in rows] for i, name in enumerate(names)})
    errors = error_breakdown([tmp_path / "e.parquet"])
    assert errors["by operands"] == {"3": {"correct": 3, "wrong": 0}, "4": {"correct": 0, "wrong": 5}}
    assert errors["by operation"] == {
        "+": {"correct": 1, "wrong": 0},
        "−": {"correct": 0, "wrong": 2},
        "×": {"correct": 1, "wrong": 0},
        "mixed": {"correct": 1, "wrong": 0},
        "none": {"correct": 0, "wrong": 2},
    }
    assert errors["by kind"] == {
        "it gives another number": 2,
        "a number is not given, or not that often": 1,
        "no answer": 1,
        "its answers were not kept": 1,
    }


def test_small_readers(tmp_path: Path) -> None:
    assert operand_count("countdown:3-5-7-20=24") == "4"
    assert operation("<answer>1+</answer>", "countdown:1-2=3") == "none"
    assert operation("<answer>8/2</answer>", "countdown:2-8=4") == "÷"
    assert operation("<answer>4 = \\frac{8}{2}.</answer>", "countdown:2-8=4") == "÷"
    assert kind("not an expression: it is empty") == "not an expression"
    assert kind("something else") == "something else"
    assert evenly_spaced(range(10), 4) == [0, 3, 6, 9]
    assert evenly_spaced([1, 2], 4) == [1, 2]
    assert strategy_text({"egsw": {"alpha": 0.3}}) == strategy_text({"name": "egsw", "alpha": 0.3}) == "egsw(alpha=0.3)"
    assert strategy_text({"egsw": None}) == "egsw"
    write_parquet(tmp_path / "e.parquet", {"problem": ["a", "a", "b"], "correct": [True, False, True]})
    with pytest.raises(StoreError, match=r"different numbers of samples: \[1, 2\]"):
        read_scores(tmp_path / "e.parquet")


def test_prompts_whose_tokens_were_recorded_are_shown(tmp_path: Path) -> None:
    names = [f"p{place}" for place in range(12)]
    columns = {
        "prompt": names,
        "completion": ["x"] * 12,
        "reward/correctness": [1.0] * 12,
        "tokens": [["a"] if name in ("p4", "p7") else None for name in names],
    }
    write_parquet(tmp_path / "run" / "rollouts" / "step-000001.parquet", columns)
    found = sampled_rollouts({"arm": tmp_path / "run"}, seed=0, limit=9, iterations={"arm": 1})
    assert [rollout["prompt"] for rollout in found] == ["p4", "p7"]
    assert all(answer["recorded"] for rollout in found for answer in rollout["answers"])


def test_token_records_reach_the_rollouts_within_their_share(tmp_path: Path) -> None:
    many = 40
    columns = {
        "prompt": ["p"] * many,
        "completion": ["x"] * many,
        "advantage": [0.5] * many,
        "reward/correctness": [float(i < 4) for i in range(many)],
        "reward/format": [1.0] * many,
        "tokens": [["a", "b"] * 250] * many,
        "entropy": [[0.123456, float("nan")] * 250] * many,
        "logp": [[-1.0, -2.0] * 250] * many,
        "token_advantage": [[0.5, 0.25] * 250] * many,
        "token_weight": [[1.0, 2.0] * 250] * many,
    }
    write_parquet(tmp_path / "run" / "rollouts" / "step-000004.parquet", columns)
    (one,) = sampled_rollouts({"arm": tmp_path / "run"}, seed=3, limit=500, iterations={"arm": 2})
    assert (one["seed"], one["step"], one["prompt"]) == (3, 2, "p")
    assert len(one["answers"]) == 10, "5,000 tokens per prompt"
    assert Counter(answer["correct"] for answer in one["answers"]) == {True: 4, False: 6}
    first = one["answers"][0]
    assert (first["entropy"][:2], first["weight"][:2]) == ([0.1235, None], [1.0, 2.0])
    assert (first["reward"], first["finish"]) == (1.1, "length")


def test_verdicts_say_no_more_than_the_intervals() -> None:
    def difference(mean: float, low: float, high: float, p: float | None) -> dict[str, Any]:
        return {"mean": mean, "low": low, "high": high, "p": p, "p_corrected": p}

    better = difference(0.041, 0.012, 0.07, 0.01)
    unsure = difference(0.041, 0.012, 0.07, 0.08)
    nothing = difference(0.001, -0.02, 0.0204, 0.9)
    worse = difference(-0.05, -0.06, -0.04, 0.001)
    assert (
        arm_verdict({"pass@1": better, "pass@8": nothing}, ["pass@1", "pass@8"], arms=3, seeds=3, failed=1)
        == "+4.1 points pass@1 [+1.2, +7.0], pass@8: no difference seen [−2.0, +2.0]; 1 failed"
    )
    assert difference_in_words("pass@1", unsure, 3, 3).endswith("(p = 0.08 after correction over 3 arms)")
    assert difference_in_words("pass@1", unsure, 3, 1).endswith("(one seed: over problems only)")
    assert arm_verdict(None, ["pass@1"], arms=1, seeds=3, failed=0) == "the baseline"
    arms = {"a": {"pass@1": nothing, "pass@8": better}, "b": {"pass@1": worse, "pass@8": unsure}}
    told = study_verdict(arms, ["pass@1", "pass@8"], "GRPO", {"pass@1": 0.05, "pass@8": 0.072}, 3)
    assert told == (
        "Of 2 arms, below GRPO in pass@1: b (−5.0 points); above GRPO in pass@8: a (+4.1 points); with 3 seeds, "
        "differences below 5.0 points of pass@1 and 7.2 points of pass@8 may be missed."
    )
    none = {"a": {"pass@1": unsure, "pass@8": worse}, "b": {"pass@1": nothing, "pass@8": worse}}
    told = study_verdict(none, ["pass@1", "pass@8"], "GRPO", {"pass@1": 0.05}, 3)
    assert told == (
        "Of 2 arms, none is shown to differ from GRPO in pass@1; below GRPO in pass@8: a (−5.0 points), b (−5.0 "
        "points); with 3 seeds, differences below 5.0 points of pass@1 may be missed."
    )
    one = [
        study_verdict({"a": {"pass@1": first, "pass@8": last}}, ["pass@1", "pass@8"], "GRPO", {}, 3)
        for first, last in ((unsure, unsure), (better, nothing), (nothing, worse))
    ]
    assert one == [
        "a is not shown to differ from GRPO in pass@1, nor in pass@8.",
        "a is above GRPO in pass@1 (+4.1 points), and not shown to differ in pass@8.",
        "a is not shown to differ from GRPO in pass@1, and below GRPO in pass@8 (−5.0 points).",
    ]
    single = study_verdict({"a": {"pass@1": unsure}}, ["pass@1"], "GRPO", {}, 1)
    assert single.startswith("a is not shown to differ from GRPO in pass@1; with one seed, another training run ")
    assert study_verdict({"a": {}}, ["pass@1"], "GRPO", {}, 3) == "There is no arm to compare with GRPO yet."
