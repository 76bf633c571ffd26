"""Runs with known effects in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from explorl.analysis.lens_table import Completions, LensTable, Tokens
from explorl.stats.regression import Noise

TYPES = 40
FAST = 8
TOKEN_COLUMNS = ("token_ids", "tokens", "entropy", "logp", "logp_after", "update_size")


def noise(count: int, deviation: float, rng: np.random.Generator, correlation: float = 0.5) -> np.ndarray:
    """Noise of this deviation, each step correlated with the one before."""
    return Noise((correlation,), deviation * np.sqrt(1 - correlation**2)).simulate(count, 1, rng)[:, 0]


def lines(**curves: Any) -> list[dict[str, Any]]:
    """Training lines of metrics.jsonl, from step 1 on; a name like lens__x stands for lens/x."""
    count = len(next(iter(curves.values())))
    return [
        {"step": step + 1, "kind": "train"}
        | {name.replace("__", "/"): float(values[step]) for name, values in curves.items()}
        for step in range(count)
    ]


def token_table(
    rng: np.random.Generator,
    *,
    steps: int = 40,
    answers: int = 8,
    length: int = 20,
    fast_slope: float = 0.0,
    fast_negative: float = 0.5,
    link: bool = False,
    large: float = 0.05,
    with_lines: list[dict[str, Any]] | None = None,
) -> LensTable:
    """Completions of ± sign, half and half, over ``TYPES`` token types.

    The first ``FAST`` types change by ``fast_slope`` nats per 100 steps and are in negative answers with this share;
    the others keep their entropy and are in either. Of each answer's tokens a share ``large`` moves by 0.2 in
    probability: with ``link`` those of the largest entropy and in the direction of the sign, else any in any direction.
    """
    shape = (steps * answers, length)
    sign = np.tile([-1, 1], steps * answers // 2)[:, None]
    step = np.repeat(np.arange(1, steps + 1), answers)[:, None]
    share = np.where(sign < 0, fast_negative, 1 - fast_negative) * 2 * FAST / TYPES
    ids = np.where(rng.random(shape) < share, rng.integers(0, FAST, shape), rng.integers(FAST, TYPES, shape))
    entropy = 1.5 + 0.3 * rng.standard_normal(shape) + np.where(ids < FAST, fast_slope * step / 100, 0.0)
    key = entropy if link else rng.random(shape)
    moved = key >= np.sort(key, axis=1)[:, [-round(large * length)]]
    direction = sign if link else rng.choice([-1, 1], shape)
    change = np.where(moved, 0.2 * direction, 1e-3 * rng.standard_normal(shape))
    texts = np.array([str(one) if one % 2 else f" t{one}" for one in range(TYPES)], dtype=object)
    columns = {
        "token_ids": ids,
        "tokens": texts[ids],
        "entropy": entropy,
        "logp": np.full(shape, np.log(0.5)),
        "logp_after": np.log(0.5 + change),
        "update_size": np.abs(change) + rng.gamma(2.0, 0.01, shape) if link else rng.random(shape),
    }
    count = np.full(len(step), length)
    place = np.repeat(np.arange(len(step)), length)
    numbers = {"advantage": sign[:, 0].astype(float), "correct": (sign[:, 0] > 0).astype(float)}
    prompts, texts_of = ["what?"] * len(step), ["<answer>that</answer>"] * len(step)
    start = np.arange(len(step)) * length
    return LensTable(
        "planted",
        Completions(step[:, 0], prompts, texts_of, start, count, numbers, [None] * len(step)),
        Tokens(
            place,
            np.arange(ids.size) % length,
            count[place],
            step[place, 0],
            {k: v.ravel() for k, v in columns.items()},
        ),
        with_lines or [],
    )


def rollouts(rng: np.random.Generator, **more: Any) -> dict[int, dict[str, list[Any]]]:
    """The same as columns by step, as a run writes them."""
    table = token_table(rng, **more)
    found: dict[int, dict[str, list[Any]]] = {}
    for answer, step in enumerate(table.completions.step):
        inside = slice(
            table.completions.start[answer], table.completions.start[answer] + table.completions.count[answer]
        )
        row = {
            "prompt": table.completions.prompt[answer],
            "completion": table.completions.completion[answer],
            "advantage": float(table.completions["advantage"][answer]),
            "reward/correctness": float(table.completions["correct"][answer]),
            **{name: values[inside].tolist() for name, values in table.tokens.columns.items()},
        }
        for name, value in row.items():
            found.setdefault(int(step), {}).setdefault(name, []).append(value)
    return found
