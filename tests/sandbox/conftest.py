"""Fixtures of the sandbox's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from explorl.sandbox import nursery as nursery_module
from explorl.sandbox import programs
from explorl.sandbox.nursery import nursery
from explorl.sandbox.programs import Guarantees
from tests.sandbox.support import ISOLATED, TRIED, named


def use(guarantees: Guarantees, monkeypatch: pytest.MonkeyPatch) -> Guarantees:
    monkeypatch.setattr(programs, "capabilities", lambda: guarantees)
    return guarantees


@pytest.fixture(params=TRIED, ids=named)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Guarantees:
    """Each set of mechanisms that this system permits, in turn, as if it were the best."""
    monkeypatch.setenv("EXPLORL_UNISOLATED", "1")
    return use(request.param, monkeypatch)


@pytest.fixture(params=ISOLATED, ids=named)
def isolated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Guarantees:
    """Each of them that isolates."""
    return use(request.param, monkeypatch)


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Say what the next nursery, which is that of this test alone, shall run."""
    programs.capabilities()  # found out by a sound one, whichever test comes first

    def start(code: str) -> None:
        nursery.close()
        monkeypatch.setattr(nursery_module, "BOOTSTRAP", code)

    yield start
    nursery.close()
