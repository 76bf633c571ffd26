"""Sample completions of a lone checkpoint and record every token, as a table for the lens."""

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
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.tasks import Task
from explorl.tasks.base import problems_of, verdicts_of

BATCH = 32
"""Completions per forward pass when tokens are recorded."""


def checkpoint_table(
    policy: Policy,
    task: Task,
    protocol: Protocol,
    *,
    limit: int | None = None,
    split: str = "holdout",
    template: str | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> LensTable:
    """Sample and verify completions of the task's problems, and record their tokens at the protocol's temperature."""
    problems = problems_of(task, split, limit)
    fitting = fitting_template(task, policy.tokenizer, template)
    prompts = [task.prompt(problem, fitting) for problem in problems]
    check_prompts(prompts, policy, task, fitting, "--template")
    samples = protocol.samples_for(task)
    sampled = _sample(policy, prompts, samples, protocol, seed, batch_size)
    indices = [index for index, _, _, _ in sampled]
    opened = all_opened(policy.tokenizer, prompts, protocol.sampling.prefix)
    verdicts = verdicts_of(
        task,
        [text for _, text, _, _ in sampled],
        [problems[index] for index in indices],
        [opened[index] for index in indices],
    )
    rendered = [render_prompt(policy.tokenizer, prompt) for prompt in prompts]
    columns: dict[str, list[Any]] = {
        "prompt": [rendered[index] for index in indices],
        "completion": [text for _, text, _, _ in sampled],
        "correct": [float(verdict.correct) for verdict in verdicts],
        "prompt_ids": [prompt for _, _, prompt, _ in sampled],
        "token_ids": [tokens for _, _, _, tokens in sampled],
        "tokens": [policy.tokenizer.batch_decode([[token] for token in tokens]) for _, _, _, tokens in sampled],
    }
    temperature = float(np.max(protocol.sampling.temperature)) or 1.0  # greedy sampling is recorded at 1
    columns |= token_columns(policy, columns["prompt_ids"], columns["token_ids"], temperature)
    return build_table(policy.name, {0: columns})


def _sample(
    policy: Policy, prompts: Sequence[Any], samples: int, protocol: Protocol, seed: int, batch_size: int | None
) -> list[tuple[int, str, list[int], list[int]]]:
    """Return for each completion the index of its prompt, its text, the prompt's tokens and its own tokens."""
    params = replace(protocol.sampling, seed=seed)
    context = getattr(policy.model.config, "max_position_embeddings", None)
    if context is not None:
        longest = max(len(prompt_token_ids(policy.tokenizer, prompt)) for prompt in prompts)
        if longest >= context:
            raise ValueError(f"a prompt has {longest} tokens, but the context of {policy.name} is {context}")
        params = replace(params, max_tokens=min(int(np.max(params.max_tokens)), context - longest))
    engine = Engine(policy.model, policy.tokenizer, batch_size=batch_size)
    try:
        engine.check(int(np.max(params.max_tokens)))
    except UnsupportedModel:
        rollouts = reference.generate(
            policy.model, policy.tokenizer, prompts, samples, params, batch_size=batch_size or 64
        )
        ids = [prompt_token_ids(policy.tokenizer, prompt) for prompt in prompts]
        return [(r.prompt_index, r.text, ids[r.prompt_index], list(r.token_ids)) for r in rollouts]
    result = engine.generate(list(prompts), samples, params).check()
    engine.release()
    return [(r.prompt_index, r.text, result.prompt_ids[r.prompt_index], list(r.token_ids)) for r in result]


def token_columns(
    policy: Policy, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float
) -> dict[str, list[Any]]:
    """Return columns with the policy's statistics of each token of these completions."""
    from explorl.modeling.token_records import answer_records

    names = {
        "logps": "logp", "entropy": "entropy", "branching": "branching", "collision": "collision",
        "other_ids": "other_ids", "other_logps": "other_logp", "state_norms": "state_norm",
    }  # fmt: skip
    columns: dict[str, list[Any]] = {name: [] for name in (*names.values(), "other")}
    pad = policy.tokenizer.pad_token_id or 0
    for start in range(0, len(completions), BATCH):
        before, after = prompts[start : start + BATCH], completions[start : start + BATCH]
        width, length = max(map(len, before)), max(1, *map(len, after))
        rows = [
            [pad] * (width - len(b)) + [*b, *a] + [pad] * (length - len(a)) for b, a in zip(before, after, strict=True)
        ]
        mask = [
            [0] * (width - len(b)) + [1] * (len(b) + len(a)) + [0] * (length - len(a))
            for b, a in zip(before, after, strict=True)
        ]
        records = answer_records(policy.model, torch.tensor(rows), torch.tensor(mask), length, temperature=temperature)
        for field, name in names.items():
            values = getattr(records, field).tolist()
            columns[name] += [row[: len(ids)] for row, ids in zip(values, after, strict=True)]
    columns["other"] = [policy.tokenizer.batch_decode([[token] for token in row]) for row in columns["other_ids"]]
    return columns
