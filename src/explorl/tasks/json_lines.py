"""Read records and splits from JSONL files; each record has its location, so that an error can name file and line."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from explorl.core.documents import DocumentError, NestingError, parse_json

Record = tuple[dict[str, Any], str]
"""The JSON object of a line, and its location: file and line."""

HOLDOUT_NAMES = ("holdout", "test", "validation", "valid", "val", "dev", "eval")
"""Names of the holdout in files and columns; the first one present is used."""
_NAMES: Mapping[str, tuple[str, ...]] = {"train": ("train", "training"), "holdout": HOLDOUT_NAMES, "sft": ("sft",)}

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSUPPORTED_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", b"\x1f\x8b": "compressed"}


def read_records(path: Path, example: str) -> Iterator[Record]:
    """Yield the JSON object of each line that is not blank, with its location; errors show ``example``, a good line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = _without_mark(line, path)
                if line.strip():
                    location = f"{path}, line {number}"
                    yield _record(line, location, example), location
    except (PermissionError, IsADirectoryError) as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a file with lines like {example}") from None


def _without_mark(line: bytes, path: Path) -> bytes:
    """Return the first line without a UTF-8 byte order mark; raise ValueError if the file is not plain UTF-8."""
    for mark, kind in _UNSUPPORTED_MARKS.items():
        if line.startswith(mark):
            raise ValueError(f"{path} is {kind}, not plain UTF-8; save it as UTF-8 without compression")
    return line.removeprefix(codecs.BOM_UTF8)


def _record(line: bytes, location: str, example: str) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        before = line[: error.start][-20:].decode(errors="replace")
        raise ValueError(
            f"{location}: not a JSON object: byte {line[error.start]:#04x} after {before!r} is not UTF-8; save the "
            f"file as UTF-8, and give a line like {example}"
        ) from None
    try:
        record = parse_json(text, location, object_pairs_hook=_without_duplicates)
    except _DuplicateKey as error:
        raise ValueError(f"{location}: duplicate key {error.args[0]!r} in one object; give it once") from None
    except DocumentError as error:
        if isinstance(error, NestingError) and text.lstrip().startswith("{"):
            raise
        record = None
    if not isinstance(record, dict):
        hint = "write one object per line instead of an array; " if text.lstrip().startswith("[") else ""
        raise ValueError(f"{location}: not a JSON object: {short_repr(text.strip())}; {hint}give a line like {example}")
    return _encodable(record) if "\\u" in text else record


class _DuplicateKey(Exception):
    """Raised for a key that an object has twice; JSON would silently use the last value."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKey(next(name for name in names if names.count(name) > 1))
    return record


def _encodable(value: Any) -> Any:
    """Replace lone surrogates in a value's texts: JSON may contain them, but tokenizers, hashes and files fail."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return {_encodable(key): _encodable(item) for key, item in value.items()} if isinstance(value, dict) else value


def split_files(folder: Path, stem: str = "", *, plain: bool = True) -> dict[str, Path]:
    """Return the files of a data set by split; "all" is a file whose name does not say which split its rows belong to.

    With a stem like ``gsm8k`` they are ``gsm8k.jsonl``, ``gsm8k-train.jsonl`` and ``gsm8k-test.jsonl``; otherwise
    ``train.jsonl`` and ``test.jsonl`` in a folder ``gsm8k`` or, if ``plain`` is true, in any folder.
    """
    whole = folder / f"{stem}.jsonl"
    if stem:
        named = _named_files(folder, f"{stem}-")
        if whole.is_file():
            rest = "train" if "holdout" in named else "holdout" if "train" in named else "all"
            return {rest: whole, **named}
        if named:
            return named
    in_subfolder = _named_files(folder / stem, "") if stem else {}
    return in_subfolder or (_named_files(folder, "") if plain or folder.resolve().name == stem else {})


def _named_files(folder: Path, prefix: str) -> dict[str, Path]:
    files = {}
    for split, names in _NAMES.items():
        paths = [path for name in names if (path := folder / f"{prefix}{name}.jsonl").is_file()]
        if paths:
            files[split] = paths[0]
    return files


def group_by_split(rows: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by their column ``split``; all are under "all" if none has one."""
    groups: dict[str, list[Record]] = {}
    for record, location in rows:
        name = record.get("split")
        groups.setdefault("all" if name is None else _split_name(name, location), []).append((record, location))
    if "all" in groups and len(groups) > 1:
        raise ValueError(f"{groups['all'][0][1]}: no split, but other lines have one; give 'train' or 'test'")
    splits = {"all": groups["all"]} if "all" in groups else {}
    for split, names in _NAMES.items():
        first = next((name for name in names if name in groups), None)
        if first is not None:
            splits[split] = groups[first]
    return splits


def _split_name(name: object, location: str) -> str:
    valid_names = [valid for names in _NAMES.values() for valid in names]
    if not isinstance(name, str) or name.strip().lower() not in valid_names:
        raise ValueError(f"{location}: split is {short_repr(name)}; give train, sft or test")
    return name.strip().lower()


def short_repr(value: object) -> str:
    """Return a value's repr for an error, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
