"""Hyperparameters that change with the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """A change from ``begin`` until step ``start`` to ``to`` from step ``start + steps`` on, with a shape in between.

    With x = (step − start)/steps, linear: begin + (to − begin)·x; cosine: begin + (to − begin)·(1 − cos πx)/2; step:
    begin until x = 1, then to.
    In a config file: ``{from: 0.1, to: 0.0, start: 200, steps: 100, shape: linear}``.
    """

    begin: float
    to: float
    start: int = 0
    steps: int = 1
    shape: Literal["linear", "cosine", "step"] = "linear"

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(
                    f"a schedule's {name} is {value!r}; use a number of steps, {least} or more, such as 100"
                )
        if self.steps < 1:
            raise ValueError(f"a schedule must end after it starts: steps is {self.steps}, use 1 or more")
        if self.start < 0:
            raise ValueError(f"a schedule cannot start before step 0: start is {self.start}")
        if self.shape not in ("linear", "cosine", "step"):
            raise ValueError(f"unknown shape of a schedule: {self.shape!r}; use linear, cosine or step")
        for name in ("begin", "to"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"a schedule's values must be finite numbers: {name} is {value!r}")

    def __call__(self, step: int) -> float:
        x = min(max((step - self.start) / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            x = (1 - math.cos(math.pi * x)) / 2
        elif self.shape == "step":
            x = float(x >= 1.0)
        return self.begin + (self.to - self.begin) * x


Scheduled = float | Schedule
"""A number, or a schedule that gives a number for each step."""


def at(value: Scheduled, step: int) -> float:
    """Return the value of a hyperparameter at a step."""
    return value(step) if isinstance(value, Schedule) else float(value)
