"""RFT runs: iterations in their folders, killed in every stage and resumed, and what a user can cause in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from explorl.core.config import Config, load_config, rft_config
from explorl.core.store import RunStore, read_parquet
from explorl.evaluation import Evaluation
from explorl.training.rft import folder, loop, sampling
from explorl.training.rft.loop import next_stage, run_rft
from explorl.training.sft.run import StoredSFTTrainer

TASK = """
from explorl.tasks import Problem, Task, Verdict

class Even(Task):
    '''Right where a completion has an even number of digits; a stranger's task: no mark, no format.'''
    splits = ("train", "holdout")

    def problems(self, split, *, limit=None):
        first = 0 if split == "train" else 100
        return [Problem(f"{split}-{n}", {"n": n}) for n in range(first, first + 8)][:limit]

    def prompt(self, problem, template=None):
        return f"{problem.data['n']}+1="

    def verify(self, completion, problem, *, opened=False):
        count = sum(sign.isdigit() for sign in str(completion))
        return Verdict(count % 2 == 0, answer=str(count))

class Never(Even):
    def verify(self, completion, problem, *, opened=False):
        return Verdict(False, answer="none")

class One(Even):
    def problems(self, split, *, limit=None):
        return super().problems(split)[:1]

    def verify(self, completion, problem, *, opened=False):
        return Verdict(True, answer="same")
"""


@pytest.fixture(autouse=True)
def own_task(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path_factory.mktemp("task")
    (place / "own_even.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(place))
    sys.modules.pop("own_even", None)


def settings(policy: Path | str, **rft: Any) -> dict[str, Any]:
    given = {
        "iterations": 2, "prompts": 6, "samples": 4, "budget": 12, "per_prompt": 3, "noise": 0.25, "batch_size": 2,
        "learning_rate": 1e-3, "selector": "branching", "filters": ["has_digit", "dedupe"],
    }  # fmt: skip
    return {
        "model": {"name": str(policy), "lora": None},
        "task": {"name": "own_even:Even"},
        "rollout": {"temperature": 1.0, "max_tokens": 12},
        "sft": {"max_length": 64, "checkpoint_every": 1},
        "rft": {**given, **rft},
        "evaluation": {"protocol": "plain", "samples": 4, "every": 1},
    }


def made(policy: Path | str, changes: dict[str, Any] | None = None, **rft: Any) -> Config:
    return load_config(values={**settings(policy, **rft), **(changes or {})})


def run(config: Config, place: Path) -> dict[str, torch.Tensor]:
    """The weights that a run ends with."""
    model = run_rft(config, RunStore(place), console=Console(quiet=True))
    (weights,) = model.glob("*.safetensors")
    return load_file(weights)


@pytest.fixture(scope="module")
def parts() -> Any:
    """Pools in three parts, so that a run can be killed between two of them."""
    before, loop.PART_SIZE = loop.PART_SIZE, 8
    yield
    loop.PART_SIZE = before


@pytest.fixture(scope="module")
def whole(small_policy: Path, parts: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing interrupted, and its weights."""
    place = tmp_path_factory.mktemp("task")
    (place / "own_even.py").write_text(TASK)
    sys.path.insert(0, str(place))
    try:
        where_to = tmp_path_factory.mktemp("whole") / "run"
        return where_to, run(made(small_policy), where_to)
    finally:
        sys.path.remove(str(place))


def test_every_iteration_is_a_folder(whole: tuple[Path, Any]) -> None:
    place, weights = whole
    assert RunStore(place).kind == "rft"
    for number in (1, 2):
        one = folder.IterationFolder(RunStore(place), number)
        pool, _ = one.pool()
        facts, selected = one.selection(), one.selected()
        assert len(pool) == 24
        assert all(sample.entropy is not None and sample.branching is not None for sample in pool)
        assert [entry["name"] for entry in facts["filters"]] == ["has_digit", "dedupe"]
        gone = read_parquet(one.folder / "dropped.parquet")
        assert len(gone["filter"]) == sum(entry["dropped"] for entry in facts["filters"])
        assert facts["filtered"] == len(pool) - len(gone["filter"])
        assert len(selected["completion"]) == facts["selected"] <= 12
        assert selected["correct"].count(False) == facts["noise"] == facts["noise_wanted"] > 0
        assert max(selected["problem"].count(problem) for problem in selected["problem"]) <= 3
        right = [score for score, good in zip(selected["score"], selected["correct"], strict=True) if good]
        assert right == sorted(right, reverse=True)
        texts = {(sample.problem, sample.sample): sample.text for sample in pool}
        keys = zip(selected["problem"], selected["sample"], strict=True)
        assert [texts[key] for key in keys] == selected["completion"]
        scores = json.loads(one.evaluation_path.read_text())["scores"]
        assert {"pass@1", "pass@4", "entropy", "branching", "distinct_answers"} <= scores.keys()
        assert scores["pass@4"]["low"] <= scores["pass@4"]["mean"] <= scores["pass@4"]["high"]
        assert not one.fit.checkpoints.exists()
    lines = RunStore(place).metrics()
    assert [(line["step"], line["kind"]) for line in lines] == [
        (0, "evaluation"), (1, "train"), (1, "evaluation"), (2, "train"), (2, "evaluation"),
    ]  # fmt: skip
    assert all(line["loss"] > 0 and line["step_time"] > 0 for line in lines if line["kind"] == "train")
    first, second = (load_file(folder.IterationFolder(RunStore(place), n).model / "model.safetensors") for n in (1, 2))
    assert any(not torch.equal(first[name], second[name]) for name in first), "the second fit has changed the weights"
    assert all(torch.equal(weights[name], second[name]) for name in second), "the run's policy is the last one"


def test_the_problems_of_an_iteration_are_the_next_ones(whole: tuple[Path, Any]) -> None:
    asked = [{sample.problem for sample in folder.IterationFolder(RunStore(whole[0]), n).pool()[0]} for n in (1, 2)]
    assert asked[0] == {f"train-{n}" for n in range(6)}
    assert asked[1] == {f"train-{n}" for n in (6, 7, 0, 1, 2, 3)}


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(owner: Any, name: str, count: int, then: Callable[..., None] = _die) -> None:
    """Replaces a method by one that dies when it has been called so often."""
    real = getattr(owner, name)
    calls = [0]

    def wrapped(*given: Any, **named: Any) -> Any:
        result = real(*given, **named)
        calls[0] += 1
        if calls[0] >= count:
            then()
        return result

    setattr(owner, name, wrapped)


def _before_it_has_its_name(name: str, iteration: str) -> None:
    """Dies when a file is written, but not yet called what it will be called."""
    real = Path.replace

    def replace(self: Path, target: Any) -> Path:
        if Path(target).name == name and iteration in str(target):
            _die()
        return real(self, target)

    Path.replace = replace  # type: ignore[method-assign]


def _in_second_fit() -> None:
    real = StoredSFTTrainer._save_checkpoint

    def save(self: Any, *given: Any) -> None:
        real(self, *given)
        if "iteration-02" in str(self.store.folder):
            _die()

    StoredSFTTrainer._save_checkpoint = save  # type: ignore[method-assign]


KILLS: dict[str, tuple[Callable[[], None], tuple[int, str]]] = {
    "while the second part is sampled": (lambda: _after(sampling.PoolSampler, "sample", 2), (1, "sampling")),
    "when it has filtered": (lambda: _after(folder.IterationFolder, "write_selection", 1), (1, "fitting")),
    "in the middle of a fit": (lambda: _after(StoredSFTTrainer, "_save_checkpoint", 2), (1, "fitting")),
    "when a fit is over": (lambda: _after(loop, "fit", 1), (1, "evaluation")),
    "while it evaluates": (lambda: _after(Evaluation, "save", 1), (1, "evaluation")),
    "when a pool has just been sampled": (lambda: _after(folder.IterationFolder, "join_parts", 1), (2, "filtering")),
    "while it filters": (lambda: _before_it_has_its_name("selected.parquet", "iteration-02"), (2, "filtering")),
    "in the second fit": (_in_second_fit, (2, "fitting")),
    "when an iteration is logged": (lambda: _after(loop._Loop, "_log", 2), (2, "evaluation")),
    "before its policy has its name": (lambda: setattr(loop, "link_folder", _die), (0, "")),
}  # fmt: skip
"""Where a run is killed that has survived those before, and where it then stands."""


def _child(config: Config, place: Path, patch: Callable[[], None]) -> None:
    patch()
    run_rft(config, RunStore(place), console=Console(quiet=True))
    os._exit(7)


def _killed(config: Config, place: Path, moment: str) -> None:
    """Runs, or goes on, in a process of its own that is killed at a moment."""
    patch, stands = KILLS[moment]
    process = multiprocessing.get_context("fork").Process(target=_child, args=(config, place, patch))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, moment
    at = next_stage(rft_config(config), RunStore(place))
    assert at == (stands if stands[0] else None), moment


def _same(weights: dict[str, torch.Tensor], place: Path, whole: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert weights.keys() == whole[1].keys()
    assert all(torch.equal(weights[name], whole[1][name]) for name in weights)
    lines = [(line["step"], line["kind"]) for line in RunStore(place).metrics()]
    assert lines == [(line["step"], line["kind"]) for line in RunStore(whole[0]).metrics()]
    assert not [path for path in place.rglob("*") if path.name.endswith((".tmp", ".old"))]


@pytest.mark.slow
def test_killed_in_every_stage_one_after_another_it_ends_with_the_same_weights(
    whole: tuple[Path, dict[str, torch.Tensor]], small_policy: Path, tmp_path: Path
) -> None:
    config, place = made(small_policy), tmp_path / "run"
    for moment in KILLS:
        _killed(config, place, moment)
    _same(run(config, place), place, whole)
    starts = json.loads((place / "provenance.json").read_text())
    stood = [stands for _, stands in KILLS.values() if stands[0]]
    assert [start["resumed_from"] for start in starts] == [None, *(f"iteration {n}, {what}" for n, what in stood), None]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while the second part is sampled", "in the middle of a fit", "when a fit is over"])
def test_killed_once_it_ends_with_the_same_weights(
    moment: str, whole: tuple[Path, dict[str, torch.Tensor]], small_policy: Path, tmp_path: Path
) -> None:
    config, place = made(small_policy), tmp_path / "run"
    _killed(config, place, moment)
    _same(run(config, place), place, whole)


def test_always_from_the_base(small_policy: Path, whole: tuple[Path, Any], tmp_path: Path) -> None:
    run(made(small_policy, **{"from": "base"}), tmp_path / "run")
    store = RunStore(tmp_path / "run")
    starts = [folder.IterationFolder(store, n).fit.config()["model"]["name"] for n in (1, 2)]
    assert starts == [str(small_policy)] * 2
    of_whole = folder.IterationFolder(RunStore(whole[0]), 2).fit.config()["model"]["name"]
    assert of_whole.endswith("iteration-01/fit/model")


@pytest.mark.parametrize(
    ("every", "ends", "scored"), [(1, 64, [0, 1, 2, 3]), (2, 64, [0, 2, 3]), (0, 64, [0, 1, 2, 3]), (0, 0, [])]
)
def test_which_policies_are_scored(every: int, ends: int, scored: list[int], small_policy: Path) -> None:
    config = made(small_policy, {"evaluation": {"every": every, "ends": ends}}, iterations=3)
    assert [number for number in range(4) if loop.is_scored(config, number)] == scored
