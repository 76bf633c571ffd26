"""What tests of the sandbox share: the layers that this machine permits, and a look at processes from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from explorl.sandbox import fork_client, programs
from explorl.sandbox.fork_client import fork_server_client
from explorl.sandbox.programs import Guarantees, SandboxError, probe

STUB = fork_client.BOOTSTRAP.partition("from ")[0]
"""What makes explorl importable without torch."""


def permitted() -> list[Guarantees]:
    found = []
    for wanted in programs.LAYER_SETS:
        try:
            found.append(probe(wanted))
        except SandboxError:
            continue
    return found


PERMITTED = permitted()
TRIED = [
    guarantees
    for guarantees in PERMITTED
    if guarantees in PERMITTED[:1] or guarantees.layers in (("landlock", "seccomp"), ("seccomp",), ())
]
ISOLATED = [
    here for here in TRIED if here.network_isolated and here.filesystem_isolated and here.processes_isolated
]  # fmt: skip


def named(guarantees: Guarantees) -> str:
    return "+".join(guarantees.layers) or "limits"


def fork_server_pid() -> int:
    assert fork_server_client._running is not None
    return fork_server_client._running[0].pid


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def eventually(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to be"
        time.sleep(0.01)


def script(
    source: str, *, python: str = sys.executable, user: int | None = None, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process that uses the sandbox, perhaps as another user."""
    code = f"{STUB}\nimport atexit\natexit.register(lambda: last())\nlast = lambda: None\n"
    code += f"from explorl.sandbox import programs\nfrom explorl.sandbox.programs import *\n{source}"
    command = [python, "-X", "dev", "-c", code, *fork_client._FOLDERS]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
        env={**os.environ, **(environment or {})},
    )
