"""Draw the change in pass@k of each arm of a study, as on its page, into a standalone file.

The README's figure is made by

    explorl study studies/passk.yaml
    python scripts/passk_change.py runs/passk docs/images/passk-change.svg
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from explorl import report
from explorl.core.store import read_json, write_text
from explorl.report.study_figures import line_styles
from explorl.report.study_sections import gains

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 2:
        raise ValueError(f"give the study's folder and the file, such as runs/passk change.svg; got {list(words)}")
    results = read_json(Path(words[0]) / "results.json", dict)
    arms = results["arms"]
    pictures = gains(arms, line_styles([arm["name"] for arm in arms], results["baseline"]), named=True)
    if not pictures:
        raise ValueError(f"{words[0]} has no evaluation from before its training")
    write_text(Path(words[1]), alone(pictures[0].svg))


def alone(svg: str) -> str:
    """Return the figure of a page as a standalone file, in the page's colours for a light background."""
    css = (Path(report.__file__).parent / "study.css").read_text(encoding="utf-8")
    colours: dict[str, str] = {}
    for name, value in re.findall(r"--([\w-]+): (#\w+)", css):
        colours.setdefault(name, value)  # the light theme comes first
    svg = re.sub(r"var\(--([\w-]+)\)", lambda variable: colours[variable[1]], svg)
    svg = svg.replace("currentColor", colours["ink"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="{FONT}" style="background: {colours["paper"]}"'
    return svg.replace("<svg", head, 1).rstrip() + "\n"


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
