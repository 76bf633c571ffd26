"""Make working folders for programs on the host's disk, where there are no namespaces, and remove leftover ones."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from explorl.sandbox.disk import OPEN_FOLDER, clear

_PREFIX = "explorl-sandbox-"


@contextmanager
def working_folder() -> Iterator[str]:
    """Yield a new folder for the folders of a program and its tests, and remove it afterwards.

    It belongs to this user even if the folders in it are given to others. It is locked while it is used, and the kernel
    unlocks it however this process ends.
    """
    folder, lock = _locked_folder()
    try:
        if os.geteuid() == 0:
            os.chmod(folder, 0o711)
        yield folder
    finally:
        _remove(folder, lock)
        os.close(lock)


def remove_leftover_folders() -> None:
    """Remove this user's unlocked folders, whose processes were killed."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_unlocked(entry.path)


def _locked_folder() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            lock = os.open(folder, OPEN_FOLDER)
        except FileNotFoundError:  # another process removed it as a leftover before it was locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)


def _remove_if_unlocked(folder: str) -> None:
    descriptor = os.open(folder, OPEN_FOLDER)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: str, descriptor: int) -> None:
    """Remove an open folder and its content; what cannot be removed is left for `remove_leftover_folders`."""
    with suppress(OSError):
        clear(descriptor)
        os.rmdir(folder)
