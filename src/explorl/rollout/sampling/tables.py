"""What rows of a session have in common and the device looks up: stop tokens, bias and bans, temperatures by position.

A row has a place in each table. Tables only grow, so that a place stays what it is while others join the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from explorl.rollout.requests import Requests
from explorl.rollout.runner import Runner
from explorl.rollout.sampling import Active


class Tables:
    """The tables of a session."""

    def __init__(self) -> None:
        self.stops: list[tuple[int, ...]] = []
        """The different sets of stop tokens."""
        self.curves: list[Sequence[float]] = []
        """Temperatures by position."""
        self.bias: np.ndarray | None = None
        """What is added to the logits (sets, vocab), the first being nothing; None where no row has any."""
        self._known: tuple[object, ...] = ()

    @property
    def bytes(self) -> int:
        return 0 if self.bias is None else self.bias.nbytes

    def add(self, requests: Requests) -> Mapping[str, np.ndarray]:
        """Takes in what these requests have; the place of each in every table, by the name that `Sample` has for it."""
        self.stops += [ids for ids in requests.stop_sets if ids not in self.stops]
        stop_set = np.array([self.stops.index(ids) for ids in requests.stop_sets])[requests.stop_set]
        curve = requests.rows["curve"] + len(self.curves)
        self.curves += requests.curves
        bias_set = np.zeros(len(requests), dtype=np.int64)
        if requests.bias is not None:
            before = np.zeros_like(requests.bias[:1]) if self.bias is None else self.bias
            bias_set = requests.bias_set + len(before)
            self.bias = np.concatenate([before, requests.bias])
        return {"stop_set": stop_set, "curve": curve, "bias_set": bias_set}

    def put(self, runner: Runner, active: Active) -> None:
        """Makes the tables known to the device, and room for what is recorded."""
        state = runner.state
        known = (
            state,
            len(self.stops),
            len(self.curves),
            self.bytes,
            active.logprobs,
            active.min_p_mass,
            active.repetition,
        )
        if known == self._known:
            return
        self._known = known
        bias = None if self.bias is None else torch.from_numpy(self.bias)
        moved = [state.set_stops(self.stops), state.set_bias(bias), state.set_curves(self.curves)]
        if any([*moved, state.keep_tops(active.logprobs)]):
            runner.drop_graphs()
        if active.min_p_mass:
            state.keep_mass()
        if active.repetition:
            state.keep_seen()
