"""The commands for studies, and those that show studies and runs: quickstart, study, report and watch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from explorl.cli import output
from explorl.cli.command_options import Jobs, LaunchFile, TableFile
from explorl.cli.output import print_line, print_more_seeds, print_next, print_table
from explorl.core import processes
from explorl.core.config import ConfigError
from explorl.core.launch import command_line
from explorl.core.terminal import counted, literal
from explorl.core.yaml_documents import parse_yaml
from explorl.study.spec import Study, find_study, load_study, seeds_in, study_names


def quickstart(
    run: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the runs and the report.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the training and the evaluation.")] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Optimizer steps per arm; by default the preset's number.", min=1)
    ] = None,
    problems: Annotated[int, typer.Option(metavar="N", help="Held-out problems to evaluate on.", min=1)] = 512,
    jobs: Jobs = None,
    json_file: TableFile = None,
) -> None:
    """Train the embedded policy in two ways and compare them.

    Plain GRPO against GRPO with risk-sensitive advantages, from the same checkpoint. It takes minutes on a CPU.
    """
    from explorl.cli.quickstart import quickstart as run_quickstart
    from explorl.cli.quickstart import table

    result = run_quickstart(run, seed=seed, steps=steps, problems=problems, jobs=jobs, console=output.console)
    print_table(table(result.results), json_file)
    output.console.print(literal(result.results["verdict"]))
    print_line(f"{result.seconds:.0f} s; report: ", (result.report, "bold"))
    print_more_seeds(["explorl", "study", str(result.study), "--run", str(run)], 1)


def _known_profiles(ctx: typer.Context) -> list[str]:
    """Return the profiles of the study on the command line, for the shell's completion."""
    words = [*(ctx.params.get("words") or ()), *ctx.args]
    try:
        return [*parse_yaml(find_study(words[0]).read_text(encoding="utf-8"), words[0])["profiles"]]
    except (ConfigError, KeyError, IndexError, TypeError, ValueError, OSError):
        return []


def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY",
            help=f"{', '.join(study_names())}, or a path to a study file. Or: status FOLDER, to see its progress; "
            "keep FOLDER FILE, to write its results without weights and answers; restore FILE… --run FOLDER, to unpack "
            "them again.",
            autocompletion=lambda: [*study_names(), "status", "keep", "restore"],
        ),
    ],
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Profile of the study: tiny for a CPU, gpu, …", autocompletion=_known_profiles
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of seeds: 0, 1, …, N-1. Or the seeds themselves: 3-5, or 3,7."),
    ] = None,
    jobs: Jobs = None,
    only: Annotated[list[str], typer.Option(metavar="ARM", help="Run only this arm. May be repeated.")] = [],  # noqa: B006
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of all arms, task.data_dir=data; warm_start=null drops the warm start. May be repeated.",
        ),
    ] = [],  # noqa: B006
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the study; by default runs/NAME-PROFILE.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run, and run nothing.")] = False,
    launch: LaunchFile = None,
    json_file: TableFile = None,
) -> None:
    """Run arms × seeds on one budget; compare them with intervals.

    The same command resumes an interrupted study: finished runs are not repeated.
    """
    if words[0] in ("status", "keep", "restore"):
        options = {"--profile": profile, "--seeds": seeds, "--jobs": jobs, "--only": only, "--run": run, "--plan": plan}
        options |= {"--launch": launch, "--json": json_file, "--set": overrides}
        allowed = {"status": "--json", "restore": "--run"}.get(words[0])
        for name, value in options.items():
            if name != allowed and value not in (None, []) and value is not False:
                raise ConfigError(f"`explorl study {words[0]}` takes no {name}; leave it out")
    if words[0] == "status":
        _print_status(words, json_file)
        return
    if words[0] == "keep":
        _keep(words)
        return
    if words[0] == "restore":
        _restore(words, run)
        return
    if len(words) != 1:
        raise ConfigError(f"`explorl study` takes one study, not {len(words)}: {' '.join(words)}")
    if processes.count() > 1:
        raise ConfigError("`explorl study` starts the processes of its runs; use --launch FILE instead of a launcher")
    find_study(words[0])  # before torch is imported below
    chosen_seeds = None if seeds is None else seeds_in(seeds)
    if plan:
        planned = load_study(words[0], profile=profile, seeds=chosen_seeds, overrides=overrides, construct=False)
        _print_plan(planned, run, only)
        return
    from explorl.study.run_study import run_study

    outcome = run_study(
        words[0],
        profile=profile,
        seeds=chosen_seeds,
        jobs=jobs,
        folder=run,
        only=only or None,
        launch=launch,
        overrides=overrides,
        console=output.console,
    )
    output.console.print(literal(outcome.results["verdict"]))
    print_line("report: ", (outcome.folder / "report.html", "bold"))
    print_table(outcome.table, json_file)
    changes = [("--set", change) for change in overrides]
    arguments = command_line(("--profile", profile), *changes, ("--run", run), ("--launch", launch))
    command = ["explorl", "study", words[0], *arguments]
    if outcome.failed:
        retry = command_line(*command, ("--seeds", seeds), *(("--only", arm) for arm in only))
        print_line("next, to retry the failed runs: ", shlex.join(retry))
        raise typer.Exit(1)
    if outcome.results["sequential"] is None:  # a sequential study fixes its seeds
        print_more_seeds(command, max(len(arm["seeds"]) for arm in outcome.results["arms"]))


def _print_status(words: list[str], json_file: Path | None) -> None:
    """Print how far the runs of a study are."""
    from explorl.study.run_study import study_status

    if len(words) != 2:
        raise ConfigError("`explorl study status` takes the study's folder, such as runs/deng-tiny")
    print_table(study_status(words[1]), json_file)


def _keep(words: list[str]) -> None:
    """Write a study's results to a file, without weights and answers."""
    from explorl.study.archive import keep

    if len(words) != 3 or not all(words):
        raise ConfigError("`explorl study keep` takes the study's folder and a file, such as runs/deng-tiny deng.json")
    archive = keep(words[1], words[2])
    left_out = f"; left out: {archive.left_out}" if archive.left_out else ""
    print_line(f"{archive.runs} of {counted(archive.of, 'run')} in ", (words[2], "bold"), left_out)


def _restore(words: list[str], run: Path | None) -> None:
    """Unpack the results of studies from files into a folder."""
    from explorl.study.archive import restore

    if len(words) < 2 or not all(words) or run is None:
        raise ConfigError("`explorl study restore` takes files and a folder, such as deng.json --run runs/deng-tiny")
    added = restore(words[1:], run, print_line)
    print_line(f"{counted(added, 'run')} added to ", (run, "bold"))
    print_next(["explorl", "report", str(run)])


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="A study, a run, or several runs to show side by side.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default report.html in the folder.")
    ] = None,
    name: Annotated[
        list[str], typer.Option(metavar="LABEL", help="Label of each run, in their order. May be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Write the page of a study, of a run or of several runs.

    The page shows what is stored so far; the runs need not be finished.
    """
    from explorl.core.store import kind_of
    from explorl.report.run_page import write_run_report

    if len(folders) == 1 and kind_of(folders[0]) == "study":
        if out is not None or name:
            raise ConfigError("--out and --name are for runs; a study's page is in its folder, with its arms' names")
        from explorl.study.run_study import write_results

        write_results(folders[0])
        page = folders[0] / "report.html"
    else:
        page = write_run_report(folders, out, names=name or None)
    print_line("report: ", (page, "bold"))


def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A study or a run.")],
    once: Annotated[bool, typer.Option("--once", help="Print the curves once and exit.")] = False,
) -> None:
    """Show the curves of a study or a run while it is running."""
    from explorl.study.watch import watch as watch_folder

    watch_folder(folder, once=once, console=output.console)


def _print_plan(study: Study, folder: Path | None, only: list[str]) -> None:
    """Print what a study would run."""
    from explorl.study.plan import effect_text, size_text, unsandboxed_warnings
    from explorl.study.run_study import default_folder

    arms = [study.arm(name) for name in only] or list(study.arms)
    target = folder or default_folder(study)
    print_line((study.title, "bold"))
    print_line(f"{size_text(study, len(arms))}, in {target}")
    print_line(effect_text(study, target))
    for line in unsandboxed_warnings(study):
        print_line(line)
    for arm in arms:
        print_line(f"  {arm.name}{', the baseline' if arm.name == study.baseline else ''}")
