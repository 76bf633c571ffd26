"""What a study will run and what it can find, said before it runs."""

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
SEEN = "as seen in the runs that are done"
ENOUGH_SEEDS = 5
"""Seeds that give an interval of some use: Student's quantile, which is 12.7 for two seeds, is 2.8 for five, and a
difference of 1.7 times the spread between seeds is found with a chance of 80 %, where two seeds need 11.5 times."""


def size_words(study: Study, arms: int | None = None) -> str:
    """Arms, seeds and budget of the study, or of so many of its arms."""
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
    """Return the number of seeds to go on to."""
    return ENOUGH_SEEDS if seeds < ENOUGH_SEEDS else 2 * seeds


def effect_words(study: Study, folder: Path) -> str:
    """The smallest difference that the study finds with a chance of 80 %, and where the spread is known from."""
    results = _results(folder)
    looks = sequential_plan(study.record())
    if looks is not None:
        return _sequential_words(study, looks, results)
    effect, source = minimum_detectable_effect(study.seed_deviation, len(study.seeds)), ASSUMED
    if results and results["minimum_detectable_effect"] is not None and results["seed_deviation_seen"]:
        effect, source = results["minimum_detectable_effect"], SEEN
    if effect is None:
        return "One seed: differences between arms cannot be told from those between trainings."
    return (
        f"Minimum detectable effect: {effect * 100:.1f} points of pass@1 to the baseline, with a chance of 80 % at "
        f"the level 0.05 for one arm; the spread between seeds is {source}."
    )


def unconfined_words(study: Study) -> list[str]:
    """Return what the study's configurations let run outside the sandbox."""
    configs = [arm.config for arm in study.arms] + ([study.warm_start] if study.warm_start else [])
    return list(dict.fromkeys(line for config in configs for line in unsandboxed_code(config)))


def _sequential_words(study: Study, looks: SequentialPlan, results: dict[str, Any] | None) -> str:
    design = looks.design
    seen = results["sequential"]["effects"] if results and results["sequential"] else {}
    known = {key: (one["deviation"], one["effect"]) for key, one in seen.items()}
    source = SEEN if known else ASSUMED
    if not known:
        known = {"pass@1": (study.seed_deviation, looks.detectable_effect(study.seed_deviation))}
    told = "; ".join(_effect(key, deviation, effect) for key, (deviation, effect) in known.items())
    return (
        f"Minimum detectable effect of one arm, with a chance of 80 %: {told}. It counts both looks (levels "
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


def changed_words(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Which arms a study has gained and lost since it was last run."""
    gained, lost = [name for name in new if name not in old], [name for name in old if name not in new]
    words = [f"new in this study: {', '.join(gained)}; runs that are done stay as they are"] if gained else []
    return words + ([f"no longer in this study: {', '.join(lost)}, of which nothing was run"] if lost else [])
