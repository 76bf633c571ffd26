"""What is remembered of a proof, when it is repeated, and what a wrong operation does."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from explorl.modeling import fast_paths, proof
from explorl.modeling.fast_paths import PathChoice, Verified, deviation, fastest, relative_difference

from . import zoo

X = [torch.linspace(-1.0, 1.0, 12).view(3, 4)]


class Trials:
    """Two kinds of a path; the faster one is wrong beyond a turning point of 40, the other beyond 80."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = zoo.build("llama")
        self.tried: list[tuple[str, int]] = []
        monkeypatch.setattr(proof, "difference", self._difference)

    def _difference(self, model: Any, dtype: Any, fast: Any, *, temperature: float) -> str:
        return str(fast(True))

    def logps(self, kind: str, ids: list[list[int]], in_float32: bool) -> Any:
        longest = max(len(row) for row in ids)
        self.tried.append((kind, longest))
        return f"{kind} is wrong" if longest > {"fast": 40, "slow": 80}[kind] else ""

    def choose(self, points: set[int], **options: Any) -> PathChoice[str]:
        return fastest(
            self.model,
            "the path",
            lambda: ["fast", "slow", "own"],
            self.logps,
            points=frozenset(points),
            dtype=None,
            **options,
        )


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch)


def test_a_kind_is_tried_once(trials: Trials) -> None:
    assert trials.choose(set()).kind == trials.choose(set()).kind == "fast"
    assert len(trials.tried) == 1


def test_a_choice_is_proven_again_for_more_turning_points_and_announced_each_time(trials: Trials) -> None:
    announced: list[PathChoice[str]] = []
    for points, kind in ((set(), "fast"), ({40}, "slow"), (set(), "slow"), ({40}, "slow"), ({80}, "own")):
        assert trials.choose(points, announce=announced.append).kind == kind
    assert [choice.points for choice in announced] == [frozenset(), frozenset({40}), frozenset({40, 80})]
    assert (announced[1].reasons, announced[1].why) == ({"fast": "fast is wrong"}, "")
    assert announced[2].why == "LlamaDecoderLayer (LlamaAttention): slow is wrong"
    assert [kind for kind, _ in trials.tried] == ["fast", "fast", "slow", "fast", "slow"]


@pytest.mark.parametrize("options", [{"options": 1}, {"temperature": 0.5}])
def test_other_options_have_a_proof_of_their_own(trials: Trials, options: dict[str, Any]) -> None:
    trials.choose(set())
    trials.choose(set(), **options)
    assert len(trials.tried) == 2


def test_numbers_that_are_not_finite_do_not_hide_a_fault() -> None:
    want = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert relative_difference(want.clone(), want) == 0
    assert relative_difference(torch.tensor([1.0, float("nan"), float("inf"), 2.1]), want) > 0.01
    assert relative_difference(torch.tensor([1.0, 0.0, float("inf"), 2.0]), want) == math.inf
    assert relative_difference(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_difference(torch.full((3,), 1e-3), torch.zeros(3)) > 1
    assert relative_difference(torch.full((3,), 1e-3), torch.zeros(3), math.inf) == pytest.approx(1e-3)
    exact = torch.ones(3, dtype=torch.float64)
    assert relative_difference(exact + 1e-9, exact, math.inf) == pytest.approx(1e-9)


def test_results_of_another_type_or_shape_differ() -> None:
    assert deviation("it", lambda x: x.double(), torch.neg, X) == math.inf
    assert deviation("it", lambda x: x[:2], torch.neg, X) == math.inf
    assert deviation("it", lambda x: (x, -x), lambda x: [x, -x], X) == 0


def test_memory_that_is_full_says_nothing_of_an_operation() -> None:
    def full(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="allocate"):
        Verified().agrees("it", full, torch.neg, X, 1e-5)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such operation")


@pytest.mark.parametrize(
    ("fast", "right", "level", "message"),
    [
        (lambda x: -1.0 * x, True, logging.NOTSET, ""),
        (lambda x: -1.001 * x, False, logging.WARNING, "it differs from the modules by 100.0 times the tolerance"),
        (failing, False, logging.INFO, "ValueError: no such operation"),
    ],
)
def test_an_operation_is_compared_once(
    fast: Any, right: bool, level: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    verified = Verified()
    with caplog.at_level(logging.INFO, fast_paths.__name__):
        assert [verified.agrees("it", fast, torch.neg, X, 1e-5) for _ in range(2)] == [right, right]
    assert [record.levelno for record in caplog.records] == ([] if right else [level])
    assert message in caplog.text
