"""Parts that all training runs share: complete checkpoints, the metrics file, progress on a terminal or in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from explorl.core.errors import ExplorlError
from explorl.core.store import RunStore
from explorl.core.terminal import Pace, ProgressLines, duration
from explorl.training.checkpoint_faults import restoring


class Diverged(ExplorlError, ValueError):
    """Training has non-finite numbers; the message names the step and what to change."""


class StoredCheckpoints:
    """Mixin of a transformers Trainer: a checkpoint gets its final name only once it is complete."""

    args: Any
    accelerator: Any
    store: RunStore
    keep_checkpoints: int = 2

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        accelerator = self.accelerator
        main = accelerator.is_main_process
        final = self.args.output_dir
        with self.store.stage_checkpoint() if main else nullcontext() as staging:
            # all processes write into one folder, which the main process renames afterwards
            self.args.output_dir = broadcast_object_list([str(staging)])[0]
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                accelerator.wait_for_everyone()
            finally:
                self.args.output_dir = final
        if main:
            self.store.prune_checkpoints(self.keep_checkpoints)
        accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with restoring(Path(checkpoint or "."), "rng_state.pth"):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Skip TRL's model card for the hub: a run folder records its provenance elsewhere."""


class MetricsRecorder(TrainerCallback):
    """Writes a line of metrics.jsonl for each logged step."""

    def __init__(self, store: RunStore) -> None:
        self.store = store

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:  # the final summary has no loss
            self.store.append_metrics({"step": state.global_step, "kind": "train", **logs})


class ProgressDisplay(TrainerCallback):
    """Shows the progress of a training: a bar with the latest reward or loss on a terminal, plain lines elsewhere.

    A step is a batch of completions, however many optimizer steps use it.
    """

    def __init__(self, label: str, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.label, self.clock = label, clock
        self.progress = progress_bar(console)
        self.lines = ProgressLines(console, clock)
        self.task: Any = None
        self._values: dict[str, float] = {}
        self._printed_step: int | None = None
        self._start = (0, 0.0)
        """Step and time at which this process started."""
        self._pace = Pace()
        self._tokens: tuple[float, float] | None = None
        """Number of tokens on the previous line, and when they were counted."""
        self._logged_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, total = _steps(args, state)
        self._start, self._printed_step, self._pace = (step, self.clock()), None, Pace(step)
        self.progress.start()
        self.task = self.progress.add_task(self.label, total=total, completed=step, note="")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        shown = {key: (logs or {}).get(key) for key in ("reward", "loss", "entropy", "num_tokens")}
        values = {key: float(value) for key, value in shown.items() if value is not None}
        if "loss" not in values or self.task is None:
            return
        self._values, self._logged_at = values, self.clock()
        note = next(f"{key} {values[key]:.3f}" for key in ("reward", "loss") if key in values)
        self.progress.update(self.task, note=note)
        if self.lines.due and state.is_world_process_zero:
            self._print_line(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, _ = _steps(args, state)
        self._pace.see(step, self.clock())
        if self.task is not None:
            self.progress.update(self.task, completed=step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._printed_step != state.global_step and state.is_world_process_zero:
            self._print_line(args, state)
        self.close()

    def close(self) -> None:
        """Restore the terminal."""
        self.progress.stop()

    def _print_line(self, args: Any, state: Any) -> None:
        step, total = _steps(args, state)
        first_step, started_at = self._start
        score = "reward" if "reward" in self._values else "loss"
        parts = [f"{key} {self._values[key]:.3f}" for key in (score, "entropy") if key in self._values]
        if "num_tokens" in self._values:
            counted = self._values["num_tokens"], self._logged_at
            tokens, since = self._tokens or (counted if first_step else (0, started_at))
            if self._logged_at > since:
                parts.append(f"{(counted[0] - tokens) / (self._logged_at - since):,.0f} tokens/s")
            self._tokens = counted
        if step < total and self._pace.seconds is not None:
            parts.append(f"{duration(self._pace.seconds * (total - step))} left")
        self._printed_step = state.global_step
        self.lines.say(", ".join([f"{self.label}: step {step:,} of {total:,}", *parts]))


def _steps(args: Any, state: Any) -> tuple[int, int]:
    """Return the number of steps done and in total; a step has `num_iterations` updates."""
    iterations = getattr(args, "num_iterations", 1)
    return math.ceil(state.global_step / iterations), math.ceil(state.max_steps / iterations)


class StopAtDivergence(TrainerCallback):
    """Raises if the loss or the gradient is not finite, before anything is saved."""

    def __init__(self, key: str, rate: float) -> None:
        self.key, self.rate = key, rate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if args.fp16:  # infinite gradients are normal: the gradient scaler skips such steps
            return
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not math.isfinite(float(value)):
                raise self.error(_steps(args, state)[0], f"{name} is {float(value)}")

    def error(self, step: int, why: str) -> Diverged:
        """Return the error for a training that diverged at this step."""
        return Diverged(
            f"training diverged at step {step} ({why}); lower the learning rate: {self.key} is {self.rate:g}, "
            f"try {self.rate / 10:g}"
        )


def progress_bar(console: Console) -> Progress:
    """Return the progress bar that all commands share; hidden if the output is not a terminal."""
    return Progress(
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class PeriodicCallback(TrainerCallback):
    """Calls a function every N steps, on the main process or on all; training ends if it returns True.

    With ``last`` it is also called after the last step, while trackers still accept metrics.
    """

    def __init__(
        self, every: int, function: Callable[[int], bool | None], *, everywhere: bool = False, last: bool = False
    ) -> None:
        self.every, self.function, self.everywhere, self.last = every, function, everywhere, last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = bool(self.every) and state.global_step % self.every == 0
        if not due and not (self.last and control.should_training_stop):
            return
        called = self.everywhere or state.is_world_process_zero
        stop = self.function(state.global_step) if called else None
        if args.world_size > 1:  # all processes have to stop together
            stop = broadcast_object_list([stop])[0]
        if stop:
            control.should_training_stop = True
