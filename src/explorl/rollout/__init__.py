"""Drawing tokens: sampling parameters and warpers, and the engine that decodes with them.

The way of one token, in the order of the files that it passes:

1. `engine`: `Engine.generate` and `Engine.open` both begin a `Session`; generate runs it to its end.
2. `requests`: prompts become token ids, and `SamplingParams` one number per request; what cannot run is refused here.
3. `session`: every request is a `Sample` (`samples`): a prompt, its tokens so far, its limit and its random key. Forks
   are further samples with the same beginning, extended rows are samples with tokens that were not drawn.
4. `plan`: how many samples are decoded together, and what memory that takes. `decoder` allocates it.
5. `schedule`: samples that wait are given seats (a column of `state`), decoded, collected, and replaced.
6. The memory computes a seated sample's prompt, unless somebody has it already, and what else it is missing, by
   `Decoder.prefill` and `Decoder.extend`. `page_memory` (on `pages`) is that memory on a GPU and wherever it is short,
   `spans` (on `cache` and `joined`) on a CPU, where one stretch per row is the fastest to read.
7. `decoder`: one step of all rows, on CUDA in a graph. The model runs (its own code, or `modeling.llama`); in every
   layer it stores the new key and value and attends to the row's pages: `attention` in torch, `triton_attention`.
8. `sampler` (`triton_sampling`): logits are warped (`sampling`, `ranking`), a token is drawn with the number that `rng`
   gives for (seed, request, position), and log π, log q, entropy and branching are recorded beside it in `state`.
9. `schedule`, every few steps (`looks`): `stops` looks for stop strings; the seats of what has ended are free, and
   `reading` brings it to the host. On a GPU the next steps have begun by then, and nobody waits (`transfer`).
10. `rollouts`: the sample becomes a `Rollout`. On a CPU, samples that have drawn the same tokens were one row all the
    way (`sharing`); `trial` has checked beforehand that all this gives what the model itself gives.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from explorl.rollout.engine import Engine
    from explorl.rollout.processors import BottomPLogitsProcessor
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
    "BottomPLogitsProcessor": "processors",
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
