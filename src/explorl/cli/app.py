"""The `explorl` command."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from typing import Annotated, Any

# Threads that spin for microseconds and then sleep: those that spin on make a small model many times slower on a busy
# computer, and those that sleep at once make it slower on a quiet one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import typer
from typer.core import TyperGroup

from explorl import __version__
from explorl.cli import analyze_commands, evaluate_commands, show_commands, study_commands, train_commands
from explorl.cli.failures import Interrupted, Terminated, clean_lines, explain, terminable, usage_error
from explorl.core import processes
from explorl.core.launch import WorkerFailed
from explorl.core.plugins import working_folder
from explorl.core.terminal import plain_warnings, replace_unencodable
from explorl.core.text import clean

# Typer's boxes would leave the texts a column of sixteen characters where a terminal has 80.
PLAIN: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            advice = str(interrupt) or "to continue, repeat the command: {command}"
            raise Interrupted(advice, 143 if isinstance(interrupt, Terminated) else 130) from interrupt


app = typer.Typer(
    name="explorl",
    cls=_Commands,
    help="Exploration in RL fine-tuning of language models with verifiable rewards.",
    pretty_exceptions_enable=False,
    **PLAIN,
)
models_app = typer.Typer(help="List the models that have names here, or fetch one.", **PLAIN)
config_app = typer.Typer(help="Show the configuration of a run, or the presets.", **PLAIN)
app.add_typer(models_app, name="models")
app.add_typer(config_app, name="config")


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# The help lists the commands in this order.
app.command()(study_commands.quickstart)
app.command()(train_commands.train)
app.command()(train_commands.sft)
app.command()(train_commands.rft)
app.command("eval")(evaluate_commands.evaluate)
app.command()(evaluate_commands.compare)
app.command()(evaluate_commands.judge)
app.command()(study_commands.study)
app.command()(study_commands.report)
app.command()(analyze_commands.quality)
app.command()(analyze_commands.analyze)
app.command()(study_commands.watch)
app.command()(show_commands.strategies)
app.command()(show_commands.doctor)
models_app.command("fetch")(show_commands.fetch)
models_app.command("list")(show_commands.list_models)
config_app.command("show")(show_commands.show_config)
config_app.command("presets")(show_commands.show_presets)


def main(argv: list[str] | None = None) -> Any:
    """Run the command; print the errors that a user can cause as a clear message, with exit code 2."""
    replace_unencodable()
    try:
        with terminable(), plain_warnings(), working_folder(_print_import):
            code = app(argv, prog_name="explorl", standalone_mode=False)
    except Interrupted as interrupt:
        _print_interruption(interrupt, sys.argv[1:] if argv is None else argv)
        sys.exit(interrupt.code)
    except processes.EndedElsewhere:
        sys.exit(2)
    except WorkerFailed as error:
        if str(error):
            print("\n".join(clean_lines(str(error))), file=sys.stderr)
        sys.exit(error.code)
    except Exception as error:
        text = usage_error(error) or explain(error)
        if text is None:
            if processes.report_failure(traceback.format_exc().rstrip(), 1):
                sys.exit(1)
            raise
        message = text if text.startswith("Usage: ") else f"explorl: {text}"
        if processes.report_failure(message, 2):
            sys.exit(2)
        if os.environ.get("EXPLORL_DEBUG"):
            print(clean(traceback.format_exc()), file=sys.stderr)
        print(message, file=sys.stderr)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _print_interruption(interrupt: Interrupted, arguments: list[str]) -> None:
    """Print how to continue, on the first process only; leave it to the launcher if there is one."""
    if not processes.is_first():
        return
    advice = str(interrupt).replace("{command}", shlex.join(["explorl", *arguments]))
    message = f"explorl: interrupted; {clean(advice)}"
    if not processes.report_interruption(message):
        print(message, file=sys.stderr)


def _print_import(text: str) -> None:
    """Print that a module of the working folder is imported: once, and on stderr, since stdout may be JSON."""
    if processes.is_first():
        print(f"explorl: {clean(text)}", file=sys.stderr)


if __name__ == "__main__":
    main()
