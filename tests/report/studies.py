"""Results of a made-up study, shaped like real ones: Countdown, three arms, two seeds, three steps with rollouts."""

from __future__ import annotations

import math
import re
from random import Random
from typing import Any

from explorl.analysis.verdicts import points
from explorl.tasks.countdown.task import verify
from explorl.tasks.countdown.templates import question, terse
from explorl.tasks.countdown.traces import trace

ARMS = {
    "plain GRPO": ([], {}, 0.0),
    "entropy-guided weighting": (["egsw"], {"training.learning_rate": 1e-4, "strategies.egsw.alpha": 0.3}, 0.05),
    "bottom-p + clip-higher": (["bottom_p", "clip_higher"], {"rollout.temperature": 1.2}, -0.02),
}
STEPS = (10, 50, 90)
MEASURES = [
    {"key": "pass@1", "label": "pass@1", "unit": "%", "higher_is_better": True},
    {"key": "best pass@1", "label": "best pass@1", "unit": "%", "higher_is_better": True},
    {"key": "area", "label": "area under the curve", "unit": "%", "higher_is_better": True},
    {"key": "steps to target", "label": "steps to target", "unit": "steps", "higher_is_better": False},
    {"key": "pass@8", "label": "pass@8", "unit": "%", "higher_is_better": True},
    {"key": "entropy", "label": "entropy", "unit": "nats", "higher_is_better": None},
    {"key": "branching", "label": "branching", "unit": "", "higher_is_better": None},
    {"key": "seconds", "label": "time", "unit": "s", "higher_is_better": False},
    {"key": "tokens", "label": "tokens", "unit": "tokens", "higher_is_better": None},
]
PUZZLES = (([3, 7, 12], 33), ([6, 3, 5], 10), ([4, 11, 15], 8), ([18, 12, 9], 21))


def make_results(*, prompts: int = 4, answers: int = 6, words: bool = False) -> dict[str, Any]:
    """A whole study; the same at each call."""
    rng = Random(0)
    return {
        "title": "Does weighting by entropy keep GRPO exploring?",
        "description": "Three arms from the same checkpoint on the same prompts, Countdown with three numbers.",
        "task": "countdown-mini",
        "model": "tiny",
        "baseline": "plain GRPO",
        "date": "2026-11-15",
        "commit": "7d88843",
        "version": "0.1.0",
        "problems": 512,
        "samples": 8,
        "steps": 90,
        "target": 0.5,
        "minimum_detectable_effect": 0.031,
        "verdict": "Entropy-guided weighting gains 5.0 points of pass@1 over plain GRPO; bottom-p with clip-higher "
        "shows no difference that this study could tell from chance.",
        "measures": MEASURES,
        "start": {
            "seeds": [0, 1],
            "measures": {
                "pass@1": _around(0.211, 0.02),
                "pass@8": _around(0.842, 0.015),
                "entropy": _around(1.1, 0.02),
            },
            "pass_at_k": _by_k([0.211, 0.41, 0.65, 0.842]),
            "held_out_plane": {"step": [0], "entropy": [1.1], "accuracy": [0.211]},
        },
        "arms": [_arm(rng, name, *arm) for name, arm in ARMS.items()],
        "overlaps": [
            {"arms": ["start"], "count": 61},
            {"arms": ["start", *ARMS], "count": 44},
            {"arms": ["start", "plain GRPO"], "count": 17},
            {"arms": ["start", "plain GRPO", "bottom-p + clip-higher"], "count": 12},
            {"arms": ["plain GRPO"], "count": 6},
            {"arms": ["entropy-guided weighting"], "count": 3},
        ],
        "config": "model: {name: tiny, lora: null}\ntask: {name: countdown-mini, template: terse}\n"
        "training:\n  steps: 90\n  learning_rate: 1.0e-4\n",
        "provenance": {
            "explorl": "0.1.0",
            "git": {"commit": "7d88843", "dirty": False},
            "libraries": {"torch": "2.13.0", "transformers": "5.22.1", "trl": "1.16.0"},
            "hardware": {"cpu": "2 cores", "gpu": None, "memory_gib": 7.8},
            "seeds": [0, 1],
        },
        "rollouts": [
            _rollout(rng, name, gain, seed, step, puzzle, answers, words)
            for name, (_, _, gain) in ARMS.items()
            for seed in (0, 1)
            for step in STEPS
            for puzzle in (PUZZLES * math.ceil(prompts / len(PUZZLES)))[:prompts]
        ],
    }


def _by_k(means: list[float]) -> dict[str, Any]:
    return {
        "k": [1, 2, 4, 8],
        "mean": means,
        "low": [mean - 0.02 for mean in means],
        "high": [mean + 0.02 for mean in means],
        "band": "95 % interval over seeds and problems",
    }


def _around(mean: float, reach: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def _arm(rng: Random, name: str, strategies: list[str], changes: dict[str, Any], gain: float) -> dict[str, Any]:
    baseline = not strategies
    steps = list(range(1, 91))
    rise = [0.22 + (0.30 + gain) * (1 - math.exp(-step / 25)) for step in steps]
    training = [value + rng.gauss(0, 0.012) for value in rise]
    entropy = [1.1 * math.exp(-step / (30 + 500 * max(gain, 0))) + 0.12 + rng.gauss(0, 0.01) for step in steps]
    held = [0, 30, 60, 90]
    holdout = [0.21 if step == 0 else 0.20 + (0.29 + gain) * (1 - math.exp(-step / 25)) for step in held]
    ks = [1, 2, 4, 8]
    first = [0.211, 0.41, 0.65, 0.842]
    curve = [0.486 + gain + 0.11 * math.log2(k) * (1 - gain) for k in ks]
    differences = None
    if not baseline:
        differences = {
            "pass@1": _around(gain, 0.021)
            | {"p": 0.0004 if gain > 0 else 0.21, "p_corrected": 0.002 if gain > 0 else 0.6},
            "best pass@1": _around(gain, 0.022) | {"p": 0.001, "p_corrected": 0.004 if gain > 0 else 0.5},
            "pass@8": _around(gain / 5, 0.02) | {"p": 0.5, "p_corrected": 0.9},
            "steps to target": _around(-200 * gain, 6.0) | {"p": 0.01, "p_corrected": 0.03},
            "entropy": _around(0.11, 0.02) | {"p": 0.0001, "p_corrected": 0.001},
            "seconds": _around(3.0, 0.8) | {"p": 0.001, "p_corrected": 0.01},
        }
    return {
        "name": name,
        "strategies": strategies,
        "changes": changes,
        "seeds": [0, 1],
        "failed": {},
        "measures": {
            "pass@1": _around(0.486 + gain, 0.022),
            "best pass@1": _around(0.491 + gain, 0.021),
            "area": _around(0.38 + gain, 0.018),
            "steps to target": _around(52 - 200 * gain, 5),
            "pass@8": _around(0.815 + gain / 5, 0.017),
            "entropy": _around(0.173 + 2 * max(gain, 0), 0.01),
            "branching": _around(1.31 + gain, 0.02),
            "seconds": _around(184 + (0 if baseline else 3), 2),
            "tokens": _around(1_412_345, 8_000),
        },
        "differences": differences,
        "verdict": "the baseline" if baseline else f"{points(gain)} points pass@1, pass@8 unchanged",
        "curves": {
            "training accuracy": _curve(steps, training, 0.025),
            "entropy": _curve(steps, entropy, 0.03),
            "length": _curve(steps, [31 + 4 * gain * step / 10 + rng.gauss(0, 0.3) for step in steps], 0.8),
            "holdout pass@1": _curve(held, holdout, 0.02),
        },
        "plane": {"step": steps, "entropy": entropy, "accuracy": training},
        "held_out_plane": {"step": held, "entropy": [1.1, 0.6, 0.3, 0.2 + gain], "accuracy": holdout},
        "over_training": {
            str(k): _curve(held, [begin + (end - begin) * step / 90 for step in held], 0.02)
            | {"band": "95 % interval over seeds and problems"}
            for k, begin, end in zip(ks, first, curve, strict=True)
        },
        "pass_at_k": _by_k(curve),
        "gain": _by_k([end - begin for begin, end in zip(first, curve, strict=True)]),
        "unsolvable": {
            str(seed): [f"countdown:{index}" for index in range(70 + round(100 * gain) + seed)] for seed in (0, 1)
        },
        "errors": {
            "by operands": {
                "2": {"correct": 801 + round(300 * gain), "wrong": 402},
                "3": {"correct": 1190 + round(900 * gain), "wrong": 1703},
            },
            "by operation": {
                "+": {"correct": 520, "wrong": 310},
                "−": {"correct": 488 + round(500 * gain), "wrong": 405},
                "×": {"correct": 390, "wrong": 611},
                "÷": {"correct": 121, "wrong": 302},
                "mixed": {"correct": 472, "wrong": 477},
            },
            "by kind": {
                "it gives another number": 1408 - round(800 * gain),
                "a number is not given, or not that often": 512,
                "no <answer>…</answer>": 140,
                "not an expression": 45,
            },
        },
        "strategy_logs": {}
        if baseline
        else {
            f"strategy/{'egsw' if gain > 0 else 'bottom_p'}/weight_change": {
                "step": steps,
                "mean": [0.2 * math.exp(-step / 40) + rng.gauss(0, 0.005) for step in steps],
            }
        },
    }


def _curve(steps: list[int], means: list[float], reach: float) -> dict[str, list[Any]]:
    return {
        "step": steps,
        "mean": means,
        "low": [mean - reach for mean in means],
        "high": [mean + reach for mean in means],
        "band": "range of the seeds",
    }


def _rollout(
    rng: Random, arm: str, gain: float, seed: int, step: int, puzzle: tuple[list[int], int], count: int, words: bool
) -> dict[str, Any]:
    nums, target = puzzle
    answers = [_answer(rng, nums, target, rng.random() < 0.3 + step / 300 + gain, step, words) for _ in range(count)]
    rewards = [answer["reward"] for answer in answers]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) + 1e-4
    for answer in answers:
        advantage = (answer["reward"] - mean) / std
        answer["advantage"] = [advantage * weight for weight in answer["weight"]]
    prompt = question(nums, target) if words else terse(nums, target)
    return {"arm": arm, "seed": seed, "step": step, "prompt": prompt, "answers": answers}


def _answer(rng: Random, nums: list[int], target: int, right: bool, step: int, words: bool) -> dict[str, Any]:
    text = trace(nums, target, rng=rng, style="words" if words else "terse", attempts=(0, 2))
    if not right:
        text = re.sub(
            r"(<answer>.*?)\d+", lambda found: f"{found[1]}{rng.randint(1, 20)}", text, count=1, flags=re.DOTALL
        )
    tokens = re.findall(r"</?\w+>| ?\w+|\s|.", text) if words else re.findall(r"</?\w+>|\d|\s|.", text)
    entropy = [rng.expovariate(3 if token.strip().isdigit() else 12) * (1.2 - step / 150) for token in tokens]
    verdict = verify(text, nums, target)
    return {
        "tokens": tokens,
        "recorded": True,
        "entropy": entropy,
        "logp": [-value * rng.random() for value in entropy],
        "weight": [1 + 0.4 * math.tanh(value - 0.3) for value in entropy],
        "correct": verdict.correct,
        "reward": float(verdict.correct) + 0.1 * float(verdict.well_formed),
        "finish": "stop",
    }
