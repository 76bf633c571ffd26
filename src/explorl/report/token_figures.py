"""The analyses of tokens, completions and positions with their figures, as `explorl analyze` runs them."""

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
from explorl.stats.interval import format_effect

MAX_TOKENS_DRAWN = 24
"""Tokens whose impact is drawn; the table has all of them."""
BAND_ALPHA = 0.18


# ---------------------------------------------------------------------------- positions
def draw_positions(profile: PositionProfile) -> list[Drawing]:
    """Return the drawing of entropy by relative position, for all completions and by sign."""

    def draw(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        centres = [100 * (index + 0.5) / profile.bins for index in range(profile.bins)]
        curves = [
            ("all completions", profile.all, palette.ink, "-"),
            ("positive", profile.positive, palette.arms[0], "--"),
            ("negative", profile.negative, palette.arms[1], ":"),
        ]
        for label, values, colour, dash in curves:
            points = [(x, value) for x, value in zip(centres, values, strict=True) if value is not None]
            if not points:
                continue
            x = [centre for centre, _ in points]
            axes.plot(x, [value.mean for _, value in points], color=colour, linestyle=dash, linewidth=1.8, label=label)
            if all(math.isfinite(value.low) for _, value in points):
                low, high = [value.low for _, value in points], [value.high for _, value in points]
                axes.fill_between(x, low, high, color=colour, alpha=BAND_ALPHA, linewidth=0)
        axes.set(xlabel="relative position in the completion (%)", ylabel="entropy (nats)", xlim=(0, 100))
        axes.legend()

    caption = (
        f"Mean token entropy in {profile.bins} parts of a completion, with 95 % bands over {profile.answers:,} "
        f"completions ({profile.tokens:,} tokens). The first fifth minus the middle: "
        f"{format_effect(profile.begin_minus_middle)} nats; the last fifth minus the middle: "
        f"{format_effect(profile.end_minus_middle)}."
    )
    return [Drawing("positions", "Entropy by position", caption, draw)]


# ---------------------------------------------------------------------------- instances
def draw_instances(result: Instances) -> list[Drawing]:
    """Return the drawings of the perplexity of the completions that contain the tokens with the largest shifts."""

    def histogram(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        axes.stairs([100 * value for value in result.all_tokens], result.edges, color=palette.bar, label="all tokens",
                    fill=True, alpha=0.45)  # fmt: skip
        axes.stairs([100 * value for value in result.top_tokens], result.edges, color=palette.arms[1], linewidth=1.8,
                    label=f"top {instances.TOP:.0%} of |Δp|")  # fmt: skip
        if result.edges[-1] > 3 * result.edges[0]:
            axes.set_xscale("log")
        axes.set(xlabel="perplexity of the completion", ylabel="tokens (%)")
        axes.legend()

    def groups(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        names = [f"lowest {instances.GROUP:.0%}\nof perplexity", f"highest {instances.GROUP:.0%}\nof perplexity"]
        _draw_points(
            axes, [result.top_in_low, result.top_in_high], names, [palette.arms[0], palette.arms[1]], scale=100
        )
        axes.axvline(100 * instances.TOP, color=palette.quiet, linewidth=1, linestyle="--")
        axes.set_xlabel(f"tokens of the group in the top {instances.TOP:.0%} of |Δp| (%)")

    share = (
        f"Share of the tokens of a completion that are among those with the largest shifts, with 95 % intervals over "
        f"completions; the dashed line is the share expected by chance. Low minus high: "
        f"{format_effect(result.low_minus_high, '+.1%')}."
    )
    distribution = (
        f"Perplexity of the completions that contain the {instances.TOP:.0%} of tokens with the largest probability "
        f"shifts, and of the completions of all tokens; {result.tokens:,} tokens of {result.answers:,} completions."
    )
    return [
        Drawing("instances", "Perplexity where shifts are large", distribution, histogram),
        Drawing("instance_groups", "Large shifts by perplexity", share, groups, (4.8, 2.0)),
    ]


# ---------------------------------------------------------------------------- categories
def draw_categories(result: CategoryCounts) -> list[Drawing]:
    """Return the drawings of tokens by category and completions by pattern; for a run, its first and last steps."""
    compared = result.length.change is not None
    data = "the first and the last fifth of the steps" if compared else f"{result.answers:,} completions"
    return [
        Drawing(
            "token_categories",
            "Tokens by category",
            f"Tokens per completion by category, with 95 % intervals over completions: {data}. "
            f"{_describe_counts(result.categories)}",
            lambda figure, palette: _draw_bars(figure, palette, result.categories, 1.0, "tokens per completion"),
            (4.8, 0.9 + 0.5 * len(result.categories)),
        ),
        Drawing(
            "response_patterns",
            "Patterns in completions",
            f"Share of completions in which a pattern occurs, with 95 % intervals over completions: {data}.",
            lambda figure, palette: _draw_bars(figure, palette, result.patterns, 100.0, "completions (%)"),
            (4.8, 0.9 + 0.32 * len(result.patterns)),
        ),
    ]


def _describe_counts(counts: Sequence[Count]) -> str:
    parts = [
        f"{count.name} {format_effect(count.change or count.all, '+.2f' if count.change else '.2f')}"
        for count in counts
    ]
    return "; ".join(parts) + "."


def _draw_bars(figure: Any, palette: Any, counts: Sequence[Count], scale: float, label: str) -> None:
    axes = figure.subplots()
    compared = any(count.change is not None for count in counts)
    parts = [("first fifth", "first", palette.arms[0], 0.2), ("last fifth", "last", palette.arms[1], -0.2)]
    for name, key, colour, shift in parts if compared else [("", "all", palette.bar, 0.0)]:
        for y, count in enumerate(reversed(counts)):
            value: Interval | None = getattr(count, key)
            if value is None:
                continue
            style = {"height": 0.36 if compared else 0.6, "color": colour}
            axes.barh(y + shift, scale * value.mean, **style, label=name if y == 0 else None)
            if math.isfinite(value.low):
                axes.hlines(y + shift, scale * value.low, scale * value.high, color=palette.ink, linewidth=1)
    axes.set_yticks(range(len(counts)), [clean(count.name, 36) for count in reversed(counts)])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(label)
    if compared:
        axes.legend()


# ---------------------------------------------------------------------------- impact
def draw_impact(result: Impact) -> list[Drawing]:
    """Return the drawings of the tokens with the largest impacts and of the impact by group."""
    shown = sorted(result.tokens, key=lambda token: (-abs(token.impact.mean), token.p))[:MAX_TOKENS_DRAWN]
    shown.sort(key=lambda token: token.impact.mean)

    def tokens(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        colours = [palette.arms[1] if token.significant else palette.quiet for token in shown]
        _draw_points(axes, [token.impact for token in shown], [_replacement(token) for token in shown], colours)
        axes.axvline(0, color=palette.ink, linewidth=0.8)
        axes.set(xlabel="impact: accuracy lost by the replacement", xlim=(-1.05, 1.05))
        axes.tick_params(axis="y", labelsize=7.5)

    def groups(figure: Any, palette: Any) -> None:
        axes = figure.subplots()
        rows = result.groups[::-1]
        names = [f"{group.name} ({group.tokens})" for group in rows]
        _draw_points(axes, [group.mean for group in rows], names, [palette.arms[0]] * len(names), shift=0.12)
        _draw_points(axes, [group.square for group in rows], names, [palette.arms[1]] * len(names), "s", shift=-0.12)
        axes.axvline(0, color=palette.ink, linewidth=0.8)
        axes.plot([], [], "o", color=palette.arms[0], label="mean impact")
        axes.plot([], [], "s", color=palette.arms[1], label="mean squared impact")
        axes.set_xlabel("impact")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.22), ncols=2)

    significant = sum(token.significant for token in result.tokens)
    by_token = (
        f"Accuracy of {result.samples} continuations from a token minus that of as many from its best alternative, "
        f"with 95 % intervals (Newcombe), for the {len(shown)} of {len(result.tokens)} tokens with the largest "
        f"impacts. Orange: different from 0 after correction for the number of tokens ({significant} of all)."
    )
    by_group = (
        "Impact of tokens by the rule that chose them (number of tokens), with 95 % intervals over completions; the "
        "squared impact is corrected for the variance from sampling continuations. "
        + " ".join(
            f"{pair.name}: {format_effect(pair.mean)}, squared {format_effect(pair.square)}."
            for pair in result.comparisons
        )
    )
    height = 1.0 + 0.2 * len(shown)
    return [
        Drawing("impact", "Impact of tokens", by_token, tokens, (4.8, height)),
        Drawing("impact_groups", "Impact by group", by_group, groups, (4.8, 1.2 + 0.36 * len(result.groups))),
    ]


def _replacement(impact: TokenImpact) -> str:
    """Return ``'12' → '13'``: the sampled token and its alternative, each cut to 12 characters."""
    sampled, other = (repr(clean(side.token, 12)) for side in (impact.sampled, impact.other))
    return f"{sampled} → {other}"


def _draw_points(
    axes: Any,
    values: Sequence[Interval | None],
    names: Sequence[str],
    colours: Sequence[str],
    marker: str = "o",
    *,
    scale: float = 1.0,
    shift: float = 0.0,
) -> None:
    """Draw a point with its interval for each value, from the bottom up."""
    for y, (value, colour) in enumerate(zip(values, colours, strict=True)):
        if value is None:
            continue
        if math.isfinite(value.low):
            axes.hlines(y + shift, scale * value.low, scale * value.high, color=colour, linewidth=1.6)
        axes.plot([scale * value.mean], [y + shift], marker, color=colour, markersize=5)
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
"""The analyses in the order in which they are reported."""
