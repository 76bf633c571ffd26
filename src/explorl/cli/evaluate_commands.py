"""The commands that evaluate policies: eval, compare and judge."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from explorl.cli import output
from explorl.cli.command_options import DTYPES, SAMPLERS, TrustRemoteCode
from explorl.cli.output import print_line
from explorl.core.config import ConfigError
from explorl.models import NAMED


def evaluate(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL",
            help=f"Model: {', '.join(NAMED)}, a folder or a hub id; LABEL=MODEL gives it a label. May be repeated.",
            autocompletion=lambda: [*NAMED],
        ),
    ],
    task: Annotated[
        list[str],
        typer.Option(
            metavar="TASK",
            help="Task: countdown, math:aime24, choice, code, gym:NAME, jsonl, …, or your own, such as "
            "my_pkg.puzzles:Puzzle. May be repeated.",
        ),
    ],
    protocol: Annotated[
        str,
        typer.Option(metavar="NAME", help="How to sample: plain, deng, mecklenburg, …; the options below override it."),
    ] = "plain",
    samples: Annotated[int | None, typer.Option(metavar="N", help="Completions per problem.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use only the first N problems.", min=1)] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Problems to use: holdout, train or sft.")] = "holdout",
    data_dir: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder with the tasks' files.")] = None,
    option: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE", help="Option of the task, such as verifier=number. May be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    template: Annotated[
        str | None, typer.Option(metavar="NAME", help="Prompt template; by default the one that fits the model.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="Sampling temperature; 0 always takes the likeliest token.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", help="Sample from the likeliest tokens, of probability X in all."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(metavar="X", help="Penalty on tokens that have occurred; 1 is none.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Length limit of a completion, in tokens.", min=1)
    ] = None,
    stop: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="Text that ends a completion, such as '</answer>'. May be repeated."),
    ] = [],  # noqa: B006 (typer's way)
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sequences to sample at a time; by default as many as fit in memory.", min=1),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.", autocompletion=lambda: DTYPES),
    ] = "float32",
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What samples: explorl, or vllm where it is installed.",
            autocompletion=lambda: SAMPLERS,
        ),
    ] = "explorl",
    trust_remote_code: TrustRemoteCode = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the samples.")] = 0,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do part of the work: 0/4 is the first of four processes on one folder."),
    ] = None,
    chunk: Annotated[int, typer.Option(metavar="N", help="Problems to sample before storing them.", min=1)] = 32,
    token_records: Annotated[
        bool | None, typer.Option(help="Keep the statistics of each token; by default up to 2 GiB of them.")
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help="Evaluate without and with a tool that completions may call: python or calculator.",
            autocompletion=lambda: ["python", "calculator"],
        ),
    ] = None,
    tool_calls: Annotated[
        int | None, typer.Option(metavar="N", help="Calls that a completion may make; by default 3.", min=1)
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the results, one folder in it per model and task.")
    ] = Path("runs/evaluations"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the scores to this JSON file.")
    ] = None,
) -> None:
    """Sample from policies, verify the answers and score them.

    Samples are stored: a later call draws only the missing ones.
    """
    from explorl.cli.run_evaluations import evaluate_command, parse_options
    from explorl.evaluation.harness import FailedEvaluation
    from explorl.rollout.tools import get_tool

    if dtype not in DTYPES:
        raise ConfigError(key="--dtype", value=dtype, hint="use float32, bfloat16 or float16")
    if engine not in SAMPLERS:
        raise ConfigError(key="--engine", value=engine, hint="use explorl or vllm")
    if tools is None and tool_calls is not None:
        raise ConfigError(
            "no tool is named", key="--tool-calls", value=tool_calls, hint="add --tools python, or leave it out"
        )
    limits = {} if tool_calls is None else {"max_calls": tool_calls}
    changes = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "max_tokens": max_tokens,
        "stop": stop or None,
    }
    results = evaluate_command(
        model,
        task,
        protocol,
        out,
        console=output.console,
        changes={key: value for key, value in changes.items() if value is not None},
        shard=shard,
        json_file=json_file,
        split=split,
        limit=limit,
        template=template,
        seed=seed,
        chunk=chunk,
        token_records=token_records,
        batch_size=batch_size,
        dtype=dtype,
        engine=engine,
        trust_remote_code=trust_remote_code,
        task_options={**parse_options(option), **({} if data_dir is None else {"data_dir": data_dir})},
        tools=None if tools is None else get_tool(tools, **limits),
    )
    if any(isinstance(result, FailedEvaluation) for result in results):
        raise typer.Exit(1)


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Evaluations of two or more models on the same problems.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the page, the figures and comparison.json.")
    ] = Path("runs/comparison"),
    name: Annotated[
        list[str], typer.Option(metavar="LABEL", help="Label of each evaluation, in their order. May be repeated.")
    ] = [],  # noqa: B006
    common: Annotated[bool, typer.Option("--common", help="Use only the problems that all of them have.")] = False,
) -> None:
    """Compare evaluations of several models on the same problems.

    Shows pass@k, maj@k, diversity, unsolvable problems, entropy, branching and quality, side by side.
    """
    from explorl.cli.compare import compare_command

    compare_command(folders, out, console=output.console, names=name or None, common=common)


def judge(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An evaluation that `explorl eval` has written.")],
    url: Annotated[
        str,
        typer.Option(metavar="URL", help="An OpenAI-compatible endpoint, such as http://localhost:8000/v1."),
    ],
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the judge at that endpoint.")],
    per_problem: Annotated[int, typer.Option(metavar="N", help="Responses to judge per problem.", min=1)] = 1,
    api_key_variable: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the endpoint's key; '' sends none.")
    ] = "OPENAI_API_KEY",
) -> None:
    """Ask a language model which responses hold irrelevant content.

    This is the only command that sends responses to another model.
    """
    from explorl.evaluation.llm_judge import LLMJudge, judge_evaluation

    llm_judge = LLMJudge(url, model, api_key=os.environ.get(api_key_variable))
    share = judge_evaluation(folder, llm_judge, per_problem=per_problem)
    print_line(f"irrelevant content: {share:.1%}; opinions: {folder / 'judged.json'}")
