"""What passes between the processes: values of Python's plain types, as JSON that comes back as it went in.

Imported in the sandbox too, so it imports nothing that takes time.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BEGUN = b"begun\n"
"""What the keeper writes to standard error when the program begins: what happens then is the program's doing."""

CROWD = 4
"""Bytes before the source of a notebook's cell that say how many interpreters share a processor."""


def encode(value: object) -> Any:
    """A value of Python's plain types, also of their subclasses, as JSON; TypeError for others."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        # Decimal digits of a long integer take quadratic time, and Python refuses them.
        return int(value) if abs(value) < 1 << 64 else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [encode(part) for part in (value.start, value.stop, value.step)]}
    raise TypeError(f"a value of type {type(value).__name__!r}; only plain values can be compared")


def decode(data: Any) -> Any:
    """What `encode` was given, in plain types only, whoever wrote it; ValueError or TypeError otherwise."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, content),) = data.items()
    if name == "int":
        return int(content, 16)
    if name in ("bytes", "bytearray"):
        return _KINDS[name].fromhex(content)
    if name == "dict":
        return {decode(key): decode(item) for key, item in content}
    if name in ("tuple", "set", "frozenset"):
        return _KINDS[name](decode(item) for item in content)
    if name in ("complex", "range"):
        return _KINDS[name](*(decode(part) for part in content))
    raise ValueError(f"no type {name!r}")


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bytes, bytearray, tuple, set, frozenset, complex, range)}
