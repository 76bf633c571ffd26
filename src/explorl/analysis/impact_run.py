"""Token impact of a run: sample continuations of some of its tokens and summarise them."""

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
from explorl.analysis.impact_tokens import ImpactCandidate, ImpactSettings, candidates_of, completion_limit, probes_of
from explorl.analysis.lens import Context, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.core.text import clean
from explorl.rollout import Engine, UnsupportedModel
from explorl.rollout.requests import eos_token_ids
from explorl.stats import Cell, Table
from explorl.stats.interval import format_effect


@dataclass(frozen=True)
class Impact:
    """Impacts of tokens, by token and by group."""

    tokens: tuple[TokenImpact, ...]
    groups: tuple[GroupImpact, ...]
    comparisons: tuple[ImpactDifference, ...]
    samples: int
    temperature: float
    longest: int
    """Most tokens of a completion."""
    sampled_tokens: int
    notes: tuple[str, ...]
    """Special cases: branches that ended, had no room or failed, and tokens that the budget left out."""


def impact(table: LensTable, context: Context) -> Impact | Unavailable:
    """Sample continuations under the run's policy, after reporting how many tokens that can take."""
    settings = ImpactSettings.of(context)
    table.tokens["token_ids"]
    policy, task = context.policy, context.task
    candidates = candidates_of(table, policy.tokenizer, task, settings)
    if not candidates:
        return Unavailable(
            f"no completion with recorded tokens has a prompt among the problems of task {task.name!r}; analyze the "
            "run with the task and the data it was trained on"
        )
    vocabulary = int(policy.model.get_input_embeddings().weight.shape[0])
    largest = max(max(candidate.prompt_ids + candidate.completion_ids) for candidate in candidates)
    if largest >= vocabulary:
        return Unavailable(
            f"the completions have the token id {largest}, but {policy.name} has {vocabulary} tokens; analyze them "
            "with the model that sampled them"
        )
    stop_ids = tuple(eos_token_ids(policy.model, policy.tokenizer))
    limits = ContinuationLimits(
        settings.max_tokens or completion_limit(table, stop_ids),
        getattr(policy.model.config.get_text_config(decoder=True), "max_position_embeddings", None),
        stop_ids,
    )
    probes = probes_of(table, candidates, policy.model, settings, context.seed)
    if not probes:
        return Unavailable("no token fits impact.rules; use others, such as impact.rules=entropy")
    selected = within_budget(_interleave_rules(probes), settings.samples, limits, settings.budget)
    if not selected:
        return Unavailable(
            f"impact.budget is {settings.budget:,} tokens, but the first token alone can take "
            f"{most_tokens(probes[:1], settings.samples, limits):,}; increase it, or use fewer impact.samples"
        )
    notes = _notes(table, candidates, probes, selected)
    if settings.samples < (enough := enough_samples(len(selected))):
        notes.append(
            f"with {settings.samples} continuations per side, even a token that decides correctness would not be "
            f"significant among {len(selected)}; impact.samples={enough} is enough"
        )
        context.say(f"impact: {notes[-1]}")
    context.say(
        f"impact: {len(selected)} tokens of {len({probe.answer for probe in selected})} completions, each with "
        f"{settings.samples} continuations of itself and of its best alternative; at most "
        f"{most_tokens(selected, settings.samples, limits):,} tokens are sampled (impact.budget {settings.budget:,})"
    )
    try:
        sampled = sample_impacts(
            Engine(policy.model, policy.tokenizer), task, selected,
            samples=settings.samples, limits=limits, temperature=settings.temperature, seed=context.seed,
        )  # fmt: skip
    except UnsupportedModel as error:
        return Unavailable(str(error))
    if not sampled.tokens:
        return Unavailable("every continuation failed because the policy's logits are not finite")
    special = {
        f"branches whose token ends the completion: {sampled.ended} of {2 * len(selected)}": sampled.ended,
        f"branches without room for another token, which are judged unchanged: {sampled.no_room}": sampled.no_room,
        f"continuations cut off at a completion of {limits.max_tokens} tokens: {sampled.cut_off}": sampled.cut_off,
        f"continuations that failed and do not count: {sampled.failed}": sampled.failed,
        f"tokens left out because one side has no continuation: {sampled.left_out}": sampled.left_out,
    }
    groups, comparisons = group_impacts(
        sampled.tokens, (*RULES, "by hand"), PAIRS, clusters=table.completions.cluster, seed=context.seed
    )
    return Impact(
        sampled.tokens, tuple(groups), tuple(comparisons), settings.samples, settings.temperature, limits.max_tokens,
        sampled.sampled_tokens, (*notes, *(text for text, count in special.items() if count)),
    )  # fmt: skip


def _interleave_rules(probes: Sequence[TokenProbe]) -> list[TokenProbe]:
    """Return the probes in an order whose every prefix has tokens of all rules."""
    turns: dict[str, int] = {}
    ranked = []
    for index, probe in enumerate(probes):
        first = probe.groups[0]
        turns[first] = turns.get(first, 0) + 1
        ranked.append((turns[first], index, probe))
    return [probe for _, _, probe in sorted(ranked, key=lambda entry: entry[:2])]


def _notes(
    table: LensTable,
    candidates: Sequence[ImpactCandidate],
    probes: Sequence[TokenProbe],
    selected: Sequence[TokenProbe],
) -> list[str]:
    notes = []
    if len(selected) < len(probes):
        notes.append(f"impact.budget leaves out {len(probes) - len(selected)} of {len(probes)} tokens")
    steps = sorted({int(table.completions.step[candidate.index]) for candidate in candidates})
    if steps[0] != steps[-1]:
        notes.append(f"the completions are from steps {steps[0]} to {steps[-1]}; the policy is the final one")
    return notes


# ---------------------------------------------------------------------------- summary and tables
def summary(result: Impact) -> str:
    """Describe the impacts in a few sentences."""
    significant = [token for token in result.tokens if token.significant]
    text = (
        f"Of {len(result.tokens)} tokens, {len(significant)} change{'s' if len(significant) == 1 else ''} the accuracy "
        f"when replaced by the best alternative, after correction for their number (Benjamini–Hochberg, "
        f"{result.samples} continuations per side)."
    )
    if significant:
        most = max(significant, key=lambda token: abs(token.impact.mean))
        text += (
            f" The largest is {clean(most.sampled.token)!r} for {clean(most.other.token)!r} at token "
            f"{most.position + 1} of completion {most.answer}: {format_effect(most.impact)}."
        )
    for comparison in result.comparisons:
        differences = [
            f"{name} {format_effect(effect)}"
            for name, effect in (("mean", comparison.mean), ("squared", comparison.square))
            if effect is not None and effect.sign
        ]
        text += f" {comparison.name}: " + (" and ".join(differences) or "no significant difference") + "."
    return " ".join([text, *(f"{note[0].upper()}{note[1:]}." for note in result.notes)])


def tables(result: Impact) -> dict[str, Table]:
    """Return tables of all tokens, of the groups, and of the comparisons."""
    tokens: list[list[Cell]] = [
        [
            token.answer, token.step, token.position, repr(token.sampled.token), token.sampled.probability,
            repr(token.other.token), token.other.probability, token.entropy, token.perplexity, ", ".join(token.groups),
            f"{token.sampled.correct}/{token.sampled.count}", f"{token.other.correct}/{token.other.count}",
            token.impact, token.p, token.corrected,
        ]
        for token in sorted(result.tokens, key=lambda token: (token.p, -abs(token.impact.mean)))
    ]  # fmt: skip
    columns = [
        "answer", "step", "position", "token", "probability", "alternative", "its probability", "entropy (nats)",
        "perplexity", "chosen by", "correct", "correct with alternative", "impact", "p", "corrected p",
    ]  # fmt: skip
    groups: list[list[Cell]] = [
        [group.name, group.tokens, group.answers, group.found, group.mean, group.square] for group in result.groups
    ]
    compared: list[list[Cell]] = [
        [difference.name, difference.mean, difference.square] for difference in result.comparisons
    ]
    return {
        "impact": Table(columns, tokens, "Impact of tokens"),
        "impact_groups": Table(
            ["tokens chosen by", "tokens", "answers", "found", "mean impact", "mean squared impact"], groups,
            "Impact by group",
        ),
        "impact_comparisons": Table(["comparison", "mean impact", "mean squared impact"], compared, "Groups compared"),
    }  # fmt: skip
