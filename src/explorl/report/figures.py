"""Figures as SVG text, to be put into a page: colours that the colour-blind can tell apart, no fonts to load."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's palette


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Mean of the last `window` values at each place (of fewer at the beginning)."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, dtype=float)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def learning_curves(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], *, window: int = 8) -> str:
    """Training accuracy by step, one line an arm: thin as measured, thick the mean of the last `window` steps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "explorl"}):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
        for colour, (name, (steps, values)) in zip(COLOURS, curves.items(), strict=False):
            axes.plot(steps, np.asarray(values) * 100, color=colour, alpha=0.25, linewidth=1)
            axes.plot(steps, smoothed(values, window) * 100, color=colour, linewidth=2.2, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("correct rollouts (%)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # black ink follows the page's text colour, so that the figure can be read in the dark
    return re.sub(r"#000000|\bblack\b", "currentColor", svg).replace("<svg ", '<svg role="img" fill="currentColor" ', 1)
