"""Every strategy on a batch that no process holds as a whole: each shapes its own rows as it would in the whole one."""

from __future__ import annotations

from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from explorl.strategies import REGISTRY, Batch, BottomP, ClipHigher, EntropyGuidedWeighting, Strategy, build_all
from explorl.strategies._lib.collectives import Collectives
from explorl.strategies.base import act_on_parts
from explorl.training.grpo import trainer as grpo
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.shaping import Shaped, shape
from tests.strategies.threads import on_threads
from tests.training.local_parts import ROWS, Undefined, batch_of, normalised, one_process, scene, shaped
from tests.training.test_every_strategy import SETTINGS, label

SCENES = ("any", "masked", "ties", "unscored")
COMPANY = ["maxrl", "ppl_shaping", "overlong_penalty", "mask_truncated", "egsw", "forking_tokens", "kl_cov", "lp_reg"]
EVERY = {
    "forking_tokens": [{"normalize": "kept", "fraction": 0.3}],
    "egsw": [{"level": "sequence", "scale": "softmax"}],
    "clip_cov": [{"fraction": 1.0, "low": -50.0, "high": 50.0}],
    "outcome_exploration": [{"baseline": "mean"}],
}
"""Settings beyond those of the other tests."""


SPECS = [[{name: setting}] for name, settings in SETTINGS.items() for setting in [*settings, *EVERY.get(name, [])]]
CASES: dict[str, tuple[str, list[Any]]] = {
    **{f"{label(spec)} {where}": (where, spec) for spec in SPECS for where in SCENES},
    **{f"company {where}": (where, [*COMPANY]) for where in SCENES},
    **{f"{hook} of NaN": ("any", [Undefined(hook)]) for hook in ("weights", "rewards")},
}
"""Every strategy in every scene, and some company."""


class Pool:
    """What the processes found, which all were started once."""

    def __init__(self, processes: int, folder: Path) -> None:
        self.processes = processes
        # Two of them take every strategy to one of the scenes, since waiting for each other is what takes time.
        self.cases = {
            name: case
            for number, (name, case) in enumerate(CASES.items())
            if processes > 2 or number // len(SCENES) % len(SCENES) == number % len(SCENES) or "NaN" in name
        }
        get_context("forkserver").set_forkserver_preload([one_process.__module__])  # they import it once for all
        start_processes(one_process, (processes, str(folder), self.cases), processes, start_method="forkserver")
        self.found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module", params=[2, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 4))])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(request.param, tmp_path_factory.mktemp("processes"))


def equal(actual: Any, expected: Any, name: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    elif isinstance(expected, str):
        assert actual == expected, name
    else:
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_every_strategy_acts_on_parts() -> None:
    assert [name for name, strategy in REGISTRY.items() if not strategy.acts_on_parts] == []
    assert SETTINGS.keys() == REGISTRY.keys()


def test_each_process_shapes_its_rows_as_in_the_whole_batch(pool: Pool) -> None:
    rows = ROWS // pool.processes
    for name, (where, specs) in pool.cases.items():
        expected = shaped(scene(where), specs)
        for rank, actual in enumerate(actual[name] for actual in pool.found):
            assert actual.keys() == expected.keys(), name
            for key, whole in expected.items():
                own = actual[key]
                if isinstance(whole, torch.Tensor) and whole.dim():
                    whole = whole[rank * rows : (rank + 1) * rows]
                    whole = whole[:, : own.size(1)] if whole.dim() == 2 else whole
                equal(own, whole, f"{name} {key} of process {rank}")


def test_a_value_that_is_not_finite_fails_on_all_processes_alike(pool: Pool) -> None:
    for hook in ("weights", "rewards"):
        errors = [result[f"{hook} of NaN"]["error"] for result in pool.found]
        assert len(set(errors)) == 1
        assert f"undefined.{hook} is nan on " in errors[0]
        assert errors[0] == shaped(scene("any"), [Undefined(hook)])["error"]


def test_processes_with_different_numbers_of_rows_hear_of_all(pool: Pool) -> None:
    places = range(pool.processes)
    rows = [rank for rank in places for _ in range(rank)]
    for rank, result in enumerate(result["collectives"] for result in pool.found):
        assert result == {
            "total": [pool.processes, sum(places)],
            "largest": [0.0, 1.0],
            "smallest": [-float(pool.processes - 1), torch.inf],
            "unknown": [pool.processes > 1, False],
            "each": list(places),
            "everywhere": rows,
            "marks": [row > 1 for row in rows],
            "here": True,
            "objects": [f"row of {row}" for row in rows],
            "before": sum(range(rank)),
        }


@pytest.mark.parametrize("rows", [(1, 7, 4), pytest.param((3, 3, 3, 3), marks=pytest.mark.slow)])
def test_rows_may_be_spread_in_any_way(rows: tuple[int, ...]) -> None:
    for name, (where, specs) in CASES.items():
        if "NaN" in name:
            continue
        whole = batch_of(scene(where), 2, gathered=True)
        expected = shape(build_all(specs), whole, normalised)
        places = on_threads(rows, partial(shaped_part, specs, whole))
        for field in ("advantages", "loss_mask", "weights", "kl_weights"):
            equal(torch.cat([getattr(part, field) for part in places]), getattr(expected, field), f"{name} {field}")
        for key, values in expected.kept.items():
            equal(torch.cat([part.kept[key] for part in places]), values, f"{name} {key}")
        for part in places:
            equal(part.metrics, expected.metrics, f"{name} metrics")


def shaped_part(specs: list[Any], whole: Batch, collectives: Collectives, own: slice) -> Shaped:
    values = {name: value[own] for name, value in vars(whole).items() if isinstance(value, torch.Tensor | list)}
    return shape(build_all(specs), whole.with_(**values, collectives=collectives), normalised)


# --- who acts on parts --------------------------------------------------------------------------------------------


class Centred(Strategy):
    """A stranger's, that takes a mean over what it takes for the whole batch."""

    def advantages(self, batch: Batch) -> torch.Tensor:
        return batch.advantages - batch.advantages.mean()


class Cool(Strategy):
    def sampling(self, prompts: Any, step: int) -> dict[str, list[float]]:
        return {"temperature": [0.5] * len(prompts)}


class OfPositions(EntropyGuidedWeighting):
    """A stranger's, on one of ours."""

    def weights(self, batch: Batch) -> torch.Tensor:
        return super().weights(batch) / batch.mask.sum()


class Knows(OfPositions):
    acts_on_parts = True


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        ([], True),
        ([BottomP(), ClipHigher()], True),
        ([Cool()], True),
        ([Centred()], False),
        ([BottomP(), Centred()], False),
        ([OfPositions()], False),
        ([Knows()], True),
    ],
)
def test_a_strategy_must_say_that_it_acts_on_parts(
    strategies: list[Strategy], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert act_on_parts(strategies) is expected
    calls = []
    monkeypatch.setattr(grpo, "generation_batch", lambda *args, gathered, **more: calls.append(gathered))
    monkeypatch.setattr(grpo, "shape", lambda *args: SimpleNamespace(metrics={}))
    monkeypatch.setattr(grpo, "put_back", lambda *args, **more: None)
    others = ("correct", "num_generations", "temperature", "has_penalties", "max_completion_length", "scale_rewards")
    for processes in (1, 2):
        trainer: Any = SimpleNamespace(
            **dict.fromkeys(others, 1),
            accelerator=SimpleNamespace(num_processes=processes, process_index=0),
            eos_token_ids=[],
            tokenizer=SimpleNamespace(pad_token_id=0),
            strategies=strategies,
            answers=None,
            state=SimpleNamespace(global_step=1),
            activity=SimpleNamespace(shaped=lambda metrics: None),
        )
        grpo.ExplorationTrainer.shape_batch(trainer, {}, SampledRows(), None, torch.zeros(1))  # type: ignore[arg-type]
    assert calls == [True, not expected]


def test_the_example_of_the_documentation_acts_on_parts() -> None:
    page = (Path(__file__).parents[2] / "docs/scale-batch.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {"__name__": "example"}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    strategy = scope["Centred"]()
    assert act_on_parts([strategy])
    whole = batch_of(scene("any"), 2, gathered=True)
    expected = shape([strategy], whole)
    counted = whole.mask > 0
    assert abs(float(expected.advantages[counted].mean())) < 1e-6 < float(whole.advantages[counted].mean().abs())
    for rank, part in enumerate(on_threads((5, 7), partial(shaped_part, [strategy], whole))):
        equal(part.advantages, expected.advantages[rank * 5 : 5 + rank * 7], "advantages")
        equal(part.metrics, expected.metrics, "metrics")
