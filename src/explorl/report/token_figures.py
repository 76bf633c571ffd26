"""The analyses of tokens, answers and positions with their figures, as `explorl analyze` runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from explorl.analysis import category_counts, gradient_check, impact_run, instances, positions
from explorl.analysis.category_counts import CategoryCounts, Count
from explorl.analysis.impact import TokenImpact
from explorl.analysis.impact_run import Impact
from explorl.analysis.instances import Instances
from explorl.analysis.lens import Analysis, Drawing
from explorl.analysis.positions import PositionProfile
from explorl.core.text import clean
from explorl.stats import Interval
from explorl.stats.clusters import format_effect

SHOWN_TOKENS = 24
"""Tokens whose impact is drawn; the table has all."""
BAND = 0.18


# ---------------------------------------------------------------------------- positions
def draw_positions(profile: PositionProfile) -> list[Drawing]:
    """Entropy by relative position, of all answers and by sign."""

    def draw(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        at = [100 * (index + 0.5) / profile.bins for index in range(profile.bins)]
        curves = [("all answers", profile.all, palette.ink, "-"), ("positive", profile.positive, palette.arms[0], "--")]
        curves.append(("negative", profile.negative, palette.arms[1], ":"))
        for label, values, colour, dash in curves:
            shown = [(x, one) for x, one in zip(at, values, strict=True) if one is not None]
            if not shown:
                continue
            x = [place for place, _ in shown]
            axes.plot(x, [one.mean for _, one in shown], color=colour, linestyle=dash, linewidth=1.8, label=label)
            if all(math.isfinite(one.low) for _, one in shown):
                low, high = [one.low for _, one in shown], [one.high for _, one in shown]
                axes.fill_between(x, low, high, color=colour, alpha=BAND, linewidth=0)
        axes.set(xlabel="relative position in the answer (%)", ylabel="entropy (nats)", xlim=(0, 100))
        axes.legend()

    caption = (
        f"Mean token entropy in {profile.bins} parts of an answer, with 95 % bands over {profile.answers:,} answers "
        f"({profile.tokens:,} tokens). The first fifth minus the middle: "
        f"{format_effect(profile.begin_minus_middle)} nats; the last fifth minus the middle: "
        f"{format_effect(profile.end_minus_middle)}."
    )
    return [Drawing("positions", "Entropy by position", caption, draw)]


# ---------------------------------------------------------------------------- instances
def draw_instances(found: Instances) -> list[Drawing]:
    """Perplexity of the answers that hold the tokens with the largest shifts."""

    def histogram(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        axes.stairs([100 * value for value in found.all_tokens], found.edges, color=palette.bar, label="all tokens",
                    fill=True, alpha=0.45)  # fmt: skip
        axes.stairs([100 * value for value in found.top_tokens], found.edges, color=palette.arms[1], linewidth=1.8,
                    label=f"top {instances.TOP:.0%} of |Δp|")  # fmt: skip
        if found.edges[-1] > 3 * found.edges[0]:
            axes.set_xscale("log")
        axes.set(xlabel="perplexity of the answer", ylabel="tokens (%)")
        axes.legend()

    def groups(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        names = [f"lowest {instances.GROUP:.0%}\nof perplexity", f"highest {instances.GROUP:.0%}\nof perplexity"]
        _points(axes, [found.top_in_low, found.top_in_high], names, [palette.arms[0], palette.arms[1]], scale=100)
        axes.axvline(100 * instances.TOP, color=palette.quiet, linewidth=1, linestyle="--")
        axes.set_xlabel(f"tokens of the group in the top {instances.TOP:.0%} of |Δp| (%)")

    share = (
        f"Share of the tokens of an answer that are among those with the largest shifts, with 95 % intervals over "
        f"answers; the dashed line is where both would be by chance. Low minus high: "
        f"{format_effect(found.low_minus_high, '+.1%')}."
    )
    where = (
        f"Perplexity of the answers that hold the {instances.TOP:.0%} of tokens with the largest probability shifts, "
        f"and of those that hold any token; {found.tokens:,} tokens of {found.answers:,} answers."
    )
    return [
        Drawing("instances", "Perplexity where shifts are large", where, histogram),
        Drawing("instance_groups", "Large shifts by perplexity", share, groups, (4.8, 2.0)),
    ]


# ---------------------------------------------------------------------------- categories
def draw_categories(found: CategoryCounts) -> list[Drawing]:
    """Tokens by category and answers by pattern; of a run, its first and its last steps."""
    compared = found.length.change is not None
    what = "the first and the last fifth of the steps" if compared else f"{found.answers:,} answers"
    return [
        Drawing(
            "token_categories",
            "Tokens by category",
            f"Tokens of an answer by category, with 95 % intervals over answers: {what}. {_said(found.categories)}",
            lambda figure, palette: _bars(figure, palette, found.categories, 1.0, "tokens of an answer"),
            (4.8, 0.9 + 0.5 * len(found.categories)),
        ),
        Drawing(
            "response_patterns",
            "Response patterns",
            f"Share of answers in which a pattern occurs, with 95 % intervals over answers: {what}.",
            lambda figure, palette: _bars(figure, palette, found.patterns, 100.0, "answers (%)"),
            (4.8, 0.9 + 0.32 * len(found.patterns)),
        ),
    ]


def _said(counts: Sequence[Count]) -> str:
    return (
        "; ".join(
            f"{one.name} {format_effect(one.change or one.all, '+.2f' if one.change else '.2f')}" for one in counts
        )
        + "."
    )


def _bars(figure: Any, palette: Any, counts: Sequence[Count], scale: float, label: str) -> None:
    axes = figure.subplots()
    compared = any(one.change is not None for one in counts)
    parts = [("first fifth", "first", palette.arms[0], 0.2), ("last fifth", "last", palette.arms[1], -0.2)]
    for name, key, colour, shift in parts if compared else [("", "all", palette.bar, 0.0)]:
        for place, one in enumerate(reversed(counts)):
            value: Interval | None = getattr(one, key)
            if value is None:
                continue
            wide = {"height": 0.36 if compared else 0.6, "color": colour}
            axes.barh(place + shift, scale * value.mean, **wide, label=name if place == 0 else None)
            if math.isfinite(value.low):
                axes.hlines(place + shift, scale * value.low, scale * value.high, color=palette.ink, linewidth=1)
    axes.set_yticks(range(len(counts)), [_title(one.name) for one in reversed(counts)])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    if compared:
        axes.legend()


def _title(name: str) -> str:
    return clean(name, 36)


# ---------------------------------------------------------------------------- impact
def draw_impact(found: Impact) -> list[Drawing]:
    """The tokens with the largest impacts, and the groups."""
    shown = sorted(found.tokens, key=lambda one: (-abs(one.impact.mean), one.p))[:SHOWN_TOKENS]
    shown.sort(key=lambda one: one.impact.mean)

    def tokens(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        colours = [palette.arms[1] if one.significant else palette.quiet for one in shown]
        _points(axes, [one.impact for one in shown], [_replaced(one) for one in shown], colours)
        axes.axvline(0, color=palette.ink, linewidth=0.8)
        axes.set(xlabel="impact: accuracy lost by the replacement", xlim=(-1.05, 1.05))
        axes.tick_params(axis="y", labelsize=7.5)

    def groups(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        rows = found.groups[::-1]
        names = [f"{one.name} ({one.tokens})" for one in rows]
        _points(axes, [one.mean for one in rows], names, [palette.arms[0]] * len(names), shift=0.12)
        _points(axes, [one.square for one in rows], names, [palette.arms[1]] * len(names), "s", shift=-0.12)
        axes.axvline(0, color=palette.ink, linewidth=0.8)
        axes.plot([], [], "o", color=palette.arms[0], label="mean impact")
        axes.plot([], [], "s", color=palette.arms[1], label="mean squared impact")
        axes.set_xlabel("impact")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2)

    certain = sum(one.significant for one in found.tokens)
    one_by_one = (
        f"Accuracy of {found.samples} continuations from a token minus that of as many from its best alternative, with "
        f"95 % intervals (Newcombe); {len(shown)} of {len(found.tokens)} tokens, those with the largest impacts. "
        f"Orange: not 0 after correction for their number ({certain} of all)."
    )
    by_group = (
        "Impact of tokens by the rule that chose them (number of tokens), with 95 % intervals over answers; from the "
        "squared impact, what the sampling of continuations adds is taken off. "
        + " ".join(
            f"{one.name}: {format_effect(one.mean)}, squared {format_effect(one.square)}." for one in found.comparisons
        )
    )
    height = 1.0 + 0.2 * len(shown)
    return [
        Drawing("impact", "Impact of tokens", one_by_one, tokens, (4.8, height)),
        Drawing("impact_groups", "Impact by group", by_group, groups, (4.8, 1.2 + 0.36 * len(found.groups))),
    ]


def _replaced(one: TokenImpact) -> str:
    """``'12' → '13'``, each cut to a few letters."""
    own, other = (repr(clean(side.token, 12)) for side in (one.sampled, one.other))
    return f"{own} → {other}"


def _points(
    axes: Any,
    values: Sequence[Interval | None],
    names: Sequence[str],
    colours: Sequence[str],
    marker: str = "o",
    *,
    scale: float = 1.0,
    shift: float = 0.0,
) -> None:
    """A point with its interval for each value, from the bottom up."""
    for place, (value, colour) in enumerate(zip(values, colours, strict=True)):
        if value is None:
            continue
        if math.isfinite(value.low):
            axes.hlines(place + shift, scale * value.low, scale * value.high, color=colour, linewidth=1.6)
        axes.plot([scale * value.mean], [place + shift], marker, color=colour, markersize=5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="y")


TOKEN_ANALYSES = (
    Analysis(
        "categories", "Token categories", category_counts.category_counts, category_counts.summary,
        category_counts.tables, draw_categories, lone=True,
    ),
    Analysis(
        "instances", "Shifts by perplexity", instances.instances, instances.summary, instances.tables, draw_instances,
    ),
    Analysis(
        "positions", "Entropy by position", positions.positions, positions.summary, positions.tables, draw_positions,
        lone=True,
    ),
    Analysis(
        "impact", "Token impact", impact_run.impact, impact_run.summary, impact_run.tables, draw_impact,
        lone=True, on_request=True,
    ),
    Analysis(
        "gradients", "Gradient check", gradient_check.gradient_check, gradient_check.summary, gradient_check.tables,
        lone=True,
    ),
)  # fmt: skip
"""In the order in which they are told."""
