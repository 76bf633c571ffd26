"""Sample completions of a lone checkpoint and record every token, as a table for the lens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from explorl.analysis.lens_table import LensTable, build_table
from explorl.evaluation import Protocol, fitting_template
from explorl.evaluation.prompts import check_prompts, fit_into_context
from explorl.evaluation.sample import open_engine, prompted_problems, sample_and_verify
from explorl.models import Policy
from explorl.rollout.requests import continuation_tokens, prompt_token_ids
from explorl.tasks import Task
from explorl.tasks.base import problems_of

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
    problems, tokenizer = problems_of(task, split, limit), policy.tokenizer
    fitting = fitting_template(task, tokenizer, template)
    prompts = [task.prompt(problem, fitting) for problem in problems]
    check_prompts(prompts, policy, task, fitting, "--template")
    params, longest = fit_into_context(policy, prompts, replace(protocol.sampling, seed=seed))
    asked = prompted_problems(tokenizer, problems, prompts, params.prefix)
    engine = open_engine(policy, longest=longest, batch_size=batch_size)
    samples = sample_and_verify(engine, task, asked, protocol.samples_for(task), params)
    engine.release()
    prefix = continuation_tokens(tokenizer, params.prefix) if params.prefix else ()
    prompt_ids = [[*prompt_token_ids(tokenizer, prompt), *prefix] for prompt in prompts]
    token_ids = [list(each.completion.token_ids) for each in samples]
    columns: dict[str, list[Any]] = {
        "prompt": [each.problem.rendered for each in samples],
        "completion": [each.completion.text for each in samples],
        "correct": [float(each.verdict.correct) for each in samples],
        "prompt_ids": [prompt_ids[each.problem_index] for each in samples],
        "token_ids": token_ids,
        "tokens": [tokenizer.batch_decode([[token] for token in tokens]) for tokens in token_ids],
    }
    temperature = float(np.max(protocol.sampling.temperature)) or 1.0  # greedy sampling is recorded at 1
    columns |= token_columns(policy, columns["prompt_ids"], columns["token_ids"], temperature)
    return build_table(policy.name, {0: columns})


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
