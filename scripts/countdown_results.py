"""Store the results of scripts/countdown_gpu.py in small files, and make tables and the figure from them.

    python scripts/countdown_results.py keep OUT docs/results/countdown-135m/2026-11-16.json --commit b444f92
    python scripts/countdown_results.py show docs/results/countdown-135m/*.json --picture docs/images/countdown-135m

A file contains the training curves and, for every evaluation, how many samples of each problem were right, so that
intervals, paired differences and sets of unsolved problems can be recomputed over several GPU sessions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from explorl.analysis.charts import Palette, PanelChart
from explorl.analysis.study_answers import error_breakdown
from explorl.core.store import read_json, write_text
from explorl.metrics import pass_at_k
from explorl.report.figures import save
from explorl.stats import Interval, bootstrap_mean, paired_difference

Record: TypeAlias = dict[str, Any]

PAPER = (("Qwen2-0.5B, SFT *", 0.38), ("Qwen2-0.5B, SFT + GRPO *", 0.43))
"""Mecklenburg 2025, on its own 500 problems: the start of its runs, and the best of them (Table 1)."""
CURVES = ("step", "reward", "entropy", "completions/mean_length", "completions/clipped_ratio", "step_time")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.command == "keep":
        write_text(
            options.file, json.dumps(kept(options.out, options.commit, options.note), separators=(",", ":")) + "\n"
        )
        return
    leases = [read_json(path) for path in options.files]
    evaluations = [evaluation for lease in leases for evaluation in lease["evaluations"]]
    for table in (scores(evaluations), boundaries(evaluations), errors(evaluations), stages(leases)):
        print("\n".join(table), end="\n\n")
    if options.picture:
        save(picture(evaluations), options.picture.parent, options.picture.name)


# -------------------------------------------------------------------- stored results


def kept(out: Path, commit: str, note: str) -> Record:
    """Return the results in a folder of countdown_gpu.py, without the completions."""
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "commit": commit,
        "note": note,
        "stages": [line for line in lines if line["stage"] != "eval"],
        "sft": read_json(out / "sft" / "log.json"),
        "runs": {path.parent.name: list(curve(path)) for path in sorted(out.glob("*/metrics.jsonl"))},
        "evaluations": [evaluation(path) for path in sorted((out / "evaluations").glob("*.json"))],
    }


def curve(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            yield {key: round(float(record[key]), 4) for key in CURVES if key in record}


def evaluation(path: Path) -> Record:
    import pyarrow.parquet as pq

    summary, answers = read_json(path), path.with_suffix(".parquet")
    correct = np.array(pq.read_table(answers, columns=["correct"])["correct"].to_pylist()).reshape(
        -1, summary["samples"]
    )
    model, problems, protocol = path.stem.rsplit("-", 2)
    return {
        "model": model,
        "problems_of": problems,
        "protocol": protocol,
        "samples": summary["samples"],
        "right": correct.sum(axis=1).tolist(),
        **{key: summary[key] for key in ("truncated", "mean_tokens", "entropy")},
        "errors": error_breakdown([answers]),
    }


# -------------------------------------------------------------------- tables


def scores(evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield the table of every model under the paper's protocol."""
    yield "| model | test | synthetic | validation | tokens | cut off |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for model in dict.fromkeys(evaluation["model"] for evaluation in evaluations):
        by = {
            evaluation["problems_of"]: evaluation
            for evaluation in evaluations
            if (evaluation["model"], evaluation["protocol"]) == (model, "mecklenburg")
        }
        if "test" in by:
            cells = [
                percent(passed(by[name], 1)) if name in by else "–" for name in ("test", "synthetic", "validation")
            ]
            test = by["test"]
            yield f"| {model} | {' | '.join(cells)} | {test['mean_tokens']:.0f} | {test['truncated']:.1%} |"


def boundaries(evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield the table of pass@k at temperature 1 on the test problems, with paired differences to the SFT model."""
    plain = {
        evaluation["model"]: evaluation
        for evaluation in evaluations
        if (evaluation["problems_of"], evaluation["protocol"]) == ("test", "plain")
    }
    ks = (1, 4, 16, 64)
    columns = ("model", *(f"pass@{k}" for k in ks), "entropy (nats)", "unsolved", "newly solved", "newly unsolved")
    yield f"| {' | '.join(columns)} |"
    yield f"| --- | {' | '.join(['---:'] * (len(ks) + 4))} |"
    start = plain.get("sft")
    for model, evaluation in plain.items():
        cells = []
        for k in ks:
            cell = percent(passed(evaluation, k)) if k <= evaluation["samples"] else "–"
            if start and evaluation is not start and k <= min(evaluation["samples"], start["samples"]):
                cell += f" ({difference(evaluation, start, k)})"
            cells.append(cell)
        cells += [
            f"{evaluation['entropy']:.4f}",
            f"{sum(right == 0 for right in evaluation['right'])} of {len(evaluation['right'])}",
        ]
        cells += (
            turned(evaluation, start)
            if start and evaluation is not start and evaluation["samples"] == start["samples"]
            else ["–", "–"]
        )
        yield f"| {model} ({evaluation['samples']} samples) | {' | '.join(cells)} |"


def turned(evaluation: Record, start: Record) -> list[str]:
    """Return how many problems only the model solves, and how many only the start solves."""
    before, now = np.array(start["right"]) > 0, np.array(evaluation["right"]) > 0
    return [str(int((~before & now).sum())), str(int((before & ~now).sum()))]


def errors(evaluations: Sequence[Record]) -> Iterator[str]:
    """Yield Mecklenburg's Figure 6 as a table: the share of right answers by operands and operations, and errors."""
    for evaluation in evaluations:
        if (evaluation["problems_of"], evaluation["protocol"]) == ("test", "mecklenburg"):
            yield f"{evaluation['model']}:"
            for by in ("by operands", "by operation"):
                shares = {
                    key: f"{count['correct'] / sum(count.values()):.1%} of {sum(count.values()):,}"
                    for key, count in evaluation["errors"][by].items()
                }
                yield f"- {by}: {', '.join(f'{key} {share}' for key, share in shares.items())}"
            kinds = evaluation["errors"]["by kind"]
            yield f"- wrong: {', '.join(f'{kind} {count}' for kind, count in kinds.items())}"


def stages(leases: Sequence[Record]) -> Iterator[str]:
    yield "| stage | steps | seconds | with everything around it |"
    yield "| --- | ---: | ---: | ---: |"
    for lease in leases:
        for stage in lease["stages"]:
            name = " ".join([stage["stage"], stage.get("arm", stage["style"]), *stage.get("set", [])])
            yield f"| {name} | {stage['steps']:,} | {stage['seconds']:.0f} | {stage['seconds_in_all']:.0f} |"


def passed(evaluation: Record, k: int) -> Interval:
    return bootstrap_mean(per_problem(evaluation, k))


def per_problem(evaluation: Record, k: int) -> Any:
    return pass_at_k(evaluation["samples"], np.array(evaluation["right"]), k)


def difference(evaluation: Record, start: Record, k: int) -> str:
    interval = paired_difference(per_problem(evaluation, k), per_problem(start, k))
    return f"{interval.mean * 100:+.1f} [{interval.low * 100:+.1f}, {interval.high * 100:+.1f}]".replace("-", "−")


def percent(interval: Interval) -> str:
    return f"{interval.mean:.1%} [{interval.low * 100:.1f}, {interval.high * 100:.1f}]".replace("%", " %")


# -------------------------------------------------------------------- the picture


def picture(evaluations: Sequence[Record]) -> PanelChart:
    """Return the chart of accuracy next to the paper's (left), and of pass@k before and after GRPO (right)."""
    caption = "Right answers by the paper's protocol, and pass@k before and after GRPO, with 95 % intervals."
    panels = partial(draw, evaluations)
    return PanelChart("countdown", "Countdown before and after GRPO", caption, (), size=(9.6, 3.8), panels=panels)


def draw(evaluations: Sequence[Record], figure: Any, palette: Palette) -> None:
    """Draw both panels."""
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    named = [
        (name, label)
        for name, label in LABELS.items()
        if any(evaluation["model"] == name for evaluation in evaluations)
    ]
    tests = {
        evaluation["model"]: passed(evaluation, 1)
        for evaluation in evaluations
        if (evaluation["problems_of"], evaluation["protocol"]) == ("test", "mecklenburg")
    }
    bars = [*((label, Interval(value, value, value), palette.bar) for label, value in PAPER)]
    bars += [(label, tests[name], palette.arms[0]) for name, label in named if name in tests]
    for position, (_, interval, colour) in enumerate(bars):
        whiskers = [[interval.mean - interval.low], [interval.high - interval.mean]]
        left.barh(-position, interval.mean * 100, color=colour, height=0.66)
        if interval.high > interval.low:
            left.errorbar(interval.mean * 100, -position, xerr=np.array(whiskers) * 100, color=palette.ink, capsize=3)
        left.text(interval.high * 100 + 1.5, -position, f"{interval.mean * 100:.1f}", va="center")
    left.set_yticks([-position for position in range(len(bars))], [label for label, _, _ in bars])
    left.set_xlim(0, 112)
    left.set_xticks(range(0, 101, 20))
    left.set_xlabel("right answers, %   (* as published, on other problems)")
    left.set_title("Countdown, three and four numbers", loc="left", fontsize=10)
    for index, (name, label) in enumerate(named):
        for evaluation in evaluations:
            if (evaluation["model"], evaluation["problems_of"], evaluation["protocol"]) == (
                name,
                "test",
                "plain",
            ) and evaluation["samples"] >= 64:
                ks = [2**i for i in range(7)]
                points = [passed(evaluation, k) for k in ks]
                colour = palette.arms[index]
                right.plot(ks, [p.mean * 100 for p in points], marker="o", color=colour, label=label)
                lows, highs = [p.low * 100 for p in points], [p.high * 100 for p in points]
                right.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
    right.set_xscale("log", base=2)
    right.set_xticks([2**i for i in range(7)], [str(2**i) for i in range(7)])
    right.set_xlabel("k")
    right.set_ylabel("pass@k at temperature 1, %")
    right.set_title("Before and after GRPO", loc="left", fontsize=10)
    if right.lines:
        right.legend(loc="lower right")
    left.grid(visible=False, axis="y")


LABELS = {
    "base": "SmolLM2-135M, as it comes",
    "sft": "SmolLM2-135M, SFT on searches",
    "GRPO-fast-0": "SmolLM2-135M, SFT + GRPO",
}
"""Models in the figure."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("keep", help="write a small file")
    keep.add_argument("out", type=Path)
    keep.add_argument("file", type=Path)
    keep.add_argument("--commit", required=True)
    keep.add_argument("--note", default="")
    show = commands.add_parser("show", help="print the tables")
    show.add_argument("files", type=Path, nargs="+")
    show.add_argument("--picture", type=Path, help="also draw PICTURE.svg and PICTURE.png")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except (FileNotFoundError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
