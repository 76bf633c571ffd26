"""What an iteration is told in: the facts that it keeps, and the lines that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from explorl.evaluation import Evaluation
from explorl.training.rft.filters import Pass
from explorl.training.rft.folder import IterationFolder
from explorl.training.rft.samples import Sample
from explorl.training.rft.selectors import Selection


def token_mean(pool: Sequence[Sample], name: str) -> float | None:
    """Mean over all sampled tokens; None where it was not recorded."""
    values = [getattr(sample, name) for sample in pool]
    tokens = [sample.tokens for sample in pool]
    return None if None in values or not sum(tokens) else float(np.average(values, weights=tokens))


def facts_of(
    pool: Sequence[Sample], kept: Sequence[Sample], passes: Sequence[Pass], found: Selection, name: str,
    budget: int,
) -> dict[str, Any]:  # fmt: skip
    """What is kept in selection.json."""
    chosen = found.samples
    return {
        "sampled": len(pool),
        "correct": sum(sample.correct for sample in pool),
        "filters": [
            {"name": one.name, "before": one.before, "dropped": len(one.dropped), "changed": one.changed,
             "dropped_correct": one.dropped_correct}
            for one in passes
        ],
        "filtered": len(kept),
        "filtered_correct": sum(sample.correct for sample in kept),
        "selector": name,
        "budget": budget,
        "candidates": found.candidates,
        "selected": len(chosen),
        "noise": found.noise,
        "noise_wanted": found.wanted_noise,
        "prompts": len({sample.problem for sample in chosen}),
        "mean_score": float(np.mean(found.scores)),
        "mean_tokens": float(np.mean([sample.tokens for sample in chosen])),
    }  # fmt: skip


def choice_text(facts: dict[str, Any]) -> str:
    """An iteration's choice in a line."""
    share = facts["correct"] / facts["sampled"]
    parts = [f"{facts['sampled']:,} sampled, {share:.1%} right"]
    parts += [f"{one['name']} drops {one['dropped']:,}" for one in facts["filters"] if one["dropped"]]
    noise = f", {facts['noise']:,} of them wrong" if facts["noise"] else ""
    parts.append(
        f"{facts['selected']:,} responses to {facts['prompts']:,} problems selected by {facts['selector']}{noise}"
    )
    if facts["selected"] < facts["budget"]:
        parts.append(f"fewer than rft.budget = {facts['budget']:,}: all that filters and rft.per_prompt leave")
    if facts["noise"] < facts["noise_wanted"]:
        parts.append(f"{facts['noise_wanted']:,} wrong ones were wanted")
    return "; ".join(parts)


def nothing_text(place: IterationFolder, pool: Sequence[Sample], kept: Sequence[Sample], passes: Sequence[Pass]) -> str:
    correct = sum(sample.correct for sample in pool)
    dropped = ", ".join(f"{one.name} dropped {len(one.dropped):,} ({one.dropped_correct:,} right)" for one in passes)
    advice = "start a new run with more rft.samples, or with a policy that solves some: `explorl sft` makes one"
    if correct:
        advice = "leave out the filter that drops the right ones, in a new run"
    return (
        f"no right response to learn from in iteration {place.number}: {len(pool):,} sampled, {correct:,} right"
        f"{f'; {dropped}' if dropped else ''}; {len(kept):,} left, none of them right; the pool is kept in "
        f"{place.pool_path}; {advice}"
    )


def scores_text(result: Evaluation, found: dict[str, Any]) -> str:
    names = [f"pass@{k}" for k in dict.fromkeys((1, result.samples))]
    parts = [
        f"{name} {found[name]['mean']:.1%} [{found[name]['low']:.1%}, {found[name]['high']:.1%}]" for name in names
    ]
    for name, text in (("entropy", "entropy"), ("branching", "branching"), ("distinct_answers", "distinct answers")):
        if found.get(name) is not None:
            parts.append(f"{text} {found[name]['mean']:.3g}")
    return f"{', '.join(parts)} on {len(result.problem_ids):,} held-out problems"
