"""The console of the commands and the lines that several of them print."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from explorl.core.terminal import literal

if TYPE_CHECKING:
    from explorl.stats import Table

console = Console()


def print_line(*parts: object) -> None:
    """Print one line of texts, or of pairs of a text and a style, without markup."""
    console.print(literal(*parts), soft_wrap=True)


def print_table(table: Table, file: Path | None) -> None:
    """Print a table, and write it to a file if one is named."""
    table.print(console)
    if file is not None:
        table.write(file)


def print_policy(model: Path, *commands: list[str]) -> None:
    """Print the folder of a trained policy and the commands to run next."""
    print_line("policy: ", (model, "bold"))
    for command in commands:
        print_next(command)


def print_next(command: list[str]) -> None:
    """Print a command to run next."""
    print_line("next: ", shlex.join(command))


def print_more_seeds(command: list[str], seeds: int) -> None:
    """Print the command that runs a study with more seeds, and what for."""
    from explorl.study.plan import more_seeds

    why = "to see how much training runs differ" if seeds == 1 else "for narrower intervals"
    print_line(f"next, {why}: {shlex.join([*command, '--seeds', str(more_seeds(seeds))])}")
