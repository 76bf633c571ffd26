"""The host's disk, where no namespaces keep programs from it: what is too much, and how it is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorl.sandbox import child, disk
from explorl.sandbox.disk import DiskQuota, clear
from explorl.sandbox.interpreter import InterpreterLimits
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.sandbox.programs import Guarantees, ProgramLimits, run_python


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def nest(path: Path, depth: int) -> None:
    """Folders deeper than any path may be long."""
    descriptor = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        deeper = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = deeper
    os.close(descriptor)


@pytest.mark.parametrize("entries", [99, 100])
@pytest.mark.parametrize("shape", ["nested", "flat", "links"])
def test_entries_are_counted(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch, shape: str, entries: int
) -> None:
    monkeypatch.setattr(disk, "ENTRIES", 99)
    (tmp_path / "sub").mkdir()
    if shape == "nested":
        nest(tmp_path / "sub", entries - 1)
    for index in range(entries - 1):
        if shape == "flat":
            (tmp_path / "sub" / str(index)).touch()
        elif shape == "links":
            (tmp_path / "sub" / str(index)).symlink_to("/")
    before = os.listdir("/proc/self/fd")
    assert DiskQuota(folder, 1 << 30).is_exceeded() is (entries == 100)
    assert os.listdir("/proc/self/fd") == before


def test_bytes_are_counted_as_the_disk_does(tmp_path: Path, folder: int) -> None:
    (tmp_path / "sub").mkdir()
    with (tmp_path / "sub" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert not DiskQuota(folder, 1 << 20).is_exceeded()
    (tmp_path / "sub" / "file").write_bytes(bytes(1 << 20))
    assert DiskQuota(folder, (1 << 20) - 1).is_exceeded()
    assert not DiskQuota(folder, 2 << 20).is_exceeded()


def test_too_deep_to_look_at_is_too_much(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    assert DiskQuota(folder, 1 << 30).is_exceeded()


def test_clear_follows_no_link(scratch: Path) -> None:
    inside, outside = scratch / "inside", scratch / "outside"
    for path in (inside / "a", outside):
        path.mkdir(parents=True)
    (outside / "file").touch()
    (inside / "link").symlink_to(outside)
    (inside / "a" / "link").symlink_to(outside)
    nest(inside / "a", 3000)
    (inside / "b").mkdir(0)
    (inside / "c" / "d").mkdir(parents=True)
    (inside / "c" / "d" / "e").touch()
    (inside / "c" / "d").chmod(0o100)
    descriptor = os.open(inside, os.O_RDONLY)
    clear(descriptor)
    os.close(descriptor)
    assert list(inside.iterdir()) == []
    assert list(outside.iterdir()) == [outside / "file"]


FLOOD = "import os\nwhile True: os.mkdir('d'); os.chdir('d')"


def test_a_program_is_told_why_it_was_ended(here: Guarantees, scratch: Path) -> None:
    if "namespaces" in here.layers:
        pytest.skip("the host's disk is out of reach")
    large = "for i in range(1 << 40): open(str(i), 'wb').write(bytes(1 << 20))"
    for source, limits in ((FLOOD, ProgramLimits()), (large, ProgramLimits(disk=1 << 22))):
        outcome = run_python(source, limits=limits)
        assert (outcome.status, outcome.stderr) == ("killed", f"{child.DISK_FULL}\n")
    assert list(scratch.iterdir()) == []


def test_an_interpreter_is_ended_that_fills_the_disk(isolated: Guarantees, scratch: Path) -> None:
    if "namespaces" in isolated.layers:
        pytest.skip("the host's disk is out of reach")
    with InterpreterPool(InterpreterLimits(seconds=60), warm=0) as pool:
        python = pool.open()
        assert python.run(FLOOD).status == "killed"
        for name in "abc":  # cells too short to be looked at while they run
            status = python.run(f"open('{name}', 'wb').write(bytes(15 << 20)) and None").status
            assert status == ("killed" if name == "c" else "ok")
        assert python.run("6 * 7").text.endswith("42\n")
    assert list(scratch.iterdir()) == []
