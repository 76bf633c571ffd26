"""List the host's files that a program may see: Python's standard and shared libraries, without installed packages.

Imported in the sandbox too, so it imports nothing slow.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PACKAGES = ("site-packages", "dist-packages")


def python_paths() -> list[str]:
    """Return the folders of the standard library and of the shared libraries that it needs."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")]
    return [path for path in dict.fromkeys(libraries + sys.path) if os.path.isdir(path)]


def package_folders(paths: Iterable[str], wanted: Iterable[str] = ()) -> list[str]:
    """Return the folders of installed packages in these folders or one below, except those that hold a wanted path."""
    wanted_paths = [os.path.realpath(path) for path in wanted]
    package_paths = set()
    for path in paths:
        for folder in (path, *_folders(path)):
            for packages in (os.path.join(folder, name) for name in _PACKAGES):
                if os.path.isdir(packages):
                    package_paths.add(os.path.realpath(packages))
    return sorted(folder for folder in package_paths if not any(is_below(path, folder) for path in wanted_paths))


def exclude_folders(paths: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """Return the files and folders that cover these folders without the hidden ones. Links are left out."""
    hidden = list(hidden)
    parts = []
    for path in paths:
        if path in hidden:
            continue
        if any(is_below(folder, path) for folder in hidden):
            with os.scandir(path) as entries:
                parts += exclude_folders([entry.path for entry in entries if not entry.is_symlink()], hidden)
        else:
            parts.append(path)
    return parts


def is_below(path: str, folder: str) -> bool:
    """Return True if a path is the folder or below it."""
    return path == folder or path.startswith(os.path.join(folder, ""))


def _folders(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            yield from (entry.path for entry in entries if entry.is_dir())
    except OSError:  # what this process cannot list, the program cannot list either
        return
