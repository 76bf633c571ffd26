"""`Engine`: samples completions from a transformers model, and records what exploration needs to know about them.

Each different prompt is computed once and its keys and values are copied to the rows of its samples. Rows that finish
are refilled at once, so the longest completion holds up nobody. The model's weights are read where they are: after an
optimizer step the next call samples from the new policy.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from explorl.rollout.attention import sampling_mode
from explorl.rollout.cache import probe
from explorl.rollout.decoder import Decoder
from explorl.rollout.plan import Plan, free_memory, make_plan
from explorl.rollout.requests import Prompt, Requests, prepare
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.sampling import Active, SamplingParams
from explorl.rollout.schedule import Schedule

logger = logging.getLogger(__name__)


class Engine:
    """Samples from any decoder-only transformers model that uses the attention interface, peft adapters included.

    Args:
        model: The model, in any mode; it is left as it was found.
        tokenizer: Its tokenizer; None where prompts are token ids and no text is wanted.
        batch_size: Most rows decoded together; None lets memory decide, up to a few hundred.
        memory_budget: Bytes that the engine may hold beside the model; None is half of what is free.
        use_graphs: Decode in CUDA graphs; None is yes on CUDA.
        use_kernels: Use the Triton kernels; None is yes on CUDA where Triton is installed.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        batch_size: int | None = None,
        memory_budget: int | None = None,
        use_graphs: bool | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; use at least 1, or None to let memory decide")
        if memory_budget is not None and memory_budget < 1:
            raise ValueError(f"memory_budget is {memory_budget}; give bytes, such as {4 << 30}, or None")
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.memory_budget = batch_size, memory_budget
        self.use_graphs, self.use_kernels = use_graphs, use_kernels
        self.plan: Plan | None = None
        """Sizes and memory of the latest call."""
        self._decoder: Decoder | None = None
        self._signature: tuple[Any, ...] = ()
        self._warned = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        params: SamplingParams | None = None,
        on_finish: Callable[[Rollout], object] | None = None,
    ) -> Rollouts:
        """Samples ``n`` completions of every prompt.

        A prompt is a text, a list of token ids, or a list of chat messages. Where a prompt and its ``max_tokens``
        reach beyond the model's context, ``max_tokens`` is cut to what is left and a warning says so; a prompt that
        leaves no room at all is an error. A request whose logits are not finite ends with ``finish_reason="error"``
        and says at which step, while the others go on: see `Rollouts.errors` and `Rollouts.check`.

        ``on_finish`` is called with every completion as it finishes, in that order; the result is in the order of the
        requests.
        """
        params = params or SamplingParams()
        device = next(self.model.parameters()).device
        self._refresh(device)
        requests = self._requests(prompts, n, params)
        active = Active.of(params, requests.rows)
        decoder = self._prepare(requests, active, device)
        if decoder.state.set_stops(requests.stop_ids):
            decoder.drop_graphs()
        assert self.plan is not None
        with sampling_mode(self.model), decoder.fused():
            schedule = Schedule(decoder, requests, active, self.plan.slots, self.tokenizer, params.stop, on_finish)
            rollouts = Rollouts(schedule.run(), requests.prompts, n, requests.seed)
        for rollout in rollouts.errors:
            logger.error(rollout.error)
        return rollouts

    def release(self) -> None:
        """Gives the cache and the graphs back; the next call makes them anew."""
        self._decoder = None

    def _requests(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Requests:
        seed = params.seed if params.seed is not None else int(torch.randint(2**62, ()).item())
        return prepare(
            prompts,
            n,
            params,
            tokenizer=self.tokenizer,
            vocab=self._input_vocab(),
            context=getattr(self._config(), "max_position_embeddings", None),
            eos=self._eos(),
            seed=seed,
        )

    def _refresh(self, device: torch.device) -> None:
        """Looks at the model anew where its parameters moved or its adapters changed; keeps the graphs otherwise."""
        signature = model_signature(self.model)
        if signature == self._signature:
            return
        if self._decoder is not None:
            logger.info("the model's parameters or adapters moved; graphs will be captured anew")
        self.layers, self.vocab = probe(self.model, device)
        self._decoder = None
        self._signature = signature

    def _prepare(self, requests: Requests, active: Active, device: torch.device) -> Decoder:
        kernels = _have_kernels(device) if self.use_kernels is None else self.use_kernels
        graphs = device.type == "cuda" if self.use_graphs is None else self.use_graphs
        if graphs and device.type != "cuda":
            raise ValueError(f"use_graphs needs a CUDA device and the model is on {device}; leave it None")
        itemsize = self.layers[0].dtype.itemsize
        config = self._config()
        plan = make_plan(
            self.layers,
            requests=len(requests),
            prompts=len(requests.different),
            prompt_tokens=max(len(prompt) for prompt in requests.different),
            tokens=int(requests.rows["max_tokens"].max()),
            vocab=self.vocab,
            logit_bytes=(itemsize if kernels else 16 + itemsize) + active.repetition,
            prefill_bytes=itemsize * (8 * config.hidden_size + 3 * (getattr(config, "intermediate_size", 0) or 0)),
            batch_size=self.batch_size,
            budget=self._budget(device),
            device=device,
            join=device.type == "cpu" and not kernels,
        )
        if plan.split and not self._warned:
            self._warned = True
            logger.warning(
                "%d requests of up to %d tokens do not fit into memory together; running %d at a time",
                len(requests),
                plan.tokens,
                plan.slots,
            )
        if self._decoder is None or not self._decoder.plan.covers(plan):
            self._decoder = None  # frees the old memory before the new is taken
            logger.info("rollout plan: %s", plan)
            self._decoder = Decoder(
                self.model, self.layers, self.vocab, plan, device, use_graphs=graphs, use_kernels=kernels
            )
        self.plan = plan
        return self._decoder

    def _budget(self, device: torch.device) -> int:
        """Bytes that the engine may hold, what it holds already included."""
        if self.memory_budget is not None:
            return self.memory_budget
        held = 0 if self._decoder is None else self._decoder.plan.bytes
        return (free_memory(device) + held) // 2

    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]

    def _input_vocab(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def _eos(self) -> tuple[int, ...]:
        """Every token that the model or its tokenizer declares to end a completion."""
        ids = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if ids is None:
            ids = getattr(self._config(), "eos_token_id", None)
        found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        own = getattr(self.tokenizer, "eos_token_id", None)
        return tuple(dict.fromkeys(int(token) for token in [*found, *([] if own is None else [own])]))


def _have_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return importlib.util.find_spec("triton") is not None


def model_signature(model: nn.Module) -> tuple[Any, ...]:
    """Changes where a captured graph would read the wrong memory or adapter; not where weights are updated in place."""
    modules: list[Any] = list(model.modules())
    tensors = tuple(
        (t.data_ptr(), t.dtype)
        for module in modules
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    )
    adapters = tuple(
        (
            tuple(module.active_adapters),
            bool(module.disable_adapters),
            tuple(module.merged_adapters),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in modules
        if hasattr(module, "merged_adapters")
    )
    hooks = tuple(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in m.__dict__) for m in modules)
    return tensors, adapters, hooks, tuple(id(module) for module in modules)
