"""Drawing tokens: sampling parameters and warpers, and the engine that decodes with them.

The way of one token, in the order of the files that it passes:

1. `engine`: `Engine.generate` and `Engine.open` both begin a `Session`; generate runs it to its end.
2. `requests`: prompts become token ids, and `SamplingParams` one number per request; what cannot run is refused here.
3. `session`: each request is a `SequenceState` (`samples`); forks and extended rows are samples too.
4. `plan`: how many samples are decoded together, and what memory that takes; `runner` allocates it.
5. `scheduler`: samples that wait are given seats (a column of `state`), decoded, collected, and replaced.
6. `memory`: a seated sample's prompt is computed, unless somebody has it already, by `Runner.prefill` and
   `Runner.extend`; into pages on a GPU and wherever memory is short, on a CPU into one stretch per row.
7. `runner`: one step of all rows, on CUDA in a graph. The model runs (its own code, or `modeling.llama`); each layer
   stores the new key and value, and attends to those of the row.
8. `sampling`: logits are warped, and a token is drawn by the number that `rng` has for (seed, request, position);
   log π, log q, entropy and branching are recorded beside it in `state`.
9. `scheduler`, every few steps (`looks`): `stops` looks for stop strings; what has ended leaves its seat, and `reading`
   brings it to the host. On a GPU the next steps have begun by then, and nobody waits (`transfer`).
10. `rollouts`: the sample becomes a `Rollout`. `trial` has checked beforehand that all this gives what the model gives.

Beside it: `backends` sample in the engine's place, `tools` and `tool_session` run what rows ask for, `branching` lets
them go on more than once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl.rollout.backends.processors import BottomPLogitsProcessor
    from explorl.rollout.engine import Engine
    from explorl.rollout.rollouts import PaddedRollouts, Rollout, Rollouts
    from explorl.rollout.sampling import SamplingParams
    from explorl.rollout.session import Session
    from explorl.rollout.trial import UnsupportedModel

__all__ = [
    "BottomPLogitsProcessor",
    "Engine",
    "PaddedRollouts",
    "Rollout",
    "Rollouts",
    "SamplingParams",
    "Session",
    "UnsupportedModel",
]

_HOME = {
    "BottomPLogitsProcessor": "backends.processors",
    "Engine": "engine",
    "PaddedRollouts": "rollouts",
    "Rollout": "rollouts",
    "Rollouts": "rollouts",
    "SamplingParams": "sampling",
    "Session": "session",
    "UnsupportedModel": "trial",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: the engine needs transformers, which takes seconds to import."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
