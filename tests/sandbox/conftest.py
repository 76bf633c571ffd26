"""Fixtures of the sandbox's tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from explorl.sandbox import fork_client, programs
from explorl.sandbox.fork_client import fork_server_client
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
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where working folders are made, in memory if possible: some disks take milliseconds to remove each folder."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="explorl-", dir=memory) as folder:
        os.chmod(folder, 0o711)  # programs may be other users
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Say what the next fork server, which is that of this test alone, shall run."""
    programs.capabilities()  # found out by a sound one, whichever test comes first

    def start(code: str) -> None:
        fork_server_client.close()
        monkeypatch.setattr(fork_client, "BOOTSTRAP", code)

    yield start
    fork_server_client.close()
