"""All analyses of the lens, in the order in which they are reported."""

from __future__ import annotations

from explorl.analysis import defects, entropy_by_sign, entropy_drop, probability_shift, reward_stages
from explorl.analysis.lens import Analysis
from explorl.report import lens_figures as figures
from explorl.report.token_figures import TOKEN_ANALYSES

RUN_ANALYSES = (
    Analysis(
        "stages", "Stages of the training", reward_stages.stages, reward_stages.stages_summary,
        reward_stages.stages_tables, figures.stages_drawings,
    ),
    Analysis(
        "law", "Entropy and reward", reward_stages.entropy_law, reward_stages.law_summary,
        reward_stages.law_tables, figures.law_drawings,
    ),
    Analysis(
        "signs", "Entropy of positive and negative completions", entropy_by_sign.sign_split,
        entropy_by_sign.split_summary, entropy_by_sign.split_tables, figures.signs_drawings,
    ),
    Analysis(
        "fastest", "Tokens with the fastest entropy drop", entropy_drop.fastest_drop, entropy_drop.drop_summary,
        entropy_drop.drop_tables, figures.fastest_drawings,
    ),
    Analysis(
        "words", "Words that rise and words that settle", entropy_drop.words, entropy_drop.words_summary,
        entropy_drop.words_tables, figures.words_drawings,
    ),
    Analysis(
        "defects", "Defects of completions", defects.defects, defects.defects_summary, defects.defects_tables,
        figures.defects_drawings,
    ),
    Analysis(
        "updates", "Changes of probability", probability_shift.updates, probability_shift.updates_summary,
        probability_shift.updates_tables, figures.updates_drawings,
    ),
)  # fmt: skip
"""The analyses that need the history of a training run."""

ANALYSES = (*RUN_ANALYSES, *TOKEN_ANALYSES)
