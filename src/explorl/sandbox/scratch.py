"""Working folders of programs on the host's disk, where there are no namespaces, and what killed processes left."""

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
    """Make a folder to make the folders of a program and of its tests in; all of it is gone afterwards.

    It stays this user's when those in it are given to others, and is locked as long as it is used: the kernel unlocks
    it however this process ends.
    """
    folder, lock = _locked_folder()
    try:
        if os.geteuid() == 0:
            os.chmod(folder, 0o711)
        yield folder
    finally:
        _remove(folder, lock)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of this user that nobody has locked: their processes were killed."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_left(entry.path)


def _locked_folder() -> tuple[str, int]:
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            lock = os.open(folder, OPEN_FOLDER)
        except FileNotFoundError:  # taken for a left one, before it was locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)


def _remove_if_left(folder: str) -> None:
    descriptor = os.open(folder, OPEN_FOLDER)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: str, descriptor: int) -> None:
    """Remove an open folder and what programs have put there; what cannot be removed is left for the next sweep."""
    with suppress(OSError):
        clear(descriptor)
        os.rmdir(folder)
