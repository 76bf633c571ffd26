"""The rates of wrong verdicts on the corpus of `benchmarks/judges.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "judges.py"


@pytest.fixture(scope="module")
def judges() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judges", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judges"] = module
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_large_enough(judges: ModuleType) -> None:
    cases = judges.read_corpus()
    assert len({case[:3] for case in cases}) == len(cases)
    for half in judges.HALVES:
        rights = [case.right for case in cases if case.half == half]
        assert min(rights.count(True), rights.count(False)) >= 600


def rates(judges: ModuleType, step: int) -> tuple[float, float]:
    """Return the rates of false rejects and false accepts among every so many answers."""
    cases = judges.read_corpus()[::step]
    wrong = judges.wrong_verdicts(cases, judges.judge(cases))
    counts = [sum(case.right is right for case in part) for right in (True, False) for part in (wrong, cases)]
    return counts[0] / counts[1], counts[2] / counts[3]


def test_some_of_the_corpus(judges: ModuleType) -> None:
    rejects, accepts = rates(judges, 9)
    assert rejects <= 0.08
    assert accepts <= 0.01


@pytest.mark.slow
def test_all_of_the_corpus(judges: ModuleType) -> None:
    rejects, accepts = rates(judges, 1)
    assert rejects <= 0.06
    assert accepts <= 0.005
