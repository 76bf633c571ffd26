"""Token impact of a run: draws continuations of some of its tokens, and says what they show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from explorl.analysis.impact import (
    PAIRS,
    RULES,
    GroupImpact,
    ImpactDifference,
    TokenImpact,
    enough_samples,
    group_impacts,
)
from explorl.analysis.impact_sampling import ContinuationLimits, TokenProbe, most_tokens, sample_impacts, within_budget
from explorl.analysis.impact_tokens import ImpactCandidate, ImpactSettings, candidates_of, longest_answer, probes_of
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.core.text import clean
from explorl.rollout import Engine, UnsupportedModel
from explorl.rollout.requests import eos_token_ids
from explorl.stats import Cell, Table
from explorl.stats.clusters import effect_cell, format_effect


@dataclass(frozen=True)
class Impact:
    """Impacts of tokens, by token and by group."""

    tokens: tuple[TokenImpact, ...]
    groups: tuple[GroupImpact, ...]
    comparisons: tuple[ImpactDifference, ...]
    samples: int
    temperature: float
    longest: int
    """Most tokens of an answer."""
    sampled_tokens: int
    notes: tuple[str, ...]
    """What was special: branches that ended, had no room, broke off, and what the budget left out."""


def impact(table: LensTable, context: Context) -> Impact | Unavailable:
    """Samples continuations under the run's policy; says before how many tokens that can take."""
    settings = ImpactSettings.of(context)
    table.tokens["token_ids"]
    policy, task = context.policy, context.task
    candidates = candidates_of(table, policy.tokenizer, task, settings)
    if not candidates:
        return Unavailable(
            f"none of the answers with recorded tokens has a prompt among the problems of task {task.name!r}; analyze "
            "the run with the task and the data it was trained on"
        )
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    largest = max(max(one.prompt_ids + one.completion_ids) for one in candidates)
    if largest >= vocabulary:
        return Unavailable(
            f"the answers have the token id {largest}, and {policy.name} knows ids below {vocabulary}; analyze them "
            "with the model that wrote them"
        )
    stop_ids = tuple(eos_token_ids(policy.model, policy.tokenizer))
    limits = ContinuationLimits(
        settings.max_tokens or longest_answer(table, stop_ids),
        getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None),
        stop_ids,
    )
    probes = probes_of(table, candidates, policy.model, settings, context.seed)
    if not probes:
        return Unavailable("no token fits the rules; use others, such as impact.rules=entropy")
    kept = within_budget(_spread(probes), settings.samples, limits, settings.budget)
    if not kept:
        return Unavailable(
            f"impact.budget is {settings.budget:,} tokens, and the first token alone can take "
            f"{most_tokens(probes[:1], settings.samples, limits):,}; allow more, or fewer impact.samples"
        )
    notes = _notes(table, candidates, probes, kept)
    if settings.samples < (enough := enough_samples(len(kept))):
        notes.append(
            f"with {settings.samples} continuations a side, a token that alone decides everything would not be found "
            f"among {len(kept)}; impact.samples={enough} is enough"
        )
        context.say(f"impact: {notes[-1]}")
    context.say(
        f"impact: {len(kept)} tokens of {len({probe.answer for probe in kept})} answers, each with "
        f"{settings.samples} continuations of itself and of its best alternative; at most "
        f"{most_tokens(kept, settings.samples, limits):,} tokens are sampled (impact.budget {settings.budget:,})"
    )
    try:
        drawn = sample_impacts(
            Engine(policy.model, policy.tokenizer), task, kept,
            samples=settings.samples, limits=limits, temperature=settings.temperature, seed=context.seed,
        )  # fmt: skip
    except UnsupportedModel as error:
        return Unavailable(str(error))
    if not drawn.tokens:
        return Unavailable("every continuation broke off, because the policy's logits are not finite")
    special = {
        f"branches whose token ends the answer: {drawn.ended} of {2 * len(kept)}": drawn.ended,
        f"branches that leave no room to go on, and are judged as they stand: {drawn.no_room}": drawn.no_room,
        f"continuations cut off at an answer of {limits.max_tokens} tokens: {drawn.cut_off}": drawn.cut_off,
        f"continuations that broke off and do not count: {drawn.failed}": drawn.failed,
        f"tokens left out for lack of continuations on one side: {drawn.left_out}": drawn.left_out,
    }
    groups, comparisons = group_impacts(
        drawn.tokens, (*RULES, "by hand"), PAIRS, clusters=table.completions.cluster, seed=context.seed
    )
    return Impact(
        drawn.tokens, tuple(groups), tuple(comparisons), settings.samples, settings.temperature, limits.max_tokens,
        drawn.sampled_tokens, (*notes, *(text for text, count in special.items() if count)),
    )  # fmt: skip


def _spread(probes: Sequence[TokenProbe]) -> list[TokenProbe]:
    """The probes in an order of which every beginning has tokens of all rules."""
    turns: dict[str, int] = {}
    ranked = []
    for place, probe in enumerate(probes):
        first = probe.groups[0]
        turns[first] = turns.get(first, 0) + 1
        ranked.append((turns[first], place, probe))
    return [probe for _, _, probe in sorted(ranked, key=lambda entry: entry[:2])]


def _notes(
    table: LensTable, candidates: Sequence[ImpactCandidate], probes: Sequence[TokenProbe], kept: Sequence[TokenProbe]
) -> list[str]:
    notes = []
    if len(kept) < len(probes):
        notes.append(f"impact.budget leaves out {len(probes) - len(kept)} of {len(probes)} tokens")
    steps = sorted({int(table.completions.step[one.answer]) for one in candidates})
    if steps[0] != steps[-1]:
        notes.append(f"the answers are of steps {steps[0]} to {steps[-1]}; the policy is that of the end")
    return notes


# ---------------------------------------------------------------------------- what it shows
def summary(found: Impact) -> str:
    """What the draws show, in a few sentences."""
    strong = [token for token in found.tokens if token.significant]
    text = (
        f"Of {len(found.tokens)} tokens, {len(strong)} change{'s' if len(strong) == 1 else ''} the accuracy when "
        f"replaced by the best alternative, after correction for their number (Benjamini–Hochberg, "
        f"{found.samples} continuations each side)."
    )
    if strong:
        most = max(strong, key=lambda token: abs(token.impact.mean))
        text += (
            f" The largest is {clean(most.sampled.token)!r} for {clean(most.other.token)!r} at token "
            f"{most.position + 1} of answer {most.answer}: {format_effect(most.impact)}."
        )
    for one in found.comparisons:
        differs = [
            f"{what} {format_effect(effect)}"
            for what, effect in (("mean", one.mean), ("squared", one.square))
            if effect is not None and effect.sign
        ]
        text += f" {one.name}: " + (" and ".join(differs) if differs else "no difference beyond doubt") + "."
    return " ".join([text, *(f"{note[0].upper()}{note[1:]}." for note in found.notes)])


def tables(found: Impact) -> dict[str, Table]:
    """Every token, every group, and the comparisons."""
    tokens: list[list[Cell]] = [
        [
            one.answer, one.step, one.position, repr(one.sampled.token), one.sampled.probability,
            repr(one.other.token), one.other.probability, one.entropy, one.perplexity, ", ".join(one.groups),
            f"{one.sampled.correct}/{one.sampled.count}", f"{one.other.correct}/{one.other.count}",
            one.impact, one.p, one.corrected,
        ]
        for one in sorted(found.tokens, key=lambda one: (one.p, -abs(one.impact.mean)))
    ]  # fmt: skip
    columns = [
        "answer", "step", "position", "token", "probability", "alternative", "its probability", "entropy (nats)",
        "perplexity", "chosen by", "correct", "correct with alternative", "impact", "p", "corrected p",
    ]  # fmt: skip
    groups: list[list[Cell]] = [
        [one.name, one.tokens, one.answers, one.found, one.mean, one.square] for one in found.groups
    ]
    compared: list[list[Cell]] = [
        [one.name, effect_cell(one.mean), effect_cell(one.square)] for one in found.comparisons
    ]
    return {
        "impact": Table(columns, tokens, "Impact of tokens"),
        "impact_groups": Table(
            ["tokens chosen by", "tokens", "answers", "found", "mean impact", "mean squared impact"], groups,
            "Impact by group",
        ),
        "impact_comparisons": Table(["comparison", "mean impact", "mean squared impact"], compared, "Groups compared"),
    }  # fmt: skip
