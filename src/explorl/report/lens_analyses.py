"""All analyses of the lens, in the order in which they are told."""

from __future__ import annotations

from explorl.analysis import defects, fastest, signs, stages, updates
from explorl.analysis.lens import Analysis
from explorl.report import lens_figures as figures
from explorl.report.token_figures import TOKEN_ANALYSES

RUN_ANALYSES = (
    Analysis(
        "stages", "Stages of the training", stages.stages, stages.stages_summary, stages.stages_tables,
        figures.stages_drawings,
    ),
    Analysis(
        "law", "Entropy and reward", stages.entropy_law, stages.law_summary, stages.law_tables, figures.law_drawings,
    ),
    Analysis(
        "signs", "Entropy of positive and negative answers", signs.sign_split, signs.split_summary, signs.split_tables,
        figures.signs_drawings,
    ),
    Analysis(
        "fastest", "Tokens with the fastest entropy drop", fastest.fastest_drop, fastest.drop_summary,
        fastest.drop_tables, figures.fastest_drawings,
    ),
    Analysis(
        "words", "Words that rise and words that settle", fastest.words, fastest.words_summary, fastest.words_tables,
        figures.words_drawings,
    ),
    Analysis(
        "defects", "Defects of responses", defects.defects, defects.defects_summary, defects.defects_tables,
        figures.defects_drawings,
    ),
    Analysis(
        "updates", "Changes of probability", updates.updates, updates.updates_summary, updates.updates_tables,
        figures.updates_drawings,
    ),
)  # fmt: skip
"""Those that need a training's history."""

ANALYSES = (*RUN_ANALYSES, *TOKEN_ANALYSES)
