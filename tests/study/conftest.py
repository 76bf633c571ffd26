"""Very small studies on the tiny policy: two arms, two seeds, two steps, and an arm that fails in its own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorl.study.arm import run_arm
from explorl.study.run_study import locked_study, write_results
from explorl.study.spec import load_study

STUDY = """
name: mini
title: A very small study
base:
  preset: tiny
  rollout: {max_tokens: 24}
  task: {train_problems: 32}
  training: {prompts_per_step: 4, generations: 2, micro_batch: 8, checkpoint_every: 1}
arms:
  plain: {}
  Shaped + hot: {strategies: [ppl_shaping], set: {rollout.temperature: 1.5, training.learning_rate: 1e-3}}
  broken: {strategies: ["study_broken:Broken"]}
baseline: plain
seeds: 2
evaluation: {every: 1, problems: 8, samples: 2}
budget: {steps: 2}
target: 0.05
"""

BROKEN = """
import sys
from dataclasses import dataclass
from explorl.strategies import Strategy

if sys.argv[0].endswith("study/arm.py"):
    raise RuntimeError("this strategy fails in a run, [not] when it is checked")

@dataclass(frozen=True)
class Broken(Strategy):
    name = "broken"
    paper = "none"
"""


@pytest.fixture(scope="session")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The study's file, with the broken strategy's module where this process and its children find it."""
    folder = tmp_path_factory.mktemp("study-file")
    (folder / "study_broken.py").write_text(BROKEN)
    (folder / "mini.yaml").write_text(STUDY)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    sys.path.insert(0, str(folder))
    yield folder / "mini.yaml"
    sys.path.remove(str(folder))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def whole_study(study_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study with its two sound arms run from beginning to end, in this process."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    with locked_study(folder, load_study(study_file)) as study:
        for seed in study.seeds:
            for slug in ("plain", "shaped-hot"):
                run_arm(folder, slug, seed)
    write_results(folder)
    return folder
