"""Draws the continuations of a token and of its best alternative, and has the task judge the whole answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from explorl.analysis.impact import Continuation, Side, TokenImpact, benjamini_hochberg, fisher, newcombe
from explorl.core.text import clean
from explorl.rollout import SamplingParams
from explorl.tasks import Problem, Task, opens_think
from explorl.tasks.base import verdicts_of

MAX_TEXT = 2000
"""Characters of a continuation that are kept."""


class ContinuationSampler(Protocol):
    """What is needed of `explorl.rollout.Engine`."""

    tokenizer: Any

    def generate(self, prompts: Sequence[Any], n: int = 1, params: SamplingParams | None = None) -> Any: ...


@dataclass(frozen=True)
class TokenProbe:
    """A token to be replaced, with what is needed to go on from it."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    """The answer that the token belongs to."""
    position: int
    other_id: int
    """The most likely token other than the answer's own, at this place."""
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
        """The answer up to and with the token, and with the other token in its place."""
        before = list(self.completion_ids[: self.position])
        return [*before, int(self.completion_ids[self.position])], [*before, int(self.other_id)]


@dataclass(frozen=True)
class ContinuationLimits:
    """How far continuations may go."""

    max_tokens: int
    """Most tokens of a whole answer."""
    context: int | None = None
    """Most tokens of prompt and answer together: the model's."""
    stop_ids: Sequence[int] = ()
    """Tokens that end an answer."""

    def room(self, prompt: Sequence[int], branch: Sequence[int]) -> int:
        """Tokens that may follow a branch."""
        room = self.max_tokens - len(branch)
        return room if self.context is None else min(room, self.context - len(prompt) - len(branch))

    def ends(self, branch: Sequence[int]) -> bool:
        return branch[-1] in self.stop_ids


@dataclass(frozen=True)
class SampledImpacts:
    """Impacts with counts of what was special."""

    tokens: tuple[TokenImpact, ...]
    sampled_tokens: int
    ended: int
    """Branches that were whole answers: their token ends it."""
    no_room: int
    """Branches that left no room for a token more, and are judged as they stand."""
    cut_off: int
    """Continuations that reached the longest answer."""
    failed: int
    """Continuations that broke off, and do not count."""
    left_out: int
    """Tokens without any continuation on one of their sides."""


def most_tokens(probes: Sequence[TokenProbe], samples: int, limits: ContinuationLimits) -> int:
    """The most tokens that drawing these continuations can take."""
    return sum(
        samples * max(0, limits.room(probe.prompt_ids, branch))
        for probe in probes
        for branch in probe.branches()
        if not limits.ends(branch)
    )


def within_budget(
    probes: Sequence[TokenProbe], samples: int, limits: ContinuationLimits, budget: int
) -> list[TokenProbe]:
    """As many of the probes, from the first on, as the budget of sampled tokens allows in the worst case."""
    kept, spent = [], 0
    for probe in probes:
        spent += most_tokens([probe], samples, limits)
        if spent > budget:
            break
        kept.append(probe)
    return kept


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
    """`samples` continuations of each probe's two branches, in one call, and their verdicts.

    Samples of one branch share its prompt, which the engine computes once. The same seed gives the same draws.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; draw 2 continuations or more of each token, such as 16")
    branches = [(probe, branch) for probe in probes for branch in probe.branches()]
    room = [limits.room(probe.prompt_ids, branch) for probe, branch in branches]
    live = [index for index, (_, branch) in enumerate(branches) if not limits.ends(branch) and room[index] > 0]
    continued: dict[int, list[Any]] = {}
    if live:
        params = SamplingParams(temperature=temperature, max_tokens=[room[index] for index in live], seed=seed)
        prompts = [[*branches[index][0].prompt_ids, *branches[index][1]] for index in live]
        continued = dict(zip(live, sampler.generate(prompts, samples, params).by_prompt(), strict=True))
    sides = _judged(sampler.tokenizer, task, branches, continued, samples)
    text = text_of or (lambda token: str(sampler.tokenizer.decode([token])))
    impacts = []
    for place, probe in enumerate(probes):
        own, other = sides[2 * place], sides[2 * place + 1]
        if own and other:
            first, second = (branch[-1] for branch in probe.branches())
            impacts.append(
                _impact(
                    probe,
                    Side(first, clean(text(first), 200), probe.probability, tuple(own)),
                    Side(second, clean(text(second), 200), probe.other_probability, tuple(other)),
                )
            )
    rollouts = [one for many in continued.values() for one in many]
    return SampledImpacts(
        _corrected(impacts),
        sum(len(one.token_ids) for one in rollouts),
        ended=sum(limits.ends(branch) for _, branch in branches),
        no_room=sum(not limits.ends(branch) and room[index] <= 0 for index, (_, branch) in enumerate(branches)),
        cut_off=sum(one.finish_reason == "length" for one in rollouts),
        failed=sum(one.finish_reason == "error" for one in rollouts),
        left_out=len(probes) - len(impacts),
    )


def _judged(
    tokenizer: Any,
    task: Task,
    branches: Sequence[tuple[TokenProbe, list[int]]],
    continued: dict[int, list[Any]],
    samples: int,
) -> list[list[Continuation]]:
    """The continuations of each branch; a branch without any stands `samples` times for itself."""
    wanted: list[tuple[int, list[int], str]] = []
    for index in range(len(branches)):
        if index in continued:
            wanted += [
                (index, list(one.token_ids), one.finish_reason)
                for one in continued[index]
                if one.finish_reason != "error"
            ]
        else:
            wanted.append((index, [], "none"))
    texts = [_text(tokenizer, branches[index][1] + more) for index, more, _ in wanted]
    problems = [branches[index][0].problem for index, _, _ in wanted]
    openings: dict[int, bool] = {}  # probes of one answer share its prompt, the very list
    for probe, _ in branches:
        if id(probe.prompt_ids) not in openings:
            openings[id(probe.prompt_ids)] = opens_think(str(tokenizer.decode(list(probe.prompt_ids))))
    opened = [openings[id(branches[index][0].prompt_ids)] for index, _, _ in wanted]
    verdicts = verdicts_of(task, texts, problems, opened) if wanted else []
    found: list[list[Continuation]] = [[] for _ in branches]
    for (index, more, finish), verdict in zip(wanted, verdicts, strict=True):
        one = Continuation(clean(_text(tokenizer, more), MAX_TEXT), verdict.correct, finish)
        found[index] += [one] * (1 if index in continued else samples)
    return found


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _impact(probe: TokenProbe, own: Side, other: Side) -> TokenImpact:
    counts = (own.correct, own.count, other.correct, other.count)
    return TokenImpact(
        probe.answer, probe.position, len(probe.completion_ids), probe.step, probe.sign, probe.entropy,
        probe.perplexity, probe.groups, own, other, newcombe(*counts), fisher(*counts), 1.0,
    )  # fmt: skip


def _corrected(impacts: Sequence[TokenImpact]) -> tuple[TokenImpact, ...]:
    corrected = benjamini_hochberg([one.p for one in impacts])
    return tuple(replace(one, corrected=value) for one, value in zip(impacts, corrected, strict=True))
