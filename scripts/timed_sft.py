"""Supervised fine-tuning with a time limit: the learning rate decays with the elapsed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from explorl.training.sft.trainer import PackedSFTTrainer

WARM_UP = 30
"""Number of warm-up steps."""


class Clock:
    """The share of the time limit that has elapsed, starting with the first step."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.now = seconds, now
        self.begun: float | None = None

    @property
    def elapsed(self) -> float:
        return 0.0 if self.begun is None else self.now() - self.begun

    def start(self) -> None:
        if self.begun is None:
            self.begun = self.now()

    def over(self, step: int | None = None) -> bool:
        self.start()
        return self.elapsed >= self.seconds

    def rate(self, step: int) -> float:
        """Return the learning rate relative to its maximum: `WARM_UP` steps of warm-up, then a decay to 1/50."""
        return min((step + 1) / WARM_UP, max(1 - self.elapsed / self.seconds, 0.02))


class TimedSFTTrainer(PackedSFTTrainer):
    """Fine-tuning whose learning rate has decayed when the time limit is reached."""

    clock: Clock

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self.clock.rate)
        return self.lr_scheduler


class Ending(TrainerCallback):
    """Stop training at the time limit or after a number of steps, and print the progress regularly."""

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self.clock, self.say = clock, say

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.clock.over():
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            tokens = float(logs.get("num_tokens", 0)) / max(self.clock.elapsed, 1e-9)
            accuracy = float(logs.get("mean_token_accuracy", 0))
            self.say(
                f"sft {self.clock.elapsed:.0f} s, step {state.global_step}: loss {float(logs['loss']):.4f}, accuracy "
                f"{accuracy:.4f}, {tokens:,.0f} tokens/s"
            )
