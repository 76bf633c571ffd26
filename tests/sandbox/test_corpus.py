"""Hostile programs and hostile tests of data sets (`corpus`), in each set of layers, as root and as an ordinary user.

For each of these settings one process of that user runs the whole corpus and says what became of it. Whether anything
of the host has changed is looked at from here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from explorl.sandbox import child
from tests.sandbox.corpus import ATTACKS, CROSSINGS, FORGERIES, HOGS, HONEST, PREAMBLE, TESTS_ATTACKS, UNUSUAL_FILES
from tests.sandbox.support import script
from tests.sandbox.test_hostile import ordinary_python

NAMESPACES, LANDLOCK, LIMITS = ("namespaces", "seccomp"), ("landlock", "seccomp"), ()
ME, ORDINARY = os.getuid(), 12345
ROLES = ("program", "tests")
RUN = """
import json, sys, tempfile
with open(ORDER) as file: order = json.load(file)
layers, tempfile.tempdir = tuple(order["layers"]), order["folder"]
try: probe(layers)
except SandboxError as error: sys.exit(f"refused: {error}")
programs.capabilities = lambda: Guarantees(True, True, True, True, layers)
def run(case):
    names = {**order["names"], "VICTIM": case["victim"], "HOST": os.getpid()}
    header = "".join(f"{name} = {value!r}\\n" for name, value in names.items()) + order["preamble"]
    program, tests = (f"ROLE = {role!r}\\n{header}\\n{case[role]}" for role in ("program", "tests"))
    tested = run_tests(program, tests, entry_point="f")
    return tested.status, tested.error, tested.seconds
print(json.dumps([in_threads(run, order["cases"], workers=2), os.listdir(order["folder"])]))
"""


class Setting(NamedTuple):
    """What shuts programs in, who runs them, and whether with a Python that root's programs can read as other users."""

    layers: tuple[str, ...]
    user: int = ME
    shared_python: bool = False

    def __str__(self) -> str:
        user = "root" if self.user == 0 else "ordinary user"
        return f"{self.layers[0] if self.layers else 'limits'}, {user}{', shared Python' * self.shared_python}"


SETTINGS = [Setting(layers) for layers in (NAMESPACES, LANDLOCK, LIMITS)]
if ME == 0:
    SETTINGS += [Setting(layers, ORDINARY, True) for layers in (NAMESPACES, LANDLOCK, LIMITS)]
    SETTINGS += [Setting(LANDLOCK, ME, True)]


def in_role(role: str, source: str) -> dict[str, str]:
    """A program and its tests, of which one is hostile and reports what was not refused."""
    program, tests = "def f(): return done", "def check(candidate):\n    assert candidate() == [], candidate()\n"
    if role == "program":
        return {"program": f"{source}\n{program}", "tests": tests}
    return {"program": program, "tests": f"{source}\n{tests}    assert not done, done"}


def forged(message: str) -> dict[str, str]:
    frame = f"message = {message!r}.encode()\nos.write({child._VERDICT}, len(message).to_bytes(8, 'big') + message)"
    return {"program": "def f(): return 1", "tests": f"{frame}\nos._exit(0)"}


CONFINED = {
    **{f"{name}: {role}": in_role(role, source) for name, source in ATTACKS.items() for role in ROLES},
    **{f"{name}: tests": in_role("tests", source) for name, source in TESTS_ATTACKS.items()},
    **{name: {"program": program, "tests": tests} for name, (program, tests) in CROSSINGS.items()},
}
LEFTOVERS = {f"{name}: {role}": in_role(role, source) for name, source in UNUSUAL_FILES.items() for role in ROLES}
HOGGED = {f"{name}: {role}": in_role(role, source) for name, source in HOGS.items() for role in ROLES}
WORKING = {name: {"program": program, "tests": tests} for name, (program, tests) in HONEST.items()}
FORGED = {name: forged(message) for name, message in FORGERIES.items()}


class Ran(NamedTuple):
    """What became of the corpus in one setting."""

    layers: tuple[str, ...]
    user: int
    results: dict[str, tuple[str, str | None, float]]
    """Status, error and seconds of each case."""
    left: list[str]
    """What is left of working folders."""
    changed: list[str]
    """Which files of the host are not as they were."""
    bystander_lives: bool


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    setting: Setting = request.param
    cases = LEFTOVERS | HOGGED | WORKING | FORGED | (CONFINED if setting.layers else {})
    python = ordinary_python() if setting.shared_python else sys.executable
    with ExitStack() as stack:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # some disks take milliseconds for each folder
        folder, victims = (Path(tempfile.mkdtemp(prefix="explorl-", dir=where)) for where in (memory, None))
        stack.callback(lambda: [shutil.rmtree(path, ignore_errors=True) for path in (folder, victims)])
        for index in range(len(cases)):
            make_victim(victims / str(index), stack)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0explorl-corpus-{os.getpid()}")
        abstract.listen()
        folder.chmod(0o711)  # or programs that are other users could not come to their own
        for path in (folder, victims, *victims.rglob("*")):
            os.chown(path, setting.user, setting.user)
        user = None if setting.user == ME else setting.user
        command = [python, "-c", "input()"]
        bystander = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, user=user, cwd="/"))
        stack.callback(bystander.kill)
        sockets = {"PORT": tcp.getsockname()[1], "ABSTRACT": abstract.getsockname().decode()}
        order = {
            "layers": setting.layers,
            "folder": str(folder),
            "names": {"PID": bystander.pid, "SOURCE": child.__file__, **sockets},
            "preamble": PREAMBLE,
            "cases": [{**case, "victim": str(victims / str(index))} for index, case in enumerate(cases.values())],
        }
        orders = victims / "order"
        orders.write_text(json.dumps(order))
        orders.chmod(0o644)
        before = look(victims)
        process = script(f"ORDER = {str(orders)!r}\n{RUN}", python=python, user=user, environment={"HOME": "/"})
        stack.enter_context(process)
        out, err = process.communicate(timeout=500)
        if err.startswith("refused"):
            pytest.skip(err)
        assert process.returncode == 0, err
        results, left = json.loads(out)
        after = look(victims)
        changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        yield Ran(
            setting.layers,
            setting.user,
            dict(zip(cases, results, strict=True)),
            left,
            changed,
            bystander.poll() is None,
        )


def make_victim(folder: Path, stack: ExitStack) -> None:
    """A folder that a program wants at: with a private file, one that all may write to, a folder and a socket."""
    (folder / "folder").mkdir(parents=True)
    (folder / "folder" / "file").write_text("x")
    for name, mode in (("secret", 0o600), ("shared", 0o666)):
        (folder / name).write_text("secret")
        (folder / name).chmod(mode)
    listening = stack.enter_context(socket.socket(socket.AF_UNIX))
    listening.bind(str(folder / "socket"))
    listening.listen()


def look(folder: Path) -> dict[str, tuple[object, ...]]:
    """What can be seen of all that is in a folder."""
    seen = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_text() if path.is_file() else None
        seen[str(path)] = (status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, status.st_nlink, content)
    return seen


@pytest.mark.parametrize("name", list(CONFINED))
def test_attack_is_refused(ran: Ran, name: str) -> None:
    if not ran.layers:
        pytest.skip("nothing but limits here")
    assert ran.results[name][:2] == ["ok", None]


@pytest.mark.parametrize("name", list(WORKING))
def test_honest_code_works(ran: Ran, name: str) -> None:
    if not ran.layers and ran.user and "thread" in name:
        pytest.skip("the kernel counts all processes of the user")
    assert ran.results[name][:2] == ["ok", None]


@pytest.mark.parametrize("name", list(HOGGED))
def test_too_much_on_the_disk_is_ended(ran: Ran, name: str) -> None:
    """Not by the limit on time. Namespaces have a disk that says when it is full, which code may not survive."""
    status, error, _ = ran.results[name]
    if "namespaces" in ran.layers:
        assert status in ("error", "failed", "killed")
    else:
        assert (status, error) == ("error", child.DISK_FULL)


@pytest.mark.parametrize("name", list(LEFTOVERS))
def test_leftover_files_do_no_harm(ran: Ran, name: str) -> None:
    assert ran.results[name][:2] == ["ok", None]


@pytest.mark.parametrize("name", list(FORGED))
def test_what_is_no_verdict_is_none(ran: Ran, name: str) -> None:
    assert ran.results[name][:2] == ["killed", "the tests' process has ended"]


def test_host_is_as_it_was(ran: Ran) -> None:
    assert ran.left == []
    assert ran.changed == []
    assert ran.bystander_lives
