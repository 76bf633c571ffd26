"""Arms of a study that are trained by rejection-sampling fine-tuning, beside arms of GRPO."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.docs.results import END, page_with, results_section

from explorl.core.config import ConfigError
from explorl.core.store import RunStore
from explorl.study.arm import is_done, run_arm, run_folder
from explorl.study.run_study import locked_study, study_status, write_results
from explorl.study.spec import Study, load_study

ROOT = Path(__file__).parents[2]

MIXED: dict[str, Any] = {
    "name": "mixed",
    "base": {
        "preset": "tiny-rft",
        "rollout": {"max_tokens": 40},
        "training": {"prompts_per_step": 2, "generations": 2, "micro_batch": 4, "iterations": 2, "beta": 0.0},
        "rft": {"prompts": 8, "samples": 4, "budget": 8, "epochs": 1},
    },
    "arms": {"GRPO": None, "RFT": {"kind": "rft", "set": {"rft.selector": "entropy"}}},
    "baseline": "GRPO",
    "seeds": 1,
    "evaluation": {"every": 1, "problems": 8, "samples": 2},
    "budget": {"steps": 2, "iterations": 1},
}


def written(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_the_study_of_table_3_has_its_five_arms() -> None:
    study = load_study("rft")
    chosen = {arm.name: (arm.config["rft"]["selector"], arm.config["rft"]["noise"]) for arm in study.arms}
    assert chosen == {
        "rule-filtered only": ("random", 0.0),
        "+ noise": ("random", 0.05),
        "+ entropy": ("entropy", 0.0),
        "+ branching": ("branching", 0.0),
        "noise + branching": ("branching", 0.05),
    }
    assert {arm.kind for arm in study.arms} == {"rft"}
    assert (study.budget, len(study.seeds)) == ({"iterations": 4}, 3)
    for arm in study.arms:
        config = study.arm_config(arm, 1, Path("study"))
        assert (config.rft.iterations, config.training.steps, config.evaluation.every) == (4, 4, 1)
        assert arm.config["rft"]["filters"] == ["has_answer", "has_digit", "cut_after_answer",
                                                {"max_redundancy": {"limit": 0.31}}]  # fmt: skip


def test_rft_and_grpo_stand_in_one_table(tmp_path: Path) -> None:
    file, folder = written(tmp_path, MIXED), tmp_path / "study"
    with locked_study(folder, load_study(file)) as study:
        assert study == Study.read(folder)
        for arm in study.arms:
            run_arm(folder, arm.slug, 0)
            store = RunStore(run_folder(folder, arm.slug, 0))
            assert is_done(store)
            assert store.kind == arm.kind
        results = write_results(folder)
    grpo, rft = results["arms"]
    assert rft["changes"] == {"kind": "rft", "rft.selector": "entropy"}
    assert rft["over_training"]["2"]["step"] == [0, 1]
    assert grpo["over_training"]["2"]["step"] == [0, 1, 2]
    assert rft["differences"]["pass@2"]["mean"] is not None
    assert (folder / "report.html").exists()
    status = study_status(folder)
    assert [row[:4] for row in status.rows] == [("GRPO", 0, "done", 2), ("RFT", 0, "done", 1)]
    run_arm(folder, "rft", 0)  # what is done is not done again
    assert len(RunStore(run_folder(folder, "rft", 0)).metrics()) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": {"minutes": 3}}, "budget has minutes.*use iterations, like {iterations: 4}"),
        ({"budget": {}}, "a budget is one of steps, tokens and minutes"),
        (
            {"arms": {"GRPO": None, "RFT": {"kind": "rft", "set": {"rft.iterations": 9}}}},
            "sets rft.iterations: all arms",
        ),
        ({"arms": {"GRPO": None, "RFT": {"kind": "rft", "strategies": ["egsw"]}}}, "has no strategies"),
        ({"arms": {"GRPO": None, "RFT": {"kind": "rtf"}}}, "arms.RFT.kind is 'rtf'"),
        (
            {"arms": {"GRPO": None, "RFT": {"kind": "rft", "set": {"rft.selector": "entropi"}}}},
            "mean 'entropy'",
        ),
    ],
)
def test_what_an_rft_arm_cannot_be_is_said(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load_study(written(tmp_path, {**MIXED, **changes}))


def made_results(gains: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    """Results of a study as `study_results` gives them, with these differences in pass@16."""
    around = {"mean": 0.4, "low": 0.3, "high": 0.5}
    measures = dict.fromkeys(("pass@1", "pass@16", "entropy", "branching"), around)

    def arm(name: str, gain: tuple[float, float, float] | None) -> dict[str, Any]:
        change = None
        if gain is not None:
            one = dict(zip(("mean", "low", "high"), gain, strict=True))
            change = {key: {**one, "p": 0.01, "p_corrected": 0.03} for key in ("pass@1", "pass@16")}
        return {"name": name, "measures": measures, "differences": change, "seeds": [0, 1, 2], "failed": {}}

    return {
        "title": "t", "date": "2026-01-02", "commit": "0123456789ab", "problems": 256, "samples": 16,
        "baseline": "plain", "steps": 4,
        "measures": [{"key": key} for key in ("pass@1", "pass@16", "entropy")],
        "start": {"measures": measures},
        "arms": [arm("plain", None), *(arm(name, gain) for name, gain in gains.items())],
    }  # fmt: skip


def test_the_page_of_results_says_what_the_intervals_say() -> None:
    text = results_section(
        made_results({"a": (0.02, 0.01, 0.03), "b": (0.01, -0.01, 0.03), "c": (-0.02, -0.03, -0.01)})
    )
    assert "| start | 40.0% [30.0%, 50.0%] | 40.0% [30.0%, 50.0%] | – | – |" in text
    assert "| a | 40.0% [30.0%, 50.0%] | 40.0% [30.0%, 50.0%] | +2.0 [+1.0, +3.0] | +2.0 [+1.0, +3.0] |" in text
    assert "pass@16 ends higher than with plain in a (+2.0 points [+1.0, +3.0], p = 0.03)" in text
    assert "lower in c (−2.0 points [−3.0, −1.0], p = 0.03)" in text
    assert "not told apart in b (+1.0 points [−1.0, +3.0], p = 0.03)" in text
    none = results_section(made_results({"b": (0.01, -0.01, 0.03)}))
    assert "No arm's pass@16 can be told apart from plain's" in none


def test_the_page_keeps_what_people_wrote_around_the_table() -> None:
    page = (ROOT / "docs" / "results" / "rft.md").read_text(encoding="utf-8")
    made = page_with(page, "THE TABLE\n")
    assert re.search(rf"THE TABLE\n\n{re.escape(END)}", made)
    assert made.split("THE TABLE")[0].strip() == page[: page.index("-->") + 3].strip()
    assert page_with(made, "THE TABLE\n") == made
    with pytest.raises(ValueError, match="no place for the results"):
        page_with("# Results\n", "x")
