"""Limit what programs write to a folder on the host's disk, and remove it.

Both use descriptors instead of paths, since programs can nest folders deeper than any path or stack and remove the
permissions. Imported in the sandbox, so it imports nothing slow.
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRIES = 2048
"""Files, folders and links that a program may have at the same time."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskQuota:
    """A folder on the host's disk, where no namespace limits what programs write."""

    def __init__(self, folder: int, size: int) -> None:
        """Limit an open ``folder`` to ``size`` bytes and `ENTRIES` entries, with everything below it."""
        self._folder, self._size = folder, size

    def is_exceeded(self) -> bool:
        """Return True if there are more bytes or entries than allowed. Programs may be changing them meanwhile.

        Stops at the first entry beyond the limit, however many there are.
        """
        entries, size = ENTRIES, self._size
        levels: list[tuple[int, list[str]]] = []
        try:
            inner: int | None = os.open(".", OPEN_FOLDER, dir_fd=self._folder)
            while inner is not None:
                levels.append((inner, []))
                for entry in _listed(inner):
                    entries -= 1
                    size -= _allocated(entry)
                    if min(entries, size) < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        levels[-1][1].append(entry.name)
                while levels and (inner := _next_folder(*levels[-1])) is None:
                    os.close(levels.pop()[0])
        except OSError:  # nested deeper than the number of files this process may open
            return True
        finally:
            for descriptor, _ in levels:
                os.close(descriptor)
        return False


def clear(folder: int) -> None:
    """Remove everything below an open folder that no program can change any more.

    Each nested folder is first moved up to this one, so the depth does not matter.
    """
    prefix = os.urandom(8).hex()  # programs cannot have used this name
    moved = 0
    folders = _remove_entries(folder)
    while folders:
        name = folders.pop()
        inner = _open(name, folder)
        try:
            if os.fstat(inner).st_mode & 0o700 != 0o700:
                os.fchmod(inner, 0o700)
            for deeper in _remove_entries(inner):
                moved += 1
                _move(deeper, inner, f"{prefix}-{moved}", folder)
                folders.append(f"{prefix}-{moved}")
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=folder)


def _allocated(entry: os.DirEntry[str]) -> int:
    """Return the bytes that an entry takes on disk, but at most its size if the file system has reserved more."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return min(status.st_size, 512 * status.st_blocks)


def _next_folder(descriptor: int, folders: list[str]) -> int | None:
    """Open the next of these folders; return None if none is left."""
    while folders:
        try:
            return _open(folders.pop(), descriptor)
        except (FileNotFoundError, NotADirectoryError):  # gone, or replaced by a file, since it was listed
            continue
    return None


def _listed(folder: int) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of an open folder; none if it has been removed."""
    with suppress(FileNotFoundError), os.scandir(folder) as listed:
        yield from listed


def _remove_entries(folder: int) -> list[str]:
    """Remove the entries of an open folder; return the names of folders that are not empty."""
    left = []
    for entry in list(_listed(folder)):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=folder)
            continue
        try:
            os.rmdir(entry.name, dir_fd=folder)
        except OSError:
            left.append(entry.name)
    return left


def _open(name: str, folder: int) -> int:
    try:
        return os.open(name, OPEN_FOLDER, dir_fd=folder)
    except PermissionError:
        _permit(name, folder)
        return os.open(name, OPEN_FOLDER, dir_fd=folder)


def _move(name: str, folder: int, new_name: str, new_folder: int) -> None:
    try:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)
    except PermissionError:
        _permit(name, folder)
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)


def _permit(name: str, folder: int) -> None:
    """Give this user all permissions to a folder, without following a link of that name."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)
