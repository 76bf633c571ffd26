"""Which answers of a run, and which of their tokens, are probed for their impact.

The policy is the one that the run ended with (or the lone checkpoint), so the answers are the latest, and their
entropies and best alternatives are computed anew under it: Eq. 5 of Deng et al. 2025 asks for those of the current
policy.
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
from explorl.analysis.instances import answer_perplexity, perplexity_groups
from explorl.analysis.lens import Context
from explorl.analysis.lens_table import LensTable
from explorl.analysis.positions import completion_signs
from explorl.core.text import clean
from explorl.rollout.requests import prompt_as_seen, prompt_token_ids
from explorl.tasks import Problem, Prompt, Task

NAME = "impact"
SAMPLES, EACH, ANSWERS, BUDGET = 16, 12, 32, 4_000_000
"""Continuations of a token, tokens a rule chooses, answers they are chosen from, and most tokens sampled."""


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
        def whole(name: str, default: int, least: int) -> int:
            value = int(context.option(NAME, name, default))
            if value < least:
                raise ValueError(f"{NAME}.{name} is {value}; use {least} or more, such as {max(default, least)}")
            return value

        rules = tuple(re.split(r"[,\s]+", context.option(NAME, "rules", ",".join(RULES)).strip(" ,")))
        for rule in rules:
            if rule not in RULES:
                raise ValueError(f"{NAME}.rules has {rule!r}; use some of {','.join(RULES)}")
        temperature = float(context.option(NAME, "temperature", 1.0))
        if not 1e-6 <= temperature <= 100:
            raise ValueError(f"{NAME}.temperature is {temperature}; use a number above 0, such as 1.0")
        return cls(
            whole("samples", SAMPLES, 2), whole("each", EACH, 1), whole("answers", ANSWERS, 1),
            whole("budget", BUDGET, 1), whole("max_tokens", 0, 0), temperature, rules,
            _by_hand(context.option(NAME, "tokens", "")),
        )  # fmt: skip


def _by_hand(text: str) -> tuple[tuple[int, int], ...]:
    """Completions and positions from ``12:3,12:7``."""
    parts = [part for part in re.split(r"[,\s]+", text.strip()) if part]
    if any(not re.fullmatch(r"\d{1,9}:\d{1,9}", part) for part in parts):
        raise ValueError(f"{NAME}.tokens is {text!r}; give answers and positions such as 12:3,12:7, both from 0")
    return tuple((int(answer), int(position)) for answer, position in (part.split(":") for part in parts))


@dataclass(frozen=True)
class ImpactCandidate:
    """An answer whose tokens may be replaced."""

    answer: int
    prompt_ids: list[int]
    completion_ids: list[int]
    problem: Problem


def candidates_of(table: LensTable, tokenizer: Any, task: Task, settings: ImpactSettings) -> list[ImpactCandidate]:
    """The latest answers whose tokens and problem are known, or those named by hand."""
    answers, ids = table.completions, table.tokens["token_ids"]
    whole = [
        index
        for index in np.flatnonzero(answers.count > 0).tolist()
        if (ids[answers.start[index] : answers.start[index] + answers.count[index]] >= 0).all()
    ]
    if settings.by_hand:
        _check_by_hand(settings.by_hand, answers.count, set(whole))
        wanted = list(dict.fromkeys(answer for answer, _ in settings.by_hand))
    else:
        wanted = whole[::-1]
    problems = problems_by_prompt(task, {answers.prompt[index] for index in wanted}, tokenizer)
    strange = next((index for index in wanted if answers.prompt[index] not in problems), None)
    if settings.by_hand and strange is not None:
        raise ValueError(
            f"{NAME}.tokens names answer {strange}, whose prompt is none of the problems of task {task.name!r}; name "
            "answers to its problems, or the task that the run was trained on"
        )
    wanted = [index for index in wanted if answers.prompt[index] in problems]
    if not settings.by_hand:
        wanted = sorted(wanted[: settings.answers])
    found: list[ImpactCandidate] = []
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index in wanted:
        problem, prompt = problems[answers.prompt[index]]
        stored = answers.prompt_ids[index] if index < len(answers.prompt_ids) else None
        own = [int(token) for token in stored] if stored else prompt_token_ids(tokenizer, prompt)
        own = prompts.setdefault(tuple(own), own)  # one list for all answers to a prompt
        start = int(answers.start[index])
        found.append(ImpactCandidate(index, own, ids[start : start + int(answers.count[index])].tolist(), problem))
    return found


def longest_answer(table: LensTable, stop_ids: Sequence[int]) -> int:
    """Most tokens of an answer, as far as the records tell: the longest where it was cut off, else twice as many."""
    answers, ids = table.completions, table.tokens["token_ids"]
    longest = int(answers.count.max())
    ends = (answers.start + answers.count - 1)[answers.count == longest]
    return longest if any(int(ids[end]) not in stop_ids for end in ends) else 2 * longest


def _check_by_hand(tokens: Sequence[tuple[int, int]], count: NDArray[np.int64], whole: set[int]) -> None:
    for answer, position in tokens:
        if answer >= len(count):
            raise ValueError(f"{NAME}.tokens names answer {answer}; the run has answers 0 to {len(count) - 1}")
        if answer not in whole:
            near = next(iter(sorted(whole)), None)
            raise ValueError(f"{NAME}.tokens names answer {answer}, whose tokens are not recorded; {near} has them")
        if position >= count[answer]:
            raise ValueError(
                f"{NAME}.tokens names position {position} of answer {answer}; it has 0 to {count[answer] - 1}"
            )


def problems_by_prompt(task: Task, wanted: set[str], tokenizer: Any) -> Mapping[str, tuple[Problem, Prompt]]:
    """The problem and the prompt behind the recorded texts of prompts, over all splits and templates of a task."""
    found: dict[str, tuple[Problem, Prompt]] = {}
    for split in task.splits:
        if len(found) == len(wanted):
            break
        try:
            problems = task.problems(split)
        except (ValueError, OSError):  # a split that is not there holds no prompt of the run
            continue
        for problem in problems:
            for template in task.templates or (None,):
                prompt = task.prompt(problem, template)
                for text in _texts(prompt, tokenizer):
                    if text in wanted:
                        found.setdefault(text, (problem, prompt))
    return found


def _texts(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Return a prompt as it may have been recorded: as the model saw it, or by the contents of its messages."""
    if isinstance(prompt, str):
        return [clean(prompt)]
    seen = [prompt_as_seen(tokenizer, prompt)] if getattr(tokenizer, "chat_template", None) else []
    return [*map(clean, seen), clean("\n".join(turn["content"] for turn in prompt))]


# ---------------------------------------------------------------------------- tokens
def probes_of(
    table: LensTable, candidates: Sequence[ImpactCandidate], model: Any, settings: ImpactSettings, seed: int
) -> list[TokenProbe]:
    """The tokens to replace, with what the policy knows of them now."""
    records = [_records(model, one, settings.temperature) for one in candidates]
    length = np.array([len(one.completion_ids) for one in candidates])
    answer = np.repeat(np.arange(len(candidates)), length)
    position = np.concatenate([np.arange(n) for n in length])
    entropy, logp, other_logp = (np.concatenate([record[key] for record in records]) for key in (0, 1, 2))
    other = np.concatenate([record[3] for record in records]).astype(np.int64)
    perplexity = answer_perplexity(logp, answer, len(candidates))
    group = perplexity_groups(perplexity, np.zeros(len(candidates), dtype=np.int64))
    sign = completion_signs(table)[[one.answer for one in candidates]]
    starts = np.concatenate([[0], np.cumsum(length)])
    if settings.by_hand:
        place_of = {one.answer: int(start) for one, start in zip(candidates, starts[:-1], strict=True)}
        chosen: Mapping[int, tuple[str, ...]] = {
            place_of[index] + at: ("by hand",) for index, at in settings.by_hand if index in place_of
        }
    else:
        chosen = choose_tokens(
            entropy, answer, position / length[answer], sign[answer], group[answer],
            settings.rules, settings.each, seed=seed,
        )  # fmt: skip
    return [
        TokenProbe(
            candidates[answer[place]].prompt_ids, candidates[answer[place]].completion_ids, int(position[place]),
            int(other[place]), candidates[answer[place]].problem,
            probability=float(np.exp(logp[place])), other_probability=float(np.exp(other_logp[place])),
            answer=candidates[answer[place]].answer, step=int(table.completions.step[candidates[answer[place]].answer]),
            sign=int(sign[answer[place]]), entropy=float(entropy[place]),
            perplexity=float(perplexity[answer[place]]), groups=rules,
        )
        for place, rules in chosen.items()
    ]  # fmt: skip


def _records(model: Any, one: ImpactCandidate, temperature: float) -> tuple[NDArray[np.float64], ...]:
    """Entropy, log π, log π of the best other token, and its id, of an answer's tokens."""
    import torch

    from explorl.modeling.token_records import answer_records

    device = next(model.parameters()).device
    ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]], device=device)
    found = answer_records(model, ids, torch.ones_like(ids), len(one.completion_ids), temperature=temperature)
    columns = (found.entropy, found.logps, found.other_logps, found.other_ids)
    return tuple(column[0].double().cpu().numpy() for column in columns)
