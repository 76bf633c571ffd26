"""Sample continuations of a token and of its best alternative, and verify the whole completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from explorl.analysis.impact import Continuation, Side, TokenImpact, newcombe
from explorl.core.text import clean
from explorl.evaluation.sample import (
    AnyEngine,
    PromptedProblem,
    VerifiedSample,
    sample_and_verify,
    verify_texts,
)
from explorl.rollout import SamplingParams
from explorl.stats.distributions import fisher
from explorl.stats.p_values import benjamini_hochberg
from explorl.tasks import Problem, Task, opens_think

MAX_TEXT = 2000
"""Most characters of a continuation that are stored."""


@dataclass(frozen=True)
class TokenProbe:
    """A token to be replaced, with the data to continue from it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """Completion that the token belongs to."""
    position: int
    other_id: int
    """Most likely token at this position other than that of the completion."""
    problem: Problem
    probability: float = float("nan")
    other_probability: float = float("nan")
    answer: int = 0
    step: int = 0
    sign: int = 0
    entropy: float = float("nan")
    perplexity: float = float("nan")
    groups: tuple[str, ...] = ()

    def branches(self) -> tuple[list[int], list[int]]:
        """Return the completion up to and including the token, and the same with the other token instead."""
        before = list(self.completion_ids[: self.position])
        return [*before, int(self.completion_ids[self.position])], [*before, int(self.other_id)]


@dataclass(frozen=True)
class ContinuationLimits:
    """Limits on the length of continuations."""

    max_tokens: int
    """Most tokens of a whole completion."""
    context: int | None = None
    """Most tokens of prompt and completion together: the model's context length."""
    stop_ids: Sequence[int] = ()
    """Tokens that end a completion."""

    def room(self, prompt: Sequence[int], branch: Sequence[int]) -> int:
        """Return how many tokens may follow a branch."""
        room = self.max_tokens - len(branch)
        return room if self.context is None else min(room, self.context - len(prompt) - len(branch))

    def ends(self, branch: Sequence[int]) -> bool:
        """Check whether the branch ends with a stop token."""
        return branch[-1] in self.stop_ids


@dataclass(frozen=True)
class SampledImpacts:
    """Impacts of tokens, with counts of special cases."""

    tokens: tuple[TokenImpact, ...]
    sampled_tokens: int
    ended: int
    """Branches whose token ends the completion."""
    no_room: int
    """Branches without room for another token, which are judged unchanged."""
    cut_off: int
    """Continuations that reached the longest length."""
    failed: int
    """Continuations that failed and do not count."""
    left_out: int
    """Tokens without any continuation on one side."""


def most_tokens(probes: Sequence[TokenProbe], samples: int, limits: ContinuationLimits) -> int:
    """Return the largest number of tokens that these continuations can take."""
    return sum(
        samples * max(0, limits.room(probe.prompt_ids, branch))
        for probe in probes
        for branch in probe.branches()
        if not limits.ends(branch)
    )


def within_budget(
    probes: Sequence[TokenProbe], samples: int, limits: ContinuationLimits, budget: int
) -> list[TokenProbe]:
    """Return the longest prefix of the probes that fits the budget of sampled tokens in the worst case."""
    selected, spent = [], 0
    for probe in probes:
        spent += most_tokens([probe], samples, limits)
        if spent > budget:
            break
        selected.append(probe)
    return selected


def sample_impacts(
    engine: AnyEngine,
    task: Task,
    probes: Sequence[TokenProbe],
    *,
    samples: int,
    limits: ContinuationLimits,
    temperature: float = 1.0,
    seed: int = 0,
) -> SampledImpacts:
    """Sample and verify `samples` continuations of each probe's two branches, in one call.

    Continuations of a branch share its prompt, which the engine computes once. The same seed gives the same samples.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; use at least 2 continuations per token, such as 16")
    branches = _branches(engine.tokenizer, probes)
    ended = [limits.ends(branch.begun) for branch in branches]
    rooms = [limits.room(probe.prompt_ids, branch) for probe in probes for branch in probe.branches()]
    live = [index for index, room in enumerate(rooms) if room > 0 and not ended[index]]
    sampled: list[VerifiedSample] = []
    if live:
        params = SamplingParams(temperature=temperature, max_tokens=[rooms[index] for index in live], seed=seed)
        asked = [branches[index] for index in live]
        sampled = sample_and_verify(engine, task, asked, samples, params, keep_failed=True)
    continuations = _continuations(engine.tokenizer, task, branches, live, sampled, samples)

    def name(token: int) -> str:
        return clean(str(engine.tokenizer.decode([token])), 200)

    impacts = []
    for index, probe in enumerate(probes):
        of_token, of_other = continuations[2 * index], continuations[2 * index + 1]
        if of_token and of_other:
            first, second = (branch[-1] for branch in probe.branches())
            sides = (
                Side(first, name(first), probe.probability, tuple(of_token)),
                Side(second, name(second), probe.other_probability, tuple(of_other)),
            )
            impacts.append(_impact(probe, *sides))
    finishes = [each.completion.finish_reason for each in sampled]
    return SampledImpacts(
        _corrected(impacts),
        sum(len(each.completion.token_ids) for each in sampled),
        ended=sum(ended),
        no_room=len(branches) - len(live) - sum(ended),
        cut_off=finishes.count("length"),
        failed=finishes.count("error"),
        left_out=len(probes) - len(impacts),
    )


def _branches(tokenizer: Any, probes: Sequence[TokenProbe]) -> list[PromptedProblem]:
    """Return the two branches of each probe as prompts that end with the beginning of a completion."""
    rendered: dict[int, str] = {}  # by id, because the probes of a completion share the list of prompt tokens
    branches = []
    for probe in probes:
        if id(probe.prompt_ids) not in rendered:
            rendered[id(probe.prompt_ids)] = str(tokenizer.decode(list(probe.prompt_ids)))
        text = rendered[id(probe.prompt_ids)]
        branches += [
            PromptedProblem(probe.problem, [*probe.prompt_ids, *branch], text, opens_think(text), branch)
            for branch in probe.branches()
        ]
    return branches


def _continuations(
    tokenizer: Any,
    task: Task,
    branches: Sequence[PromptedProblem],
    live: Sequence[int],
    sampled: Sequence[VerifiedSample],
    samples: int,
) -> list[list[Continuation]]:
    """Return the continuations of each branch; one that cannot continue counts `samples` times by itself."""
    continuations: list[list[Continuation]] = [[] for _ in branches]
    for each in sampled:
        finish = str(each.completion.finish_reason)
        if finish != "error":
            text = clean(_text(tokenizer, each.completion.token_ids), MAX_TEXT)
            continuations[live[each.problem_index]].append(Continuation(text, each.verdict.correct, finish))
    closed = sorted(set(range(len(branches))) - set(live))
    texts = [_text(tokenizer, branches[index].begun) for index in closed]
    for index, verdict in zip(closed, verify_texts(task, texts, [branches[i] for i in closed]), strict=True):
        continuations[index] = [Continuation("", verdict.correct, "none")] * samples
    return continuations


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _impact(probe: TokenProbe, sampled: Side, other: Side) -> TokenImpact:
    counts = (sampled.correct, sampled.count, other.correct, other.count)
    return TokenImpact(
        probe.answer, probe.position, len(probe.completion_ids), probe.step, probe.sign, probe.entropy,
        probe.perplexity, probe.groups, sampled, other, newcombe(*counts), fisher(*counts), 1.0,
    )  # fmt: skip


def _corrected(impacts: Sequence[TokenImpact]) -> tuple[TokenImpact, ...]:
    corrected = benjamini_hochberg([impact.p for impact in impacts])
    return tuple(replace(impact, corrected=value) for impact, value in zip(impacts, corrected, strict=True))
