"""What strategies do to the tiny policy: the study `effects`, three seeds, about a quarter of an hour on two cores.

Run as a script on the study's folder, it prints the table of docs/strategies.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from explorl.core.store import RunStore
from explorl.study.arm import run_folder
from explorl.study.spec import Study

FILE = "effects"
Measure = Callable[[Path], float]


def rollout_entropy(run: Path) -> float:
    """Mean −log π of what was sampled in the first five steps, when the policies are still alike: an estimate of the
    policy's entropy at the sampling temperature, along the rollouts."""
    values = []
    for path in sorted((run / "rollouts").glob("step-*.parquet"))[:5]:
        rows = pq.read_table(path, columns=["logp"]).to_pydict()["logp"]
        values += [-value for row in rows if row is not None for value in row]
    return float(np.mean(values))


def last_summary(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(sorted((run / "evaluations").glob("step-*.json"))[-1].read_text())
    return found


def end_entropy(run: Path) -> float:
    """Entropy of the trained policy's own answers to held-out problems."""
    return float(last_summary(run)["entropy"])  # type: ignore[arg-type]


def pass_at_8(run: Path) -> float:
    return float(last_summary(run)["pass_at_k"]["8"]["mean"])  # type: ignore[index]


EXPECTED: list[tuple[str, str, str, Measure, bool]] = [
    ("entropy of the first rollouts", "temperature 1.3", "plain", rollout_entropy, True),
    ("entropy of the first rollouts", "bottom-p 0.5", "plain", rollout_entropy, False),
    ("entropy after training", "entropy advantage", "plain", end_entropy, False),
    ("entropy after training", "clip-higher twice", "plain twice", end_entropy, True),
    ("entropy after training", "high perplexity", "low perplexity", end_entropy, False),
    ("pass@8 after training", "negative samples", "plain", pass_at_8, True),
]
"""A measure that should be higher in the first arm than in the second, and whether the tiny policy shows it."""


def by_seed(folder: Path, arm: str, measure: Measure) -> np.ndarray:
    study = Study.read(folder)
    slug = study.arm(arm).slug
    return np.array([measure(run_folder(folder, slug, seed)) for seed in study.seeds])


def skipped(folder: Path) -> tuple[int, int]:
    """Batches below the threshold, and batches, over all seeds; each line says that just those were left out."""
    below = total = 0
    study = Study.read(folder)
    for seed in study.seeds:
        store = RunStore(run_folder(folder, study.arm("pass threshold 0.5").slug, seed))
        for line in store.metrics():
            if line.get("kind") == "train":
                assert line["strategy/pass_threshold/skipped"] == float(line["reward"] < 0.5 - 1e-6), line["step"]
                below, total = below + (line["reward"] < 0.5), total + 1
    return below, total


def table(folder: Path) -> list[str]:
    lines = ["| measure | arm | against | each seed's difference | mean |", "| --- | --- | --- | --- | ---: |"]
    for what, arm, other, measure, _ in EXPECTED:
        differences = by_seed(folder, arm, measure) - by_seed(folder, other, measure)
        each = ", ".join(f"{value:+.3f}" for value in differences)
        lines.append(f"| {what} | {arm} | {other} | {each} | {differences.mean():+.3f} |")
    return lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from explorl.study.run_study import run_study

    place = tmp_path_factory.mktemp("effects") / "study"
    outcome = run_study(FILE, folder=place, console=Console())
    assert outcome.failed == []
    return place


@pytest.mark.slow
def test_effects(folder: Path) -> None:
    print("\n".join(table(folder)))
    for what, arm, other, measure, seen in EXPECTED:
        difference = (by_seed(folder, arm, measure) - by_seed(folder, other, measure)).mean()
        least = -0.01 if measure is pass_at_8 else 0.0 if seen else -0.02
        assert difference > least, (what, arm, other)


@pytest.mark.slow
def test_pass_threshold_skips_what_it_should(folder: Path) -> None:
    below, total = skipped(folder)
    assert 0 < below < total


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
    below, total = skipped(Path(sys.argv[1]))
    print(f"pass threshold 0.5: {below} of {total} batches lie below it, and just those were skipped")
