"""Read JSON and tensor files from untrusted sources in bounded time and memory.

A small document can stand for billions of values, through shared objects in a tensor file, or be nested so deeply
that code which walks it overflows the stack. `DocumentError` says what is wrong with it, and where. YAML is read by
`core.yaml_documents`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from explorl.core.errors import ExplorlError

MAX_DEPTH = 64
"""Maximum nesting depth of lists and mappings."""
MAX_SHARED = 10_000_000
"""Maximum number of values of a tensor file, with shared ones counted each time."""
MAX_UNSTORED = 2**30
"""Maximum bytes of a tensor beyond those that its file stores, if elements share storage."""


class DocumentError(ExplorlError, ValueError):
    """A document that cannot be read; the message names it, the place in it, and what to do."""


class NestingError(DocumentError):
    """A document with too many levels of lists and mappings."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place} is nested over {MAX_DEPTH} levels, the maximum")


# ---------------------------------------------------------------------------- JSON
def parse_json(text: str | bytes, place: str, **options: Any) -> Any:
    """Parse a JSON document; raise DocumentError if it is invalid. The options are those of `json.loads`."""
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise NestingError(place) from None
    except ValueError as error:
        raise DocumentError(f"{place} is not JSON: {shortened(str(error))}") from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_DEPTH:  # type: ignore[arg-type]
        _check_depth(value, place)
    return value


def _check_depth(value: Any, place: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for part in level for item in _items(part)]
        if not level:
            return
    raise NestingError(place)


# ---------------------------------------------------------------------------- tensors
def load_tensors(path: str | Path, **options: Any) -> Any:
    """Load the tensors and plain values that `torch.save` wrote to a file, without running any code from it.

    Raise DocumentError if it holds anything else. The options are those of `torch.load`.
    """
    import torch

    try:
        value = torch.load(path, **{"map_location": "cpu", **options, "weights_only": True})
    except (MemoryError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged file raises errors of torch, pickle or zip
        reason = "loading it would run code" if "WeightsUnpickler error" in str(error) else _first_line(error)
        raise DocumentError(
            f"{path} is no file of tensors and plain values: {reason}; restore it, or remove it"
        ) from None
    check_size(value, lambda part: _items(_checked_tensor(part, str(path))), MAX_SHARED, str(path))
    return value


def _checked_tensor(value: Any, place: str) -> Any:
    """Return a value; raise `DocumentError` for a tensor that is far larger than its stored elements."""
    import torch

    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        size = value.numel() * value.element_size()
        if size > value.untyped_storage().nbytes() + MAX_UNSTORED:
            raise DocumentError(
                f"{place} has a tensor of {size:,} bytes that the file does not store; restore it, or remove it"
            )
    return value


def _first_line(error: Exception) -> str:
    return shortened(next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__))


def shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


# ---------------------------------------------------------------------------- sizes
def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def check_size(root: Any, parts: Callable[[Any], Iterable[Any]], most: int, place: str) -> None:
    """Raise DocumentError if a value, with shared parts expanded, is too large or too deep, or contains itself."""
    sizes: dict[int, tuple[int, int]] = {}
    open_values: set[int] = set()

    def measure(value: Any, level: int) -> tuple[int, int]:
        key = id(value)
        if key in sizes:
            return sizes[key]
        if key in open_values:
            raise DocumentError(f"{place} contains itself; write it without the cycle")
        if level > MAX_DEPTH:
            raise NestingError(place)
        open_values.add(key)
        count, depth = 1, 0
        for part in parts(value):
            part_count, part_depth = measure(part, level + 1)
            count, depth = count + part_count, max(depth, part_depth + 1)
        open_values.discard(key)
        if count > most:
            raise DocumentError(f"{place} has over {most:,} values; make it smaller")
        if depth > MAX_DEPTH:
            raise NestingError(place)
        sizes[key] = count, depth
        return count, depth

    measure(root, 0)
