"""What programs leave in a folder on the host's disk: whether it is too much, and removing it.

Both go by descriptors, since programs nest folders deeper than any path or stack and take the rights to them away.
Imported in the sandbox, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRIES = 2048
"""Files, folders and links that a program may have at a time."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Disk:
    """A folder on the host's disk, where no namespace limits what programs write."""

    def __init__(self, folder: int, size: int) -> None:
        """``folder``: an open one; ``size``: the bytes that all below it may take together."""
        self._folder, self._size = folder, size

    def is_over(self) -> bool:
        """Return whether there are more bytes or entries, which programs may be changing meanwhile.

        Looks at few more than the allowed entries, however many there are.
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
        except OSError:  # nested deeper than this process may have open files
            return True
        finally:
            for descriptor, _ in levels:
                os.close(descriptor)
        return False


def clear(folder: int) -> None:
    """Remove all that lies below an open folder which no program can change any more.

    Each nested folder is first moved up to this one, so depth costs neither stack nor time.
    """
    prefix = os.urandom(8).hex()  # a name that no program has used
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
    """Bytes that an entry takes on disk, no more than its size where the file system has reserved some."""
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return min(status.st_size, 512 * status.st_blocks)


def _next_folder(descriptor: int, folders: list[str]) -> int | None:
    """Open the next of these folders; None if there is none left."""
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
    """Give this user all rights to a folder, and not to what a link of that name points to."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)
