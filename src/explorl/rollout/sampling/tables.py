"""What rows of a session have in common and the device looks up: stop tokens, bias and bans, temperatures by position.

A row has a place in each table. Tables only grow, so that a place stays what it is while others join the session.
"""

from __future__ import annotations

import hashlib
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
        self._curves: dict[Sequence[float], int] = {}
        """Their places."""
        self.bias: np.ndarray | None = None
        """What is added to the logits (sets, vocab), the first being nothing; None where no row has any."""
        self._rows: dict[bytes, int] = {}
        """Which row of ``bias`` has this digest."""
        self._known: tuple[object, ...] = ()

    @property
    def bytes(self) -> int:
        return 0 if self.bias is None else self.bias.nbytes

    def add(self, requests: Requests) -> Mapping[str, np.ndarray]:
        """Takes in what these requests have; the place of each in every table, by its name in `SequenceState`."""
        self.stops += [ids for ids in requests.stop_sets if ids not in self.stops]
        stop_set = np.array([self.stops.index(ids) for ids in requests.stop_sets])[requests.stop_set]
        curve = np.zeros(len(requests), dtype=np.int64)
        if requests.curves:
            places = [self._curves.setdefault(values, len(self._curves)) for values in requests.curves]
            curve, self.curves = np.array(places)[requests.rows["curve"]], [*self._curves]
        bias_set = np.zeros(len(requests), dtype=np.int64)
        if requests.bias is not None:
            bias_set = self._add_bias(requests.bias)[requests.bias_set]
        return {"stop_set": stop_set, "curve": curve, "bias_set": bias_set}

    def _add_bias(self, rows: np.ndarray) -> np.ndarray:
        """The place of each of these rows."""
        if self.bias is None:
            self.bias = np.zeros_like(rows[:1])
            self._rows = {_digest(self.bias[0]): 0}
        places, new = [], [self.bias]
        for row in rows:
            place = self._rows.setdefault(_digest(row), len(self._rows))
            if place == len(self.bias) + len(new) - 1:
                new.append(row[None])
            places.append(place)
        self.bias = np.concatenate(new)
        return np.array(places)

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
        bias = None if self.bias is None else torch.from_numpy(self.bias)
        moved = [state.set_stops(self.stops), state.set_bias(bias), state.set_curves(self.curves)]
        if any([*moved, state.allocate_tops(active.logprobs)]):
            runner.drop_graphs()
        if active.min_p_mass:
            state.allocate_mass()
        if active.repetition:
            state.allocate_seen()
        self._known = known


def _digest(row: np.ndarray) -> bytes:
    return hashlib.blake2b(row.tobytes()).digest()
