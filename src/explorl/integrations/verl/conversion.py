"""From the rows that verl's driver holds to the `Batch` that strategies see, and back.

verl sorts rows by length to balance its workers, and adds empty ones so that their number divides. Strategies see the
real rows alone, the answers to a prompt side by side in the order in which the prompts were asked, so what they say
does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from explorl.integrations.verl.settings import Settings
from explorl.strategies import Batch
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.shaping import Shaped

PREFIX = "explorl/"
"""Of the columns of verl's batch that carry what the strategies said to the workers."""
ROWS = ("rewards", "correct", "correctness", "group", "truncated", "temperature")
"""Values per row that `Strategy.penalty` finds in a micro-batch."""
SCORE = "score"
"""Name of verl's total reward among the numbers that may say what is correct."""


def order_of(keys: Sequence[str], padding: Sequence[bool], asked: Sequence[str], *, single: bool = True) -> list[int]:
    """Places of the real rows, those of a prompt together; a key is ``<prompt>_<answer>_<output>``.

    single: several outputs of one answer are an error.
    """
    place = {prompt: number for number, prompt in enumerate(asked)}
    real = []
    for row, key in enumerate(keys):
        if padding[row]:
            continue
        prompt, answer, output = key.rsplit("_", 2)
        if single and int(output):
            raise ValueError(
                f"an agent loop gave {int(output) + 1} outputs or more to one request ({prompt}): strategies compare "
                "the answers to a prompt, one output each; use an agent loop with one output, or explorl.strategies=[]"
            )
        real.append((place.get(prompt, len(place)), prompt, int(answer), int(output), row))
    return [row for *_, row in sorted(real)]


def groups_of(prompts: Sequence[str]) -> Int[Tensor, " batch"]:
    """0 for the first prompt, 1 for the second, and so on."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.long)


def truncated_rows(
    responses: Int[Tensor, "batch time"], lengths: Int[Tensor, " batch"], ends: Sequence[int]
) -> Bool[Tensor, " batch"]:
    """True where the last token of an answer does not end it, or there is none."""
    last = responses.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return ~torch.isin(last, torch.tensor(list(ends), dtype=last.dtype)) | (lengths == 0)


def correct_of(settings: Settings, extras: Sequence[Mapping[str, Any]]) -> Correct:
    """What a correct answer is: by default `acc` where the reward function returns it, else the score, at least 1."""
    names = numbers_of(extras)
    if settings.correct is not None:
        return Correct.of(settings.correct, names)
    name = "acc" if "acc" in names else SCORE
    return Correct(name, names.index(name), guessed=True)


def numbers_of(extras: Sequence[Mapping[str, Any]]) -> list[str]:
    """The score, and what else the reward function returned as a number for every row."""
    first = extras[0] if extras else {}
    more = [key for key in first if key != SCORE and all(_number(extra.get(key)) is not None for extra in extras)]
    return [SCORE, *more]


def parts_of(
    names: Sequence[str], scores: Float[Tensor, " batch"], extras: Sequence[Mapping[str, Any]]
) -> Float[Tensor, "batch functions"]:
    """The score and the other numbers, one column each."""
    columns = [scores.tolist() if name == SCORE else [_number(extra[name]) for extra in extras] for name in names]
    return torch.tensor(columns, dtype=torch.float32).T


def answers_of(key: str, extras: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """What each answer says, as the reward function returned it."""
    if not any(key in extra for extra in extras):
        known = ", ".join(sorted({name for extra in extras for name in extra})) or "nothing beside the score"
        raise ValueError(f"explorl.answers is {key!r}, and the reward function returned {known}")
    return [None if extra.get(key) is None else str(extra[key]) for extra in extras]


def batch_of(
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
    """The batch of a step. ``columns`` are verl's, padded on the right and in the rows' order."""
    mask = columns["response_mask"].to(torch.float32)

    def values(name: str) -> Tensor:
        return columns[name].to(torch.float32) * mask

    old = values("old_log_probs")
    return Batch(
        logps=old,
        old_logps=old,
        ref_logps=values("ref_log_prob") if "ref_log_prob" in columns else None,
        sampling_logps=values("rollout_log_probs") if "rollout_log_probs" in columns else None,
        entropy=values("entropy"),
        branching=None,
        mask=mask,
        advantages=values("advantages"),
        rewards=rewards.to(torch.float32),
        correct=correct.marks(parts),
        correctness=correct.rewards(parts),
        group=group,
        truncated=truncated,
        temperature=temperature.to(torch.float32),
        step=step,
        prompts=list(prompts),
        answers=list(answers),
        max_length=max_length,
    )


def carried(shaped: Shaped, batch: Batch, *, penalties: bool) -> dict[str, Tensor]:
    """What the workers' loss needs, by column: one value per token, or one per row."""
    columns = {"weights": shaped.weights, "kl_weights": shaped.kl_weights}
    if shaped.clip is not None:
        columns |= {"clip_low": shaped.clip[0], "clip_high": shaped.clip[1]}
    if penalties:
        columns |= {f"row/{name}": getattr(batch, name) for name in ROWS} | {"recorded_entropy": batch.entropy}
        columns |= {f"kept/{name}": tensor for name, tensor in shaped.kept.items()}
    return {PREFIX + name: tensor for name, tensor in columns.items()}


def spread(values: Tensor, order: Sequence[int], rows: int, *, fill: float = 0.0) -> Tensor:
    """Values of the real rows at their places among all rows; ``fill`` in the empty ones."""
    out = values.new_full((rows, *values.shape[1:]), fill)
    out[torch.tensor(list(order), dtype=torch.long)] = values
    return out


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, bool | int | float) else None
