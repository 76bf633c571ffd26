"""Comparisons: what is compared is alike, the numbers are the metrics', and the figures show them whole."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from explorl.analysis.ability_boundary import Boundary, boundary
from explorl.analysis.response_quality import quality_by_step, quality_table
from explorl.cli.compare import EvaluationComparison, compare, compare_command
from explorl.core.store import RunStore, StoreError
from explorl.evaluation import Evaluation, protocol
from explorl.evaluation.harness import run_evaluation
from explorl.evaluation.results_folder import load_evaluation
from explorl.metrics import pass_at_k
from explorl.models import Policy, load_policy
from explorl.report import boundary_figures
from explorl.report.figures import PAGE, figure_of, save
from explorl.rollout.sampling import SamplingParams
from explorl.stats import permutation_test
from explorl.stats.distributions import student_quantile

HOW = protocol("plain", samples=4, max_tokens=48)


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    """The tiny policy, and the same with some noise in its weights."""
    tiny = load_policy("tiny", device="cpu")
    noisy = Policy("noisy", copy.deepcopy(tiny.model), tiny.tokenizer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in noisy.model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * 0.25)
    return {"tiny": tiny, "noisy": noisy}


@pytest.fixture(scope="module")
def folders(policies: dict[str, Policy], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("evaluations")
    return [r.folder for r in run_evaluation(policies, ["countdown-mini"], HOW, out, name="plain", limit=12)]


@pytest.fixture(scope="module")
def compared(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> EvaluationComparison:
    return compare(folders, tmp_path_factory.mktemp("comparison"))


def test_two_models(folders: list[Path], compared: EvaluationComparison) -> None:
    result, tmp_path = compared, compared.out
    tiny, noisy = map(load_evaluation, folders)
    written = json.loads((tmp_path / "comparison.json").read_text())
    by_measure = {d["measure"]: d for d in written["differences"]}
    for k in (1, 2, 4):
        ours, theirs = (np.asarray(pass_at_k(4, e.correct.sum(axis=1), k)) for e in (noisy, tiny))
        measures = by_measure[f"pass@{k}"]
        assert (measures["model"], measures["baseline"]) == ("noisy", "tiny")
        difference = ours - theirs
        reach = student_quantile(0.975, len(difference) - 1) * difference.std(ddof=1) / len(difference) ** 0.5
        assert measures["difference"]["mean"] == pytest.approx(difference.mean())
        assert measures["difference"]["low"] == pytest.approx(difference.mean() - reach)
        assert measures["difference"]["high"] == pytest.approx(difference.mean() + reach)
        assert measures["p"] == permutation_test(ours, theirs)
    lost = {name: set(ids) for name, ids in written["unsolvable"].items()}
    assert lost["tiny"] == {i for i, row in zip(tiny.problem_ids, tiny.correct, strict=True) if not row.any()}
    overlaps = {frozenset(entry["models"]): entry["problems"] for entry in written["overlaps"]}
    assert overlaps.get(frozenset({"tiny", "noisy"}), 0) == len(lost["tiny"] & lost["noisy"])
    assert overlaps.get(frozenset({"noisy"}), 0) == len(lost["noisy"] - lost["tiny"])
    assert result.table.columns == ("measure", "tiny", "noisy")
    assert result.table.rows[0][1] == tiny.pass_at(1)
    assert (tmp_path / "differences.csv").read_text().startswith("models,measure,difference,")
    assert "noisy $-$ tiny" in (tmp_path / "differences.tex").read_text()


def test_figures_are_svg_and_png(compared: EvaluationComparison, tmp_path: Path) -> None:
    out, names = compared.out, {path.name for path in compared.figures}
    for name in ("pass-at-k", "pass-at-k-difference", "maj-at-k", "answer-diversity", "unsolvable",
                 "entropy-and-branching", "responses"):  # fmt: skip
        assert {f"{name}.svg", f"{name}.png"} <= names
        svg = (out / f"{name}.svg").read_text()
        ElementTree.fromstring(svg)
        assert "noisy" in svg  # letters stay letters
        with Image.open(out / f"{name}.png") as image:
            assert image.width > 600
            edge = np.asarray(image.convert("L"))
            for side in (edge[0], edge[-1], edge[:, 0], edge[:, -1]):
                assert side.min() > 250  # nothing runs into the margin
    for path in save(boundary_figures.venn(compared.boundary), tmp_path, "unsolvable"):
        assert path.read_bytes() == (out / path.name).read_bytes()  # the same again


def test_a_comparison_has_a_page(compared: EvaluationComparison) -> None:
    text = (compared.out / "report.html").read_text(encoding="utf-8")
    first, second = compared.boundary.names
    assert f"{second} against {first}: " in text
    for k in compared.boundary.ks:
        assert f"{compared.boundary.scores[second][f'pass@{k}'].mean * 100:.1f}" in text
    for section in ("summary", "pass-at-k", "unsolvable", "errors", "provenance"):
        assert f'<section id="{section}"' in text
    assert "was recorded.</p>" not in text  # what a comparison cannot have is not missed
    assert '<section id="curves"' not in text
    assert "</script>" in text


def test_the_command_prints_both_tables(folders: list[Path], tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    compare_command(folders, tmp_path, console=console, names=["before", "after"])
    printed = console.export_text()
    assert "after − before" in printed
    assert "distinct answers per problem" in printed
    assert "report.html" in printed


def test_unlike_evaluations_are_refused(policies: dict[str, Policy], folders: list[Path], tmp_path: Path) -> None:
    noisy = {"noisy": policies["noisy"]}

    def other(params: Any = HOW, **options: Any) -> Path:
        options = {"name": "plain", "limit": 12, **options}
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        return run_evaluation(noisy, ["countdown-mini"], params, out, **options)[0].folder

    cool = other(protocol("plain", samples=4, max_tokens=48, temperature=0.5))
    with pytest.raises(StoreError, match=r"differ in sampling.temperature: 1.0 and 0.5"):
        compare([folders[0], cool], tmp_path / "out")
    with pytest.raises(StoreError, match=r"differ in split: 'holdout' and 'train'"):
        compare([folders[0], other(split="train")], tmp_path / "out")
    fewer = other(limit=10)
    with pytest.raises(StoreError, match=r"12 problems, noisy 10, 10 of them the same: .* is in tiny and not in noisy"):
        compare([folders[0], fewer], tmp_path / "out")
    thinner = other(replace(HOW, samples=2))
    with pytest.raises(StoreError, match=r"tiny has 4 samples per problem, noisy 2"):
        compare([folders[0], thinner], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shared = compare([folders[0], fewer, thinner], tmp_path / "out", names=["a", "b", "c"], common=True).boundary
    assert (len(shared.problems), shared.samples) == (10, 2)
    # the same model, seed and problems: the same samples, whatever else was drawn beside them
    assert shared.evaluations["b"].rows["answer"] == shared.evaluations["c"].rows["answer"]
    assert all(d.difference.mean == 0 for d in shared.differences if (d.model, d.baseline) == ("c", "b"))


def test_bad_input(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs at least 2 evaluation folders, got 1"):
        compare(folders[:1], tmp_path)
    with pytest.raises(StoreError, match="no evaluation's folder"):
        compare([folders[0], tmp_path], tmp_path)
    with pytest.raises(ValueError, match="two models are called"):
        compare([folders[0], folders[0]], tmp_path)
    with pytest.raises(ValueError, match="3 names for 2 folders"):
        compare(folders, tmp_path, names=["a", "b", "c"])
    with pytest.raises(ValueError, match="needs 2 evaluations"):
        boundary({})


# ---------------------------------------------------------------- sets of many models


def made_up(names: list[str], seed: int = 0) -> Boundary:
    """Evaluations as they might be, of models that solve ever less."""
    rng = np.random.default_rng(seed)
    evaluations = {}
    for index, name in enumerate(names):
        correct = rng.random((30, 4)) < 0.35 / (1 + index)
        rows: dict[str, list[Any]] = {
            "correct": correct.ravel().tolist(),
            "answer": [str(value) for value in rng.integers(0, 5, 120)],
            "well_formed": [True] * 120,
            "tokens": rng.integers(10, 40, 120).tolist(),
            "finish_reason": ["stop"] * 120,
            "entropy": rng.random(120).tolist(),
            "branching": (1 + rng.random(120)).tolist(),
        }
        ids = [f"p{i}" for i in range(30)]
        evaluations[name] = Evaluation("task", name, "plain", 4, SamplingParams(), ids, rows)
    return boundary(evaluations)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_region_of_a_venn_diagram_has_its_number_inside(count: int) -> None:
    names = [f"m{i}" for i in range(count)]
    places = boundary_figures.region_centres(names)
    assert len(places) == 2**count - 1
    for some, (x, y) in places.items():
        for name, ellipse in zip(names, boundary_figures.ELLIPSES[count], strict=True):
            inside = bool(boundary_figures._inside(np.array(x), np.array(y), ellipse))
            assert inside == (name in some)
    points = np.array(list(places.values()))
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.eye(len(points))
    assert apart.min() > 0.06  # two numbers do not touch


def test_the_venn_diagram_shows_the_counts() -> None:
    comparison = made_up(["a", "b", "c"])
    figure = figure_of(boundary_figures.venn(comparison), PAGE)
    texts = {(text.get_position(), text.get_text()) for text in figure.axes[0].texts}
    places = boundary_figures.region_centres(comparison.names)
    counts = comparison.overlaps()
    assert texts == {(position, str(counts.get(some, 0))) for some, position in places.items()}
    assert sum(counts.values()) == len(set.union(*map(set, comparison.unsolvable.values())))


def test_more_than_four_models_get_an_upset_plot(tmp_path: Path) -> None:
    comparison = made_up([f"model {i} with a rather long name" for i in range(7)])
    upset, curves = boundary_figures.upset(comparison), boundary_figures.curves(comparison, "pass")
    heights = [bar.get_width() for bar in figure_of(upset, PAGE).axes[1].patches]
    assert len(heights) > 4
    assert heights == list(comparison.overlaps().values())[: len(heights)]
    for name, figure in (("unsolvable", upset), ("pass-at-k", curves)):
        png = save(figure, tmp_path, name)[1]
        with Image.open(png) as image:
            edge = np.asarray(image.convert("L"))
        assert min(side.min() for side in (edge[0], edge[-1], edge[:, 0], edge[:, -1])) > 250, name


# ---------------------------------------------------------------- quality by training step


def test_malformed_answers_are_counted_as_the_trainer_counts_them(tmp_path: Path) -> None:
    """One mark, but no <think> before it: the trainer gave no reward for the form."""
    store = RunStore.create(tmp_path / "run", {})
    texts = ["<think> 1 </think><answer> 1 </answer>", "<answer> 1 </answer>", "<answer> 1"]
    store.write_rollouts(1, {"completion": texts, "reward/format": [1.0, 0.0, None]})
    assert quality_by_step(store)[0].format_violations == 2
    assert quality_by_step(store, mark="<answer>")[0].format_violations == 0
    assert quality_by_step(store, mark=r"\boxed{")[0].format_violations == 3


def test_quality_by_step(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", {})
    with pytest.raises(StoreError, match="has no rollouts"):
        quality_by_step(store)
    good = "so <answer> 1 + 2 </answer>"
    store.write_rollouts(2, {"completion": [good, "no answer at all", "<answer> 1 <answer> 2 </answer> 好"]})
    store.write_rollouts(10, {"completion": [good, good, "a b c a b c a b c <answer> 1 </answer>"]})
    first, second = quality_by_step(store)
    assert (first.step, first.responses, first.format_violations, first.language_mixing) == (2, 3, 2, 1)
    assert (first.repetitive, first.redundancy) == (0, 0)
    assert (second.step, second.format_violations, second.repetitive, second.language_mixing) == (10, 0, 1, 0)
    assert second.redundancy == pytest.approx((1 - 6 / 10) / 3)
    assert quality_by_step(store, mark=r"\boxed{")[1].format_violations == 3
    table = quality_table([first, second])
    assert table.rows[1][:4] == (10, 3, 0, 1)
