"""Conversion of arguments to NumPy: arrays, torch tensors, nested or ragged lists."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_numpy(values: Any) -> NDArray[Any]:
    """Convert anything array-like to a NumPy array. Tensors are recognised without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # NumPy has no such type
            values = values.float()
    return np.asarray(values)


def integers(name: str, values: Any) -> NDArray[np.int64]:
    """Convert whole numbers to int64. 4.0 is accepted; 4.5 and NaN raise `ValueError`."""
    array = to_numpy(values)
    if array.dtype.kind == "f":
        bad = ~np.isfinite(array) | (array != np.floor(array))
        if bad.any():
            raise ValueError(f"{name} must be a whole number, got {array[bad].flat[0]}")
    elif array.dtype.kind not in "biu":
        raise ValueError(f"{name} must be a whole number, got {values!r}")
    return array.astype(np.int64)


def samples(name: str, values: Any) -> tuple[list[NDArray[np.float64]], bool]:
    """Return one float array per problem, and whether `values` was a single problem (a flat sequence)."""
    if hasattr(values, "detach"):
        values = to_numpy(values)
    depth = values.ndim if isinstance(values, np.ndarray) and values.dtype != object else _depth(values)
    if depth not in (1, 2):
        raise ValueError(f"{name} must be problems × samples or the samples of one problem, got {depth} dimensions")
    rows = [to_numpy(row).astype(np.float64) for row in ([values] if depth == 1 else values)]
    for index, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"{name} must be problems × samples, problem {index} has {row.ndim} dimensions")
        if not np.isfinite(row).all():
            raise ValueError(f"{name} must be finite, problem {index} has {row[~np.isfinite(row)][0]}")
    return rows, depth == 1


def verdicts(values: Any) -> tuple[list[NDArray[np.bool_]], bool]:
    """Convert like `samples`, to booleans. Only 0 and 1 are accepted: a format reward of 0.1 is not correct."""
    rows, single = samples("correct", values)
    for index, row in enumerate(rows):
        odd = (row != 0) & (row != 1)
        if odd.any():
            raise ValueError(f"correct must be 0 or 1, problem {index} has {row[odd][0]}; pass `reward >= 1`")
    return [row.astype(bool) for row in rows], single


def first_k(rows: list[Any], k: int | None) -> list[Any]:
    """Return the first k samples of each problem, or all of them if k is None."""
    needed = 1 if k is None else int(integers("k", k))
    if needed < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    for index, row in enumerate(rows):
        if len(row) < needed:
            raise ValueError(f"k = {needed} samples are needed, problem {index} has {len(row)}")
    return rows if k is None else [row[:needed] for row in rows]


def answer_rows(answers: Any, correct: Any) -> tuple[list[list[Any]], list[NDArray[np.bool_]], bool]:
    """Return answers and verdicts, problem by problem, and whether there was a single problem.

    An answer is any hashable value, or None if the completion has none. NaN, which tables use for missing values,
    becomes None: NaN differs from itself, so that each would count as another answer.
    """
    right, single = verdicts(correct)
    table = [answers] if single else list(answers)
    if len(table) != len(right):
        raise ValueError(f"answers are for {len(table)} problems, correct for {len(right)}")
    # tensors and arrays: their Python values hash by value
    rows = [row.tolist() if hasattr(row, "tolist") else list(row) for row in table]
    rows = [[None if isinstance(answer, float) and answer != answer else answer for answer in row] for row in rows]
    for index, (row, marks) in enumerate(zip(rows, right, strict=True)):
        if len(row) != len(marks):
            raise ValueError(f"problem {index} has {len(row)} answers but {len(marks)} marks in correct")
        if odd := [answer for answer in row if not isinstance(answer, Hashable)]:
            raise ValueError(f"an answer must be a text, a number or None, problem {index} has {odd[0]!r}")
    return rows, right, single


def _depth(values: Any) -> int:
    """Return 1 for a flat sequence of numbers, more if its first element is a sequence; 2 for an empty one."""
    return 1 + to_numpy(values[0]).ndim if len(values) else 2
