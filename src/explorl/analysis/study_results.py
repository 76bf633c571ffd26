"""What a study's runs show, as one dictionary of plain values: results.json, from which the report is made.

Everything is read from the run stores, so it can be made again at any time, and while the study still runs. Steps are
training steps (batches of prompts); shares are between 0 and 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from explorl.analysis.statistics import (
    Estimate,
    area_weights,
    crossed_mean,
    holm,
    minimum_detectable_effect,
    seeds_mean,
    steps_to,
)
from explorl.analysis.study_answers import error_breakdown, sampled_rollouts
from explorl.analysis.verdicts import arm_verdict, study_verdict
from explorl.metrics import Cell, Interval, Table, pass_at_k, upset_counts
from explorl.store import RunStore, StoreError

CURVES = {
    "training accuracy": "rewards/correctness/mean",
    "entropy": "entropy",
    "length": "completions/mean_length",
}
"""Curves of the training, and the key of metrics.jsonl that each is read from."""
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
    """One evaluation: how many of the samples of each problem are right."""

    problems: tuple[str, ...]
    correct: NDArray[np.int64]
    samples: int

    def per_problem(self, k: int) -> NDArray[np.float64]:
        """Unbiased pass@k of each problem."""
        return np.asarray(pass_at_k(self.samples, self.correct, k))

    @property
    def unsolved(self) -> list[str]:
        """Problems without a right answer."""
        return [problem for problem, count in zip(self.problems, self.correct, strict=True) if count == 0]


@dataclass(frozen=True)
class Run:
    """A run of an arm with a seed, read from its folder."""

    folder: Path
    seed: int
    iterations: int

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The training steps' lines of metrics."""
        return [line for line in RunStore(self.folder).metrics() if line.get("kind") == "train"]

    @cached_property
    def evaluations(self) -> dict[float, Scores]:
        """By step, the earliest first. One that lies beyond the last logged step belongs to an interrupted start."""
        last = max((line["step"] for line in self.lines), default=0)
        paths = {
            int(path.stem.removeprefix("step-")): path for path in (self.folder / "evaluations").glob("step-*.json")
        }
        return {
            self.steps(step): read_scores(path.with_suffix(".parquet"))
            for step, path in sorted(paths.items())
            if step <= last
        }

    @cached_property
    def end(self) -> Path:
        """The last evaluation's summary."""
        return self.folder / "evaluations" / f"step-{round(max(self.evaluations) * self.iterations):06d}.json"

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.end.read_text(encoding="utf-8"))

    @property
    def done(self) -> bool:
        """Whether the trained policy has been evaluated."""
        last = self.steps(self.lines[-1]["step"]) if self.lines else None
        return (self.folder / "model").is_dir() and last in self.evaluations

    @property
    def final(self) -> Scores:
        return self.evaluations[max(self.evaluations)]

    def steps(self, updates: int) -> float:
        """Updates as training steps."""
        return updates // self.iterations if updates % self.iterations == 0 else updates / self.iterations

    def curve(self, key: str) -> dict[float, float]:
        """A value of the metrics by step."""
        return {self.steps(line["step"]): line[key] for line in self.lines if line.get(key) is not None}

    def accuracy(self, k: int = 1) -> dict[float, float]:
        """Held-out pass@k by step."""
        return {step: float(scores.per_problem(k).mean()) for step, scores in self.evaluations.items()}


def study_results(folder: str | Path) -> dict[str, Any]:
    """Everything that the report of a study shows."""
    place = Path(folder)
    study = _study(place)
    runs = {arm["name"]: _runs(place, arm, study["seeds"]) for arm in study["arms"]}
    complete = {name: [run for run in found if run.done] for name, found in runs.items()}
    baseline = complete[study["baseline"]]
    some = next((run for found in (baseline, *complete.values()) for run in found), None)
    ks = _ks(some.final.samples) if some else [1]
    measured = {name: _measures(found, ks, study["target"]) for name, found in complete.items()}
    differences = _differences(measured, study["baseline"])
    deviation = _seen_deviation(measured, study["baseline"])
    effect = minimum_detectable_effect(deviation or study["seed_deviation"], len(study["seeds"]))
    main = ["pass@1"] if len(ks) == 1 else ["pass@1", f"pass@{ks[-1]}"]
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
                    main,
                    arms=len(study["arms"]) - 1,
                    seeds=len({run.seed for run in complete[name]} & {run.seed for run in baseline}),
                    failed=len(failed),
                ),
                **_pictures(complete[name], ks),
                "errors": error_breakdown([run.end.with_suffix(".parquet") for run in complete[name]]),
            }
        )
    first = {name: found[0] for name, found in complete.items() if found}
    compared = {name: ones["pass@1"] for name, ones in differences.items() if "pass@1" in ones}
    return {
        "title": study["title"],
        "description": study["description"],
        "task": study["base"]["task"]["name"],
        "model": study["base"]["model"]["name"],
        "baseline": study["baseline"],
        "date": study["created"],
        **_origin(baseline, study["seeds"]),
        "problems": len(some.final.problems) if some else 0,
        "samples": some.final.samples if some else 0,
        "steps": study["base"]["training"]["steps"],
        "target": study["target"],
        "minimum_detectable_effect": effect,
        "seed_deviation_seen": deviation,
        "verdict": study_verdict(compared, "pass@1", study["baseline"], effect, len(study["seeds"])),
        "measures": _measure_list(ks, measured),
        "arms": arms,
        "overlaps": _overlaps(first, study["baseline"], study["seeds"][0]),
        "config": yaml.safe_dump(study["base"], sort_keys=False, allow_unicode=True),
        "rollouts": sampled_rollouts(
            {name: run.folder for name, run in first.items() if run.seed == study["seeds"][0]},
            seed=study["seeds"][0],
            limit=study["base"]["rollout"]["max_tokens"],
            iterations={arm["name"]: arm["config"]["training"]["iterations"] for arm in study["arms"]},
        ),
    }


def results_table(results: Mapping[str, Any]) -> Table:
    """The arms with their scores, and their differences to the baseline; it prints, and can be written."""
    scores = [entry["key"] for entry in results["measures"] if entry["key"].startswith("pass@")]
    columns = ["arm", *scores, *(f"Δ {key}" for key in scores), "p (Holm)", "entropy", "seeds"]
    rows: list[list[Cell]] = []
    for arm in results["arms"]:
        differences = arm["differences"] or {}
        rows.append(
            [
                arm["name"],
                *(_cell(arm["measures"].get(key)) for key in scores),
                *(_cell(differences.get(key)) for key in scores),
                differences.get("pass@1", {}).get("p_corrected"),
                _cell(arm["measures"].get("entropy")),
                f"{len(arm['seeds'])}, {len(arm['failed'])} failed" if arm["failed"] else str(len(arm["seeds"])),
            ]
        )
    shares = {name: "+.1%" if name.startswith("Δ") else ".1%" for name in columns if "pass@" in name}
    return Table(columns, rows, title=results["title"], number={**shares, "p (Holm)": ".3f", "entropy": ".3f"})


def strategy_text(spec: Any) -> str:
    """A strategy of a configuration as people read it: ``egsw(alpha=0.3)``."""
    if isinstance(spec, str):
        return spec
    if "name" in spec:
        name, given = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    else:
        name, given = next(iter(spec.items()))
    return f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})" if given else str(name)


def read_scores(path: Path) -> Scores:
    """The scores in an evaluation's parquet file."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["problem", "correct"]).to_pydict()
    counts: dict[str, list[int]] = {}
    for problem, correct in zip(rows["problem"], rows["correct"], strict=True):
        counts.setdefault(problem, []).append(int(correct))
    samples = {len(marks) for marks in counts.values()}
    if len(samples) != 1:
        raise StoreError(f"{path} has problems with different numbers of samples: {sorted(samples)}")
    return Scores(tuple(counts), np.array([sum(marks) for marks in counts.values()]), samples.pop())


# ---------------------------------------------------------------------------- reading
def _study(folder: Path) -> dict[str, Any]:
    path = folder / "study.json"
    if not path.is_file():
        raise StoreError(f"{folder} holds no study: {path} is missing")
    return json.loads(path.read_text(encoding="utf-8"))


def _runs(folder: Path, arm: Mapping[str, Any], seeds: Sequence[int]) -> list[Run]:
    iterations = arm["config"]["training"]["iterations"]
    return [Run(folder / "arms" / arm["slug"] / f"seed-{seed}", seed, iterations) for seed in seeds]


def _failures(runs: Sequence[Run]) -> dict[str, str]:
    texts = {str(run.seed): run.folder / "error.txt" for run in runs if not run.done}
    return {seed: path.read_text(encoding="utf-8").strip() for seed, path in texts.items() if path.exists()}


def _origin(runs: Sequence[Run], seeds: Sequence[int]) -> dict[str, Any]:
    """Versions, hardware and commit of the baseline's first start; what differs from start to start stays out."""
    path = runs[0].folder / "provenance.json" if runs else None
    first = json.loads(path.read_text(encoding="utf-8"))[0] if path is not None and path.exists() else {}
    kept = ("explorl", "git_commit", "python", "libraries", "platform", "processor", "cores", "threads", "gpus")
    return {
        "commit": first.get("git_commit"),
        "version": first.get("explorl", ""),
        "provenance": {**{key: first[key] for key in kept if key in first}, "seeds": list(seeds)},
    }


# ---------------------------------------------------------------------------- measures
Values = dict[int, Any]
"""By seed: a number, or one number a problem."""


def _measures(runs: Sequence[Run], ks: Sequence[int], target: float | None) -> dict[str, Values]:
    """What each run of an arm scores. A measure that a run lacks is there for no run."""
    found: dict[str, Values] = {}
    for run in runs:
        steps = [*run.evaluations]
        curve = np.stack([scores.per_problem(1) for scores in run.evaluations.values()])
        means = curve.mean(axis=1)
        values: dict[str, Any] = {f"pass@{k}": run.final.per_problem(k) for k in ks}
        values["best pass@1"] = curve[int(means.argmax())]
        values["area"] = area_weights(steps) @ curve
        if target is not None:
            values["steps to target"] = steps_to(steps, means.tolist(), target)
        values["entropy"], values["branching"] = run.summary.get("entropy"), run.summary.get("branching")
        values["seconds"] = sum(line.get("step_time") or 0.0 for line in run.lines)
        values["tokens"] = max((line.get("num_tokens") or 0 for line in run.lines), default=None)
        for key, value in values.items():
            found.setdefault(key, {})[run.seed] = value
    return {key: ones for key, ones in found.items() if not any(value is None for value in ones.values())}


def _estimate(values: Values) -> Estimate | None:
    if not values:
        return None
    stacked = np.stack([np.asarray(value, dtype=np.float64) for value in values.values()])
    return crossed_mean(stacked) if stacked.ndim == 2 else seeds_mean(stacked)


def _interval(values: Values) -> dict[str, float | None]:
    """Mean and interval, which ends at 0, and at 1 where there is a share a problem: no measure is below or above."""
    estimate = _estimate(values)
    if estimate is None:
        return {"mean": None, "low": None, "high": None}
    highest = 1.0 if np.ndim(next(iter(values.values()))) == 1 else np.inf
    low, high = (None if end is None else min(max(end, 0.0), highest) for end in (estimate.low, estimate.high))
    return {"mean": estimate.mean, "low": low, "high": high}


def _differences(measured: Mapping[str, dict[str, Values]], baseline: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Each arm minus the baseline, over the seeds that both have; corrected over the arms, measure by measure."""
    estimates: dict[str, dict[str, Estimate]] = {}
    seeds: dict[str, int] = {}
    for name, own in measured.items():
        if name == baseline:
            continue
        for key, values in own.items():
            other = measured[baseline].get(key, {})
            paired = {seed: value - other[seed] for seed, value in values.items() if seed in other}
            estimate = _estimate(paired)
            seeds[name] = len(paired)
            if estimate is not None:
                estimates.setdefault(key, {})[name] = estimate
    result: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in measured if name != baseline}
    for key, by_arm in estimates.items():
        # of one seed the problems' interval is known, but not whether another training would agree
        p_values = {name: estimate.p if seeds[name] > 1 else None for name, estimate in by_arm.items()}
        corrected = holm(p_values)
        for name, one in by_arm.items():
            result[name][key] = {
                "mean": one.mean, "low": one.low, "high": one.high, "p": p_values[name], "p_corrected": corrected[name],
            }  # fmt: skip
    return result


def _seen_deviation(measured: Mapping[str, dict[str, Values]], baseline: str) -> float | None:
    """Standard deviation between seeds of the difference in pass@1 to the baseline, pooled over the arms."""
    squares, freedom = 0.0, 0
    for name, own in measured.items():
        other = measured[baseline].get("pass@1", {})
        seeds = [seed for seed in own.get("pass@1", {}) if seed in other]
        if name != baseline and len(seeds) > 1:
            means = np.array([float(np.mean(own["pass@1"][seed] - other[seed])) for seed in seeds])
            squares += float(((means - means.mean()) ** 2).sum())
            freedom += len(seeds) - 1
    return float(np.sqrt(squares / freedom)) if squares > 0 else None


def _measure_list(ks: Sequence[int], measured: Mapping[str, dict[str, Values]]) -> list[dict[str, Any]]:
    units = {f"pass@{k}": ("%", True) for k in ks if k in (ks[0], ks[-1])} | dict(UNITS)
    there = {key for own in measured.values() for key in own}
    return [
        {"key": key, "label": LABELS.get(key, key), "unit": unit, "higher_is_better": better}
        for key, (unit, better) in units.items()
        if key in there
    ]


def _ks(samples: int) -> list[int]:
    """1, 2, 4, … up to the number of samples."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


# ---------------------------------------------------------------------------- pictures
def _pictures(runs: Sequence[Run], ks: Sequence[int]) -> dict[str, Any]:
    """Curves, the entropy–accuracy plane, pass@k, unsolvable problems and strategy logs of an arm."""
    curves = {name: _training_curve([run.curve(key) for run in runs]) for name, key in CURVES.items()}
    steps = _shared([run.evaluations for run in runs])
    held_out = [_interval({run.seed: run.evaluations[step].per_problem(1) for run in runs}) for step in steps]
    curves["holdout pass@1"] = {
        "step": steps,
        **{end: [one[end] for one in held_out] for end in ("mean", "low", "high")},
        "band": "95 % interval over seeds and problems",
    }
    logs = sorted({key for run in runs for line in run.lines for key in line if key.startswith("strategy/")})
    plane = {name: dict(zip(curves[name]["step"], curves[name]["mean"], strict=True)) for name in CURVES}
    at = [step for step in plane["entropy"] if step in plane["training accuracy"]]
    by_k = [_interval({run.seed: run.final.per_problem(k) for run in runs}) for k in ks] if runs else []
    return {
        "curves": curves,
        "plane": {
            "step": at,
            "entropy": [plane["entropy"][step] for step in at],
            "accuracy": [plane["training accuracy"][step] for step in at],
        },
        "pass_at_k": {
            "k": list(ks) if runs else [],
            **{end: [one[end] for one in by_k] for end in ("mean", "low", "high")},
        },
        "unsolvable": {str(run.seed): run.final.unsolved for run in runs},
        "strategy_logs": {
            key: {name: _training_curve([run.curve(key) for run in runs])[name] for name in ("step", "mean")}
            for key in logs
        },
    }


def _training_curve(curves: Sequence[Mapping[float, float]]) -> dict[str, Any]:
    """Mean over seeds by step, with the lowest and the highest seed; an interval of so few runs would hide the mean."""
    steps = _shared(curves)
    table = np.array([[curve[step] for step in steps] for curve in curves], dtype=np.float64)
    if not steps:
        return {"step": [], "mean": [], "low": [], "high": [], "band": "range of the seeds"}
    return {
        "step": steps,
        "mean": table.mean(axis=0).tolist(),
        "low": table.min(axis=0).tolist(),
        "high": table.max(axis=0).tolist(),
        "band": "range of the seeds",
    }


def _shared(curves: Sequence[Mapping[float, Any]]) -> list[float]:
    """The steps that all runs have: with a budget of tokens or minutes some end earlier."""
    return [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []


def _overlaps(first: Mapping[str, Run], baseline: str, seed: int) -> list[dict[str, Any]]:
    """Sizes of the exclusive regions of the unsolvable sets of one seed, the starting policy's among them."""
    runs = {name: run for name, run in first.items() if run.seed == seed}
    sets = {name: run.final.unsolved for name, run in runs.items()}
    if baseline in runs and 0 in runs[baseline].evaluations and "start" not in sets:
        sets = {"start": runs[baseline].evaluations[0].unsolved, **sets}
    order = list(sets)
    return [{"arms": sorted(names, key=order.index), "count": count} for names, count in upset_counts(sets).items()]


def _cell(values: Mapping[str, Any] | None) -> Cell:
    if not values or values.get("mean") is None:
        return None
    if values.get("low") is None or values.get("high") is None:
        return float(values["mean"])
    return Interval(values["mean"], values["low"], values["high"])
