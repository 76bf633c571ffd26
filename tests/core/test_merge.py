"""Merging nested mappings and flattening them."""

from __future__ import annotations

from explorl.core.merge import deep_merge, flatten


def test_mappings_are_merged_key_by_key_and_other_values_replaced() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert deep_merge(base, {"a": {"c": [3]}, "d": {"e": 2}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 2}}
    assert deep_merge(base, {"a": None}) == {"a": None, "d": 1}
    assert base == {"a": {"b": 1, "c": [1, 2]}, "d": 1}, "the base is not changed"


def test_a_key_can_be_replaced_whole() -> None:
    base, changes = {"a": {"b": 1, "c": 2}, "budget": {"steps": 1}}, {"a": {"b": 3}, "budget": {"tokens": 2}}
    assert deep_merge(base, changes, replace=("budget",)) == {"a": {"b": 3, "c": 2}, "budget": {"tokens": 2}}
    assert deep_merge(base, changes)["budget"] == {"steps": 1, "tokens": 2}


def test_nested_values_have_dotted_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": 2}}, "e": {}}) == {"a.b": 1, "a.c.d": 2, "e": {}}
