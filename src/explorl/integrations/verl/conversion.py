"""Convert the rows of verl's driver to the strategies' `Batch`, and the results back.

verl sorts rows by length to balance its workers and adds empty rows for divisibility. Strategies get only the real
rows, with the completions of a prompt side by side and prompts in the order of submission, so that results do not
depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.integrations.verl.settings import VerlSettings
from explorl.strategies import Batch
from explorl.training.grpo.batch import build_batch
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.shaping import Shaped

PREFIX = "explorl/"
"""Prefix of the columns of verl's batch that hold the strategies' results."""
ROWS = ("rewards", "correct", "correctness", "group", "truncated", "temperature")
"""Row values that `Strategy.penalty` receives in a micro-batch."""
SCORE = "score"
"""Name of verl's total reward among the numbers that can define correctness."""


def real_row_order(
    keys: Sequence[str], padding: Sequence[bool], prompt_ids: Sequence[str], *, single: bool = True
) -> list[int]:
    """Return the indices of the real rows, grouped by prompt; a key is ``<prompt>_<completion>_<output>``.

    single: raise if a completion has several outputs.
    """
    position = {prompt: number for number, prompt in enumerate(prompt_ids)}
    real = []
    for row, key in enumerate(keys):
        if padding[row]:
            continue
        prompt, completion, output = key.rsplit("_", 2)
        if single and int(output):
            raise ValueError(
                f"an agent loop returned {int(output) + 1} outputs or more for one request ({prompt}), but strategies "
                "compare completions with one output each; use an agent loop with one output, or explorl.strategies=[]"
            )
        real.append((position.get(prompt, len(position)), prompt, int(completion), int(output), row))
    return [row for *_, row in sorted(real)]


def group_indices(prompts: Sequence[str]) -> Int[Tensor, " batch"]:
    """Return the group index of each row: 0 for the first prompt, 1 for the second, and so on."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.long)


def correctness_rule(settings: VerlSettings, extras: Sequence[Mapping[str, Any]]) -> Correct:
    """Return how correctness is defined: by default `acc` ≥ 1 if the reward function returns it, else the score ≥ 1."""
    names = reward_names(extras)
    if settings.correct is not None:
        return Correct.of(settings.correct, names)
    name = "acc" if "acc" in names else SCORE
    return Correct(name, names.index(name), guessed=True)


def reward_names(extras: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the score and of everything that the reward function returned as a number for every row."""
    first = extras[0] if extras else {}
    more = [key for key in first if key != SCORE and all(_number(extra.get(key)) is not None for extra in extras)]
    return [SCORE, *more]


def reward_parts(
    names: Sequence[str], scores: Float[Tensor, " batch"], extras: Sequence[Mapping[str, Any]]
) -> Float[Tensor, "batch functions"]:
    """Return the score and the other numbers, one column each."""
    columns = [scores.tolist() if name == SCORE else [_number(extra[name]) for extra in extras] for name in names]
    return torch.tensor(columns, dtype=torch.float32).T


def extract_answers(key: str, extras: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return each completion's answer, as returned by the reward function."""
    if not any(key in extra for extra in extras):
        names = ", ".join(sorted({name for extra in extras for name in extra})) or "only the score"
        raise ValueError(f"explorl.answers is {key!r}, but the reward function returned {names}")
    return [None if extra.get(key) is None else str(extra[key]) for extra in extras]


def batch_of_columns(
    columns: Mapping[str, Tensor],
    *,
    group: Int[Tensor, " batch"],
    rewards: Float[Tensor, " batch"],
    parts: Float[Tensor, "batch functions"],
    correct: Correct,
    truncated: Bool[Tensor, " batch"],
    temperature: Float[Tensor, " batch"],
    step: int,
    prompts: Sequence[str],
    answers: Sequence[str | None] = (),
    max_length: int | None = None,
) -> Batch:
    """Return the batch of a step. ``columns`` are verl's, right-padded and in the order of the rows."""
    mask = columns["response_mask"].to(torch.float32)

    def values(name: str) -> Tensor:
        return columns[name].to(torch.float32) * mask

    old = values("old_log_probs")
    return build_batch(
        correct=correct,
        parts=parts,
        logps=old,
        old_logps=old,
        ref_logps=values("ref_log_prob") if "ref_log_prob" in columns else None,
        sampling_logps=values("rollout_log_probs") if "rollout_log_probs" in columns else None,
        entropy=values("entropy"),
        branching=None,
        mask=mask,
        advantages=values("advantages"),
        rewards=rewards.to(torch.float32),
        group=group,
        truncated=truncated,
        temperature=temperature.to(torch.float32),
        step=step,
        prompts=list(prompts),
        answers=list(answers),
        max_length=max_length,
    )


def loss_columns(shaped: Shaped, batch: Batch, *, penalties: bool) -> dict[str, Tensor]:
    """Return the columns that the workers' loss needs, each with one value per token or per row."""
    columns = {"weights": shaped.weights, "kl_weights": shaped.kl_weights}
    if shaped.clip is not None:
        columns |= {"clip_low": shaped.clip[0], "clip_high": shaped.clip[1]}
    if penalties:
        columns |= {f"row/{name}": getattr(batch, name) for name in ROWS} | {"recorded_entropy": batch.entropy}
        columns |= {f"kept/{name}": tensor for name, tensor in shaped.kept.items()}
    return {PREFIX + name: tensor for name, tensor in columns.items()}


def scatter_rows(values: Tensor, order: Sequence[int], rows: int, *, fill: float = 0.0) -> Tensor:
    """Return the values of the real rows at their indices among all rows, and ``fill`` in the empty rows."""
    out = values.new_full((rows, *values.shape[1:]), fill)
    out[torch.tensor(list(order), dtype=torch.long)] = values
    return out


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, bool | int | float) else None
