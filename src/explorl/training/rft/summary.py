"""Counts and texts that summarise an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from explorl.evaluation import Evaluation
from explorl.training.rft.filters import FilterResult
from explorl.training.rft.folder import IterationFolder
from explorl.training.rft.samples import Sample
from explorl.training.rft.selectors import Selection


def selection_facts(
    pool: Sequence[Sample], kept: Sequence[Sample], results: Sequence[FilterResult], selection: Selection, name: str,
    budget: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the contents of selection.json."""
    chosen = selection.samples
    return {
        "sampled": len(pool),
        "correct": sum(sample.correct for sample in pool),
        "filters": [
            {"name": result.name, "before": result.before, "dropped": len(result.dropped), "changed": result.changed,
             "dropped_correct": result.dropped_correct}
            for result in results
        ],
        "filtered": len(kept),
        "filtered_correct": sum(sample.correct for sample in kept),
        "selector": name,
        "budget": budget,
        "candidates": selection.candidates,
        "selected": len(chosen),
        "noise": selection.noise,
        "noise_wanted": selection.wanted_noise,
        "prompts": len({sample.problem for sample in chosen}),
        "mean_score": float(np.mean(selection.scores)),
        "mean_tokens": float(np.mean([sample.tokens for sample in chosen])),
    }  # fmt: skip


def selection_text(facts: dict[str, Any]) -> str:
    """Describe a selection in one line."""
    share = facts["correct"] / facts["sampled"]
    parts = [f"{facts['sampled']:,} sampled, {share:.1%} correct"]
    parts += [f"{filter_['name']} drops {filter_['dropped']:,}" for filter_ in facts["filters"] if filter_["dropped"]]
    noise = f", {facts['noise']:,} of them wrong" if facts["noise"] else ""
    parts.append(
        f"{facts['selected']:,} responses to {facts['prompts']:,} problems selected by {facts['selector']}{noise}"
    )
    if facts["selected"] < facts["budget"]:
        parts.append(f"fewer than rft.budget = {facts['budget']:,}: filters and rft.per_prompt leave no more")
    if facts["noise"] < facts["noise_wanted"]:
        parts.append(f"{facts['noise_wanted']:,} wrong ones were requested")
    return "; ".join(parts)


def empty_selection_text(
    iteration: IterationFolder, pool: Sequence[Sample], kept: Sequence[Sample], results: Sequence[FilterResult]
) -> str:
    """Describe why nothing can be selected, and what to change."""
    correct = sum(sample.correct for sample in pool)
    dropped = ", ".join(f"{r.name} dropped {len(r.dropped):,} ({r.dropped_correct:,} correct)" for r in results)
    advice = "start a new run with more rft.samples, or with a policy that solves some, such as one from `explorl sft`"
    if correct:
        advice = "start a new run without the filter that drops the correct ones"
    return (
        f"iteration {iteration.number} has no correct response to train on: {len(pool):,} sampled, {correct:,} correct"
        f"{f'; {dropped}' if dropped else ''}; {len(kept):,} left, none correct; the pool is in "
        f"{iteration.pool_path}; {advice}"
    )


def scores_text(result: Evaluation, scores: dict[str, Any]) -> str:
    """Format an evaluation's scores in one line."""
    names = [f"pass@{k}" for k in dict.fromkeys((1, result.samples))]
    parts = [
        f"{name} {scores[name]['mean']:.1%} [{scores[name]['low']:.1%}, {scores[name]['high']:.1%}]" for name in names
    ]
    for name, text in (("entropy", "entropy"), ("branching", "branching"), ("distinct_answers", "distinct answers")):
        if scores.get(name) is not None:
            parts.append(f"{text} {scores[name]['mean']:.3g}")
    return f"{', '.join(parts)} on {len(result.problem_ids):,} held-out problems"
