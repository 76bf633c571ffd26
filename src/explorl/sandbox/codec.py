"""Encode values of Python's built-in types as JSON for other processes, and decode them to equal values.

Imported in the sandbox too, so it imports nothing slow.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STARTED = b"begun\n"
"""Written to standard error by the supervisor when the program starts: later failures are the program's."""

LOAD_BYTES = 4
"""Bytes before the source of a cell that hold the number of interpreters per processor."""


def encode(value: object) -> Any:
    """Return a value of a plain type, or of a subclass, as JSON; raise TypeError for others."""
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
    """Return the value that was encoded; raise ValueError or TypeError for data that `encode` does not produce."""
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


def describe_error(error: BaseException) -> str:
    """Return the error as ``AssertionError: text``, or only its name if it has no text."""
    try:
        text = str(error)[:1000]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bytes, bytearray, tuple, set, frozenset, complex, range)}
