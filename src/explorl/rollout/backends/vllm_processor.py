"""A logits processor for vLLM that applies `explorl.rollout.backends.chain`, found by vLLM through an entry point.

It is loaded into every vLLM in whose environment Explorl is installed, and acts only on requests with our arguments
(``extra_args``, or ``vllm_xargs`` of a server). One class serves both of vLLM's interfaces, which share the entry point
group ``vllm.logits_processors``:

    V1                 temperature → [this] → vLLM's top-k, top-p → sample    (min-p just before this)
    Model Runner V2    [this] → temperature → min-p → top-k, top-p → sample

In both it is applied after bias, bans, a grammar and penalties, and only removes tokens, so that vLLM's own temperature
can be applied before or after it. vLLM's top-k, top-p and min-p would be applied in another order than ours, so a
request that sets one of them in addition to one of our arguments is rejected; it must be given as ``explorl_top_p`` and
so on. Rows at temperature 0 are left to vLLM's argmax.
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
    """Return vLLM's base class of that interface, or None if this release does not have it."""
    try:
        return importlib.import_module(module).LogitsProcessor
    except (ImportError, AttributeError):
        return None


_V1 = _interface("vllm.v1.sample.logits_processor.interface")
_V2 = _interface("vllm.v1.worker.gpu.sample.logits_processor.interface")
_BASES: tuple[Any, ...] = tuple(base for base in (_V1, _V2) if base is not None) or (object,)


def checked(params: Any) -> Chain | None:
    """Return the chain of a vLLM request, or None if it has none; raise `ValueError` if it can't be applied."""
    chain = Chain.read(params.extra_args)
    if chain is None:
        return None
    off = {"top_p": 1.0, "top_k": (0, -1), "min_p": 0.0}
    for name, value in off.items():
        setting = getattr(params, name)
        if setting not in (value if isinstance(value, tuple) else (value,)):
            raise ValueError(
                f"{name} is {setting} together with {PREFIX}… arguments, which vLLM would apply in another order; "
                f"give it as {PREFIX}{name} instead"
            )
    if chain.temperatures and params.temperature != 1:
        raise ValueError(f"temperature is {params.temperature} together with {PREFIX}temperatures; leave it at 1.0")
    if chain.key is not None and (params.n or 1) > 1:
        raise ValueError(
            f"n is {params.n} together with {PREFIX}key, so all completions would use the same random numbers; use 1"
        )
    return chain


class ExplorlLogitsProcessor(*_BASES):  # type: ignore[misc]
    """Removes the tokens that a request's chain cuts off."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        checked(sampling_params)

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: bool = False) -> None:
        states = device_or_states if hasattr(device_or_states, "prompt_len") else None
        self._states: Any = states
        self.device: torch.device = device_or_states if states is None else states.device
        self._seed = int(getattr(vllm_config.model_config, "seed", None) or 0)
        self._keyless = 0
        """Number of requests without a key so far. All workers count alike, so they use the same random numbers."""
        self._requests: dict[int, tuple[Chain, float, list[int]]] = {}
        """Chain, temperature and tokens so far, by index in the batch (V1) or by slot (V2)."""
        self._rows: Chains | None = None
        self._index: Tensor | None = None
        slots = 0 if states is None else states.max_num_reqs
        self._active = np.zeros(slots, dtype=bool)
        self._rate: Tensor | None = None

    def is_argmax_invariant(self) -> bool:
        """Return True, so that V1 calls it after the temperature and not for greedy rows; it does change the argmax."""
        return True

    def _new(self, params: Any, tokens: list[int]) -> tuple[Chain, float, list[int]] | None:
        """Return the entry of a new request, or None if its chain does nothing."""
        chain = checked(params)
        if chain is None or chain.idle or params.temperature == 0:
            return None
        if chain.key is None:
            key = int(rng.request_keys(self._seed, [self._keyless])[0])
            self._keyless += 1
            chain = Chain(**{**vars(chain), "key": key})
        return chain, params.temperature, tokens

    # ---------------------------------------------------------------- V1

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None or not (self._requests or batch_update.added):
            return
        from vllm.v1.sample.logits_processor.builtin import process_dict_updates

        if process_dict_updates(self._requests, batch_update, lambda params, _, tokens: self._new(params, tokens)):
            chains = [chain for chain, _, _ in self._requests.values()]
            self._rows = Chains.of(chains, self.device) if chains else None
            self._index = torch.tensor(list(self._requests), dtype=torch.long, device=self.device)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        if not self._requests:
            return logits
        return self._after_temperature(logits) if ctx is None else self._before_temperature(logits, ctx)

    def _after_temperature(self, logits: Tensor) -> Tensor:
        assert self._rows is not None
        assert self._index is not None
        lengths = [len(tokens) for _, _, tokens in self._requests.values()]
        positions = torch.tensor(lengths, dtype=torch.long, device=self.device)
        logits[self._index] = _cut(logits[self._index], self._rows, positions)
        return logits

    # ---------------------------------------------------------------- Model Runner V2

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        request = self._new(sampling_params, [])
        if request is not None:
            self._requests[req_idx] = request
        elif self._requests.pop(req_idx, None) is None:
            return False
        self._active[req_idx] = request is not None
        self._rows = None
        return request is not None

    def apply_staged_writes(self) -> None:
        if self._rows is not None or not self._requests:
            return
        idle: tuple[Chain, float, list[int]] = (Chain(), 1.0, [])
        slots = [self._requests.get(slot, idle) for slot in range(len(self._active))]
        self._rows = Chains.of([chain for chain, _, _ in slots], self.device)
        self._rate = torch.tensor(
            [1 / temperature for _, temperature, _ in slots], dtype=torch.float32, device=self.device
        )

    def _before_temperature(self, logits: Tensor, ctx: Any) -> Tensor:
        if not self._active[ctx.idx_mapping_np].any():
            return logits
        self.apply_staged_writes()
        assert self._rows is not None
        assert self._rate is not None
        slots = ctx.expanded_idx_mapping.long()
        positions = ctx.pos.long() + 1 - self._states.prompt_len.gpu[slots].long()
        return _cut(logits, self._rows.select(slots), positions, self._rate[slots])


def _cut(logits: Tensor, rows: Chains, positions: Tensor, rate: Tensor | None = None) -> Tensor:
    if "temperatures" in rows.active:
        logits = logits / rows.temperatures(positions)[:, None]
    return logits.masked_fill(rows.removed(logits, positions, rate), -torch.inf)
