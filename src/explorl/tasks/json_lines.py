"""Records of JSONL files, each with its place, so that an error can name file and line; and which split each is of."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from explorl.core.documents import DocumentError, NestingError, parse_json

Record = tuple[dict[str, Any], str]
"""The JSON object of a line, and its place."""

HOLDOUT_NAMES = ("holdout", "test", "validation", "valid", "val", "dev", "eval")
"""What the holdout may be called in files and columns; the first that there is counts."""
_NAMES: Mapping[str, tuple[str, ...]] = {"train": ("train", "training"), "holdout": HOLDOUT_NAMES, "sft": ("sft",)}

_LONE = re.compile("[\ud800-\udfff]")
_OTHER_MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16", b"\x1f\x8b": "compressed"}


def read_records(path: Path, example: str) -> Iterator[Record]:
    """The JSON object of each line that is not blank, and its place; ``example`` is a good line, for the error."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = _begun(line, path)
                if line.strip():
                    place = f"{path}, line {number}"
                    yield _record(line, place, example), place
    except (PermissionError, IsADirectoryError) as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; give a file with lines like {example}") from None


def _begun(line: bytes, path: Path) -> bytes:
    """The first line without the mark that some editors begin a file with."""
    for mark, kind in _OTHER_MARKS.items():
        if line.startswith(mark):
            raise ValueError(f"{path} is {kind}, not plain UTF-8; save it as UTF-8 without compression")
    return line.removeprefix(codecs.BOM_UTF8)


def _record(line: bytes, place: str, example: str) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        before = line[: error.start][-20:].decode(errors="replace")
        raise ValueError(
            f"{place}: not a JSON object: byte {line[error.start]:#04x} after {before!r} is not UTF-8; save the file "
            f"as UTF-8, and give a line like {example}"
        ) from None
    try:
        record = parse_json(text, place, object_pairs_hook=_once)
    except _Twice as error:
        raise ValueError(f"{place}: the key {error.args[0]!r} stands twice in one object; give it once") from None
    except DocumentError as error:
        if isinstance(error, NestingError) and text.lstrip().startswith("{"):
            raise
        record = None
    if not isinstance(record, dict):
        hint = "an array must be a line per object; " if text.lstrip().startswith("[") else ""
        raise ValueError(f"{place}: not a JSON object: {short_repr(text.strip())}; {hint}give a line like {example}")
    return _encodable(record) if "\\u" in text else record


class _Twice(Exception):
    """A key that stands twice in an object, of which JSON would silently take the last."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return found


def _encodable(value: Any) -> Any:
    """A value whose texts have no lone surrogate: JSON can write one, and no tokenizer, hash or file can take it."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return {_encodable(key): _encodable(item) for key, item in value.items()} if isinstance(value, dict) else value


def split_files(folder: Path, stem: str = "", *, plain: bool = True) -> dict[str, Path]:
    """The files of a data set by split; "all" is one that does not say, by its name, of which split its rows are.

    With a stem like ``gsm8k`` they are ``gsm8k.jsonl``, ``gsm8k-train.jsonl`` and ``gsm8k-test.jsonl``; or else
    ``train.jsonl`` and ``test.jsonl`` in a folder ``gsm8k`` or, if ``plain`` names will do, in any folder.
    """
    whole = folder / f"{stem}.jsonl"
    if stem:
        beside = _named(folder, f"{stem}-")
        if whole.is_file():
            rest = "train" if "holdout" in beside else "holdout" if "train" in beside else "all"
            return {rest: whole, **beside}
        if beside:
            return beside
    own = _named(folder / stem, "") if stem else {}
    return own or (_named(folder, "") if plain or folder.resolve().name == stem else {})


def _named(folder: Path, prefix: str) -> dict[str, Path]:
    found = {}
    for split, names in _NAMES.items():
        paths = [path for name in names if (path := folder / f"{prefix}{name}.jsonl").is_file()]
        if paths:
            found[split] = paths[0]
    return found


def group_by_split(rows: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by what their column ``split`` says; all under "all" where none has it."""
    groups: dict[str, list[Record]] = {}
    for record, place in rows:
        name = record.get("split")
        groups.setdefault("all" if name is None else _split_name(name, place), []).append((record, place))
    if "all" in groups and len(groups) > 1:
        raise ValueError(f"{groups['all'][0][1]}: no split, which other lines have; give 'train' or 'test', say")
    named = {"all": groups["all"]} if "all" in groups else {}
    for split, names in _NAMES.items():
        first = next((name for name in names if name in groups), None)
        if first is not None:
            named[split] = groups[first]
    return named


def _split_name(name: object, place: str) -> str:
    known = [known for names in _NAMES.values() for known in names]
    if not isinstance(name, str) or name.strip().lower() not in known:
        raise ValueError(f"{place}: split is {short_repr(name)}; give train, sft or test")
    return name.strip().lower()


def short_repr(value: object) -> str:
    """A value as it stands in an error: at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
