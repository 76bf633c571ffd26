"""The sections of a study's page: tables, and figures with the numbers behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from explorl.analysis.charts import Chart, PanelChart, smoothing_window
from explorl.report.figures import page_svg
from explorl.report.study_figures import (
    MANY,
    PANEL,
    Bar,
    LineStyle,
    Series,
    bars,
    bars_size,
    frame_of,
    labelled_lines,
    lines,
    plane,
    regions,
    regions_size,
)
from explorl.report.study_numbers import (
    NOTHING,
    difference_mark,
    finite_or_none,
    format_interval,
    format_number,
    format_with_unit,
    scaled,
    with_minus_sign,
)

CURVE_UNITS = {"training accuracy": "%", "holdout pass@1": "%", "entropy": "nats", "length": "tokens"}
MAX_PANELS = 3
"""Values of k whose pass@k over training is drawn, including the first and the last."""
MAX_REGIONS = 16
"""Regions of the unsolvable sets that are drawn; the table has the smaller ones too."""

CLIPPED_BANDS = " Some bands are cut off at the frame; the table of numbers has their ends."

Arm = Mapping[str, Any]


@dataclass(frozen=True)
class NumberTable:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure with its title, caption and the numbers behind it."""

    title: str
    caption: str
    svg: str
    numbers: NumberTable
    arms: Sequence[str] = field(default_factory=list)
    """The arms in the legend."""

    @classmethod
    def of(cls, chart: Chart, numbers: NumberTable, arms: Sequence[str] = ()) -> Picture:
        """Return the picture of a chart."""
        return cls(chart.title, chart.caption, page_svg(chart, chart.name), numbers, list(arms))


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary table: a cell per arm and measure with its interval and its difference to the baseline."""
    measures = [
        {
            "key": measure["key"],
            "label": measure.get("label") or measure["key"],
            "unit": measure.get("unit") or "",
            "shown_unit": "" if _label_has_unit(measure) else measure.get("unit") or "",
            "better": {True: "more is better", False: "less is better"}.get(measure.get("higher_is_better"), ""),
        }
        for measure in results.get("measures") or []
    ]
    wanted = {measure["key"]: measure.get("higher_is_better") for measure in results.get("measures") or []}
    rows = []
    for arm in (*_start_row(results), *(results.get("arms") or [])):
        values, differences = arm.get("measures") or {}, arm.get("differences") or {}
        cells = []
        for measure in measures:
            key, unit = measure["key"], measure["unit"]
            value, difference = values.get(key) or {}, differences.get(key)
            cells.append(
                {
                    "label": measure["label"],
                    "unit": measure["shown_unit"],
                    "mean": format_number(value.get("mean"), unit),
                    "interval": " ".join(filter(None, [format_interval(value, unit), value.get("note")])),
                    "difference": format_number(difference.get("mean"), unit, signed=True) if difference else "",
                    "difference_interval": " ".join(
                        filter(None, [format_interval(difference, unit, signed=True), (difference or {}).get("note")])
                    ),
                    "mark": difference_mark(difference, wanted[key]),
                }
            )
        seeds, failed = arm.get("seeds") or [], arm.get("failed") or {}
        rows.append(
            {
                "name": arm["name"],
                "strategies": arm.get("subtitle")
                or ", ".join(map(_text, arm.get("strategies") or []))
                or ("no strategy" if arm.get("strategies") is not None else ""),
                "seeds": f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}" if arm.get("seeds") is not None else "",
                "failed": [(seed, *_last_line(error)) for seed, error in failed.items()],
                "baseline": arm["name"] == results.get("baseline"),
                "verdict": arm.get("verdict") or "",
                "cells": cells,
            }
        )
    return {"measures": measures, "rows": rows, "differences": _differences(results, measures)}


def _start_row(results: Mapping[str, Any]) -> list[Arm]:
    """Return the policy before training in the form of an arm, if it was evaluated."""
    start = results.get("start")
    return [{**start, "name": "start", "subtitle": "before training"}] if start and _has_start(results) else []


def _has_start(results: Mapping[str, Any]) -> bool:
    return bool(results.get("start")) and all(arm["name"] != "start" for arm in results.get("arms") or [])


def _last_line(error: Any) -> tuple[str, str]:
    """Return the last line of an error, and the whole text if it has more lines."""
    text = str(error or "no message").strip()
    last = text.splitlines()[-1] if text else ""
    return last, text if text != last else ""


def _label_has_unit(measure: Mapping[str, Any]) -> bool:
    """Check whether a measure's label already names its unit, as "steps to target" does."""
    return (measure.get("unit") or "") in (measure.get("label") or measure["key"]).split()


def _differences(results: Mapping[str, Any], measures: Sequence[Mapping[str, str]]) -> NumberTable:
    rows = []
    for arm in results.get("arms") or []:
        for measure in measures:
            difference = (arm.get("differences") or {}).get(measure["key"])
            if difference:
                unit = measure["unit"]
                name = measure["label"] + (f" ({_points(unit)})" if unit else "")
                ends = (format_number(difference.get(end), unit, signed=True) for end in ("mean", "low", "high"))
                rows.append([arm["name"], name, *ends, _p(difference.get("p")), _p(difference.get("p_corrected"))])
    return NumberTable(["arm", "measure", "difference", "low", "high", "p", "corrected p"], rows)


def _points(unit: str) -> str:
    return "points" if unit == "%" else unit


def _p(value: Any) -> str:
    p = finite_or_none(value)
    return NOTHING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def learning_curves(arms: Sequence[Arm], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return a picture for each curve that any arm has, in the order of `CURVE_UNITS`."""
    has_section = any(arm.get("over_training") for arm in arms)  # held-out pass@1 then has its own section
    recorded = {
        name: None for arm in arms for name in arm.get("curves") or {} if not (has_section and name == "holdout pass@1")
    }
    names = [name for name in CURVE_UNITS if name in recorded] + [name for name in recorded if name not in CURVE_UNITS]
    pictures = []
    for index, name in enumerate(names):
        unit = CURVE_UNITS.get(name, "%" if "pass@" in name or "accuracy" in name else "")
        curves = {arm["name"]: ((arm.get("curves") or {}).get(name) or {}) for arm in arms}
        pictures += _curves(curves, styles, f"curve{index}", _capitalize(name), name, unit)
    return pictures


def strategy_logs(arms: Sequence[Arm], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return a picture for each number that a strategy logged."""
    names = list({name: None for arm in arms for name in arm.get("strategy_logs") or {}})
    pictures = []
    for index, name in enumerate(names):
        curves = {arm["name"]: ((arm.get("strategy_logs") or {}).get(name) or {}) for arm in arms}
        parts = name.removeprefix("strategy/").split("/")
        label = parts[-1].replace("_", " ")
        pictures += _curves(curves, styles, f"log{index}", " · ".join([*parts[:-1], label]), label, "")
    return pictures


def pass_at_k(results: Mapping[str, Any], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return the pictures of pass@k by k, before training and at the end, and of its change by training."""
    arms: Sequence[Arm] = results.get("arms") or []
    curves = {}
    for arm in (*_start_row(results), *arms):
        curve = arm.get("pass_at_k") or {}
        band = (curve.get("band") or "95 % interval") if curve.get("low") else None
        curves[arm["name"]] = {**curve, "step": curve.get("k"), "band": band}
    pictures = _curves(curves, styles, "passk", "pass@k on the holdout", "pass@k", "%", x="k")
    return pictures + gains(arms, styles)


def gains(arms: Sequence[Arm], styles: Mapping[str, LineStyle], *, named: bool = False) -> list[Picture]:
    """Return the picture of the change in pass@k by training; below zero, problems were lost."""
    series = {
        arm["name"]: _series({**arm["gain"], "step": arm["gain"]["k"]}, "%")
        for arm in arms
        if (arm.get("gain") or {}).get("k")
    }
    series = {name: curve for name, curve in series.items() if any(value is not None for value in curve.mean)}
    if not series:
        return []
    changes_in_words = []
    for name, curve in series.items():
        ends = [(k, value) for k, value in zip(curve.x, curve.mean, strict=False) if value is not None]
        words = (
            f"{with_minus_sign(f'{value:+.1f}')} points at k = {k:g}" for k, value in dict.fromkeys((ends[0], ends[-1]))
        )
        changes_in_words.append(f"{name} {' and '.join(words)}")
    label = f"Change from before training to the end: {'; '.join(changes_in_words)}."
    bands = sorted({arm["gain"]["band"] for arm in arms if arm["name"] in series and arm["gain"].get("band")})
    caption = f"{label} Below zero, training lost problems that the policy could solve before."
    caption += "".join(f" Band: {band}, paired." for band in bands)
    if frame_of(series.values()) is not None:
        caption += CLIPPED_BANDS
    curves = lines(series, styles, zero=True, powers_of_two=True, named=named)
    chart = Chart("gain", "Change in pass@k by training", caption, [curves], "k", "change in pass@k (points)")
    return [Picture.of(chart, _curve_numbers(series, "%", "k", signed=True), [*series])]


def over_training(arms: Sequence[Arm], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return the pictures of held-out pass@k by step, for several values of k."""
    ks = sorted({int(k) for arm in arms for k in arm.get("over_training") or {}})
    if not any(
        len((curve or {}).get("step") or []) > 1 for arm in arms for curve in (arm.get("over_training") or {}).values()
    ):
        return []
    if len(arms) == 1:
        return _all_ks(arms[0], ks)
    panel_ks = [ks[round(index * (len(ks) - 1) / (MAX_PANELS - 1))] for index in range(MAX_PANELS)]
    pictures = []
    for k in dict.fromkeys(panel_ks):
        curves = {arm["name"]: (arm.get("over_training") or {}).get(str(k)) or {} for arm in arms}
        pictures += _curves(
            curves, styles, f"over{k}", f"pass@{k} over training", f"held-out pass@{k}", "%", smooth=False
        )
    return pictures


def _all_ks(arm: Arm, ks: Sequence[int]) -> list[Picture]:
    """Return the picture of one arm, with a line for each k."""
    series = {f"pass@{k}": _series(arm["over_training"][str(k)], "%") for k in ks}
    ends = [f"pass@{ks[0]}"] if len(ks) == 1 else [f"pass@{ks[0]}", f"pass@{ks[-1]}"]
    changes_in_words = []
    for name in ends:
        values = [value for value in series[name].mean if value is not None]
        changes_in_words.append(f"{name} goes from {values[0]:.1f} to {values[-1]:.1f} %")
    label = f"pass@k over training: {', '.join(changes_in_words)}."
    band = arm["over_training"][str(ks[0])].get("band")
    caption = label + (f" Band: {band}." if band else "")
    chart = Chart(
        "over", "pass@k over training", caption, [labelled_lines(series)], "training step", "held-out pass@k (%)"
    )
    return [Picture.of(chart, _curve_numbers(series, "%", "step"))]


def _series(curve: Mapping[str, Any], unit: str) -> Series:
    ends = [[scaled(value, unit) for value in curve.get(key) or []] for key in ("mean", "low", "high")]
    steps = [finite_or_none(value) for value in curve.get("step") or []][: len(ends[0])]
    return Series(steps, ends[0][: len(steps)], ends[1], ends[2])


def _curves(
    curves: Mapping[str, Mapping[str, Any]],
    styles: Mapping[str, LineStyle],
    identifier: str,
    title: str,
    y: str,
    unit: str,
    x: str = "step",
    smooth: bool = True,
) -> list[Picture]:
    measured = {name: _series(curve, unit) for name, curve in curves.items()}
    measured = {name: curve for name, curve in measured.items() if any(value is not None for value in curve.mean)}
    if not measured:
        return []
    window = max(smoothing_window(len(curve.x)) for curve in measured.values()) if smooth and x == "step" else 1
    series = {name: (curve.smoothed() if window > 1 else curve).thinned() for name, curve in measured.items()}
    label = _describe_ends(title, series, unit, x)
    bands = {curve["band"] for name, curve in curves.items() if name in series and curve.get("band")}
    caption = label
    if window > 1:
        caption += f" Lines: running means over up to {window} steps; faint points: the steps, a marker at the last."
    caption += "".join(f" Band: {band}." for band in sorted(bands))
    if bands and frame_of(series.values()) is not None:
        caption += CLIPPED_BANDS
    if bands and len(series) > MANY:
        caption += " Choose an arm in the legend to see its band."
    axes = "training step" if x == "step" else x, f"{y} ({unit})" if unit else y
    chart = Chart(identifier, title, caption, [lines(series, styles, powers_of_two=x == "k")], *axes)
    return [Picture.of(chart, _curve_numbers(series, unit, x), [*series])]


def _describe_ends(title: str, series: Mapping[str, Series], unit: str, x: str) -> str:
    """Return a sentence on which curves end highest and lowest."""
    last = {
        name: next(v for v in reversed(curve.mean) if v is not None) / (100 if unit == "%" else 1)
        for name, curve in series.items()
    }
    best, worst = max(last, key=lambda name: last[name]), min(last, key=lambda name: last[name])
    end = max(value for curve in series.values() for value in curve.x if value is not None)
    at = f"at {x} {end:g}" if x == "step" else f"at {x} = {end:g}"
    if len(last) == 1:
        return f"{title}: {format_with_unit(last[best], unit)} {at} ({best})."
    if last[best] == last[worst]:
        return f"{title}: all arms end at {format_with_unit(last[best], unit)} {at}."
    return (
        f"{title}: {at}, {best} is highest with {format_with_unit(last[best], unit)} and {worst} lowest with "
        f"{format_with_unit(last[worst], unit)}."
    )


def _curve_numbers(series: Mapping[str, Series], unit: str, x: str, *, signed: bool = False) -> NumberTable:
    """Return the measured values of curves as a table."""
    unit_name = "points" if signed else unit
    positions = sorted({value for curve in series.values() for value in curve.x if value is not None})
    columns = [x, *(f"{name} ({unit_name})" if unit else name for name in series)]
    index_at = {
        name: {position: index for index, position in enumerate(curve.x) if position is not None}
        for name, curve in series.items()
    }
    rows = []
    for position in positions:
        row = [f"{position:g}"]
        for name, curve in series.items():
            index = index_at[name].get(position)
            if index is None:
                row.append(NOTHING)
                continue
            share = 100 if unit == "%" else 1
            mean, low, high = (
                None if index >= len(values) or values[index] is None else values[index] / share  # type: ignore[operator]
                for values in (curve.raw or curve.mean, () if curve.raw else curve.low, () if curve.raw else curve.high)
            )
            span = format_interval({"low": low, "high": high}, unit, signed=signed)
            row.append(f"{format_number(mean, unit, signed=signed)} {span}".strip())
        rows.append(row)
    return NumberTable(columns, rows)


def entropy_plane(results: Mapping[str, Any], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return the picture of each arm's path through entropy and accuracy.

    The path is that of held-out completions if they were scored several times, otherwise of training completions.
    """
    arms: Sequence[Arm] = results.get("arms") or []
    measured = any(len((arm.get("held_out_plane") or {}).get("step") or []) > 1 for arm in arms)
    start = _start_point(results) if measured else None
    paths: dict[str, tuple[list[float | None], list[float | None]]] = {}
    rows: list[list[str]] = []
    paths_in_words = []
    for arm in arms:
        path = arm.get("held_out_plane" if measured else "plane") or {}
        pairs = zip(path.get("entropy") or [], path.get("accuracy") or [], strict=False)
        steps = path.get("step") or []
        points = {
            steps[index] if index < len(steps) else index + 1: (finite_or_none(entropy), finite_or_none(accuracy))
            for index, (entropy, accuracy) in enumerate(pairs)
        }
        points = {step: point for step, point in points.items() if None not in point}
        if not points:
            continue
        paths[arm["name"]] = ([a for a, _ in points.values()], [scaled(b, "%") for _, b in points.values()])
        rows += [
            [arm["name"], str(step), format_number(a, "nats"), format_number(b, "%")] for step, (a, b) in points.items()
        ]
        first, last = next(iter(points.values())), next(reversed(points.values()))
        paths_in_words.append(
            f"{arm['name']} goes from {format_number(first[0], 'nats')} to {format_number(last[0], 'nats')} nats and "
            f"from {format_number(first[1], '%')} to {format_number(last[1], '%')} %"
        )
    if not paths:
        return []
    since = "before training" if start else "the first step"
    label = f"Entropy and accuracy from {since} to the end: " + "; ".join(paths_in_words) + "."
    axes = (
        ("entropy of held-out completions (nats)", "held-out pass@1 (%)")
        if measured
        else ("entropy (nats)", "training accuracy (%)")
    )
    start_mark = "The cross is the start" if start else "An open circle is the start"
    line_mark = "a dot is an evaluation" if measured else "the lines are running means"
    caption = f"{label} {start_mark}, {line_mark}, a large marker is the end."
    numbers = NumberTable(["arm", "step", "entropy (nats)", "accuracy (%)"], _subsample(rows, 600))
    arm_paths = plane(paths, styles, start=start, measured=measured)
    chart = Chart("plane", "Entropy and accuracy", caption, [arm_paths], *axes, size=(PANEL[0], 3.6))
    return [Picture.of(chart, numbers, [*(["start"] if start else []), *paths])]


def _start_point(results: Mapping[str, Any]) -> tuple[float, float] | None:
    if not _has_start(results):
        return None
    path = results["start"].get("held_out_plane") or {}
    entropy, accuracy = (finite_or_none((path.get(key) or [None])[0]) for key in ("entropy", "accuracy"))
    return None if entropy is None or accuracy is None else (entropy, 100 * accuracy)


def _subsample(rows: list[list[str]], count: int) -> list[list[str]]:
    return rows[:: -(-len(rows) // count)] if rows else rows


def unsolvable(results: Mapping[str, Any], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return the picture of the problems that no sample solved, by the arms that share them."""
    overlaps = [
        (list(region.get("arms") or []), int(region.get("count") or 0)) for region in results.get("overlaps") or []
    ]
    overlaps = sorted((region for region in overlaps if region[1]), key=lambda region: -region[1])
    if not overlaps:
        return []
    in_overlaps = {name for members, _ in overlaps for name in members}
    names = [name for name in styles if name in in_overlaps]
    unsolved_by_all = sum(count for members, count in overlaps if set(names) == set(members))
    members, count = overlaps[0]
    label = (
        f"Unsolved problems: {unsolved_by_all} by all {len(names)} policies; the largest region, {count}, belongs to "
        f"{_join_names(members)}."
    )
    largest = overlaps[:MAX_REGIONS]
    seeds = max((len(arm.get("unsolvable") or {}) for arm in results.get("arms") or []), default=0)
    caption = label + " Each row counts the problems that exactly the marked policies leave unsolved"
    caption += ", in the first seed." if seeds > 1 else "."
    if len(overlaps) > MAX_REGIONS:
        caption += f" The {len(overlaps) - MAX_REGIONS} smaller regions are in the table."
    numbers = NumberTable(["left unsolved by exactly", "problems"], [[_join_names(m), str(c)] for m, c in overlaps])
    drawn = [([name for name in members if name in styles], count) for members, count in largest]
    panels = regions(drawn, names, styles, "problems unsolved in all samples")
    title, size = "Overlap of the unsolvable sets", regions_size(len(largest))
    chart = PanelChart("overlaps", title, caption, (), size=size, panels=panels)
    return [Picture.of(chart, numbers, names)]


def unsolvable_counts(arms: Sequence[Arm]) -> NumberTable:
    """Return how many problems each arm leaves unsolved, by seed; no rows if there is only one seed."""
    seeds = sorted({str(seed) for arm in arms for seed in arm.get("unsolvable") or {}}, key=lambda s: (len(s), s))
    rows = []
    for arm in arms:
        sets = {str(seed): ids for seed, ids in (arm.get("unsolvable") or {}).items()}
        if sets:
            counts = [str(len(sets[seed])) if sets.get(seed) is not None else NOTHING for seed in seeds]
            rows.append([arm["name"], *counts])
    return NumberTable(["arm", *(f"seed {seed}" for seed in seeds)], rows if len(seeds) > 1 else [])


def errors(arms: Sequence[Arm], styles: Mapping[str, LineStyle]) -> list[Picture]:
    """Return the pictures of correct and wrong completions by kind of problem, and of wrong ones by kind of error."""
    kinds = list({kind: None for arm in arms for kind in arm.get("errors") or {}})
    pictures = []
    for index, kind in enumerate(kinds):
        tables = {arm["name"]: ((arm.get("errors") or {}).get(kind) or {}) for arm in arms}
        tables = {name: table for name, table in tables.items() if table}
        if not tables:
            continue
        split = any(isinstance(value, Mapping) for table in tables.values() for value in table.values())
        picture = _correct_and_wrong if split else _wrong
        pictures.append(picture(kind, tables, styles, f"errors{index}"))
    return pictures


def _correct_and_wrong(
    kind: str, tables: Mapping[str, Mapping[str, Any]], styles: Mapping[str, LineStyle], identifier: str
) -> Picture:
    groups: dict[str, list[Bar]] = {}
    rows, shares = [], {}
    kind_name = kind.removeprefix("by ")
    for group in {group: None for table in tables.values() for group in table}:
        title = f"{group} {kind_name}" if kind_name == "operands" else group
        for name, table in tables.items():
            cell = table.get(group) or {}
            correct, wrong = int(cell.get("correct") or 0), int(cell.get("wrong") or 0)
            if correct + wrong:
                shares[title, name] = correct / (correct + wrong)
                bar = Bar(
                    name, (100 * correct / (correct + wrong), 100 * wrong / (correct + wrong)), str(correct + wrong)
                )
                groups.setdefault(title, []).append(bar)
                rows.append([title, name, str(correct), str(wrong), format_number(shares[title, name], "%")])
    lowest = min(shares, key=lambda key: shares[key], default=None)
    label = f"Completions {kind}: " + (
        f"the lowest share of correct ones is {format_with_unit(shares[lowest], '%')}, for {lowest[0]} with "
        f"{lowest[1]}."
        if lowest
        else "none."
    )
    caption = label + " Plain is correct, hatched is wrong; the number beside a bar counts its completions."
    numbers = NumberTable([kind_name, "arm", "correct", "wrong", "correct (%)"], rows)
    title, x, size = _capitalize(f"completions {kind}"), "share of completions (%)", bars_size(groups)
    chart = Chart(identifier, title, caption, [bars(groups, styles)], x, size=size, grid="x")
    return Picture.of(chart, numbers, [*tables])


def _wrong(
    kind: str, tables: Mapping[str, Mapping[str, Any]], styles: Mapping[str, LineStyle], identifier: str
) -> Picture:
    groups: dict[str, list[Bar]] = {}
    rows = []
    totals = {name: sum(finite_or_none(count) or 0 for count in table.values()) for name, table in tables.items()}
    sums = {
        group: sum(finite_or_none(t.get(group)) or 0 for t in tables.values())
        for table in tables.values()
        for group in table
    }
    for group in sorted(sums, key=lambda group: -sums[group]):
        for name, table in tables.items():
            count = finite_or_none(table.get(group)) or 0
            share = count / totals[name] if totals[name] else 0.0
            groups.setdefault(group, []).append(Bar(name, (0.0, 100 * share), f"{count:g}"))
            rows.append([group, name, f"{count:g}", format_number(share, "%")])
    most_frequent = max(sums, key=lambda group: sums[group])
    label = (
        f"Wrong completions {kind}: the most frequent is “{most_frequent}”, {sums[most_frequent]:g} of "
        f"{sum(sums.values()):g}."
    )
    numbers = NumberTable([kind.removeprefix("by "), "arm", "completions", "share of wrong (%)"], rows)
    title, x, size = (
        _capitalize(f"wrong completions {kind}"),
        "share of the arm's wrong completions (%)",
        bars_size(groups),
    )
    chart = Chart(identifier, title, label, [bars(groups, styles)], x, size=size, grid="x")
    return Picture.of(chart, numbers, [*tables])


def changes(arms: Sequence[Arm]) -> NumberTable:
    """Return what each arm changes in the base configuration; a dot is the base's value."""
    keys = list({key: None for arm in arms for key in arm.get("changes") or {}})
    rows = [["strategies", *(", ".join(map(_text, arm.get("strategies") or [])) or "·" for arm in arms)]]
    for key in keys:
        if key != "strategies":
            rows.append([key, *(_text((arm.get("changes") or {}).get(key, "·")) for arm in arms)])
    return NumberTable(["setting", *(arm["name"] for arm in arms)], rows)


def provenance(value: Any) -> NumberTable:
    """Return nested facts as rows of a dotted name and a value."""
    rows: list[list[str]] = []

    def walk(prefix: str, node: Any) -> None:
        if isinstance(node, Mapping) and node:
            for key, child in node.items():
                walk(f"{prefix}.{key}" if prefix else str(key), child)
        elif isinstance(node, list) and any(isinstance(child, Mapping | list) for child in node):
            for index, child in enumerate(node):
                walk(f"{prefix}.{index}" if prefix else str(index), child)
        else:
            rows.append([prefix, _text(node)])

    if value:
        walk("", value)
    return NumberTable(["fact", "value"], rows)


def _text(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value).replace("-", "−")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _capitalize(text: str) -> str:
    return text if text.startswith("pass@") else text[:1].upper() + text[1:]


def _join_names(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names) or "no policy"
    return ", ".join(names[:-1]) + " and " + names[-1]
