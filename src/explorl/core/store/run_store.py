"""Store a run in a folder that survives crashes: configuration, provenance, metrics, rollouts, checkpoints.

    run/
      config.yaml            the resolved configuration
      run.json               what kind of run it is: grpo, sft or rft
      provenance.json        version, git commit, seeds, library versions, hardware; one entry per start
      metrics.jsonl          one line per logged step
      rollouts/*.parquet     completions, one file per step
      evaluations/*.json     summaries, with their completions beside them as parquet
      checkpoints/checkpoint-N/
      iterations/            of an rft run: see explorl.training.rft.folder

Files and checkpoint folders are written under a temporary name, synced and renamed, so whatever has its final name is
complete. Only `metrics.jsonl` grows in place: a line is appended by one write and synced, and `rewind` removes an
incomplete last line together with everything after the checkpoint that a run resumes from.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from explorl.core.documents import DocumentError, parse_json
from explorl.core.store.atomic_files import (
    StoreError,
    atomic_folder,
    fsync_folder,
    json_text,
    open_lock,
    read_json,
    step_files,
    storage_errors,
    sync_tree,
    to_array,
    write_arrays,
    write_json,
    write_text,
)
from explorl.core.store.provenance import provenance
from explorl.core.yaml_documents import parse_yaml

RESUME_COMMANDS = {
    "grpo": "explorl train --resume {folder}",
    "sft": "explorl sft --resume {folder}",
    "rft": "explorl rft --resume {folder}",
    "study": "explorl study FILE.yaml --run {folder}",
    "evaluation": "explorl eval --model … --task … --out {parent}",
}
"""The command that resumes what a folder holds, by its kind."""
_ARTICLES = {"study": "a", "evaluation": "an"}


def kind_of(folder: str | Path) -> str | None:
    """Return the kind of run in a folder (grpo, sft or rft), "study" or "evaluation"; None if it holds none of them."""
    folder = Path(folder)
    for name, kind in (("study.json", "study"), ("evaluation.json", "evaluation")):
        if (folder / name).is_file():
            return kind
    return RunStore(folder).kind


def resume_command(folder: str | Path) -> str:
    """Return the command that resumes what a folder holds."""
    folder = Path(folder)
    command = RESUME_COMMANDS.get(kind_of(folder) or "", RESUME_COMMANDS["grpo"])
    return command.format(folder=shlex.quote(str(folder)), parent=shlex.quote(str(folder.parent)))


def read_study(folder: Path) -> dict[str, Any]:
    """Return the record of a study, study.json in its folder; raise StoreError if it is missing or damaged."""
    path = folder / "study.json"
    if not path.is_file():
        raise StoreError(f"{folder} holds no study: {path} is missing")
    record: dict[str, Any] = read_json(path, dict)
    for key, kind, needs in (("arms", dict, {"name", "slug", "config"}), ("seeds", int, set())):
        entries = record.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, kind) for entry in entries):
            raise StoreError(f"{path} has no list of {key}; restore it")
        if any(needs - entry.keys() for entry in entries if isinstance(entry, dict)):
            raise StoreError(f"{path} has an entry of {key} without {', '.join(sorted(needs))}; restore it")
    return record


class RunStore:
    """Read and write one run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock: IO[str] | None = None
        self._written: list[tuple[str, Sequence[Any], Any]] = []
        """The columns of the latest rollouts: name, values, and the values as a pyarrow array."""

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

    @property
    def kind_path(self) -> Path:
        return self.folder / "run.json"

    # ------------------------------------------------------------------ beginning
    @property
    def kind(self) -> str | None:
        """The kind of run: "grpo", "sft" or "rft"; None if there is none, or it is unknown."""
        if self.kind_path.is_file():
            return str(read_json(self.kind_path, dict).get("kind"))
        if not self.config_path.is_file():
            return None
        lines = [line for line in self.metrics() if line.get("kind") == "train"]  # older versions have no run.json
        return None if not lines else "grpo" if any("reward" in line for line in lines) else "sft"

    @property
    def has_steps(self) -> bool:
        """True if anything has been trained here, or sampled to train on."""
        lines = any(line.get("kind") == "train" for line in self.metrics())
        parts = (*self.checkpoints.glob("checkpoint-*"), *self.folder.glob("iterations/iteration-*"))
        return lines or bool(parts) or (self.folder / "model").exists()

    @classmethod
    def create(cls, folder: str | Path, config: Mapping[str, Any]) -> RunStore:
        """Start a run in a folder without a run, or with one that never reached its first step."""
        store = cls(folder)
        store.require_empty()
        with storage_errors(store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
        store.kind_path.unlink(missing_ok=True)
        store.metrics_path.unlink(missing_ok=True)
        store.write_config(config)
        return store

    def require_empty(self) -> None:
        """Raise StoreError if the folder already holds something, or cannot be written."""
        if (kind := kind_of(self.folder)) in ("study", "evaluation"):
            raise StoreError(f"{self.folder} holds {_ARTICLES[kind]} {kind}; name another folder with --run")
        if self.config_path.exists() and self.has_steps:
            raise StoreError(
                f"{self.folder} already holds a run; resume it with `{resume_command(self.folder)}`, "
                "or name another folder with --run"
            )
        nearest = next(path for path in [self.folder, *self.folder.absolute().parents] if path.exists())
        if not nearest.is_dir():
            raise StoreError(f"cannot write {self.folder}: {nearest} is a file; name another folder with --run")
        if not os.access(nearest, os.W_OK):
            raise StoreError(f"cannot write into {self.folder}: no permission; name another folder with --run")

    def begin(self, config: Mapping[str, Any], kind: str) -> None:
        """Start a run of this kind, or resume it."""
        if self.has_steps:
            self.check_kind(kind)
        if not self.has_steps:
            self.create(self.folder, config)
        elif self.config() != json.loads(json.dumps(config)):
            self.write_config(config)
        if not self.kind_path.exists():
            write_json(self.kind_path, {"kind": kind})

    def check_kind(self, kind: str) -> None:
        """Raise StoreError, with the right command, if the folder holds something of another kind."""
        present = kind_of(self.folder)
        if present not in (None, kind):
            raise StoreError(
                f"{self.folder} holds a run of kind {present}, not {kind}; resume it with "
                f"`{resume_command(self.folder)}`"
            )

    def lock(self) -> None:
        """Lock the folder against other processes, until `unlock` or the end of this process."""
        self._lock = open_lock(self.folder)

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration."""
        write_text(self.config_path, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))

    @classmethod
    def open(cls, folder: str | Path) -> RunStore:
        """Open an existing run; raise StoreError if the folder holds none."""
        store = cls(folder)
        if not store.config_path.is_file():
            if store.kind_path.is_file():
                raise StoreError(f"{store.folder} is an incomplete run: {store.config_path} is missing; restore it")
            kind = kind_of(folder)
            if kind:
                article = _ARTICLES.get(kind, "a")
                raise StoreError(f"{store.folder} holds {article} {kind}; resume it with `{resume_command(folder)}`")
            raise StoreError(
                f"{store.folder} holds no run: {store.config_path} is missing; give the folder that --run named, such "
                "as runs/a"
            )
        return store

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration that the run was created with."""
        try:
            loaded = parse_yaml(self.config_path.read_text(encoding="utf-8"), str(self.config_path))
        except (DocumentError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.config_path} is damaged: {str(error).splitlines()[0]}; restore it") from error
        if not isinstance(loaded, dict):
            raise StoreError(f"{self.config_path} is not a mapping like `training: {{steps: 100}}`; restore it")
        return loaded

    def data_changed_warning(self, digest: str) -> str | None:
        """Return a warning if the digest differs from that of the rows that the run was last trained on."""
        starts = read_json(self.provenance_path, list) if self.provenance_path.exists() else []
        before = next((start["rows"] for start in reversed(starts) if start.get("rows")), digest)
        if before == digest:
            return None
        return (
            f"the problems differ from those that {self.folder} was trained on so far: their texts, their answers or "
            "their number have changed; training continues with the current ones"
        )

    def record_start(self, **facts: Any) -> None:
        """Add an entry to provenance.json, which has one per start or resumption of the run."""
        entries = read_json(self.provenance_path, list) if self.provenance_path.exists() else []
        write_json(self.provenance_path, [*entries, {**provenance(), **facts}])

    # ------------------------------------------------------------------ metrics
    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        line = json_text(_finite(dict(record))) + "\n"
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

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the lines of this kind of metrics.jsonl, or all; without an incomplete last line."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8", errors="replace").split("\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(parse_json(line, f"{self.metrics_path}, line {number}"))
            except DocumentError as error:
                raise StoreError(f"{error}; restore it, or remove the line") from error
            if not isinstance(records[-1], dict):
                raise StoreError(f"{self.metrics_path}, line {number} holds no mapping; restore it, or remove the line")
        return records if kind is None else [record for record in records if record.get("kind") == kind]

    # ------------------------------------------------------------------ rollouts
    def write_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Write the completions of one step; if called again with more columns, only these are converted."""
        cache = {name: (values, array) for name, values, array in self._written}
        self._written = [
            (name, values, cache[name][1] if name in cache and cache[name][0] is values else to_array(values))
            for name, values in columns.items()
        ]
        write_arrays(self.rollouts / f"step-{step:06d}.parquet", {name: array for name, _, array in self._written})

    # ------------------------------------------------------------------ checkpoints
    def checkpoint_folders(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        paths = [path for path in self.checkpoints.glob("checkpoint-*") if path.name[11:].isdecimal()]
        return sorted(paths, key=checkpoint_step)

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint."""
        return next(reversed(self.checkpoint_folders()), None)

    def latest_valid_checkpoint(self, fault: Callable[[Path], str | None], say: Callable[[str], None]) -> Path | None:
        """Return the newest checkpoint without a fault, or None if there are no checkpoints.

        Newer ones with a fault are renamed and reported to ``say``; StoreError if all have one.
        """
        faults: dict[Path, str] = {}
        for path in reversed(self.checkpoint_folders()):
            why = fault(path)
            if why is None:
                for damaged, reason in faults.items():
                    damaged.replace(damaged.with_name(f"damaged-{damaged.name}"))
                    say(f"{damaged.name} is damaged ({reason}); resuming from {path.name}")
                return path
            faults[path] = why
        if faults:
            path, reason = next(iter(faults.items()))
            raise StoreError(
                f"{self.folder} has no valid checkpoint: in {path.name}, {reason}; remove {self.checkpoints} to train "
                "from the beginning"
            )
        return None

    @contextmanager
    def stage_checkpoint(self) -> Iterator[Path]:
        """Yield a folder to write `checkpoint-N` into; move that to `checkpoints/` when the block ends."""
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
        """Remove all but the newest `keep` checkpoints; each is renamed first, so that no partial one is visible."""
        for path in self.checkpoint_folders()[:-keep] if keep > 0 else []:
            renamed = path.with_name(f".{path.name}.removed")
            path.replace(renamed)
            shutil.rmtree(renamed, ignore_errors=True)

    # ------------------------------------------------------------------ resuming
    def rewind(self, step: int) -> None:
        """Remove everything logged after `step`, so that a resumed run logs no step twice, and temporary files."""
        records = [record for record in self.metrics() if record.get("step", 0) <= step]
        write_text(self.metrics_path, "".join(json_text(record) + "\n" for record in records))
        for number, path in step_files(self.rollouts, ".parquet").items():
            if number > step:
                path.unlink()
        patterns = (".*.tmp", ".*.old", ".*.removed", "staged")
        for path in [path for pattern in patterns for path in self.folder.rglob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoint_step(checkpoint: Path) -> int:
    """Return the optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
