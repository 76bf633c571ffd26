"""Sample continuations of a token and of its best alternative, and verify the whole completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from explorl.analysis.impact import Continuation, Side, TokenImpact, newcombe
from explorl.core.text import clean
from explorl.rollout import SamplingParams
from explorl.stats.distributions import fisher
from explorl.stats.p_values import benjamini_hochberg
from explorl.tasks import Problem, Task, opens_think
from explorl.tasks.base import verdicts_of

MAX_TEXT = 2000
"""Most characters of a continuation that are stored."""


class ContinuationSampler(Protocol):
    """The part of `explorl.rollout.Engine` that is needed here."""

    tokenizer: Any

    def generate(self, prompts: Sequence[Any], n: int = 1, params: SamplingParams | None = None) -> Any:
        """Sample n completions of each prompt."""
        ...


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
    sampler: ContinuationSampler,
    task: Task,
    probes: Sequence[TokenProbe],
    *,
    samples: int,
    limits: ContinuationLimits,
    temperature: float = 1.0,
    seed: int = 0,
    text_of: Callable[[int], str] | None = None,
) -> SampledImpacts:
    """Sample and verify `samples` continuations of each probe's two branches, in one call.

    Continuations of a branch share its prompt, which the engine computes once. The same seed gives the same samples.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; use at least 2 continuations per token, such as 16")
    branches = [(probe, branch) for probe in probes for branch in probe.branches()]
    rooms = [limits.room(probe.prompt_ids, branch) for probe, branch in branches]
    live = [index for index, (_, branch) in enumerate(branches) if not limits.ends(branch) and rooms[index] > 0]
    rollouts: dict[int, list[Any]] = {}
    if live:
        params = SamplingParams(temperature=temperature, max_tokens=[rooms[index] for index in live], seed=seed)
        prompts = [[*branches[index][0].prompt_ids, *branches[index][1]] for index in live]
        rollouts = dict(zip(live, sampler.generate(prompts, samples, params).by_prompt(), strict=True))
    continuations = _verify(sampler.tokenizer, task, branches, rollouts, samples)
    decode = text_of or (lambda token: str(sampler.tokenizer.decode([token])))
    impacts = []
    for index, probe in enumerate(probes):
        sampled, other = continuations[2 * index], continuations[2 * index + 1]
        if sampled and other:
            first, second = (branch[-1] for branch in probe.branches())
            impacts.append(
                _impact(
                    probe,
                    Side(first, clean(decode(first), 200), probe.probability, tuple(sampled)),
                    Side(second, clean(decode(second), 200), probe.other_probability, tuple(other)),
                )
            )
    flat = [rollout for of_branch in rollouts.values() for rollout in of_branch]
    return SampledImpacts(
        _corrected(impacts),
        sum(len(rollout.token_ids) for rollout in flat),
        ended=sum(limits.ends(branch) for _, branch in branches),
        no_room=sum(not limits.ends(branch) and rooms[index] <= 0 for index, (_, branch) in enumerate(branches)),
        cut_off=sum(rollout.finish_reason == "length" for rollout in flat),
        failed=sum(rollout.finish_reason == "error" for rollout in flat),
        left_out=len(probes) - len(impacts),
    )


def _verify(
    tokenizer: Any,
    task: Task,
    branches: Sequence[tuple[TokenProbe, list[int]]],
    rollouts: dict[int, list[Any]],
    samples: int,
) -> list[list[Continuation]]:
    """Verify the continuations of each branch; a branch that cannot continue counts `samples` times by itself."""
    pending: list[tuple[int, list[int], str]] = []
    for index in range(len(branches)):
        if index in rollouts:
            pending += [
                (index, list(rollout.token_ids), rollout.finish_reason)
                for rollout in rollouts[index]
                if rollout.finish_reason != "error"
            ]
        else:
            pending.append((index, [], "none"))
    texts = [_text(tokenizer, branches[index][1] + ids) for index, ids, _ in pending]
    problems = [branches[index][0].problem for index, _, _ in pending]
    openings: dict[int, bool] = {}  # by id, because the probes of a completion share the list of prompt tokens
    for probe, _ in branches:
        if id(probe.prompt_ids) not in openings:
            openings[id(probe.prompt_ids)] = opens_think(str(tokenizer.decode(list(probe.prompt_ids))))
    opened = [openings[id(branches[index][0].prompt_ids)] for index, _, _ in pending]
    verdicts = verdicts_of(task, texts, problems, opened) if pending else []
    continuations: list[list[Continuation]] = [[] for _ in branches]
    for (index, ids, finish), verdict in zip(pending, verdicts, strict=True):
        continuation = Continuation(clean(_text(tokenizer, ids), MAX_TEXT), verdict.correct, finish)
        continuations[index] += [continuation] * (1 if index in rollouts else samples)
    return continuations


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _impact(probe: TokenProbe, sampled: Side, other: Side) -> TokenImpact:
    counts = (sampled.correct, sampled.count, other.correct, other.count)
    return TokenImpact(
        probe.answer, probe.position, len(probe.completion_ids), probe.step, probe.sign, probe.entropy,
        probe.perplexity, probe.groups, sampled, other, newcombe(*counts), fisher(*counts), 1.0,
    )  # fmt: skip


def _corrected(impacts: Sequence[TokenImpact]) -> tuple[TokenImpact, ...]:
    corrected = benjamini_hochberg([impact.p for impact in impacts])
    return tuple(replace(impact, corrected=value) for impact, value in zip(impacts, corrected, strict=True))
