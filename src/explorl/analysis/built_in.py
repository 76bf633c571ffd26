"""The analyses of the lens, in the order in which they are reported."""

from __future__ import annotations

from explorl.analysis.category_counts import category_counts
from explorl.analysis.defects import defects
from explorl.analysis.entropy_by_sign import sign_split
from explorl.analysis.entropy_drop import fastest_drop, words
from explorl.analysis.gradient_check import gradient_check
from explorl.analysis.impact_findings import impact_findings
from explorl.analysis.instances import instances
from explorl.analysis.lens import Analysis
from explorl.analysis.positions import positions
from explorl.analysis.probability_shift import updates
from explorl.analysis.reward_stages import entropy_law, stages

ANALYSES = (
    Analysis("stages", "Stages of the training", stages),
    Analysis("law", "Entropy and reward", entropy_law),
    Analysis("signs", "Entropy of positive and negative completions", sign_split),
    Analysis("fastest", "Tokens with the fastest entropy drop", fastest_drop),
    Analysis("words", "Words that rise and words that settle", words),
    Analysis("defects", "Defects of completions", defects),
    Analysis("updates", "Changes of probability", updates),
    Analysis("categories", "Token categories", category_counts, lone=True),
    Analysis("instances", "Shifts by perplexity", instances),
    Analysis("positions", "Entropy by position", positions, lone=True),
    Analysis("impact", "Token impact", impact_findings, lone=True, on_request=True),
    Analysis("gradients", "Gradient check", gradient_check, lone=True),
)
