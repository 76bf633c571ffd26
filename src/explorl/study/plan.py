"""Texts about a study's size and power, shown before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from explorl.analysis.interim_looks import SequentialPlan, sequential_plan
from explorl.analysis.study_results import study_results
from explorl.core.config import unsandboxed_code
from explorl.core.store import StoreError
from explorl.core.terminal import counted
from explorl.stats.crossed import minimum_detectable_effect
from explorl.study.spec import Study

ASSUMED = "as the study assumes (seed_deviation)"
MEASURED = "as measured in the finished runs"
ENOUGH_SEEDS = 5
"""Seeds for a useful interval: Student's quantile is 2.8 for five seeds and 12.7 for two, and five seeds detect a
difference of 1.7 standard deviations between seeds with a chance of 80 %, where two need 11.5."""


def size_text(study: Study, arms: int | None = None) -> str:
    """Describe arms, seeds and budget of the study, or of ``arms`` of its arms."""
    limit = ", ".join(f"{value:,g} {unit}" for unit, value in study.budget.items())
    count = len(study.arms) if arms is None else arms
    if study.sequential is None:
        return f"{counted(count, 'arm')} × {counted(len(study.seeds), 'seed')}, {limit} each"
    first, keep = study.sequential["first"], min(study.sequential["keep"], len(study.arms) - 1)
    return (
        f"{counted(count, 'arm')} × {counted(first, 'seed')}, then {counted(keep, 'arm')} and {study.baseline} × "
        f"{len(study.seeds) - first} more, {limit} each"
    )


def more_seeds(seeds: int) -> int:
    """Return the number of seeds to suggest next."""
    return ENOUGH_SEEDS if seeds < ENOUGH_SEEDS else 2 * seeds


def effect_text(study: Study, folder: Path) -> str:
    """Describe the minimum detectable effect, and the source of the spread between seeds."""
    results = _results(folder)
    looks = sequential_plan(study.record())
    if looks is not None:
        return _sequential_text(study, looks, results)
    effect, source = minimum_detectable_effect(study.seed_deviation, len(study.seeds)), ASSUMED
    if results and results["minimum_detectable_effect"] is not None and results["seed_deviation_seen"]:
        effect, source = results["minimum_detectable_effect"], MEASURED
    if effect is None:
        return "One seed: differences between arms cannot be separated from those between training runs."
    return (
        f"Minimum detectable effect: {effect * 100:.1f} points of pass@1 to the baseline, with a chance of 80 % at "
        f"the level 0.05 for one arm; the spread between seeds is {source}."
    )


def unsandboxed_warnings(study: Study) -> list[str]:
    """Return warnings about code that the study's configurations run outside the sandbox."""
    configs = [arm.config for arm in study.arms] + ([study.warm_start] if study.warm_start else [])
    return list(dict.fromkeys(line for config in configs for line in unsandboxed_code(config)))


def _sequential_text(study: Study, looks: SequentialPlan, results: dict[str, Any] | None) -> str:
    design = looks.design
    measured = results["sequential"]["effects"] if results and results["sequential"] else {}
    effects = {key: (value["deviation"], value["effect"]) for key, value in measured.items()}
    source = MEASURED if effects else ASSUMED
    if not effects:
        effects = {"pass@1": (study.seed_deviation, looks.detectable_effect(study.seed_deviation))}
    listing = "; ".join(_effect(key, deviation, effect) for key, (deviation, effect) in effects.items())
    return (
        f"Minimum detectable effect of one arm, with a chance of 80 %: {listing}. It counts both looks (levels "
        f"{design.levels[0]:.4f} and {design.levels[1]:.4f}), the arms that stop early, and the correction over "
        f"{counted(design.tests, 'comparison')} ({counted(design.arms, 'arm')} × "
        f"{counted(design.measures, 'measure')}); the spread between seeds is {source}."
    )


def _effect(key: str, deviation: float, effect: float) -> str:
    if key.startswith("pass@") or key == "area":
        return f"{effect * 100:.1f} points of {key} at a spread of {deviation * 100:.2g}"
    return f"{effect:.2g} of {key} at a spread of {deviation:.2g}"


def _results(folder: Path) -> dict[str, Any] | None:
    if not (folder / "arms").is_dir():
        return None
    try:
        return study_results(folder)
    except StoreError:
        return None


def arm_changes(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return messages about arms that the study gained or lost since its last run."""
    added, removed = [name for name in new if name not in old], [name for name in old if name not in new]
    messages = [f"new in this study: {', '.join(added)}; finished runs are kept"] if added else []
    return messages + ([f"no longer in this study: {', '.join(removed)}, which never ran"] if removed else [])
