"""A run is a folder that survives anything: config, provenance, metrics, rollouts, checkpoints.

    run/
      config.yaml            the resolved configuration
      run.json               what kind of run it is: grpo, sft or rft
      provenance.json        version, git commit, seeds, library versions, hardware; one entry for each start
      metrics.jsonl          one line for each logged step
      rollouts/*.parquet     what the policy wrote, one file per step
      evaluations/*.json     summaries, with their completions beside them as parquet
      checkpoints/checkpoint-N/
      iterations/            those of an rft run: see explorl.training.rft.folder

A file is written under a temporary name, synced and renamed, and a checkpoint folder likewise, so whatever carries its
final name is whole. `metrics.jsonl` alone grows in place: a line is appended by one write and synced, and `rewind`
cuts off a torn last line together with everything after the checkpoint that a run resumes from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from explorl import __version__
from explorl.core.documents import DocumentError, parse_json
from explorl.core.errors import ExplorlError
from explorl.core.text import clean, is_clean
from explorl.core.yaml_documents import parse_yaml

MOST_BYTES = 80
"""Length of a name that `file_name` makes: three of them fit into a file system's 255."""
_LONE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile("\r\n?")
_PLAIN = {bool, int, float, type(None)}
RESUME_COMMANDS = {
    "grpo": "explorl train --resume {folder}",
    "sft": "explorl sft --resume {folder}",
    "rft": "explorl rft --resume {folder}",
    "study": "explorl study FILE.yaml --run {folder}",
    "evaluation": "explorl eval --model … --task … --out {parent}",
}
"""The command that goes on with what a folder holds, by its kind."""
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


class StoreError(ExplorlError):
    """A run folder that cannot be written, read or resumed; the message names the path and what to do."""


def kind_of(folder: str | Path) -> str | None:
    """What a folder holds: a run of kind grpo, sft or rft, a study or an evaluation; None: none of them."""
    place = Path(folder)
    for name, kind in (("study.json", "study"), ("evaluation.json", "evaluation")):
        if (place / name).is_file():
            return kind
    return RunStore(place).kind


def resume_command(folder: str | Path) -> str:
    """The command that goes on with what a folder holds."""
    place = Path(folder)
    command = RESUME_COMMANDS.get(kind_of(place) or "", RESUME_COMMANDS["grpo"])
    return command.format(folder=shlex.quote(str(place)), parent=shlex.quote(str(place.parent)))


def fsync_folder(folder: Path) -> None:
    """Makes a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block ends, remove it when the block fails."""
    path = Path(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def open_lock(folder: Path) -> IO[str]:
    """Lock a folder for this process until the returned file is closed; StoreError if another process has locked it."""
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StoreError(f"another process is at work in {folder}; wait for it, or stop it first") from None
    return file


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process while the block runs; the system releases the lock if the process dies."""
    with open_lock(folder):
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked the folder."""
    path = folder / ".lock"
    if not path.exists():
        return False
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


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
    """Write a text file whole or not at all; a lone surrogate, which has no UTF-8, becomes U+FFFD."""
    with atomic_path(path) as temporary:
        temporary.write_text(_LONE.sub("\ufffd", text), encoding="utf-8", newline="")


def write_json(path: str | Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_text(path, _json(value, indent=2) + "\n")


def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]] | None = None) -> Any:
    """What a JSON file holds, if need be a mapping or a list; `StoreError` where it holds none."""
    try:
        value = parse_json(path.read_bytes(), str(path))
    except DocumentError as error:
        raise StoreError(f"{error}; restore it, or remove it") from error
    if kind is not None and not isinstance(value, kind):
        raise StoreError(f"{path} holds no {'mapping' if kind is dict else 'list'}; restore it, or remove it")
    return value


def read_study(folder: Path) -> dict[str, Any]:
    """Return the record of a study, study.json in its folder; `StoreError` where there is none."""
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


def _json(value: Any, **options: Any) -> str:
    """JSON that has UTF-8: lone surrogates are written as the escapes that JSON has for them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    return text.encode("utf-8", "backslashreplace").decode()


def write_parquet(
    path: str | Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, Any] | None = None
) -> None:
    """Writes a parquet file whole or not at all, its texts cleaned; ``types`` are pyarrow's, by column."""
    types = types or {}
    _write_arrays(path, {name: _array(values, types.get(name)) for name, values in columns.items()})


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """The columns of a parquet file, or those of them that it has; `StoreError` where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            there = [name for name in columns or file.schema_arrow.names if name in file.schema_arrow.names]
            table = file.read(columns=there)
            return {name: table[name].to_pylist() for name in there}
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}; restore it, or remove it") from error


def _array(values: Sequence[Any], kind: Any = None) -> Any:
    """A column as pyarrow has it, its texts cleaned."""
    import pyarrow as pa

    return pa.array(cleaned(values), kind)


def _write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({cleaned(name): array for name, array in arrays.items()})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def digest_of(rows: Sequence[Any]) -> str:
    """A digest of rows of plain values."""
    return hashlib.blake2b(json.dumps(rows, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """A folder's files of steps, such as ``step-000012.parquet``, by step; somebody's copies of them are none."""
    found = ((path.stem.removeprefix("step-"), path) for path in folder.glob(f"step-*{ending}"))
    return dict(sorted((int(step), path) for step, path in found if step.isdecimal()))


def cleaned(value: Any) -> Any:
    """Plain values with every text `clean`, keys too; a line ends with a newline only."""
    if isinstance(value, str):
        return clean(_LINE_END.sub("\n", value))
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds <= _PLAIN or (kinds == {str} and is_clean("".join(value))):
            return value
        return [cleaned(item) for item in value]
    return {cleaned(key): cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


def file_name(text: str) -> str:
    """A text as a name of a file or folder: letters, digits and ``.+_-``, not hidden, no path, not too long."""
    name = re.sub(r"[^\w.+-]+", "-", clean(text)).strip("-.")
    if name and len(name.encode()) <= MOST_BYTES:
        return name
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    start = name.encode()[: MOST_BYTES - 9].decode(errors="ignore")
    return f"{start}-{digest}" if start else digest


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns the errors of a full disk or a folder without permission into a `StoreError` that names the path."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        # safetensors and torch wrap the operating system's error into their own types
        wrapped = (
            "No space left", "File too large", "(os error ", "PytorchStreamWriter failed", "file write failed",
            "iostream error", "unexpected pos",
        )  # fmt: skip
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
        self._lock: IO[str] | None = None
        self._written: list[tuple[str, Sequence[Any], Any]] = []
        """The columns of the latest rollouts: name, values, and those as pyarrow has them."""

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
        """What kind of run it is: "grpo", "sft" or "rft"; None: no run, or one that cannot be told."""
        if self.kind_path.is_file():
            return str(read_json(self.kind_path, dict).get("kind"))
        if not self.config_path.is_file():
            return None
        lines = [line for line in self.metrics() if line.get("kind") == "train"]  # of a version without run.json
        return None if not lines else "grpo" if any("reward" in line for line in lines) else "sft"

    @property
    def has_steps(self) -> bool:
        """Whether anything has been trained here, or sampled to be learnt."""
        lines = any(line.get("kind") == "train" for line in self.metrics())
        parts = (*self.checkpoints.glob("checkpoint-*"), *self.folder.glob("iterations/iteration-*"))
        return lines or bool(parts) or (self.folder / "model").exists()

    @classmethod
    def create(cls, folder: str | Path, config: Mapping[str, Any]) -> RunStore:
        """Starts a run in a folder that holds none yet, or one that never came to its first step."""
        store = cls(folder)
        store.require_empty()
        with storage_errors(store.folder):
            store.folder.mkdir(parents=True, exist_ok=True)
        store.kind_path.unlink(missing_ok=True)
        store.metrics_path.unlink(missing_ok=True)
        store.write_config(config)
        return store

    def require_empty(self) -> None:
        """That a new run may start here: `StoreError` where there is one with steps, or no permission."""
        if (held := kind_of(self.folder)) in ("study", "evaluation"):
            article = "an" if held == "evaluation" else "a"
            raise StoreError(f"{self.folder} holds {article} {held}; name another folder with --run")
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
        """Starts a run of this kind, or goes on with it."""
        if self.has_steps:
            self.check_kind(kind)
        if not self.has_steps:
            self.create(self.folder, config)
        elif self.config() != json.loads(json.dumps(config)):
            self.write_config(config)
        if not self.kind_path.exists():
            write_json(self.kind_path, {"kind": kind})

    def check_kind(self, kind: str) -> None:
        """That what is here, if anything, is of this kind; `StoreError` with the command for what it is."""
        held = kind_of(self.folder)
        if held not in (None, kind):
            raise StoreError(
                f"{self.folder} holds a run of kind {held}, not {kind}; resume it with `{resume_command(self.folder)}`"
            )

    def lock(self) -> None:
        """Keeps other processes out of the folder, until `unlock` or the end of this one."""
        self._lock = open_lock(self.folder)

    def unlock(self) -> None:
        """Lets other processes in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes the resolved configuration."""
        write_text(self.config_path, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))

    @classmethod
    def open(cls, folder: str | Path) -> RunStore:
        """Opens a run that was created before."""
        store = cls(folder)
        if not store.config_path.is_file():
            if store.kind_path.is_file():
                raise StoreError(f"{store.folder} holds half a run: {store.config_path} is missing; restore it")
            held = kind_of(folder)
            what = f"a {held}; go on with it with `{resume_command(folder)}`" if held else "no run"
            why = "" if held else f": {store.config_path} is missing; list the folder that --run named, such as runs/a"
            raise StoreError(f"{store.folder} holds {what}{why}")
        return store

    def config(self) -> dict[str, Any]:
        """The resolved configuration that the run was created with."""
        try:
            loaded = parse_yaml(self.config_path.read_text(encoding="utf-8"), str(self.config_path))
        except (DocumentError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.config_path} is damaged: {str(error).splitlines()[0]}; restore it") from error
        if not isinstance(loaded, dict):
            raise StoreError(f"{self.config_path} is not a mapping like `training: {{steps: 100}}`; restore it")
        return loaded

    def data_changed_warning(self, digest: str) -> str | None:
        """Says so where the rows with this digest are not what the run was trained on when it was last started."""
        starts = read_json(self.provenance_path, list) if self.provenance_path.exists() else []
        before = next((start["rows"] for start in reversed(starts) if start.get("rows")), digest)
        if before == digest:
            return None
        return (
            f"the problems are not those that {self.folder} was trained on so far: their texts, their answers or their "
            "number have changed; going on with what they are now"
        )

    def record_start(self, **facts: Any) -> None:
        """Adds an entry to provenance.json: one for each time the run was started or resumed."""
        entries = read_json(self.provenance_path, list) if self.provenance_path.exists() else []
        write_json(self.provenance_path, [*entries, {**provenance(), **facts}])

    # ------------------------------------------------------------------ metrics
    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        line = _json(_finite(dict(record))) + "\n"
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
                records.append(parse_json(line, f"{self.metrics_path}, line {number}"))
            except DocumentError as error:
                raise StoreError(f"{error}; restore it, or remove the line") from error
            if not isinstance(records[-1], dict):
                raise StoreError(f"{self.metrics_path}, line {number} holds no mapping; restore it, or remove the line")
        return records

    # ------------------------------------------------------------------ rollouts
    def write_rollouts(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes the completions of one step; written once more with further columns, only those are converted."""
        held = {name: (values, array) for name, values, array in self._written}
        self._written = [
            (name, values, held[name][1] if name in held and held[name][0] is values else _array(values))
            for name, values in columns.items()
        ]
        _write_arrays(self.rollouts / f"step-{step:06d}.parquet", {name: array for name, _, array in self._written})

    # ------------------------------------------------------------------ checkpoints
    def checkpoint_folders(self) -> list[Path]:
        """The checkpoints, oldest first."""
        found = [path for path in self.checkpoints.glob("checkpoint-*") if path.name[11:].isdecimal()]
        return sorted(found, key=checkpoint_step)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return next(reversed(self.checkpoint_folders()), None)

    def latest_valid_checkpoint(self, fault: Callable[[Path], str | None], say: Callable[[str], None]) -> Path | None:
        """The newest checkpoint without a fault; those with one are set aside, and it is said. None where there is none
        at all, `StoreError` where all have faults."""
        faults: dict[Path, str] = {}
        for path in reversed(self.checkpoint_folders()):
            why = fault(path)
            if why is None:
                for damaged, reason in faults.items():
                    damaged.replace(damaged.with_name(f"damaged-{damaged.name}"))
                    say(f"{damaged.name} is damaged ({reason}); going on from {path.name}")
                return path
            faults[path] = why
        if faults:
            path, reason = next(iter(faults.items()))
            raise StoreError(
                f"{self.folder} has no whole checkpoint: in {path.name}, {reason}; remove {self.checkpoints} to train "
                "from the beginning"
            )
        return None

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
        found = self.checkpoint_folders()
        for path in found[:-keep] if keep > 0 else []:
            doomed = path.with_name(f".{path.name}.removed")
            path.replace(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    # ------------------------------------------------------------------ resuming
    def rewind(self, step: int) -> None:
        """Forgets everything logged after `step`, so that a resumed run has no double step."""
        kept = [record for record in self.metrics() if record.get("step", 0) <= step]
        write_text(self.metrics_path, "".join(_json(record) + "\n" for record in kept))
        for after, path in step_files(self.rollouts, ".parquet").items():
            if after > step:
                path.unlink()
        litter_names = (".*.tmp", ".*.old", ".*.removed", "staged")
        for litter in [path for name in litter_names for path in self.folder.rglob(name)]:
            shutil.rmtree(litter) if litter.is_dir() else litter.unlink()


def checkpoint_step(checkpoint: Path) -> int:
    """The update after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


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
