"""Runs with known effects in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from explorl.analysis.lens_table import LensTable, table_of
from explorl.analysis.series import Noise

TYPES = 40
FAST = 8
TOKEN_COLUMNS = ("token_ids", "tokens", "entropy", "logp", "logp_after", "update_size")


def noise(count: int, deviation: float, rng: np.random.Generator, correlation: float = 0.5) -> np.ndarray:
    """Noise of this deviation, each step correlated with the one before."""
    return Noise((correlation,), deviation * np.sqrt(1 - correlation**2)).simulated(count, 1, rng)[:, 0]


def lines(**curves: Any) -> list[dict[str, Any]]:
    """Training lines of metrics.jsonl, from step 1 on; a name like lens__x stands for lens/x."""
    count = len(next(iter(curves.values())))
    return [
        {"step": step + 1, "kind": "train"}
        | {name.replace("__", "/"): float(values[step]) for name, values in curves.items()}
        for step in range(count)
    ]


def rollouts(
    rng: np.random.Generator,
    *,
    steps: int = 40,
    answers: int = 8,
    length: int = 20,
    fast_slope: float = 0.0,
    fast_negative: float = 0.5,
    link: bool = False,
    large: float = 0.05,
) -> dict[int, dict[str, list[Any]]]:
    """Answers of ± sign, half and half, over ``TYPES`` token types, as columns by step.

    The first ``FAST`` types change by ``fast_slope`` nats a 100 steps and are in negative answers with this share; the
    others keep their entropy and are in either. Of each answer's tokens a share ``large`` moves by 0.2 in probability:
    with ``link`` those of the largest entropy and in the direction of the sign, else any in any direction.
    """
    found = {}
    for step in range(1, steps + 1):
        columns: dict[str, list[Any]] = {
            key: [] for key in ("prompt", "completion", "advantage", "reward/correctness", *TOKEN_COLUMNS)
        }
        for place in range(answers):
            sign = 1 if place % 2 else -1
            fast = rng.random(length) < 2 * (fast_negative if sign < 0 else 1 - fast_negative) * FAST / TYPES
            ids = np.where(fast, rng.integers(0, FAST, length), rng.integers(FAST, TYPES, length))
            entropy = 1.5 + 0.3 * rng.standard_normal(length) + np.where(ids < FAST, fast_slope * step / 100, 0.0)
            key = entropy if link else rng.random(length)
            moved = key >= np.sort(key)[-round(large * length)]
            direction = sign if link else rng.choice([-1, 1], length)
            change = np.where(moved, 0.2 * direction, 1e-3 * rng.standard_normal(length))
            values = {
                "prompt": "what?",
                "completion": "<answer>that</answer>",
                "advantage": float(sign),
                "reward/correctness": float(sign > 0),
                "token_ids": ids.tolist(),
                "tokens": [str(one) if one % 2 else f" t{one}" for one in ids],
                "entropy": entropy.tolist(),
                "logp": [float(np.log(0.5))] * length,
                "logp_after": np.log(0.5 + change).tolist(),
                "update_size": (np.abs(change) + rng.gamma(2.0, 0.01, length) if link else rng.random(length)).tolist(),
            }
            for name, value in values.items():
                columns[name].append(value)
        found[step] = columns
    return found


def token_table(rng: np.random.Generator, *, with_lines: list[dict[str, Any]] | None = None, **more: Any) -> LensTable:
    """The table of `rollouts`."""
    return table_of("planted", rollouts(rng, **more), lines=with_lines or [])
