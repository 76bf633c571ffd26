"""The findings of token impact: sentence, tables and charts of what `impact_run` measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from explorl.analysis import impact_run
from explorl.analysis.charts import Chart, Palette, interval_rows, rule
from explorl.analysis.impact import TokenImpact
from explorl.analysis.impact_run import Impact
from explorl.analysis.lens import Context, Findings, Unavailable
from explorl.analysis.lens_table import LensTable
from explorl.core.text import clean
from explorl.stats.interval import format_effect

DRAWN = 24
"""Tokens in the chart; the table has all of them."""


def impact_findings(table: LensTable, context: Context) -> Findings | Unavailable:
    """Measure the impact of tokens and return the findings."""
    result = impact_run.impact(table, context)
    if isinstance(result, Unavailable):
        return result
    charts = [_token_chart(result), _group_chart(result)]
    return Findings(impact_run.summary(result), impact_run.tables(result), charts, asdict(result))


def _token_chart(result: Impact) -> Chart:
    """Return the chart of the tokens with the largest impacts."""
    shown = sorted(result.tokens, key=lambda token: (-abs(token.impact.mean), token.p))[:DRAWN]
    shown.sort(key=lambda token: token.impact.mean)
    significant = sum(token.significant for token in result.tokens)
    caption = (
        f"Accuracy of {result.samples} continuations from a token minus that of as many from its best alternative, "
        f"with 95 % intervals (Newcombe), for the {len(shown)} of {len(result.tokens)} tokens with the largest "
        f"impacts. Orange: different from 0 after correction for the number of tokens ({significant} of all)."
    )
    names, colours = map(_replacement, shown), [1 if token.significant else "quiet" for token in shown]
    marks = [interval_rows([*names], [token.impact for token in shown], colours), rule(0, "ink"), _whole_range]
    x, size = "impact: accuracy lost by the replacement", (4.8, 1.0 + 0.2 * len(shown))
    return Chart("impact", "Impact of tokens", caption, marks, x, size=size)


def _group_chart(result: Impact) -> Chart:
    """Return the chart of the impact of tokens by the rule that chose them."""
    rows = result.groups[::-1]
    names = [f"{group.name} ({group.tokens})" for group in rows]
    means, squares = [group.mean for group in rows], [group.square for group in rows]
    caption = (
        "Impact of tokens by the rule that chose them (number of tokens), with 95 % intervals over completions; the "
        "squared impact is corrected for the variance from sampling continuations. "
        + " ".join(
            f"{pair.name}: {format_effect(pair.mean)}, squared {format_effect(pair.square)}."
            for pair in result.comparisons
        )
    )
    marks = [
        interval_rows(names, means, [0] * len(rows), shift=0.12, label="mean impact"),
        interval_rows(names, squares, [1] * len(rows), shift=-0.12, marker="s", label="mean squared impact"),
        rule(0, "ink"),
        lambda axes, palette: axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2),
    ]
    return Chart(
        "impact_groups", "Impact by group", caption, marks, "impact", size=(4.8, 1.2 + 0.36 * len(result.groups))
    )


def _whole_range(axes: Any, palette: Palette) -> None:
    axes.set_xlim(-1.05, 1.05)
    axes.tick_params(axis="y", labelsize=7.5)


def _replacement(impact: TokenImpact) -> str:
    """Return ``'12' → '13'``: the sampled token and its alternative, each cut to 12 characters."""
    sampled, other = (repr(clean(side.token, 12)) for side in (impact.sampled, impact.other))
    return f"{sampled} → {other}"
