"""Choose the completions of a run, and their tokens, whose impact is measured.

The policy is the final one of the run (or the lone checkpoint). So the latest completions are used, and their entropies
and best alternatives are recomputed under that policy, as Eq. 5 of Deng et al. 2025 requires.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorl.analysis.impact import RULES, choose_tokens
from explorl.analysis.impact_sampling import TokenProbe
from explorl.analysis.instances import completion_perplexity, perplexity_groups
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import LensTable
from explorl.analysis.positions import completion_signs
from explorl.core.text import clean
from explorl.rollout.requests import prompt_token_ids, render_prompt
from explorl.tasks import Problem, Prompt, Task

NAME = "impact"
SAMPLES, EACH, COMPLETIONS, BUDGET = 16, 12, 32, 4_000_000
"""Defaults: continuations per token, tokens per rule, completions to choose from, and most tokens sampled."""


@dataclass(frozen=True)
class ImpactSettings:
    """The options ``impact.…``."""

    samples: int
    each: int
    answers: int
    budget: int
    max_tokens: int
    temperature: float
    rules: tuple[str, ...]
    by_hand: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, context: Context) -> ImpactSettings:
        """Read the options; raise ValueError if one is out of range."""

        def integer(name: str, default: int, least: int) -> int:
            value = int(context.option(NAME, name, default))
            if value < least:
                raise ValueError(f"{NAME}.{name} is {value}; use {least} or more, such as {max(default, least)}")
            return value

        rules = tuple(re.split(r"[,\s]+", context.option(NAME, "rules", ",".join(RULES)).strip(" ,")))
        for rule in rules:
            if rule not in RULES:
                raise ValueError(f"{NAME}.rules has the unknown rule {rule!r}; use some of {','.join(RULES)}")
        temperature = float(context.option(NAME, "temperature", 1.0))
        if not 1e-6 <= temperature <= 100:
            raise ValueError(f"{NAME}.temperature is {temperature}; use a number above 0, such as 1.0")
        return cls(
            integer("samples", SAMPLES, 2), integer("each", EACH, 1), integer("answers", COMPLETIONS, 1),
            integer("budget", BUDGET, 1), integer("max_tokens", 0, 0), temperature, rules,
            _by_hand(context.option(NAME, "tokens", "")),
        )  # fmt: skip


def _by_hand(text: str) -> tuple[tuple[int, int], ...]:
    """Parse completions and positions from ``12:3,12:7``."""
    parts = [part for part in re.split(r"[,\s]+", text.strip()) if part]
    if any(not re.fullmatch(r"\d{1,9}:\d{1,9}", part) for part in parts):
        raise ValueError(f"{NAME}.tokens is {text!r}; use completions and positions, both from 0, such as 12:3,12:7")
    return tuple((int(index), int(position)) for index, position in (part.split(":") for part in parts))


@dataclass(frozen=True)
class ImpactCandidate:
    """A completion whose tokens may be replaced."""

    index: int
    prompt_ids: list[int]
    completion_ids: list[int]
    problem: Problem


def candidates_of(table: LensTable, tokenizer: Any, task: Task, settings: ImpactSettings) -> list[ImpactCandidate]:
    """Return the latest completions whose tokens and problem are known, or those that the user named."""
    completions, ids = table.completions, table.tokens["token_ids"]
    recorded = [
        index
        for index in np.flatnonzero(completions.count > 0).tolist()
        if (ids[completions.start[index] : completions.start[index] + completions.count[index]] >= 0).all()
    ]
    if settings.by_hand:
        _check_by_hand(settings.by_hand, completions.count, set(recorded))
        selected = list(dict.fromkeys(index for index, _ in settings.by_hand))
    else:
        selected = recorded[::-1]
    problems = problems_by_prompt(task, {completions.prompt[index] for index in selected}, tokenizer)
    unknown = next((index for index in selected if completions.prompt[index] not in problems), None)
    if settings.by_hand and unknown is not None:
        raise ValueError(
            f"{NAME}.tokens names completion {unknown}, whose prompt is not among the problems of task {task.name!r}; "
            "use completions of its problems, or the task that the run was trained on"
        )
    selected = [index for index in selected if completions.prompt[index] in problems]
    if not settings.by_hand:
        selected = sorted(selected[: settings.answers])
    candidates: list[ImpactCandidate] = []
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index in selected:
        problem, prompt = problems[completions.prompt[index]]
        stored = completions.prompt_ids[index] if index < len(completions.prompt_ids) else None
        prompt_ids = [int(token) for token in stored] if stored else prompt_token_ids(tokenizer, prompt)
        prompt_ids = prompts.setdefault(tuple(prompt_ids), prompt_ids)  # one list for all completions of a prompt
        start = int(completions.start[index])
        candidates.append(
            ImpactCandidate(index, prompt_ids, ids[start : start + int(completions.count[index])].tolist(), problem)
        )
    return candidates


def completion_limit(table: LensTable, stop_ids: Sequence[int]) -> int:
    """Return the limit on a completion's length: the longest recorded one if it was cut off, else twice that."""
    completions, ids = table.completions, table.tokens["token_ids"]
    longest = int(completions.count.max())
    ends = (completions.start + completions.count - 1)[completions.count == longest]
    return longest if any(int(ids[end]) not in stop_ids for end in ends) else 2 * longest


def _check_by_hand(tokens: Sequence[tuple[int, int]], count: NDArray[np.int64], recorded: set[int]) -> None:
    for index, position in tokens:
        if index >= len(count):
            raise ValueError(f"{NAME}.tokens names completion {index}; the run has completions 0 to {len(count) - 1}")
        if index not in recorded:
            example = next(iter(sorted(recorded)), None)
            raise ValueError(
                f"{NAME}.tokens names completion {index}, whose tokens are not recorded; use one such as {example}"
            )
        if position >= count[index]:
            raise ValueError(
                f"{NAME}.tokens names position {position} of completion {index}; it has 0 to {count[index] - 1}"
            )


def problems_by_prompt(task: Task, texts: set[str], tokenizer: Any) -> Mapping[str, tuple[Problem, Prompt]]:
    """Find the problem and the prompt of recorded prompt texts, among all splits and templates of a task."""
    problem_of: dict[str, tuple[Problem, Prompt]] = {}
    for split in task.splits:
        if len(problem_of) == len(texts):
            break
        try:
            problems = task.problems(split)
        except (ValueError, OSError):  # a split without data has no prompt of the run
            continue
        for problem in problems:
            for template in task.templates or (None,):
                prompt = task.prompt(problem, template)
                for text in _recorded_texts(prompt, tokenizer):
                    if text in texts:
                        problem_of.setdefault(text, (problem, prompt))
    return problem_of


def _recorded_texts(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Return the texts as which a prompt may be recorded: rendered, or the contents of its messages."""
    if isinstance(prompt, str):
        return [clean(prompt)]
    rendered = [render_prompt(tokenizer, prompt)] if getattr(tokenizer, "chat_template", None) else []
    return [*map(clean, rendered), clean("\n".join(turn["content"] for turn in prompt))]


# ---------------------------------------------------------------------------- tokens
def probes_of(
    table: LensTable, candidates: Sequence[ImpactCandidate], model: Any, settings: ImpactSettings, seed: int
) -> list[TokenProbe]:
    """Return the tokens to replace, with their statistics under the policy."""
    records = [_records(model, candidate, settings.temperature) for candidate in candidates]
    length = np.array([len(candidate.completion_ids) for candidate in candidates])
    owner = np.repeat(np.arange(len(candidates)), length)
    position = np.concatenate([np.arange(n) for n in length])
    entropy, logp, other_logp = (np.concatenate([record[key] for record in records]) for key in (0, 1, 2))
    other = np.concatenate([record[3] for record in records]).astype(np.int64)
    perplexity = completion_perplexity(logp, owner, len(candidates))
    group = perplexity_groups(perplexity, np.zeros(len(candidates), dtype=np.int64))
    sign = completion_signs(table)[[candidate.index for candidate in candidates]]
    starts = np.concatenate([[0], np.cumsum(length)])
    if settings.by_hand:
        start_of = {candidate.index: int(start) for candidate, start in zip(candidates, starts[:-1], strict=True)}
        chosen: Mapping[int, tuple[str, ...]] = {
            start_of[index] + offset: ("by hand",) for index, offset in settings.by_hand if index in start_of
        }
    else:
        chosen = choose_tokens(
            entropy, owner, position / length[owner], sign[owner], group[owner],
            settings.rules, settings.each, seed=seed,
        )  # fmt: skip
    probes = []
    for token, rules in chosen.items():
        candidate = candidates[owner[token]]
        probes.append(
            TokenProbe(
                candidate.prompt_ids, candidate.completion_ids, int(position[token]), int(other[token]),
                candidate.problem,
                probability=float(np.exp(logp[token])), other_probability=float(np.exp(other_logp[token])),
                answer=candidate.index, step=int(table.completions.step[candidate.index]),
                sign=int(sign[owner[token]]), entropy=float(entropy[token]),
                perplexity=float(perplexity[owner[token]]), groups=rules,
            )
        )  # fmt: skip
    return probes


def _records(model: Any, candidate: ImpactCandidate, temperature: float) -> tuple[NDArray[np.float64], ...]:
    """Return entropy, log π, log π of the best other token, and its id, of each token of a completion."""
    import torch

    from explorl.modeling.token_records import answer_records

    device = next(model.parameters()).device
    ids = torch.tensor([[*candidate.prompt_ids, *candidate.completion_ids]], device=device)
    records = answer_records(model, ids, torch.ones_like(ids), len(candidate.completion_ids), temperature=temperature)
    columns = (records.entropy, records.logps, records.other_logps, records.other_ids)
    return tuple(column[0].double().cpu().numpy() for column in columns)
