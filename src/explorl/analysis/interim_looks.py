"""Results of a study with two interim looks: differences that are valid after both, and which arms continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorl.stats.arm_differences import Differences, Paired, Values, estimate_mean, mean_interval, pooled_deviation
from explorl.stats.p_values import holm
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
"""Decisions about an arm after the first interim look, as results.json has them."""


@dataclass(frozen=True)
class SequentialPlan:
    """The plan of a sequential study."""

    design: Design
    seeds: tuple[int, ...]
    """Seeds in the order in which they run."""
    measures: tuple[str, ...]
    """Measures that are corrected for; the first decides about efficacy."""
    arms: tuple[str, ...]
    """All arms except the baseline."""

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """Seeds of the first interim look."""
        return self.seeds[: self.design.first]

    def differences(self, paired: Paired) -> Differences:
        """Return each arm's difference at its latest look: mean, interval at that look's level, sequential p values.

        An arm without all seeds of the first look only has a mean. The measures of the plan are corrected together,
        over all arms of the study; any other measure is corrected over the arms with a look.
        """
        result: Differences = {name: {} for name in self.arms}
        p_values: dict[tuple[str, str], float | None] = {
            (name, key): 1.0 for name in self.arms for key in self.measures
        }
        for key, by_arm in paired.items():
            for name, values in by_arm.items():
                if values:
                    difference = self._latest(values)
                    result[name][key] = difference
                    p_values[name, key] = difference["p"] if difference["look"] else p_values.get((name, key))
        p_corrected = self._correct(p_values)
        for name, by_measure in result.items():
            for key, difference in by_measure.items():
                difference["p_corrected"] = p_corrected[name, key] if difference["look"] else None
        return result

    def _correct(self, p_values: Mapping[tuple[str, str], float | None]) -> dict[tuple[str, str], float | None]:
        family = {pair: p for pair, p in p_values.items() if pair[1] in self.measures}
        corrected = holm(family)
        for key in {pair[1] for pair in p_values} - set(self.measures):
            corrected |= holm({pair: p for pair, p in p_values.items() if pair[1] == key})
        return corrected

    def _latest(self, values: Values) -> dict[str, Any]:
        """Return the difference at the latest look with all its seeds."""
        looks = self._values_by_look(values)
        if not looks:
            return {**mean_interval(values), "low": None, "high": None, "p": None, "look": 0}
        p_values = [_p_value(look) for look in looks]
        return {
            **mean_interval(looks[-1], self.design.levels[len(looks) - 1]),
            "p": sequential_p(p_values, self.design.shares),
            "look": len(looks),
        }

    def _values_by_look(self, values: Values) -> list[Values]:
        """Return the values at each look with all its seeds; the second look requires the first."""
        looks = []
        for count in self.design.seeds_by_look:
            seeds = self.seeds[:count]
            if any(seed not in values for seed in seeds):
                break
            looks.append({seed: values[seed] for seed in seeds})
        return looks

    # ------------------------------------------------------------------------ the first interim look
    def decisions(self, paired: Paired, unfinished: Mapping[str, str]) -> dict[str, str]:
        """Return the decision about each arm after the first look, which takes place when all its runs have ended."""
        if self._waiting(unfinished):
            return {name: unfinished.get(name, WAITING) for name in self.arms}
        first = {
            key: {
                name: looks[0]
                for name, values in paired.get(key, {}).items()
                if (looks := self._values_by_look(values))
            }
            for key in self.measures
        }
        p_values = {
            (name, key): sequential_p([_p_value(first[key][name])], self.design.shares) if name in first[key] else 1.0
            for name in self.arms
            for key in self.measures
        }
        p_corrected = holm(p_values)
        significant = [
            name for name in self.arms if (p := p_corrected[name, self.measures[0]]) is not None and p < LEVEL
        ]
        deviations = {key: pooled_deviation(by_arm) or 0.0 for key, by_arm in first.items()}
        scores = {}
        for name in self.arms:
            observed = {
                key: (float(np.mean([np.mean(value) for value in by_arm[name].values()])), deviations[key])
                for key, by_arm in first.items()
                if name in by_arm
            }
            if observed and name not in significant:
                scores[name] = expected_findings(observed, self.design)
        continuing = select_arms(scores, self.design.keep)
        decisions = (
            dict.fromkeys(scores, FUTILITY)
            | dict.fromkeys(significant, EFFICACY)
            | dict.fromkeys(continuing, CONTINUES)
        )
        return {name: decisions.get(name, FAILED) for name in self.arms}

    def _waiting(self, unfinished: Mapping[str, str]) -> list[str]:
        """Return the arms that the first look must wait for, including a baseline that failed."""
        return [name for name, state in unfinished.items() if state == WAITING or name not in self.arms]

    # ------------------------------------------------------------------------ power
    def detectable_effect(self, deviation: float) -> float:
        """Return the smallest effect that the whole study, with selection and correction, detects with 80 % power."""
        return detectable_effect(deviation, self.design)

    def record(self, paired: Paired, unfinished: Mapping[str, str]) -> dict[str, Any]:
        """Return the plan, the state of each arm, and the detectable effects as JSON values."""
        decisions = self.decisions(paired, unfinished)
        primary = paired.get(self.measures[0], {})
        effects = {}
        for key in self.measures:
            deviation = pooled_deviation(paired.get(key, {}))
            if deviation is not None:
                effect = self.detectable_effect(deviation)
                chance_of_half = detection_chance(effect / 2, deviation, self.design)
                effects[key] = {"deviation": deviation, "effect": effect, "chance_of_half": chance_of_half}
        return {
            "first": self.design.first,
            "seeds": self.design.seeds,
            "keep": self.design.keep,
            "measures": list(self.measures),
            "levels": list(self.design.levels),
            "tests": self.design.tests,
            "waiting": self._waiting(unfinished),
            "arms": {
                name: {"decision": decisions[name], "look": len(self._values_by_look(primary.get(name, {})))}
                for name in self.arms
            },
            "effects": effects,
        }


def sequential_plan(study: Mapping[str, Any]) -> SequentialPlan | None:
    """Return the sequential plan of a study, given the contents of study.json; None if it has none."""
    plan = study.get("sequential")
    if plan is None:
        return None
    arms = tuple(arm["name"] for arm in study["arms"] if arm["name"] != study["baseline"])
    design = Design(plan["first"], len(study["seeds"]), plan["keep"], len(arms), len(plan["measures"]))
    return SequentialPlan(design, tuple(study["seeds"]), tuple(plan["measures"]), arms)


def describe_look(arm: Mapping[str, Any] | None) -> str:
    """Describe an arm's last look, and why it was the last: ``1, futility``."""
    if arm is None:
        return "–"
    if arm["look"] == 2:
        return "2"
    if not arm["look"]:
        return arm["decision"] if arm["decision"] == FAILED else "none yet"
    return f"1, {arm['decision']}"


def describe_plan(record: Mapping[str, Any], baseline: str) -> str:
    """Describe the plan in a few sentences for a page with results."""
    measures = ", ".join(record["measures"])
    first, last = (f"{1 - level:.2%}".replace("%", " %") for level in record["levels"])
    return (
        f"Every arm has {record['first']} seeds at the first interim look; then the {record['keep']} most promising "
        f"arms and {baseline} continue to {record['seeds']}. p is valid over both looks (O'Brien–Fleming shares of the "
        f"level) and corrected over {record['tests']} comparisons (Holm; all arms × {measures}): the probability of "
        f"any false finding is at most 5 %. An interval after the first look has {first} confidence, after the second "
        f"{last}."
    )


def describe_power(record: Mapping[str, Any]) -> str:
    """Describe the smallest effects that the study can detect, measure by measure."""
    descriptions = []
    for key, effect in record["effects"].items():
        scale, unit = (100, " points") if key.startswith("pass@") or key == "area" else (1, " nats")
        unit = "" if key == "branching" else unit
        descriptions.append(
            f"{effect['effect'] * scale:.2g}{unit} of {key} (standard deviation between seeds "
            f"{effect['deviation'] * scale:.2g}; half that effect with "
            f"{effect['chance_of_half']:.0%} power)".replace("% power", " % power")
        )
    if not descriptions:
        return "The spread between seeds is not known yet, so neither are the effects that the study can detect."
    return f"Smallest effects of one arm that this design detects with 80 % power: {'; '.join(descriptions)}."


def describe_findings(
    differences: Mapping[str, Mapping[str, Mapping[str, Any]] | None], record: Mapping[str, Any]
) -> str:
    """List the arms and measures with a significant difference, or say that there are none."""
    from explorl.analysis.verdicts import is_significant

    pairs: Sequence[str] = [
        f"{name} in {key} (p = {by_measure[key]['p_corrected']:.2g})"
        for name, by_measure in differences.items()
        for key in record["measures"]
        if by_measure and key in by_measure and is_significant(by_measure[key])
    ]
    if not pairs:
        return f"None of {record['tests']} comparisons is significant after correction."
    return f"Significant after correction over {record['tests']} comparisons: {', '.join(pairs)}."


def _p_value(values: Values) -> float:
    """Return the p value of one look; 1 if the spread is unknown."""
    estimate = estimate_mean(values)
    p = None if estimate is None else estimate.p
    return 1.0 if p is None else p
