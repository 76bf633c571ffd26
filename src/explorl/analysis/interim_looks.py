"""A study with two looks: its differences with intervals and p values that hold after both, and which arms went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorl.stats.arm_differences import Differences, Paired, Values, estimate_mean, mean_interval, pooled_deviation
from explorl.stats.crossed import holm
from explorl.stats.sequential import (
    LEVEL,
    Design,
    detectable_effect,
    detection_chance,
    expected_findings,
    select_arms,
    sequential_p,
)

WAITING, FAILED, CONTINUES, FUTILITY, EFFICACY = "waits", "failed", "goes on", "futility", "efficacy"
"""What the first look decides about an arm."""


@dataclass(frozen=True)
class SequentialPlan:
    """The plan of a sequential study."""

    design: Design
    seeds: tuple[int, ...]
    """In the order in which they are run."""
    measures: tuple[str, ...]
    """What the correction is over."""
    arms: tuple[str, ...]
    """All but the baseline."""

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """Those of the first look."""
        return self.seeds[: self.design.first]

    def differences(self, paired: Paired) -> Differences:
        """For each arm and measure its latest look: mean, interval at that look's level, and p values over both looks.

        An arm without all seeds of the first look has a mean alone. The measures of the plan are corrected together,
        over every arm that the study has; any other measure over the arms that were looked at.
        """
        result: Differences = {name: {} for name in self.arms}
        p_values: dict[tuple[str, str], float | None] = {
            (name, key): 1.0 for name in self.arms for key in self.measures
        }
        for key, by_arm in paired.items():
            for name, values in by_arm.items():
                if values:
                    found = self._latest(values)
                    result[name][key] = found
                    p_values[name, key] = found["p"] if found["look"] else p_values.get((name, key))
        after = self._corrected(p_values)
        for name, own in result.items():
            for key, found in own.items():
                found["p_corrected"] = after[name, key] if found["look"] else None
        return result

    def _corrected(self, p_values: Mapping[tuple[str, str], float | None]) -> dict[tuple[str, str], float | None]:
        family = {pair: p for pair, p in p_values.items() if pair[1] in self.measures}
        after = holm(family)
        for key in {pair[1] for pair in p_values} - set(self.measures):
            after |= holm({pair: p for pair, p in p_values.items() if pair[1] == key})
        return after

    def _latest(self, values: Values) -> dict[str, Any]:
        """The latest look whose seeds are all there."""
        made = self._made(values)
        if not made:
            return {**mean_interval(values), "low": None, "high": None, "p": None, "look": 0}
        p_values = [_p(one) for one in made]
        return {
            **mean_interval(made[-1], self.design.levels[len(made) - 1]),
            "p": sequential_p(p_values, self.design.shares),
            "look": len(made),
        }

    def _made(self, values: Values) -> list[Values]:
        """What each look that was made saw; the last needs the first."""
        found = []
        for count in self.design.seeds_by_look:
            wanted = self.seeds[:count]
            if any(seed not in values for seed in wanted):
                break
            found.append({seed: values[seed] for seed in wanted})
        return found

    # ------------------------------------------------------------------------ the first look
    def decisions(self, paired: Paired, unfinished: Mapping[str, str]) -> dict[str, str]:
        """What becomes of each arm after the first look, which is made when every run of it has ended."""
        if self._waiting(unfinished):
            return {name: unfinished.get(name, WAITING) for name in self.arms}
        first = {
            key: {name: made[0] for name, values in paired.get(key, {}).items() if (made := self._made(values))}
            for key in self.measures
        }
        p_values = {
            (name, key): sequential_p([_p(first[key][name])], self.design.shares) if name in first[key] else 1.0
            for name in self.arms
            for key in self.measures
        }
        after = holm(p_values)
        sure = [name for name in self.arms if (p := after[name, self.measures[0]]) is not None and p < LEVEL]
        deviations = {key: pooled_deviation(by_arm) or 0.0 for key, by_arm in first.items()}
        promises = {}
        for name in self.arms:
            seen = {
                key: (float(np.mean([np.mean(one) for one in by_arm[name].values()])), deviations[key])
                for key, by_arm in first.items()
                if name in by_arm
            }
            if seen and name not in sure:
                promises[name] = expected_findings(seen, self.design)
        alive = select_arms(promises, self.design.keep)
        told = dict.fromkeys(promises, FUTILITY) | dict.fromkeys(sure, EFFICACY) | dict.fromkeys(alive, CONTINUES)
        return {name: told.get(name, FAILED) for name in self.arms}

    def _waiting(self, unfinished: Mapping[str, str]) -> list[str]:
        """Arms without which there is no first look; a baseline that failed is one."""
        return [name for name, what in unfinished.items() if what == WAITING or name not in self.arms]

    # ------------------------------------------------------------------------ power
    def detectable_effect(self, deviation: float) -> float:
        """The smallest effect that the whole study finds with a chance of 80 %, selection and correction included."""
        return detectable_effect(deviation, self.design)

    def record(self, paired: Paired, unfinished: Mapping[str, str]) -> dict[str, Any]:
        """The plan, where each arm is, and what could be found, as plain values."""
        decided = self.decisions(paired, unfinished)
        primary = paired.get(self.measures[0], {})
        effects = {}
        for key in self.measures:
            deviation = pooled_deviation(paired.get(key, {}))
            if deviation is not None:
                effect = self.detectable_effect(deviation)
                halved = detection_chance(effect / 2, deviation, self.design)
                effects[key] = {"deviation": deviation, "effect": effect, "chance_of_half": halved}
        return {
            "first": self.design.first,
            "seeds": self.design.seeds,
            "keep": self.design.keep,
            "measures": list(self.measures),
            "levels": list(self.design.levels),
            "tests": self.design.tests,
            "waiting": self._waiting(unfinished),
            "arms": {
                name: {"decision": decided[name], "look": len(self._made(primary.get(name, {})))} for name in self.arms
            },
            "effects": effects,
        }


def sequential_plan(study: Mapping[str, Any]) -> SequentialPlan | None:
    """The looks of a study, as study.json has it; None where it has one."""
    plan = study.get("sequential")
    if plan is None:
        return None
    arms = tuple(arm["name"] for arm in study["arms"] if arm["name"] != study["baseline"])
    design = Design(plan["first"], len(study["seeds"]), plan["keep"], len(arms), len(plan["measures"]))
    return SequentialPlan(design, tuple(study["seeds"]), tuple(plan["measures"]), arms)


def describe_look(arm: Mapping[str, Any] | None) -> str:
    """An arm's last look, and why it was the last: ``1, futility``."""
    if arm is None:
        return "–"
    if arm["look"] == 2:
        return "2"
    if not arm["look"]:
        return arm["decision"] if arm["decision"] == FAILED else "none yet"
    return f"1, {arm['decision']}"


def describe_plan(record: Mapping[str, Any], baseline: str) -> str:
    """The rule in two sentences, for a page with results."""
    measures = ", ".join(record["measures"])
    first, last = (f"{1 - level:.2%}".replace("%", " %") for level in record["levels"])
    return (
        f"Every arm has {record['first']} seeds; after that look the {record['keep']} most promising arms and "
        f"{baseline} go on to {record['seeds']}. p holds over both looks (O'Brien–Fleming shares of the level) and is "
        f"corrected over {record['tests']} comparisons (Holm; all arms × {measures}): the chance of any false "
        f"finding is at most 5 %. An interval after the first look has {first} confidence, after the last {last}."
    )


def describe_power(record: Mapping[str, Any]) -> str:
    """What the study could find, measure by measure."""
    told = []
    for key, one in record["effects"].items():
        scale, unit = (100, " points") if key.startswith("pass@") or key == "area" else (1, " nats")
        unit = "" if key == "branching" else unit
        told.append(
            f"{one['effect'] * scale:.2g}{unit} of {key} (spread between seeds {one['deviation'] * scale:.2g}; half "
            f"that effect with a chance of {one['chance_of_half']:.0%})".replace("%)", " %)")
        )
    if not told:
        return "No spread between seeds is known yet, and so not what the study can find."
    return f"The smallest effects of one arm that this design finds with a chance of 80 %: {'; '.join(told)}."


def describe_findings(
    differences: Mapping[str, Mapping[str, Mapping[str, Any]] | None], record: Mapping[str, Any]
) -> str:
    """Every pair of arm and measure that is beyond doubt, or that there is none."""
    from explorl.analysis.verdicts import is_significant

    pairs: Sequence[str] = [
        f"{name} in {key} (p = {own[key]['p_corrected']:.2g})"
        for name, own in differences.items()
        for key in record["measures"]
        if own and key in own and is_significant(own[key])
    ]
    if not pairs:
        return f"Of {record['tests']} comparisons none is beyond doubt after correction."
    return f"Beyond doubt after correction over {record['tests']} comparisons: {', '.join(pairs)}."


def _p(values: Values) -> float:
    """The p value of one look; 1 where nothing is known of the spread."""
    estimate = estimate_mean(values)
    p = None if estimate is None else estimate.p
    return 1.0 if p is None else p
