"""Working folders of programs on the host's disk, where there are no namespaces, and what killed processes left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PREFIX = "explorl-sandbox-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def working_folder() -> Iterator[str]:
    """An empty folder, which is gone afterwards.

    It lies in another, which stays this user's when the inner one is given to another, and which is locked as long as
    it is used: the kernel unlocks it however this process ends.
    """
    outer, lock = _locked_folder()
    try:
        if os.geteuid() == 0:
            os.chmod(outer, 0o711)
        inner = os.path.join(outer, "work")
        os.mkdir(inner, 0o700)
        yield inner
    finally:
        _remove(outer)
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
            lock = os.open(folder, _OPEN)
        except FileNotFoundError:  # taken for a left one, before it was locked
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.isdir(folder):
            return folder, lock
        os.close(lock)


def _remove_if_left(folder: str) -> None:
    descriptor = os.open(folder, _OPEN)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(descriptor)


def _remove(folder: str) -> None:
    """Remove a folder whatever a program has put there: folders without rights, or nested beyond all recursion."""
    with suppress(OSError):
        os.rmdir(os.path.join(folder, "work"))
        os.rmdir(folder)
        return
    subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)
