"""Sampling completions: sampling parameters, warpers, and the engine that decodes with them.

The path of a token through the files:

1. `engine`: both `Engine.generate` and `Engine.open` create a `Session`; generate runs it to its end.
2. `requests`: prompts become token ids, and `SamplingParams` one value per request. Invalid requests are rejected here.
3. `session`: each request is a sequence; forks and extended ones are sequences too.
4. `memory_plan`: how many sequences are decoded together, and what memory that takes; `runner` allocates it.
5. `scheduler`: waiting sequences are admitted to slots (a column of `state`), decoded, read back, and replaced.
6. `memory`: the prompt of an admitted sequence is computed by `Runner.prefill` and `Runner.extend` unless it is stored
   already: into pages on a GPU and when memory is short, on a CPU into one entry that its sequences share.
7. `runner`: one step of all slots, on CUDA in a graph. The model (its own code, or `modeling.llama`) is run; each layer
   stores the new key and value, and attends to those of the sequence.
8. `sampling`: logits are warped, and a token is sampled with the random number that `rng` has for (seed, request,
   position). Its log π, log q, entropy and branching factor are stored in `state`.
9. `scheduler`, every few steps: `stops` searches for stop strings, sequences that have ended leave their slots, and
   `readback` copies them to the host. On a GPU the next steps have begun by then, so that the device never waits.
10. `rollouts`: the sequence becomes a `Rollout`. `trial` has checked beforehand that all this agrees with the model.

`backends` sample in place of the engine, `tools` and `tool_session` run the tool calls of sequences, and `branching`
forks sequences.
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

_MODULES = {
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
    """Import a public name on first use, as the engine needs transformers, which takes seconds to import."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
