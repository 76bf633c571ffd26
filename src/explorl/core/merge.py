"""Merge nested mappings, and flatten them to dotted keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any], replace: Collection[str] = ()) -> dict[str, Any]:
    """Return a new mapping in which mappings are merged key by key and other values are replaced.

    ``replace`` names keys whose values are replaced even if they are mappings.
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if key not in replace and isinstance(old, Mapping) and isinstance(value, Mapping):
            value = deep_merge(old, value, replace)
        merged[key] = value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings under their dotted keys; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
