"""Render a chart as an element of the page, as an SVG file and as a PNG file, in the page's colours."""

from __future__ import annotations

import io
import re
import warnings
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from explorl.analysis.charts import Chart, Palette
from explorl.core.store import atomic_path, write_text

DOTS_PER_INCH = 160
ARM_COLOURS = 7
PAGE = Palette(
    "#000001", "#000002", "#000003", "#000004", "#000005", tuple(f"#0001{index:02x}" for index in range(ARM_COLOURS))
)
"""Placeholders for the page's CSS variables."""
VARIABLES = {
    PAGE.ink: "currentColor", PAGE.line: "var(--line)", PAGE.bar: "var(--bar)", PAGE.quiet: "var(--quiet)",
    PAGE.paper: "var(--paper)",
} | {colour: f"var(--arm-{index})" for index, colour in enumerate(PAGE.arms)}  # fmt: skip


def page_svg(chart: Chart, identifier: str) -> str:
    """Return the chart as an element for the page, in whose light or dark colours it is shown."""
    import matplotlib

    with matplotlib.rc_context(_settings(PAGE)):
        return _svg(figure_of(chart, PAGE), identifier, chart.caption)


def file_svg(chart: Chart) -> str:
    """Return the chart as an SVG file: light in print; on a screen light or dark, as the reader's system is set."""
    element = page_svg(chart, chart.name).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    light, dark = (_css_variables(values) for values in _themes())
    style = (
        f"<style>svg {{ color: var(--ink); background: var(--paper); font-family: sans-serif; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    )
    end = element.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{element[:end]}\n{style}{element[end:]}'


def file_png(chart: Chart) -> bytes:
    """Return the chart as a PNG file in the light colours, on a white background."""
    import matplotlib

    light = _themes()[0]
    palette = Palette(
        light["ink"], light["line"], light["bar"], light["quiet"], light["paper"],
        tuple(light[f"arm-{index}"] for index in range(ARM_COLOURS)),
    )  # fmt: skip
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_settings(palette)):
        warnings.simplefilter("ignore")  # a glyph that the font lacks becomes a box
        figure_of(chart, palette).savefig(
            buffer, format="png", dpi=DOTS_PER_INCH, facecolor=light["paper"], metadata={"Software": None}
        )
    return buffer.getvalue()


def save(chart: Chart, folder: Path, name: str) -> list[Path]:
    """Write the chart as `name`.svg and `name`.png, atomically, and return their paths."""
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    write_text(paths[0], file_svg(chart))
    with atomic_path(paths[1]) as temporary:
        temporary.write_bytes(file_png(chart))
    return paths


def figure_of(chart: Chart, palette: Palette) -> Any:
    """Return the chart as a matplotlib figure in the colours of a palette."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=chart.size, layout="constrained")
    chart.draw(figure, palette)
    return figure


def _settings(palette: Palette) -> dict[str, Any]:
    """Return the matplotlib settings of every chart, with this palette's ink and grid."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "explorl",
        "text.parse_math": False,
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), palette.ink),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": palette.line,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }


@cache
def _themes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the page's colours, light and dark, from its style sheet."""
    css = (resources.files("explorl.report") / "study.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[:2]
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block)) for block in (light, dark)]
    return themes[0], themes[1]


def _css_variables(values: dict[str, str]) -> str:
    names = ("ink", "paper", "line", "bar", "quiet", *(f"arm-{index}" for index in range(ARM_COLOURS)))
    return " ".join(f"--{name}: {values[name]};" for name in names)


def _svg(figure: Any, identifier: str, label: str = "") -> str:
    """Return the figure as an SVG element for a page: no external references, unique ids, the page's own colours."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph missing in matplotlib's font is drawn with the reader's
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _page_tag(tag[0], identifier), svg)
    accessibility = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    svg = re.sub(r"\n\s*", "\n", svg)
    return svg.replace("<svg", f'<svg {accessibility} fill="currentColor" stroke-linejoin="round"', 1)


def _page_tag(tag: str, identifier: str) -> str:
    if tag.startswith("<svg"):
        box = re.search(r'viewBox="[^"]*"', tag)
        return f"<svg {box[0]}>" if box else "<svg>"
    tag = tag.replace("xlink:href", "href")
    tag = re.sub(r'\bid="arm (\d+) (\w+)"', r'class="\2" data-arm="\1"', tag)
    tag = re.sub(r'\bid="', f'id="{identifier}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{identifier}-", tag)
    tag = re.sub(r"font-family: [^;\"]*;?", "", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    return re.sub(r"#[0-9a-f]{6}", lambda colour: VARIABLES.get(colour[0], "currentColor"), tag)
