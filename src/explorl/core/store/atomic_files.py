"""Write files and folders whole or not at all, lock folders, and read what was written."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from explorl.core.documents import DocumentError, parse_json
from explorl.core.errors import ExplorlError
from explorl.core.text import clean, is_clean

MOST_BYTES = 80
"""Maximum length of a name that `file_name` returns: three of them fit into a file system's 255."""
_LONE = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile("\r\n?")
_PLAIN = {bool, int, float, type(None)}


class StoreError(ExplorlError):
    """A run folder that cannot be written, read or resumed; the message names the path and what to do."""


def fsync_folder(folder: Path) -> None:
    """Sync a folder, which makes renames in it durable."""
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
    """Sync every file of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; move it to `path` when the block ends, remove it when the block fails."""
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
    """Write a JSON file whole or not at all."""
    write_text(path, json_text(value, indent=2) + "\n")


def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]] | None = None) -> Any:
    """Return the value in a JSON file; raise StoreError if it is invalid or, with ``kind``, no mapping or no list."""
    try:
        value = parse_json(path.read_bytes(), str(path))
    except DocumentError as error:
        raise StoreError(f"{error}; restore it, or remove it") from error
    if kind is not None and not isinstance(value, kind):
        raise StoreError(f"{path} holds no {'mapping' if kind is dict else 'list'}; restore it, or remove it")
    return value


def json_text(value: Any, **options: Any) -> str:
    """Return JSON text that can be encoded as UTF-8: lone surrogates are written as JSON escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, **options)
    return text.encode("utf-8", "backslashreplace").decode()


def write_parquet(
    path: str | Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, Any] | None = None
) -> None:
    """Write a parquet file whole or not at all, with texts cleaned; ``types`` are pyarrow's, by column."""
    types = types or {}
    write_arrays(path, {name: to_array(values, types.get(name)) for name, values in columns.items()})


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """Return the columns of a parquet file, or those of ``columns`` that it has; StoreError if it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in columns or file.schema_arrow.names if name in file.schema_arrow.names]
            table = file.read(columns=names)
            return {name: table[name].to_pylist() for name in names}
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}; restore it, or remove it") from error


def to_array(values: Sequence[Any], kind: Any = None) -> Any:
    """Return a column as a pyarrow array, with texts cleaned."""
    import pyarrow as pa

    return pa.array(cleaned(values), kind)


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({cleaned(name): array for name, array in arrays.items()})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def digest_of(rows: Sequence[Any]) -> str:
    """Return a digest of rows of plain values."""
    return hashlib.blake2b(json.dumps(rows, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def step_files(folder: Path, ending: str) -> dict[int, Path]:
    """Return a folder's files such as ``step-000012.parquet`` by step, without copies that users made of them."""
    paths = ((path.stem.removeprefix("step-"), path) for path in folder.glob(f"step-*{ending}"))
    return dict(sorted((int(step), path) for step, path in paths if step.isdecimal()))


def cleaned(value: Any) -> Any:
    """Return plain values with every text `clean`, including keys, and with newlines as the only line ends."""
    if isinstance(value, str):
        return clean(_LINE_END.sub("\n", value))
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds <= _PLAIN or (kinds == {str} and is_clean("".join(value))):
            return value
        return [cleaned(item) for item in value]
    return {cleaned(key): cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


def file_name(text: str) -> str:
    """Return a text as the name of a file or folder: letters, digits and ``.+_-``, not hidden and not too long."""
    name = re.sub(r"[^\w.+-]+", "-", clean(text)).strip("-.")
    if name and len(name.encode()) <= MOST_BYTES:
        return name
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    start = name.encode()[: MOST_BYTES - 9].decode(errors="ignore")
    return f"{start}-{digest}" if start else digest


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise errors of a full disk or missing permission as a `StoreError` that names the path."""
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
