"""Record what is needed to reproduce a run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from explorl import __version__
from explorl.core.text import clean

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


def provenance() -> dict[str, Any]:
    """Return what is needed to reproduce a run: versions, commit, hardware, time."""
    import torch

    versions: dict[str, str | None] = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    cuda = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "explorl": __version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "libraries": versions,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "command": [clean(part) for part in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def _git_commit() -> str | None:
    """Return the commit of the source tree that this code runs from, with + if it was changed; None if installed."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
