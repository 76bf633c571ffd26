"""The sections of a study's page: its results turned into tables, and into figures with the numbers behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from explorl.report.study_figures import MANY, Bar, Look, Series, bars, lines, plane, regions
from explorl.report.study_numbers import NOTHING, finite, interval, mark, scaled, spoken, written

CURVE_UNITS = {"training accuracy": "%", "holdout pass@1": "%", "entropy": "nats", "length": "tokens"}
REGIONS = 16
"""Regions of the unsolvable sets that are drawn; the smaller ones are in the table."""

Arm = Mapping[str, Any]


@dataclass(frozen=True)
class Numbers:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure, what it is called, what to see in it, and the numbers behind it."""

    title: str
    caption: str
    svg: str
    numbers: Numbers
    arms: Sequence[str] = field(default=())
    """Whose looks the legend must explain."""


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Arms × measures, each with its interval, its difference to the baseline and the mark of the difference."""
    measures = [
        {
            "key": measure["key"],
            "label": measure.get("label") or measure["key"],
            "unit": measure.get("unit") or "",
            "shown_unit": "" if _says(measure) else measure.get("unit") or "",
            "better": {True: "more is better", False: "less is better"}.get(measure.get("higher_is_better"), ""),
        }
        for measure in results.get("measures") or []
    ]
    wanted = {measure["key"]: measure.get("higher_is_better") for measure in results.get("measures") or []}
    rows = []
    for arm in results.get("arms") or []:
        values, differences = arm.get("measures") or {}, arm.get("differences") or {}
        cells = []
        for measure in measures:
            key, unit = measure["key"], measure["unit"]
            value, difference = values.get(key) or {}, differences.get(key)
            cells.append(
                {
                    "label": measure["label"],
                    "unit": measure["shown_unit"],
                    "mean": written(value.get("mean"), unit),
                    "interval": interval(value, unit),
                    "difference": written(difference.get("mean"), unit, signed=True) if difference else "",
                    "difference_interval": interval(difference, unit, signed=True),
                    "mark": mark(difference, wanted[key]),
                }
            )
        seeds, failed = arm.get("seeds") or [], arm.get("failed") or {}
        rows.append(
            {
                "name": arm["name"],
                "strategies": ", ".join(map(_text, arm.get("strategies") or [])) or "no strategy",
                "seeds": f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'}",
                "failed": [(seed, *_last_line(error)) for seed, error in failed.items()],
                "baseline": arm["name"] == results.get("baseline"),
                "verdict": arm.get("verdict") or "",
                "cells": cells,
            }
        )
    return {"measures": measures, "rows": rows, "differences": _differences(results, measures)}


def _last_line(error: Any) -> tuple[str, str]:
    """What an error says in the end, and the whole of it where that is more."""
    text = str(error or "no message").strip()
    last = text.splitlines()[-1] if text else ""
    return last, text if text != last else ""


def _says(measure: Mapping[str, Any]) -> bool:
    """Whether a measure's label already names its unit, as "steps to target" does."""
    return (measure.get("unit") or "") in (measure.get("label") or measure["key"]).split()


def _differences(results: Mapping[str, Any], measures: Sequence[Mapping[str, str]]) -> Numbers:
    rows = []
    for arm in results.get("arms") or []:
        for measure in measures:
            difference = (arm.get("differences") or {}).get(measure["key"])
            if difference:
                unit = measure["unit"]
                name = measure["label"] + (f" ({_points(unit)})" if unit else "")
                ends = (written(difference.get(end), unit, signed=True) for end in ("mean", "low", "high"))
                rows.append([arm["name"], name, *ends, _p(difference.get("p")), _p(difference.get("p_corrected"))])
    return Numbers(["arm", "measure", "difference", "low", "high", "p", "corrected p"], rows)


def _points(unit: str) -> str:
    return "points" if unit == "%" else unit


def _p(value: Any) -> str:
    p = finite(value)
    return NOTHING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def learning_curves(arms: Sequence[Arm], looks: Mapping[str, Look]) -> list[Picture]:
    """A picture for each curve that any arm has, in the order of `CURVE_UNITS`."""
    recorded = {name: None for arm in arms for name in arm.get("curves") or {}}
    names = [name for name in CURVE_UNITS if name in recorded] + [name for name in recorded if name not in CURVE_UNITS]
    pictures = []
    for index, name in enumerate(names):
        unit = CURVE_UNITS.get(name, "%" if "pass@" in name or "accuracy" in name else "")
        curves = {arm["name"]: ((arm.get("curves") or {}).get(name) or {}) for arm in arms}
        pictures += _curves(curves, looks, f"curve{index}", _capital(name), name, unit)
    return pictures


def strategy_logs(arms: Sequence[Arm], looks: Mapping[str, Look]) -> list[Picture]:
    """A picture for each number that a strategy logged."""
    names = list({name: None for arm in arms for name in arm.get("strategy_logs") or {}})
    pictures = []
    for index, name in enumerate(names):
        curves = {arm["name"]: ((arm.get("strategy_logs") or {}).get(name) or {}) for arm in arms}
        parts = name.removeprefix("strategy/").split("/")
        what = parts[-1].replace("_", " ")
        pictures += _curves(curves, looks, f"log{index}", " · ".join([*parts[:-1], what]), what, "")
    return pictures


def pass_at_k(arms: Sequence[Arm], looks: Mapping[str, Look]) -> list[Picture]:
    """pass@k by k."""
    curves = {}
    for arm in arms:
        curve = arm.get("pass_at_k") or {}
        band = "95 % interval over seeds and problems" if curve.get("low") else None
        curves[arm["name"]] = {**curve, "step": curve.get("k"), "band": band}
    return _curves(curves, looks, "passk", "pass@k on the holdout", "pass@k", "%", x="k")


def _curves(
    curves: Mapping[str, Mapping[str, Any]],
    looks: Mapping[str, Look],
    identifier: str,
    title: str,
    y: str,
    unit: str,
    x: str = "step",
) -> list[Picture]:
    series = {}
    for name, curve in curves.items():
        ends = [[scaled(value, unit) for value in curve.get(key) or []] for key in ("mean", "low", "high")]
        places = [finite(value) for value in curve.get("step") or []][: len(ends[0])]
        if any(value is not None for value in ends[0][: len(places)]):
            series[name] = Series(places, ends[0][: len(places)], ends[1], ends[2]).thinned()
    if not series:
        return []
    label = _ends(title, series, unit, x)
    svg = lines(
        series,
        looks,
        identifier=identifier,
        label=label,
        x="training step" if x == "step" else x,
        y=f"{y} ({unit})" if unit else y,
        powers_of_two=x == "k",
    )
    bands = {curve["band"] for name, curve in curves.items() if name in series and curve.get("band")}
    caption = label + "".join(f" Band: {band}." for band in sorted(bands))
    if bands and len(series) > MANY:
        caption += " Choose an arm in the legend to see its band."
    return [Picture(title, caption, svg, _curve_numbers(series, unit, x), list(series))]


def _ends(title: str, series: Mapping[str, Series], unit: str, x: str) -> str:
    """The main finding of curves: who ends highest and who lowest."""
    last = {
        name: next(v for v in reversed(curve.mean) if v is not None) / (100 if unit == "%" else 1)
        for name, curve in series.items()
    }
    best, worst = max(last, key=lambda name: last[name]), min(last, key=lambda name: last[name])
    place = max(place for curve in series.values() for place in curve.x if place is not None)
    at = f"at {x} {place:g}" if x == "step" else f"at {x} = {place:g}"
    if len(last) == 1:
        return f"{title}: {spoken(last[best], unit)} {at} ({best})."
    if last[best] == last[worst]:
        return f"{title}: all arms end at {spoken(last[best], unit)} {at}."
    return (
        f"{title}: {at}, {best} is highest with {spoken(last[best], unit)} and {worst} lowest with "
        f"{spoken(last[worst], unit)}."
    )


def _curve_numbers(series: Mapping[str, Series], unit: str, x: str) -> Numbers:
    places = sorted({place for curve in series.values() for place in curve.x if place is not None})
    columns = [x, *(f"{name} ({unit})" if unit else name for name in series)]
    by_place = {
        name: {place: index for index, place in enumerate(curve.x) if place is not None}
        for name, curve in series.items()
    }
    rows = []
    for place in places:
        row = [f"{place:g}"]
        for name, curve in series.items():
            index = by_place[name].get(place)
            if index is None:
                row.append(NOTHING)
                continue
            share = 100 if unit == "%" else 1
            mean, low, high = (
                None if index >= len(values) or values[index] is None else values[index] / share  # type: ignore[operator]
                for values in (curve.mean, curve.low, curve.high)
            )
            row.append(f"{written(mean, unit)} {interval({'low': low, 'high': high}, unit)}".strip())
        rows.append(row)
    return Numbers(columns, rows)


def entropy_plane(arms: Sequence[Arm], looks: Mapping[str, Look]) -> list[Picture]:
    """The way of each arm through entropy and accuracy."""
    paths: dict[str, tuple[list[float | None], list[float | None]]] = {}
    rows: list[list[str]] = []
    ways = []
    for arm in arms:
        path = arm.get("plane") or {}
        pairs = zip(path.get("entropy") or [], path.get("accuracy") or [], strict=False)
        steps = path.get("step") or []
        points = {
            steps[index] if index < len(steps) else index + 1: (finite(entropy), finite(accuracy))
            for index, (entropy, accuracy) in enumerate(pairs)
        }
        points = {step: point for step, point in points.items() if None not in point}
        if not points:
            continue
        paths[arm["name"]] = ([a for a, _ in points.values()], [scaled(b, "%") for _, b in points.values()])
        rows += [[arm["name"], str(step), written(a, "nats"), written(b, "%")] for step, (a, b) in points.items()]
        first, last = next(iter(points.values())), next(reversed(points.values()))
        ways.append(
            f"{arm['name']} goes from {written(first[0], 'nats')} to {written(last[0], 'nats')} nats and from "
            f"{written(first[1], '%')} to {written(last[1], '%')} %"
        )
    if not paths:
        return []
    label = "Entropy and accuracy from the first step to the last: " + "; ".join(ways) + "."
    svg = plane(paths, looks, identifier="plane", label=label, x="entropy (nats)", y="training accuracy (%)")
    caption = label + " The lines are running means; an open circle is the beginning, the large marker the end."
    numbers = Numbers(["arm", "step", "entropy (nats)", "accuracy (%)"], _at_most(rows, 600))
    return [Picture("Entropy and accuracy", caption, svg, numbers, list(paths))]


def _at_most(rows: list[list[str]], count: int) -> list[list[str]]:
    return rows[:: -(-len(rows) // count)] if rows else rows


def unsolvable(results: Mapping[str, Any], looks: Mapping[str, Look]) -> list[Picture]:
    """Problems that no sample solved: which arms share them."""
    overlaps = [
        (list(region.get("arms") or []), int(region.get("count") or 0)) for region in results.get("overlaps") or []
    ]
    overlaps = sorted((region for region in overlaps if region[1]), key=lambda region: -region[1])
    if not overlaps:
        return []
    met = {name for members, _ in overlaps for name in members}
    names = [name for name in looks if name in met]
    everyone = sum(count for members, count in overlaps if set(names) == set(members))
    members, count = overlaps[0]
    label = (
        f"Unsolved problems: {everyone} by all of {len(names)} policies; the largest region, {count}, belongs to "
        f"{_and(members)}."
    )
    drawn = overlaps[:REGIONS]
    svg = regions(
        [([name for name in members if name in looks], count) for members, count in drawn],
        names,
        looks,
        identifier="overlaps",
        label=label,
    )
    caption = label + " A row counts the problems that exactly the marked policies leave unsolved, in the first seed."
    if len(overlaps) > REGIONS:
        caption += f" The {len(overlaps) - REGIONS} smaller regions are in the table."
    numbers = Numbers(["left unsolved by exactly", "problems"], [[_and(m), str(c)] for m, c in overlaps])
    return [Picture("Overlap of the unsolvable sets", caption, svg, numbers, names)]


def unsolvable_counts(arms: Sequence[Arm]) -> Numbers:
    """How many problems each arm leaves unsolved, by seed."""
    seeds = sorted({str(seed) for arm in arms for seed in arm.get("unsolvable") or {}}, key=lambda s: (len(s), s))
    rows = []
    for arm in arms:
        sets = {str(seed): ids for seed, ids in (arm.get("unsolvable") or {}).items()}
        if sets:
            counts = [str(len(sets[seed])) if sets.get(seed) is not None else NOTHING for seed in seeds]
            rows.append([arm["name"], *counts])
    return Numbers(["arm", *(f"seed {seed}" for seed in seeds)], rows)


def errors(arms: Sequence[Arm], looks: Mapping[str, Look]) -> list[Picture]:
    """Correct and wrong answers by what the problem asks, and wrong answers by what is wrong with them."""
    kinds = list({kind: None for arm in arms for kind in arm.get("errors") or {}})
    pictures = []
    for index, kind in enumerate(kinds):
        tables = {arm["name"]: ((arm.get("errors") or {}).get(kind) or {}) for arm in arms}
        tables = {name: table for name, table in tables.items() if table}
        if not tables:
            continue
        split = any(isinstance(value, Mapping) for table in tables.values() for value in table.values())
        picture = _correct_and_wrong if split else _wrong
        pictures.append(picture(kind, tables, looks, f"errors{index}"))
    return pictures


def _correct_and_wrong(
    kind: str, tables: Mapping[str, Mapping[str, Any]], looks: Mapping[str, Look], identifier: str
) -> Picture:
    groups: dict[str, list[Bar]] = {}
    rows, shares = [], {}
    what = kind.removeprefix("by ")
    for group in {group: None for table in tables.values() for group in table}:
        title = f"{group} {what}" if what == "operands" else group
        for name, table in tables.items():
            cell = table.get(group) or {}
            correct, wrong = int(cell.get("correct") or 0), int(cell.get("wrong") or 0)
            if correct + wrong:
                shares[title, name] = correct / (correct + wrong)
                bar = Bar(
                    name, (100 * correct / (correct + wrong), 100 * wrong / (correct + wrong)), str(correct + wrong)
                )
                groups.setdefault(title, []).append(bar)
                rows.append([title, name, str(correct), str(wrong), written(shares[title, name], "%")])
    lowest = min(shares, key=lambda key: shares[key], default=None)
    label = f"Answers {kind}: " + (
        f"the lowest share of correct ones is {spoken(shares[lowest], '%')}, for {lowest[0]} with {lowest[1]}."
        if lowest
        else "none."
    )
    svg = bars(groups, looks, identifier=identifier, label=label, x="share of answers (%)")
    caption = label + " Plain is correct, hatched is wrong; the number behind a bar counts its answers."
    numbers = Numbers([what, "arm", "correct", "wrong", "correct (%)"], rows)
    return Picture(_capital(f"answers {kind}"), caption, svg, numbers, list(tables))


def _wrong(kind: str, tables: Mapping[str, Mapping[str, Any]], looks: Mapping[str, Look], identifier: str) -> Picture:
    groups: dict[str, list[Bar]] = {}
    rows = []
    totals = {name: sum(finite(count) or 0 for count in table.values()) for name, table in tables.items()}
    sums = {
        group: sum(finite(t.get(group)) or 0 for t in tables.values()) for table in tables.values() for group in table
    }
    for group in sorted(sums, key=lambda group: -sums[group]):
        for name, table in tables.items():
            count = finite(table.get(group)) or 0
            share = count / totals[name] if totals[name] else 0.0
            groups.setdefault(group, []).append(Bar(name, (0.0, 100 * share), f"{count:g}"))
            rows.append([group, name, f"{count:g}", written(share, "%")])
    most = max(sums, key=lambda group: sums[group])
    label = f"Wrong answers {kind}: the most frequent is “{most}”, {sums[most]:g} of {sum(sums.values()):g}."
    svg = bars(groups, looks, identifier=identifier, label=label, x="share of the arm's wrong answers (%)")
    numbers = Numbers([kind.removeprefix("by "), "arm", "answers", "share of wrong (%)"], rows)
    return Picture(_capital(f"wrong answers {kind}"), label, svg, numbers, list(tables))


def changes(arms: Sequence[Arm]) -> Numbers:
    """What each arm changes in the base configuration; a dot stands for the base's value."""
    keys = list({key: None for arm in arms for key in arm.get("changes") or {}})
    rows = [["strategies", *(", ".join(map(_text, arm.get("strategies") or [])) or "·" for arm in arms)]]
    for key in keys:
        if key != "strategies":
            rows.append([key, *(_text((arm.get("changes") or {}).get(key, "·")) for arm in arms)])
    return Numbers(["setting", *(arm["name"] for arm in arms)], rows)


def provenance(value: Any) -> Numbers:
    """Nested facts as rows of a name with dots and a value."""
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
    return Numbers(["fact", "value"], rows)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _capital(text: str) -> str:
    return text if text.startswith("pass@") else text[:1].upper() + text[1:]


def _and(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names) or "no policy"
    return ", ".join(names[:-1]) + " and " + names[-1]
