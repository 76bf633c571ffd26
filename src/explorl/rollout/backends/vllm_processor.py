"""vLLM's logits processor for what `explorl.rollout.backends.chain` says, found by vLLM through an entry point.

It is loaded into every vLLM beside which Explorl is installed, and acts only on requests with arguments of ours
(``extra_args``, or ``vllm_xargs`` of a server). One class serves both of vLLM's interfaces, which share the entry point
group ``vllm.logits_processors``:

    V1                 temperature → [this] → vLLM's top-k, top-p → draw      (min-p just before this)
    Model Runner V2    [this] → temperature → min-p → top-k, top-p → draw

In both it sees what bias, bans, a grammar and penalties have left, and only takes tokens away, so that vLLM's own
temperature acts in either order. vLLM's top-k, top-p and min-p would come before or behind it, another order than ours:
a request that sets one of them beside an argument of ours is refused; it is given as ``explorl_top_p`` and so on.
Rows at temperature 0 are left to vLLM's argmax.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from explorl.rollout.backends.chain import PREFIX, Chain, Chains
from explorl.rollout.sampling import rng


def _interface(module: str) -> type | None:
    """vLLM's base class of that interface; None in a release that does not have it."""
    try:
        return importlib.import_module(module).LogitsProcessor
    except (ImportError, AttributeError):
        return None


_V1 = _interface("vllm.v1.sample.logits_processor.interface")
_V2 = _interface("vllm.v1.worker.gpu.sample.logits_processor.interface")
_BASES: tuple[Any, ...] = tuple(base for base in (_V1, _V2) if base is not None) or (object,)


def checked(params: Any) -> Chain | None:
    """The chain of a request of vLLM's; `ValueError` where it cannot be honoured, None where it has none."""
    chain = Chain.read(params.extra_args)
    if chain is None:
        return None
    off = {"top_p": 1.0, "top_k": (0, -1), "min_p": 0.0}
    for name, value in off.items():
        given = getattr(params, name)
        if given not in (value if isinstance(value, tuple) else (value,)):
            raise ValueError(
                f"{name} is {given} beside {PREFIX}… arguments, and vLLM would cut in another order; "
                f"give it as {PREFIX}{name} instead"
            )
    if chain.temperatures and params.temperature != 1:
        raise ValueError(f"temperature is {params.temperature} beside {PREFIX}temperatures; leave it at 1.0")
    if chain.key is not None and (params.n or 1) > 1:
        raise ValueError(f"n is {params.n} beside {PREFIX}key, and all of them would throw the same coins; ask for 1")
    return chain


class ExplorlLogitsProcessor(*_BASES):  # type: ignore[misc]
    """Takes away the tokens that a request's chain removes."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        checked(sampling_params)

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: bool = False) -> None:
        states = device_or_states if hasattr(device_or_states, "prompt_len") else None
        self._states: Any = states
        self.device: torch.device = device_or_states if states is None else states.device
        self._seed = int(getattr(vllm_config.model_config, "seed", None) or 0)
        self._seen = 0
        """Requests so far that have no key of their own. All workers count alike, so that they throw the same coins."""
        self._of: dict[int, tuple[Chain, float, list[int]]] = {}
        """Chain, temperature and tokens so far, by place in the batch (V1) or by slot (V2)."""
        self._rows: Chains | None = None
        self._places: Tensor | None = None
        slots = 0 if states is None else states.max_num_reqs
        self._on = np.zeros(slots, dtype=bool)
        self._rate: Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        """True has V1 call it behind the temperature, and for rows that are not greedy; it does change the argmax."""
        return True

    def _new(self, params: Any, tokens: list[int]) -> tuple[Chain, float, list[int]] | None:
        chain = checked(params)
        if chain is None or chain.idle or params.temperature == 0:
            return None
        if chain.key is None:
            key = int(rng.request_keys(self._seed, [self._seen])[0])
            self._seen += 1
            chain = Chain(**{**vars(chain), "key": key})
        return chain, params.temperature, tokens

    # ---------------------------------------------------------------- V1

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None or not (self._of or batch_update.added):
            return
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        if process_dict_updates(self._of, batch_update, lambda params, _, tokens: self._new(params, tokens)):
            chains = [chain for chain, _, _ in self._of.values()]
            self._rows = Chains.of(chains, self.device) if chains else None
            self._places = torch.tensor(list(self._of), dtype=torch.long, device=self.device)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        if not self._of:
            return logits
        return self._behind_temperature(logits) if ctx is None else self._before_temperature(logits, ctx)

    def _behind_temperature(self, logits: Tensor) -> Tensor:
        assert self._rows is not None
        assert self._places is not None
        so_far = [len(tokens) for _, _, tokens in self._of.values()]
        positions = torch.tensor(so_far, dtype=torch.long, device=self.device)
        logits[self._places] = _cut(logits[self._places], self._rows, positions)
        return logits

    # ---------------------------------------------------------------- Model Runner V2

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        found = self._new(sampling_params, [])
        if found is not None:
            self._of[req_idx] = found
        elif self._of.pop(req_idx, None) is None:
            return False
        self._on[req_idx] = found is not None
        self._rows = None
        return found is not None

    def apply_staged_writes(self) -> None:
        if self._rows is not None or not self._of:
            return
        nothing: tuple[Chain, float, list[int]] = (Chain(), 1.0, [])
        slots = [self._of.get(slot, nothing) for slot in range(len(self._on))]
        self._rows = Chains.of([chain for chain, _, _ in slots], self.device)
        self._rate = torch.tensor([1 / warm for _, warm, _ in slots], dtype=torch.float32, device=self.device)

    def _before_temperature(self, logits: Tensor, ctx: Any) -> Tensor:
        if not self._on[ctx.idx_mapping_np].any():
            return logits
        self.apply_staged_writes()
        assert self._rows is not None
        assert self._rate is not None
        slots = ctx.expanded_idx_mapping.long()
        positions = ctx.pos.long() + 1 - self._states.prompt_len.gpu[slots].long()
        return _cut(logits, self._rows.take(slots), positions, self._rate[slots])


def _cut(logits: Tensor, rows: Chains, positions: Tensor, rate: Tensor | None = None) -> Tensor:
    if "temperatures" in rows.active:
        logits = logits / rows.temperatures(positions)[:, None]
    return logits.masked_fill(rows.removed(logits, positions, rate), -torch.inf)
