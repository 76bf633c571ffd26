"""Which of the host's files a program sees: Python's standard library and shared libraries, but no installed packages.

Imported in the sandbox too, so it imports nothing that takes time.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PACKAGES = ("site-packages", "dist-packages")


def python_paths() -> list[str]:
    """Folders that the standard library and the shared libraries below it are read from."""
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")]
    return [path for path in dict.fromkeys(libraries + sys.path) if os.path.isdir(path)]


def package_folders(paths: Iterable[str], wanted: Iterable[str] = ()) -> list[str]:
    """Where packages are installed, in these folders or one below; not if one of those ``wanted`` lies there."""
    kept = [os.path.realpath(path) for path in wanted]
    found = set()
    for path in paths:
        for folder in (path, *_folders(path)):
            for packages in (os.path.join(folder, name) for name in _PACKAGES):
                if os.path.isdir(packages):
                    found.add(os.path.realpath(packages))
    return sorted(folder for folder in found if not any(is_below(path, folder) for path in kept))


def without(paths: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """Files and folders that together are these folders less the hidden ones. Links are left out: they need none."""
    hidden = list(hidden)
    parts = []
    for path in paths:
        if path in hidden:
            continue
        if any(is_below(folder, path) for folder in hidden):
            with os.scandir(path) as entries:
                parts += without([entry.path for entry in entries if not entry.is_symlink()], hidden)
        else:
            parts.append(path)
    return parts


def is_below(path: str, folder: str) -> bool:
    """Whether a path is the folder or in it."""
    return path == folder or path.startswith(os.path.join(folder, ""))


def _folders(path: str) -> Iterator[str]:
    try:
        with os.scandir(path) as entries:
            yield from (entry.path for entry in entries if entry.is_dir())
    except OSError:  # what cannot be listed here cannot be listed there
        return
