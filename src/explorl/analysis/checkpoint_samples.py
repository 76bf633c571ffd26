"""The answers of a lone checkpoint with a record of every token, as a table that the lens can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from explorl.analysis.lens_table import LensTable, build_table
from explorl.evaluation import Protocol, fitting_template
from explorl.evaluation.prompts import all_opened, check_prompts
from explorl.models import Policy
from explorl.rollout import Engine, UnsupportedModel
from explorl.rollout.backends import generate as reference
from explorl.rollout.requests import prompt_as_seen, prompt_token_ids
from explorl.tasks import Task
from explorl.tasks.base import problems_of, verdicts_of

ROWS = 32
"""Completions whose tokens are recorded at a time."""


def checkpoint_table(
    policy: Policy,
    task: Task,
    how: Protocol,
    *,
    limit: int | None = None,
    split: str = "holdout",
    template: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> LensTable:
    """Samples and verifies answers to the task's problems, and records their tokens at the protocol's temperature."""
    problems = problems_of(task, split, limit)
    fitting = fitting_template(task, policy.tokenizer, template)
    prompts = [task.prompt(problem, fitting) for problem in problems]
    check_prompts(prompts, policy, task, fitting, "--template")
    samples = how.samples_for(task)
    drawn = _drawn(policy, prompts, samples, how, seed, batch_size)
    places = [place for place, _, _, _ in drawn]
    opened = all_opened(policy.tokenizer, prompts, how.sampling.prefix)
    verdicts = verdicts_of(
        task,
        [text for _, text, _, _ in drawn],
        [problems[place] for place in places],
        [opened[place] for place in places],
    )
    seen = [prompt_as_seen(policy.tokenizer, prompt) for prompt in prompts]
    columns: dict[str, list[Any]] = {
        "prompt": [seen[place] for place in places],
        "completion": [text for _, text, _, _ in drawn],
        "correct": [float(verdict.correct) for verdict in verdicts],
        "prompt_ids": [prompt for _, _, prompt, _ in drawn],
        "token_ids": [tokens for _, _, _, tokens in drawn],
        "tokens": [policy.tokenizer.batch_decode([[token] for token in tokens]) for _, _, _, tokens in drawn],
    }
    temperature = float(np.max(how.sampling.temperature)) or 1.0  # greedy answers are looked at as they are
    columns |= token_columns(policy, columns["prompt_ids"], columns["token_ids"], temperature)
    return build_table(policy.name, {0: columns})


def _drawn(
    policy: Policy, prompts: Sequence[Any], samples: int, how: Protocol, seed: int, batch_size: int | None
) -> list[tuple[int, str, list[int], list[int]]]:
    """Of each answer: which prompt it is to, its text, the prompt's tokens and its own."""
    params = replace(how.sampling, seed=seed)
    context = getattr(policy.model.config, "max_position_embeddings", None)
    if context is not None:
        longest = max(len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in prompts)
        if longest >= context:
            raise ValueError(f"a prompt of {longest} tokens does not fit into the context of {policy.name}: {context}")
        params = replace(params, max_tokens=min(int(np.max(params.max_tokens)), context - longest))
    engine = Engine(policy.model, policy.tokenizer, batch_size=batch_size)
    try:
        engine.check(int(np.max(params.max_tokens)))
    except UnsupportedModel:
        answers = reference.generate(
            policy.model, policy.tokenizer, prompts, samples, params, batch_size=batch_size or 64
        )
        ids = [prompt_token_ids(policy.tokenizer, prompt) for prompt in prompts]
        return [(one.prompt_index, one.text, ids[one.prompt_index], list(one.token_ids)) for one in answers]
    found = engine.generate(list(prompts), samples, params).check()
    engine.release()
    return [(one.prompt_index, one.text, found.prompt_ids[one.prompt_index], list(one.token_ids)) for one in found]


def token_columns(
    policy: Policy, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float
) -> dict[str, list[Any]]:
    """Columns with what the policy thinks of each token of these answers."""
    from explorl.modeling.token_records import answer_records

    names = {
        "logps": "logp", "entropy": "entropy", "branching": "branching", "collision": "collision",
        "other_ids": "other_ids", "other_logps": "other_logp", "state_norms": "state_norm",
    }  # fmt: skip
    columns: dict[str, list[Any]] = {name: [] for name in (*names.values(), "other")}
    pad = policy.tokenizer.pad_token_id or 0
    for start in range(0, len(answers), ROWS):
        before, after = prompts[start : start + ROWS], answers[start : start + ROWS]
        width, length = max(map(len, before)), max(1, *map(len, after))
        rows = [
            [pad] * (width - len(b)) + [*b, *a] + [pad] * (length - len(a)) for b, a in zip(before, after, strict=True)
        ]
        mask = [
            [0] * (width - len(b)) + [1] * (len(b) + len(a)) + [0] * (length - len(a))
            for b, a in zip(before, after, strict=True)
        ]
        found = answer_records(policy.model, torch.tensor(rows), torch.tensor(mask), length, temperature=temperature)
        for field, name in names.items():
            values = getattr(found, field).tolist()
            columns[name] += [row[: len(own)] for row, own in zip(values, after, strict=True)]
    columns["other"] = [policy.tokenizer.batch_decode([[token] for token in row]) for row in columns["other_ids"]]
    return columns
