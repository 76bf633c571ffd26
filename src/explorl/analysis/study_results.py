"""Results of a study's runs as one dictionary of JSON values, results.json, from which the report is made.

Everything is read from the run stores, so the results can be computed again at any time, also while the study is
running. Steps are training steps (batches of prompts); shares are between 0 and 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from explorl.analysis.interim_looks import SequentialPlan, describe_look, sequential_plan
from explorl.analysis.study_answers import error_breakdown, sampled_rollouts
from explorl.analysis.verdicts import arm_verdict, study_verdict
from explorl.core.store import RunStore, StoreError, read_json, read_parquet, read_study, step_files
from explorl.metrics import pass_at_k, upset_counts
from explorl.stats import Cell, Interval, Table
from explorl.stats.arm_differences import (
    Values,
    corrected_differences,
    mean_interval,
    paired_differences,
    pooled_deviation,
)
from explorl.stats.crossed import area_weights, minimum_detectable_effect, steps_to

CURVES = {
    "training accuracy": "rewards/correctness/mean",
    "entropy": "entropy",
    "length": "completions/mean_length",
}
"""Training curves, and the key of metrics.jsonl that each is read from."""
OTHER_CURVES = {"reward": "reward", "loss": "loss"}
"""Curves of runs without training accuracy, because of custom rewards or fine-tuning on solutions."""
START = "start"
"""Name of the policy before training, among the arms."""
UNITS: Mapping[str, tuple[str, bool | None]] = {
    "best pass@1": ("%", True),
    "area": ("%", True),
    "steps to target": ("steps", False),
    "entropy": ("nats", None),
    "branching": ("", None),
    "seconds": ("s", False),
    "tokens": ("tokens", False),
}
LABELS = {"area": "mean pass@1 over training", "entropy": "entropy at the end", "branching": "branching at the end"}


@dataclass(frozen=True)
class Scores:
    """One evaluation: how many of the samples of each problem are correct."""

    problems: tuple[str, ...]
    correct: NDArray[np.int64]
    samples: int

    def per_problem(self, k: int) -> NDArray[np.float64]:
        """Return the unbiased pass@k of each problem."""
        return np.asarray(pass_at_k(self.samples, self.correct, k))

    @property
    def ordered(self) -> Scores:
        """The same scores with sorted problems, because scores are paired by position."""
        order = sorted(range(len(self.problems)), key=self.problems.__getitem__)
        return Scores(tuple(self.problems[index] for index in order), self.correct[order], self.samples)

    @property
    def unsolved(self) -> list[str]:
        """Problems without a correct completion."""
        return [problem for problem, count in zip(self.problems, self.correct, strict=True) if count == 0]


@dataclass(frozen=True)
class ArmRun:
    """A run of an arm with a seed, read from its folder."""

    folder: Path
    seed: int
    iterations: int

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The training steps' lines of metrics."""
        return RunStore(self.folder).metrics("train")

    @cached_property
    def evaluations(self) -> dict[float, Scores]:
        """Scores by step, the earliest first.

        Evaluations after the last logged step belong to an interrupted start and are ignored, and those of other
        problems than the last one are left out with a warning.
        """
        last = max((line.get("step", 0) for line in RunStore(self.folder).metrics()), default=0)
        scores_at = {
            self.steps(step): read_scores(path.with_suffix(".parquet")).ordered
            for step, path in step_files(self.folder / "evaluations", ".json").items()
            if step <= last
        }
        others = [step for step, scores in scores_at.items() if scores.problems != scores_at[max(scores_at)].problems]
        if others:
            steps = ", ".join(f"{step:g}" for step in others)
            warnings.warn(
                f"{self.folder}: at step {steps} it was scored on other problems than at step {max(scores_at):g}; "
                "these scores are left out",
                stacklevel=2,
            )
        return {step: scores for step, scores in scores_at.items() if step not in others}

    @cached_property
    def end(self) -> Path:
        """Path of the last evaluation's summary."""
        return self._summary_path(max(self.evaluations))

    @cached_property
    def summaries(self) -> dict[float, dict[str, Any]]:
        """The evaluations' summaries by step."""
        return {step: read_json(self._summary_path(step), dict) for step in self.evaluations}

    @property
    def summary(self) -> dict[str, Any]:
        """The last summary; empty if the run has not been scored."""
        return self.summaries[max(self.evaluations)] if self.evaluations else {}

    def _summary_path(self, step: float) -> Path:
        return self.folder / "evaluations" / f"step-{round(step * self.iterations):06d}.json"

    @property
    def done(self) -> bool:
        """True if the trained policy has been evaluated."""
        last = self.steps(self.lines[-1]["step"]) if self.lines else None
        return (self.folder / "model").is_dir() and last in self.evaluations

    @property
    def final(self) -> Scores:
        """The scores of the last evaluation."""
        return self.evaluations[max(self.evaluations)]

    def steps(self, updates: int) -> float:
        """Return a number of updates as training steps."""
        return updates // self.iterations if updates % self.iterations == 0 else updates / self.iterations

    def curve(self, key: str) -> dict[float, float]:
        """Return a metric by step."""
        return {self.steps(line["step"]): line[key] for line in self.lines if line.get(key) is not None}

    def accuracy(self, k: int = 1) -> dict[float, float]:
        """Return held-out pass@k by step."""
        return {step: float(scores.per_problem(k).mean()) for step, scores in self.evaluations.items()}


def study_results(folder: str | Path) -> dict[str, Any]:
    """Return everything that the report of a study shows."""
    root = Path(folder)
    study = read_study(root)
    runs = {arm["name"]: _runs(root, arm, study["seeds"]) for arm in study["arms"]}
    complete = {name: [run for run in arm_runs if run.done] for name, arm_runs in runs.items()}
    return build_results(study, runs, complete)


def build_results(
    study: Mapping[str, Any], runs: Mapping[str, Sequence[ArmRun]], complete: Mapping[str, Sequence[ArmRun]]
) -> dict[str, Any]:
    """Return the results of arms from their complete runs."""
    baseline = complete[study["baseline"]]
    scored = [run for arm_runs in (baseline, *complete.values()) for run in arm_runs if run.evaluations]
    any_run = scored[0] if scored else None
    if len({run.final.problems for run in scored}) > 1:
        raise StoreError(
            f"{', '.join(complete)} were scored on different problems and cannot be compared; make a report of each"
        )
    _check_data(complete)
    ks = reported_ks(min(scores.samples for run in scored for scores in run.evaluations.values())) if scored else [1]
    measured = {name: _measures(arm_runs, ks, study["target"]) for name, arm_runs in complete.items()}
    paired = paired_differences(measured, study["baseline"])
    plan = sequential_plan(study)
    others = [name for name in measured if name != study["baseline"]]
    differences = corrected_differences(paired, others) if plan is None else plan.differences(paired)
    main = ["pass@1"] if len(ks) == 1 else ["pass@1", f"pass@{ks[-1]}"]
    tested = [] if plan is None else [key for key in plan.measures if key.startswith("pass@")]
    observed = {key: pooled_deviation(paired.get(key, {})) for key in ("pass@1", *(tested or main))}
    deviation = observed["pass@1"]
    spreads = {**observed, "pass@1": deviation or study["seed_deviation"]}
    detectable = {key: _detectable(spread, study, plan) for key, spread in spreads.items() if spread is not None}
    arms = []
    for arm in study["arms"]:
        name = arm["name"]
        failed = _failures(runs[name])
        arms.append(
            {
                "name": name,
                "strategies": [strategy_text(spec) for spec in arm["config"]["strategies"]],
                "changes": arm["changes"],
                "seeds": [run.seed for run in complete[name]],
                "failed": failed,
                "measures": {key: _interval(values) for key, values in measured[name].items()},
                "differences": differences.get(name),
                "verdict": arm_verdict(
                    None if name == study["baseline"] else differences.get(name, {}),
                    tested or main,
                    arms=len(study["arms"]) - 1,
                    seeds=len({run.seed for run in complete[name]} & {run.seed for run in baseline}),
                    failed=len(failed),
                    comparisons=plan.design.tests if plan is not None and tested else None,
                ),
                **_curves(complete[name], ks),
                "errors": error_breakdown(
                    [run.end.with_suffix(".parquet") for run in complete[name] if run.evaluations]
                ),
            }
        )
    start = None if START in complete else _start(baseline, ks)
    first = {name: arm_runs[0] for name, arm_runs in complete.items() if arm_runs}
    with_rollouts = {
        run.seed for arm_runs in complete.values() for run in arm_runs if any(run.folder.glob("rollouts/*.parquet"))
    }
    rollout_seed = next((seed for seed in study["seeds"] if seed in with_rollouts), study["seeds"][0])
    return {
        "title": study["title"],
        "description": study["description"],
        "task": study["base"]["task"]["name"],
        "model": study["base"]["model"]["name"],
        "baseline": study["baseline"],
        "date": study["created"],
        **_origin(baseline, study["seeds"]),
        "problems": len(any_run.final.problems) if any_run else 0,
        "samples": any_run.final.samples if any_run else 0,
        "steps": study["base"]["training"]["steps"],
        "target": study["target"],
        "minimum_detectable_effect": detectable.get("pass@1"),
        "seed_deviation_seen": deviation,
        "sequential": None if plan is None else plan.record(paired, _unfinished(runs, plan.first_seeds)),
        "verdict": study_verdict(
            differences,
            tested or main,
            study["baseline"],
            {key: effect for key, effect in detectable.items() if effect is not None},
            study.get("compared_seeds", len(study["seeds"])),
        ),
        "measures": _measure_list(ks, measured),
        "start": start,
        "arms": arms,
        "overlaps": _overlaps(first, study["baseline"], study["seeds"][0]),
        "config": yaml.safe_dump(study["base"], sort_keys=False, allow_unicode=True),
        "rollouts": sampled_rollouts(
            {name: run.folder for name, arm_runs in complete.items() for run in arm_runs if run.seed == rollout_seed},
            seed=rollout_seed,
            limit=study["base"]["rollout"]["max_tokens"],
            iterations={arm["name"]: arm["config"]["training"]["iterations"] for arm in study["arms"]},
        ),
    }


def _detectable(spread: float, study: Mapping[str, Any], plan: SequentialPlan | None) -> float | None:
    """Return the smallest difference that the study's seeds detect with 80 % power at this spread between seeds."""
    return minimum_detectable_effect(spread, len(study["seeds"])) if plan is None else plan.detectable_effect(spread)


def results_table(results: Mapping[str, Any]) -> Table:
    """Return a table of the arms with their scores and their differences to the baseline."""
    plan = results.get("sequential")
    scores = [entry["key"] for entry in results["measures"] if entry["key"].startswith("pass@")]
    scores = [key for key in plan["measures"] if key.startswith("pass@")] or scores if plan else scores
    gains = [f"Δ {key} (points)" for key in scores]
    tested = [key for key in plan["measures"] if key not in scores] if plan else []
    with_p = plan["measures"] if plan else ["pass@1"]
    columns = ["arm", *scores, *gains, *(f"Δ {key}" for key in tested), *(f"p ({key})" for key in with_p)]
    columns += ["entropy (nats)", "seeds", *(["last look"] if plan else [])]
    rows: list[list[Cell]] = []
    for arm in results["arms"]:
        differences = arm["differences"] or {}
        rows.append(
            [
                arm["name"],
                *(cell(arm["measures"].get(key)) for key in scores),
                *(cell(differences.get(key), 100) for key in scores),
                *(cell(differences.get(key)) for key in tested),
                *(differences.get(key, {}).get("p_corrected") for key in with_p),
                cell(arm["measures"].get("entropy")),
                f"{len(arm['seeds'])}, {len(arm['failed'])} failed" if arm["failed"] else str(len(arm["seeds"])),
                *([describe_look(plan["arms"].get(arm["name"]))] if plan else []),
            ]
        )
    number = {**dict.fromkeys(scores, ".1%"), **dict.fromkeys(gains, "+.1f")}
    number |= {f"Δ {key}": "+.4f" for key in tested}
    return Table(columns, rows, title=results["title"], number=number)


def strategy_text(spec: Any) -> str:
    """Return a strategy of a configuration in readable form: ``egsw(alpha=0.3)``."""
    if isinstance(spec, str):
        return spec
    if "name" in spec:
        name, options = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    else:
        name, options = next(iter(spec.items()))
    return f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})" if options else str(name)


def read_scores(path: Path) -> Scores:
    """Read the scores of an evaluation's parquet file."""
    rows = read_parquet(path, ["problem", "correct"])
    counts: dict[str, list[int]] = {}
    for problem, correct in zip(rows["problem"], rows["correct"], strict=True):
        counts.setdefault(problem, []).append(int(correct))
    samples = {len(marks) for marks in counts.values()}
    if len(samples) != 1:
        raise StoreError(f"{path} has problems with different numbers of samples: {sorted(samples)}")
    return Scores(tuple(counts), np.array([sum(marks) for marks in counts.values()]), samples.pop())


# ---------------------------------------------------------------------------- reading
def _runs(folder: Path, arm: Mapping[str, Any], seeds: Sequence[int]) -> list[ArmRun]:
    iterations = arm["config"]["training"]["iterations"]
    return [ArmRun(folder / "arms" / arm["slug"] / f"seed-{seed}", seed, iterations) for seed in seeds]


def _check_data(complete: Mapping[str, Sequence[ArmRun]]) -> None:
    """Raise `StoreError` if the runs' recorded fingerprints of the held-out data differ."""
    first: dict[str, str] = {}
    for name, runs in complete.items():
        for run in runs:
            if run.evaluations and (data := run.summary.get("data")):
                first.setdefault(data, f"{name}, seed {run.seed}")
    if len(first) > 1:
        run_1, run_2, *_ = first.values()
        raise StoreError(
            f"{run_1} and {run_2} were judged by different data: the answers or texts of the held-out problems have "
            "changed in between; remove the folders of the older runs and train them again"
        )


def _failures(runs: Sequence[ArmRun]) -> dict[str, str]:
    texts = {str(run.seed): run.folder / "error.txt" for run in runs if not run.done}
    return {seed: path.read_text(encoding="utf-8").strip() for seed, path in texts.items() if path.exists()}


def _unfinished(runs: Mapping[str, Sequence[ArmRun]], seeds: Sequence[int]) -> dict[str, str]:
    """Return the arms without all of these seeds: "failed" if all missing runs failed, else "waits"."""
    unfinished = {}
    for name, arm_runs in runs.items():
        open_runs = [run for run in arm_runs if run.seed in seeds and not run.done]
        if open_runs:
            unfinished[name] = "failed" if len(_failures(open_runs)) == len(open_runs) else "waits"
    return unfinished


def _origin(runs: Sequence[ArmRun], seeds: Sequence[int]) -> dict[str, Any]:
    """Return versions, hardware and commit of the baseline's first start, without what differs between starts."""
    path = runs[0].folder / "provenance.json" if runs else None
    starts = read_json(path, list) if path is not None and path.exists() else []
    first: dict[str, Any] = starts[0] if starts else {}
    keys = ("explorl", "git_commit", "python", "libraries", "platform", "processor", "cores", "threads", "gpus")
    return {
        "commit": first.get("git_commit"),
        "version": first.get("explorl", ""),
        "provenance": {**{key: first[key] for key in keys if key in first}, "seeds": list(seeds)},
    }


# ---------------------------------------------------------------------------- measures
def _measures(runs: Sequence[ArmRun], ks: Sequence[int], target: float | None) -> dict[str, Values]:
    """Return the measures of each run of an arm, without measures that any run lacks."""
    measures: dict[str, Values] = {}
    for run in runs:
        values = _held_out_measures(run, ks, target) if run.evaluations else dict.fromkeys(f"pass@{k}" for k in ks)
        values["entropy"], values["branching"] = run.summary.get("entropy"), run.summary.get("branching")
        values["seconds"] = sum(line.get("step_time") or 0.0 for line in run.lines)
        values["tokens"] = max((line.get("num_tokens") or 0 for line in run.lines), default=None)
        for key, value in values.items():
            measures.setdefault(key, {})[run.seed] = value
    return {key: values for key, values in measures.items() if not any(value is None for value in values.values())}


def _held_out_measures(run: ArmRun, ks: Sequence[int], target: float | None) -> dict[str, Any]:
    """Return the measures of a run on the held-out problems."""
    steps = [*run.evaluations]
    curve = np.stack([scores.per_problem(1) for scores in run.evaluations.values()])
    means = curve.mean(axis=1)
    values: dict[str, Any] = {f"pass@{k}": run.final.per_problem(k) for k in ks}
    values["best pass@1"] = curve[int(means.argmax())]
    values["area"] = area_weights(steps) @ curve
    if target is not None:
        values["steps to target"] = steps_to(steps, means.tolist(), target)
    return values


def _interval(values: Values) -> dict[str, Any]:
    """Return mean and interval, limited to values above 0, and below 1 for shares of problems."""
    highest = 1.0 if values and np.ndim(next(iter(values.values()))) == 1 else np.inf
    return _clip(mean_interval(values), 0.0, highest)


def _clip(interval: Mapping[str, Any], lowest: float, highest: float) -> dict[str, Any]:
    """Limit an interval to the range of its measure."""
    ends = {end: None if interval[end] is None else min(max(interval[end], lowest), highest) for end in ("low", "high")}
    return {**interval, **ends}


def _measure_list(ks: Sequence[int], measured: Mapping[str, dict[str, Values]]) -> list[dict[str, Any]]:
    units = {f"pass@{k}": ("%", True) for k in ks if k in (ks[0], ks[-1])} | dict(UNITS)
    available = {key for measures in measured.values() for key in measures}
    return [
        {"key": key, "label": LABELS.get(key, key), "unit": unit, "higher_is_better": better}
        for key, (unit, better) in units.items()
        if key in available
    ]


def reported_ks(samples: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, … up to the number of samples."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


# ---------------------------------------------------------------------------- curves
def _curves(runs: Sequence[ArmRun], ks: Sequence[int]) -> dict[str, Any]:
    """Return curves, pass@k at the end and over training, the entropy plane, unsolved problems and strategy logs."""
    curves = {name: _training_curve([run.curve(key) for run in runs]) for name, key in CURVES.items()}
    if not curves["training accuracy"]["step"]:
        others = {name: _training_curve([run.curve(key) for run in runs]) for name, key in OTHER_CURVES.items()}
        curves |= {name: curve for name, curve in others.items() if curve["step"]}
    scored = [run for run in runs if run.evaluations]
    over_training = {str(k): _held_out(scored, k) for k in ks}
    curves["holdout pass@1"] = over_training["1"]
    logs = sorted({key for run in runs for line in run.lines for key in line if key.startswith("strategy/")})
    plane = {name: dict(zip(curves[name]["step"], curves[name]["mean"], strict=True)) for name in CURVES}
    steps = [step for step in plane["entropy"] if step in plane["training accuracy"]]
    return {
        "curves": curves,
        "plane": {
            "step": steps,
            "entropy": [plane["entropy"][step] for step in steps],
            "accuracy": [plane["training accuracy"][step] for step in steps],
        },
        "held_out_plane": _held_out_plane(scored),
        "over_training": over_training,
        "pass_at_k": _by_k({run.seed: run.final for run in scored}, ks),
        "gain": _gain(scored, ks),
        "unsolvable": {str(run.seed): run.final.unsolved for run in scored},
        "strategy_logs": {
            key: {name: _training_curve([run.curve(key) for run in runs])[name] for name in ("step", "mean")}
            for key in logs
        },
    }


def _start(runs: Sequence[ArmRun], ks: Sequence[int]) -> dict[str, Any] | None:
    """Return the scores of the policy before training from the baseline's runs; None without any."""
    scored = [run for run in runs if 0 in run.evaluations]
    if not scored:
        return None
    measures = {f"pass@{k}": _interval({run.seed: run.evaluations[0].per_problem(k) for run in scored}) for k in ks}
    for key in ("entropy", "branching"):
        values = {run.seed: run.summaries[0].get(key) for run in scored}
        if not any(value is None for value in values.values()):
            measures[key] = _interval(values)
    return {
        "seeds": [run.seed for run in scored],
        "measures": measures,
        "pass_at_k": _by_k({run.seed: run.evaluations[0] for run in scored}, ks),
        "held_out_plane": {
            "step": [0], "entropy": [measures.get("entropy", {}).get("mean")], "accuracy": [measures["pass@1"]["mean"]],
        },
    }  # fmt: skip


def _held_out(runs: Sequence[ArmRun], k: int) -> dict[str, Any]:
    """Return held-out pass@k by step."""
    steps = _shared([run.evaluations for run in runs])
    intervals = [_interval({run.seed: run.evaluations[step].per_problem(k) for run in runs}) for step in steps]
    return {"step": steps, **_bounds(intervals), "band": describe_interval(len(runs))}


def _held_out_plane(runs: Sequence[ArmRun]) -> dict[str, list[Any]]:
    """Return mean entropy and pass@1 on the held-out problems by step."""
    steps = [
        step
        for step in _shared([run.evaluations for run in runs])
        if all(run.summaries[step].get("entropy") is not None for run in runs)
    ]
    return {
        "step": steps,
        "entropy": [float(np.mean([run.summaries[step]["entropy"] for run in runs])) for step in steps],
        "accuracy": [float(np.mean([run.evaluations[step].per_problem(1) for run in runs])) for step in steps],
    }


def _by_k(scores: Mapping[int, Scores], ks: Sequence[int]) -> dict[str, Any]:
    """Return pass@k by k from one evaluation per seed."""
    if not scores:
        return {"k": [], "mean": [], "low": [], "high": []}
    intervals = [_interval({seed: of_seed.per_problem(k) for seed, of_seed in scores.items()}) for k in ks]
    return {"k": list(ks), **_bounds(intervals), "band": describe_interval(len(scores))}


def _gain(runs: Sequence[ArmRun], ks: Sequence[int]) -> dict[str, Any]:
    """Return the change of pass@k from before training to the end by k, paired by problem and seed."""
    scored_before = [
        run
        for run in runs
        if 0 in run.evaluations and len(run.evaluations) > 1 and run.final.problems == run.evaluations[0].problems
    ]
    if not scored_before:
        return {"k": [], "mean": [], "low": [], "high": []}
    gains = [
        {run.seed: run.final.per_problem(k) - run.evaluations[0].per_problem(k) for run in scored_before} for k in ks
    ]
    return {
        "k": list(ks),
        **_bounds([_clip(mean_interval(gain), -1.0, 1.0) for gain in gains]),
        "band": describe_interval(len(scored_before)),
    }


def _bounds(intervals: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {end: [interval[end] for interval in intervals] for end in ("mean", "low", "high")}


def describe_interval(seeds: int) -> str:
    """Describe what an interval is over."""
    return "95 % interval over problems (one seed)" if seeds == 1 else "95 % interval over seeds and problems"


def _training_curve(curves: Sequence[Mapping[float, float]]) -> dict[str, Any]:
    """Return the mean over seeds by step with the lowest and the highest seed, as intervals of few runs are wide."""
    steps = _shared(curves)
    table = np.array([[curve[step] for step in steps] for curve in curves], dtype=np.float64)
    if not steps or len(curves) == 1:
        return {"step": steps, "mean": table[0].tolist() if steps else [], "low": [], "high": [], "band": None}
    return {
        "step": steps,
        "mean": table.mean(axis=0).tolist(),
        "low": table.min(axis=0).tolist(),
        "high": table.max(axis=0).tolist(),
        "band": "range of the seeds",
    }


def _shared(curves: Sequence[Mapping[float, Any]]) -> list[float]:
    """Return the steps that all runs have; with a budget of tokens or minutes some runs end earlier."""
    return [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []


def _overlaps(first: Mapping[str, ArmRun], baseline: str, seed: int) -> list[dict[str, Any]]:
    """Return the sizes of the exclusive regions of one seed's sets of unsolved problems, including the start's."""
    runs = {name: run for name, run in first.items() if run.seed == seed}
    sets = {name: run.final.unsolved for name, run in runs.items() if run.evaluations}
    if baseline in runs and 0 in runs[baseline].evaluations and START not in sets:
        sets = {START: runs[baseline].evaluations[0].unsolved, **sets}
    order = list(sets)
    return [{"arms": sorted(names, key=order.index), "count": count} for names, count in upset_counts(sets).items()]


def cell(values: Mapping[str, Any] | None, scale: float = 1.0) -> Cell:
    """Return a measure with its interval as a table cell, times `scale`; None if it was not measured."""
    if not values or values.get("mean") is None:
        return None
    if values.get("low") is None or values.get("high") is None:
        return float(values["mean"]) * scale
    return Interval(values["mean"] * scale, values["low"] * scale, values["high"] * scale)
