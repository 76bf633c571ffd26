"""Render a drawing of the lens as an element of the page, as an SVG file and as a PNG file, in the page's colours."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from explorl.analysis.lens import Drawing
from explorl.report.study_figures import _ARM_COLOURS, _BAR, _INK, _LINE, _QUIET, _RC, _svg

DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Palette:
    """The colours of a drawing; they depend on where it is shown."""

    ink: str
    """Text, axes, and curves of the whole run."""
    line: str
    """Grid lines."""
    bar: str
    """Bars that belong to no arm."""
    quiet: str
    """Less important parts."""
    paper: str
    """The background; also the colour of text on a bar."""
    arms: tuple[str, ...]
    """Hues safe for colour-blind readers: 0 is blue (positive, before), 1 is orange (negative, after)."""


PAGE = Palette(_INK, _LINE, _BAR, _QUIET, "#000005", tuple(f"#0001{index:02x}" for index in range(_ARM_COLOURS)))
"""Placeholders that `study_figures` turns into the page's CSS variables."""


def page_svg(drawing: Drawing, identifier: str) -> str:
    """Return the drawing as an element for the page, in whose light or dark colours it is shown."""
    import matplotlib

    with matplotlib.rc_context(_settings(PAGE)):
        return _svg(_figure(drawing, PAGE), identifier, drawing.caption)


def file_svg(drawing: Drawing) -> str:
    """Return the drawing as an SVG file: light in print; on a screen light or dark, as the reader's system is set."""
    element = page_svg(drawing, drawing.name).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    light, dark = (_css_variables(values) for values in _themes())
    style = (
        f"<style>svg {{ color: var(--ink); background: var(--paper); font-family: sans-serif; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    )
    end = element.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{element[:end]}\n{style}{element[end:]}'


def file_png(drawing: Drawing) -> bytes:
    """Return the drawing as a PNG file in the light colours, on a white background."""
    import matplotlib

    light = _themes()[0]
    palette = Palette(
        light["ink"], light["line"], light["bar"], light["quiet"], light["paper"],
        tuple(light[f"arm-{index}"] for index in range(_ARM_COLOURS)),
    )  # fmt: skip
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(_settings(palette)):
        warnings.simplefilter("ignore")  # a glyph that the font lacks becomes a box
        _figure(drawing, palette).savefig(
            buffer, format="png", dpi=DOTS_PER_INCH, facecolor=light["paper"], metadata={"Software": None}
        )
    return buffer.getvalue()


def _figure(drawing: Drawing, palette: Palette) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=drawing.size, layout="constrained")
    drawing.draw(figure, palette)
    for axes in figure.axes:
        axes.set_axisbelow(True)
    return figure


def _settings(palette: Palette) -> dict[str, Any]:
    """Return the matplotlib settings of every figure of the report, with this palette's ink and grid."""
    colours = {_INK: palette.ink, _LINE: palette.line}
    more: dict[str, Any] = {"axes.grid": True, "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8.5}
    return {key: colours.get(str(value), value) for key, value in _RC.items()} | more


@cache
def _themes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the page's colours, light and dark, from its style sheet."""
    css = (resources.files("explorl.report") / "study.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[:2]
    themes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block)) for block in (light, dark)]
    return themes[0], themes[1]


def _css_variables(values: dict[str, str]) -> str:
    names = ("ink", "paper", "line", "bar", "quiet", *(f"arm-{index}" for index in range(_ARM_COLOURS)))
    return " ".join(f"--{name}: {values[name]};" for name in names)
