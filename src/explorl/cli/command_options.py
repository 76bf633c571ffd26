"""Options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from explorl.core.config import presets

DTYPES = ["float32", "bfloat16", "float16"]
SAMPLERS = ["explorl", "vllm"]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file with the keys that `explorl config show` prints."),
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Configuration to start from, such as tiny.", autocompletion=presets),
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key: training.learning_rate=5e-6. May be repeated."),
]
RunFolder = Annotated[
    Path | None, typer.Option("--run", metavar="FOLDER", help="Folder of the run; by default a new one under runs/.")
]
Resume = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Resume this run from its latest checkpoint.")]
LaunchFile = Annotated[
    Path | None,
    typer.Option("--launch", metavar="FILE", help="Train with several processes, as this accelerate file describes."),
]
Jobs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Runs side by side; by default one per GPU or, without a GPU, one per core.", min=1),
]
TableFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the table to this file: .json, .csv, .tex or .md."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with a model. Read it first.")
]
