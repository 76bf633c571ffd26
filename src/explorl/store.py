"""A run is a folder that survives anything: config, provenance, metrics, rollouts, checkpoints.

    run/
      config.yaml            the resolved configuration
      provenance.json        version, git commit, seeds, library versions, hardware; one entry for each start
      metrics.jsonl          one line for each logged step
      rollouts/*.parquet     what the policy wrote, one file a step
      evaluations/*.json     summaries, with their completions beside them as parquet
      checkpoints/checkpoint-N/

A file is written under a temporary name, synced and renamed, and a checkpoint folder likewise, so whatever carries its
final name is whole. `metrics.jsonl` alone grows in place: a line is appended by one write and synced, and `rewind`
cuts off a torn last line together with everything after the checkpoint that a run resumes from.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


class StoreError(Exception):
    """A run folder that cannot be written, read or resumed; the message names the path and what to do."""


def fsync_folder(folder: Path) -> None:
    """Makes a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`; renamed to it when the block ends, removed when the block fails."""
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Makes every file of a folder durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path`; takes its place when the block ends, removed when the block fails."""
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        try:
            yield temporary
            sync_tree(temporary)
            temporary.chmod(0o755)
            if path.exists():
                path.replace(temporary.with_suffix(".old"))
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(temporary.with_suffix(".old"), ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_parquet(path: str | Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes a parquet file whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with atomic_path(path) as temporary:
        pq.write_table(pa.table(dict(columns)), temporary, compression="zstd")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns the errors of a full disk or a folder without permission into a `StoreError` that names the path."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # safetensors and torch wrap the operating system's error into their own types
        wrapped = ("No space left", "os error 28", "PytorchStreamWriter failed", "file write failed")
        if isinstance(error, OSError) or any(phrase in str(error) for phrase in wrapped):
            raise StoreError(f"cannot write {path}: {error}{_free_space(path)}") from error
        raise


def _free_space(path: Path) -> str:
    folder = next((p for p in [path, *path.parents] if p.exists()), None)
    if folder is None or (not folder.is_dir() and not folder.parent.is_dir()):
        return ""
    return f" ({shutil.disk_usage(folder).free / 2**20:.0f} MiB free there)"


class RunStore:
    """Reads and writes one run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    # ------------------------------------------------------------------ paths
    @property
    def config_path(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def provenance_path(self) -> Path:
        return self.folder / "provenance.json"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts"

    # ------------------------------------------------------------------ beginning
    @classmethod
    def create(cls, folder: str | Path, config: Mapping[str, Any]) -> RunStore:
        """Starts a run in a folder that holds none yet."""
        store = cls(folder)
        if store.config_path.exists():
            raise StoreError(
                f"{store.folder} already holds a run; resume it with `explorl train --resume {store.folder}`, "
                "or name another folder with --run"
            )
        with storage_errors(store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(store.folder, os.W_OK):
                raise StoreError(f"cannot write into {store.folder}: no permission; name another folder with --run")
        write_text(store.config_path, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        return store

    @classmethod
    def open(cls, folder: str | Path) -> RunStore:
        """Opens a run that was created before."""
        store = cls(folder)
        if not store.config_path.is_file():
            raise StoreError(f"{store.folder} holds no run: {store.config_path} is missing")
        return store

    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run was created with."""
        loaded = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise StoreError(f"{self.config_path} is not a mapping")
        return loaded

    def record_start(self, **facts: Any) -> None:
        """Adds an entry to provenance.json: one for each time the run was started or resumed."""
        entries = json.loads(self.provenance_path.read_text(encoding="utf-8")) if self.provenance_path.exists() else []
        write_json(self.provenance_path, [*entries, {**provenance(), **facts}])

    # ------------------------------------------------------------------ metrics
    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        line = json.dumps(_finite(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        with storage_errors(self.metrics_path):
            size = self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
            descriptor = os.open(self.metrics_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                payload = line.encode()
                try:
                    if os.write(descriptor, payload) != len(payload):
                        raise OSError(28, "No space left on device")
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; a torn last line is left out."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8", errors="replace").split("\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise StoreError(f"{self.metrics_path}, line {number} is not JSON: {error}") from error
        return records

    # ------------------------------------------------------------------ rollouts
    def write_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes the completions of one step."""
        write_parquet(self.rollouts / f"step-{step:06d}.parquet", columns)

    # ------------------------------------------------------------------ checkpoints
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint; whatever carries this name is whole."""
        found = {int(p.name.removeprefix("checkpoint-")): p for p in self.checkpoints.glob("checkpoint-*")}
        return found[max(found)] if found else None

    @contextmanager
    def stage_checkpoint(self) -> Iterator[Path]:
        """A folder to write `checkpoint-N` into; it is moved to `checkpoints/` when the block ends."""
        with atomic_folder(self.checkpoints / "staged") as staging:
            yield staging
            for folder in staging.glob("checkpoint-*"):
                sync_tree(folder)
                target = self.checkpoints / folder.name
                shutil.rmtree(target, ignore_errors=True)
                folder.replace(target)
        shutil.rmtree(self.checkpoints / "staged", ignore_errors=True)
        fsync_folder(self.checkpoints)

    def prune_checkpoints(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints: each loses its name first, so none is ever seen half-gone."""
        found = sorted(self.checkpoints.glob("checkpoint-*"), key=lambda p: int(p.name.removeprefix("checkpoint-")))
        for path in found[:-keep] if keep > 0 else []:
            doomed = path.with_name(f".{path.name}.removed")
            path.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    # ------------------------------------------------------------------ resuming
    def rewind(self, step: int) -> None:
        """Forgets everything logged after `step`, so that a resumed run has no double step."""
        kept = [record for record in self.metrics() if record.get("step", 0) <= step]
        write_text(self.metrics_path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        for path in self.rollouts.glob("step-*.parquet"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        litter_names = (".*.tmp", ".*.old", ".*.removed", "staged")
        for litter in [path for name in litter_names for path in self.folder.rglob(name)]:
            shutil.rmtree(litter) if litter.is_dir() else litter.unlink()


def _finite(value: Any) -> Any:
    """NaN and infinity have no place in JSON: they become null."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def provenance() -> dict[str, Any]:
    """What a reader needs to judge or repeat a run: versions, commit, hardware, time."""
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
        "explorl": _explorl_version(),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "libraries": versions,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _explorl_version() -> str:
    try:
        return metadata.version("explorl")
    except metadata.PackageNotFoundError:
        return "unknown"


def _git_commit() -> str | None:
    """The commit of the source tree that this code runs from, with + where it was changed; None when installed."""
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
