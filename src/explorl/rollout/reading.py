"""Brings what seats have sampled, and what was recorded of it, from the device to their samples: `Reading`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.sampling import Active
from explorl.rollout.sequences import Sample
from explorl.rollout.state import BRANCHING, ENTROPY, LOGP, LOGQ, TOKENS, State
from explorl.rollout.transfer import Download, upload


class Reading:
    """What samples in these seats have sampled, up to these lengths of their completions; on its way to the host."""

    def __init__(
        self, state: State, active: Active, samples: Sequence[Sample], seats: np.ndarray, lengths: np.ndarray
    ) -> None:
        self.samples = samples
        for sample, length in zip(samples, lengths.tolist(), strict=True):
            sample.cut(length)  # where somebody looked at it before its stop string was found
        self._begins = np.array([len(sample.tokens) for sample in samples])
        self._ends = lengths
        where, self._longest = upload(seats, state.ints.device), int(lengths.max())
        wanted = {
            "ints": state.out_ints[:, where, : self._longest],
            "reals": state.out_reals[:, where, : self._longest],
        }
        if active.min_p_mass and state.out_mass is not None:
            wanted["min_p_mass"] = state.out_mass[where, : self._longest]
        if state.top_ids is not None and state.top_logps is not None:
            wanted["top_ids"] = state.top_ids[where, : self._longest]
            wanted["top_logps"] = state.top_logps[where, : self._longest]
        self._names, self._download = list(wanted), Download(*wanted.values())

    def land(self) -> None:
        """Gives the samples their tokens and records, once they are there."""
        held = dict(zip(self._names, self._download.wait(), strict=True))
        sizes = (self._ends - self._begins).tolist()
        column = np.arange(self._longest)
        new = (column >= self._begins[:, None]) & (column < self._ends[:, None])
        index = torch.from_numpy(np.flatnonzero(new))

        def parts(values: Tensor) -> Sequence[Tensor]:
            return values.flatten(0, 1).index_select(0, index).split(sizes)

        ints, reals = held.pop("ints"), held.pop("reals")
        tokens = ints[TOKENS].flatten().index_select(0, index).numpy().tolist()
        records = {"branching": parts(ints[BRANCHING]), "entropy": parts(reals[ENTROPY])}
        records |= {"logps": parts(reals[LOGP]), "sampling_logps": parts(reals[LOGQ])}
        records |= {name: parts(values) for name, values in held.items()}
        records["sampled"] = torch.ones(len(tokens), dtype=torch.bool).split(sizes)
        ends = np.cumsum(sizes).tolist()
        try:
            for i, (sample, size, end) in enumerate(zip(self.samples, sizes, ends, strict=True)):
                if size == 0:
                    continue
                own = {name: values[i] for name, values in records.items() if name in sample.kinds}
                k = sample.tops
                if 0 < k < own["top_ids"].shape[-1]:
                    own |= {name: own[name][:, :k] for name in ("top_ids", "top_logps")}
                sample.append(tokens[end - size : end], own)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Takes the tokens back, after an interruption: they will be sampled again."""
        for sample, begin in zip(self.samples, self._begins.tolist(), strict=True):
            sample.cut(begin)
