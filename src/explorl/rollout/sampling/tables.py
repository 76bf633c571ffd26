"""Tables that sequences of a session share and the device looks up: stop tokens, bias, temperatures by position.

A sequence has an index into each table. Tables only grow, so an index stays valid when others join the session.
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
        """The distinct sets of stop tokens."""
        self.curves: list[Sequence[float]] = []
        """Temperatures by position."""
        self._curves: dict[Sequence[float], int] = {}
        """Index of each sequence of temperatures."""
        self.bias: np.ndarray | None = None
        """Values to add to the logits (sets, vocab), the first row zero; None if no sequence has any."""
        self._rows: dict[bytes, int] = {}
        """Row of ``bias`` by digest."""
        self._published: tuple[object, ...] = ()

    @property
    def bytes(self) -> int:
        return 0 if self.bias is None else self.bias.nbytes

    def add(self, requests: Requests) -> Mapping[str, np.ndarray]:
        """Add the entries of these requests; return the index of each request in every table, by field."""
        self.stops += [ids for ids in requests.stop_sets if ids not in self.stops]
        stop_set = np.array([self.stops.index(ids) for ids in requests.stop_sets])[requests.stop_set]
        curve = np.zeros(len(requests), dtype=np.int64)
        if requests.curves:
            indices = [self._curves.setdefault(values, len(self._curves)) for values in requests.curves]
            curve, self.curves = np.array(indices)[requests.rows["curve"]], [*self._curves]
        bias_set = np.zeros(len(requests), dtype=np.int64)
        if requests.bias is not None:
            bias_set = self._add_bias(requests.bias)[requests.bias_set]
        return {"stop_set": stop_set, "curve": curve, "bias_set": bias_set}

    def _add_bias(self, rows: np.ndarray) -> np.ndarray:
        """Add rows of bias that are new; return the index of each row."""
        if self.bias is None:
            self.bias = np.zeros_like(rows[:1])
            self._rows = {_digest(self.bias[0]): 0}
        indices, new = [], [self.bias]
        for row in rows:
            index = self._rows.setdefault(_digest(row), len(self._rows))
            if index == len(self.bias) + len(new) - 1:
                new.append(row[None])
            indices.append(index)
        self.bias = np.concatenate(new)
        return np.array(indices)

    def put(self, runner: Runner, active: Active) -> None:
        """Copy changed tables to the device, and allocate memory for the statistics to record."""
        state = runner.state
        current = (
            state,
            len(self.stops),
            len(self.curves),
            self.bytes,
            active.logprobs,
            active.min_p_mass,
            active.repetition,
        )
        if current == self._published:
            return
        bias = None if self.bias is None else torch.from_numpy(self.bias)
        moved = [state.set_stops(self.stops), state.set_bias(bias), state.set_curves(self.curves)]
        if any([*moved, state.allocate_tops(active.logprobs)]):
            runner.drop_graphs()
        if active.min_p_mass:
            state.allocate_mass()
        if active.repetition:
            state.allocate_seen()
        self._published = current


def _digest(row: np.ndarray) -> bytes:
    return hashlib.blake2b(row.tobytes()).digest()
