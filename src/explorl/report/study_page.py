"""The page of a study: one self-contained HTML file with tables, figures and the rollout browser."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from explorl.analysis.interim_looks import describe_findings, describe_plan, describe_power
from explorl.core.store import cleaned, write_text
from explorl.report import study_sections as sections
from explorl.report.lens_sections import lens_sections
from explorl.report.study_figures import LineStyle, line_styles, swatch
from explorl.report.study_numbers import format_with_unit
from explorl.report.study_rollouts import compact, script_json, token_measures, trim_rollouts

NOUNS = {"runs": "run", "comparison": "model"}
"""The word for what is compared, by the kind of results; "arm" for a study."""


def write_report(path: Path, results: Mapping[str, Any], *, max_bytes: int = 5_000_000) -> None:
    """Write the page of a study's results in at most `max_bytes`, leaving rollouts out if necessary.

    Raise `ValueError` if the page is too large even without rollouts.
    """
    results = cleaned(dict(results))  # names, errors and completions are untrusted
    content = _content(results)
    rollouts = compact(results.get("rollouts") or [])
    # Rendered with one rollout to count the browser's controls; the spare bytes are for longer numbers in its notes.
    rest = len(_bytes(_render(content, rollouts, rollouts[:1]))) - len(_bytes(script_json(rollouts[:1]))) + 1000
    if rest > max_bytes:
        raise ValueError(
            f"the report of {results.get('title')!r} takes {rest:,} bytes without any rollout, more than "
            f"max_bytes={max_bytes:,}; allow more, for instance max_bytes={2 * rest:,}"
        )
    shown = trim_rollouts(rollouts, max_bytes - rest)
    write_text(path, _render(content, rollouts, shown))


def _content(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything on the page except the rollouts."""
    arms: Sequence[Mapping[str, Any]] = results.get("arms") or []
    names = [arm["name"] for arm in arms]
    styles = line_styles(names, results.get("baseline"))
    return {
        "title": results.get("title") or "Study",
        "verdict": results.get("verdict") or "",
        "description": results.get("description") or "",
        "baseline": results.get("baseline") or "",
        "facts": _facts(results),
        "note": _note(results),
        "swatches": {name: swatch(style) for name, style in styles.items()},
        "arm_indices": {name: style.index for name, style in styles.items()},
        "summary": sections.summary(results),
        "noun": NOUNS.get(results.get("kind") or "", "arm"),
        "figures": [
            section
            for section in _figures(results, arms, styles)
            if section[3] or results.get("kind") not in ("runs", "comparison")
        ],
        "unsolvable": sections.unsolvable_counts(arms),
        "changes": sections.changes(arms),
        "config": results.get("config") or "",
        "provenance": sections.provenance(results.get("provenance")),
    }


def _figures(
    results: Mapping[str, Any], arms: Sequence[Mapping[str, Any]], styles: Mapping[str, LineStyle]
) -> list[tuple[str, str, str, list[sections.Picture]]]:
    """Return the sections with pictures: id, heading, the name of one picture, and the pictures."""
    return [
        ("over-training", "pass@k over training", "pass@k over training", sections.over_training(arms, styles)),
        ("pass-at-k", "pass@k", "pass@k curve", sections.pass_at_k(results, styles)),
        ("plane", "Entropy and accuracy", "entropy with accuracy", sections.entropy_plane(results, styles)),
        ("curves", "Learning curves", "learning curve", sections.learning_curves(arms, styles)),
        ("unsolvable", "Unsolved problems", "unsolvable set", sections.unsolvable(results, styles)),
        ("errors", "Errors", "error breakdown", sections.errors(arms, styles)),
        ("logs", "Strategy logs", "strategy log", sections.strategy_logs(arms, styles)),
        *lens_sections(results),
    ]


def _facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    problems, samples = results.get("problems"), results.get("samples")
    facts = {
        "task": results.get("task"),
        "model": results.get("model"),
        "baseline": results.get("baseline") if len(results.get("arms") or []) > 1 else None,
        "steps": results.get("steps"),
        "evaluation": f"{problems} problems × {samples} samples" if problems and samples else None,
        "target": None if results.get("target") is None else format_with_unit(results["target"], "%"),
        "date": results.get("date"),
        "explorl": results.get("version"),
        "commit": results.get("commit"),
    }
    return [(name, str(value)) for name, value in facts.items() if value not in (None, "")]


def _note(results: Mapping[str, Any]) -> str:
    if plan := results.get("sequential"):
        differences = {arm["name"]: arm["differences"] for arm in results["arms"]}
        parts = (describe_plan(plan, results["baseline"]), describe_findings(differences, plan), describe_power(plan))
        return " ".join(parts)
    effect = results.get("minimum_detectable_effect")
    if effect is None:
        return ""
    points = format_with_unit(effect, "%")[:-2]
    return f"A study of this size finds differences in pass@1 from about {points} points upwards."


def _render(content: Mapping[str, Any], rollouts: Sequence[Any], shown: Sequence[dict[str, Any]]) -> str:
    """Return the page with the `shown` rollouts; `rollouts` are all of them, for the note on what is left out."""
    import jinja2

    script = _file("study.js")
    prompts, completions = len(shown), sum(len(rollout["answers"]) for rollout in shown)
    all_prompts, all_completions = len(rollouts), sum(len(rollout["answers"]) for rollout in rollouts)
    trimmed_note = (
        f"To keep this page small, {prompts} of {all_prompts} prompts with {completions} of {all_completions} "
        "completions are shown, chosen evenly over arms, seeds and steps; the run folders hold all of them."
        if completions < all_completions or prompts < all_prompts
        else ""
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_file("study.html")).render(
        **content,
        css=_file("study.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode(),
        trimmed_note=trimmed_note,
        rollout_count=len(shown),
        measures=token_measures(shown),
        measures_json=script_json([asdict(measure) for measure in token_measures(shown)]),
        rollouts_json=script_json(list(shown)),
    )


def _file(name: str) -> str:
    return (resources.files("explorl.report") / name).read_text(encoding="utf-8")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8")
