"""Record an evaluation of the policy in training: in the run's folder, the log history and all trackers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from transformers.trainer_callback import CallbackHandler

from explorl.core.store import RunStore
from explorl.evaluation import Evaluation


def store_evaluation(store: RunStore, step: int, result: Evaluation) -> dict[str, float]:
    """Write the completions of an evaluation and its line of metrics to a run's folder; return pass@k."""
    result.save(store.folder / "evaluations", f"step-{step:06d}")
    scores = {f"pass@{k}": result.pass_at(k).mean for k in result.ks}
    store.append_metrics({"step": step, "kind": "evaluation", **scores})
    return scores


def log_scores(
    handler: CallbackHandler | None, args: Any, state: Any, control: Any, result: Evaluation, facts: Mapping[str, str]
) -> None:
    """Log pass@k with its intervals to the history and all trackers.

    ``facts``, such as the task's name, go to the trackers. The keys have TRL's prefix for an evaluation,
    ``eval_pass@1``; trackers show that as eval/pass@1.
    """
    scores: dict[str, float] = {}
    for k in result.ks:
        interval = result.pass_at(k)
        ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
        scores |= {f"eval_pass@{k}{end}": value for end, value in ends.items()}
    state.log_history.append({**scores, "step": state.global_step})
    if handler is None:
        return
    due = control.should_log  # the handler resets it, but the metrics of training may be due at this step too
    texts = {f"eval_{name}": text for name, text in facts.items() if text}
    handler.on_log(args, state, control, {**scores, **texts})
    control.should_log = due


def calling_handler() -> CallbackHandler | None:
    """Return the handler that calls the current callback: transformers gives callbacks no access to trackers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler):
            return owner
        frame = frame.f_back
    return None
