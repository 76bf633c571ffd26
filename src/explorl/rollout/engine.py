"""`Engine`: samples completions from a transformers model, with the token statistics that exploration needs.

Each distinct prompt is computed once, and its completions share its keys and values. Sequences that finish are replaced
at once, so the longest completion does not hold up the others. The model's weights are used in place: after an
optimizer step the next call samples from the new policy.

Before a model is sampled from, the engine is tried on it: see `explorl.rollout.trial`. `UnsupportedModel` is raised for
a model that the engine would not compute like its own forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from explorl.modeling.attention import model_lock
from explorl.modeling.gpu import kernels_run
from explorl.modeling.llama import llama_like
from explorl.modeling.onednn_ops import copied_bytes
from explorl.modeling.precision import CastWeights, default_torch_settings, weights_dtype
from explorl.modeling.proof import TAIL, reached, touched
from explorl.rollout.memory.cache import probe
from explorl.rollout.memory_plan import MAX_SLOTS, MemoryNeeds, Plan, free_memory, make_plan, total_memory
from explorl.rollout.requests import Prompt, Requests, eos_token_ids, prepare
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.runner import Runner
from explorl.rollout.sampling import Active, SamplingParams
from explorl.rollout.sampling.params import is_whole
from explorl.rollout.session import Session
from explorl.rollout.trial import ExecutionMode, UnsupportedModel, execution_mode

logger = logging.getLogger(__name__)

MAX_IDLE_SHARE = 0.1
"""Share of a device's memory that an idle engine may hold."""
MIN_TOKENS_TO_COPY = TAIL
"""Shortest token limit for which the weights are copied: the copy takes as long as five steps save. The engine is tried
on as many tokens, so that copies are tried too."""


class Engine:
    """Samples from any decoder-only transformers model that uses the attention interface, peft adapters included.

    Args:
        model: The model, in train or eval mode, which is not changed.
        tokenizer: Its tokenizer; None if prompts are token ids and no text is needed.
        batch_size: Most sequences decoded together; None lets memory decide, up to a few hundred.
        memory_budget: Bytes that the engine may hold in addition to the model and its copy in another ``dtype``; None
            is half of the free memory.
        use_graphs: Decode in CUDA graphs; None means yes on CUDA.
        use_kernels: Use the Triton kernels; None means yes on CUDA if they run and agree with the model.
        dtype: Data type of the computation; None is that of the weights. With another one the engine holds a copy of
            the weights in it, refreshed at each call.
        unrolled: Run Llama-like layers unrolled; None means yes if that agrees with the model.
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
        dtype: torch.dtype | None = None,
        unrolled: bool | None = None,
    ) -> None:
        _check(model, batch_size, memory_budget, dtype)
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.memory_budget = batch_size, memory_budget
        self.use_graphs, self.use_kernels = use_graphs, use_kernels
        self.dtype, self.unrolled = dtype, unrolled
        self.plan: Plan | None = None
        """Sizes and memory of the latest call."""
        self._runner: Runner | None = None
        self._cast_weights: CastWeights | None = None
        self._signature: tuple[Any, ...] = ()
        self.max_copy_bytes = memory_budget
        """Most bytes that copies of the weights may take; None means no limit of their own."""
        self._warned = False
        self._latest: Session | None = None
        """The open session, if any. It must be closed before the next begins, even if the caller has dropped it."""

    @default_torch_settings()
    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        params: SamplingParams | None = None,
        on_finish: Callable[[Rollout], object] | None = None,
    ) -> Rollouts:
        """Sample ``n`` completions of every prompt, and return them in the order of the requests.

        A prompt is a text, a list of token ids, or a list of chat messages. If a prompt and its ``max_tokens`` exceed
        the model's context, ``max_tokens`` is reduced with a warning; a prompt that leaves no room at all raises
        `ValueError`. A request whose logits are not finite ends with ``finish_reason="error"`` and names the step,
        while the others continue: see `Rollouts.errors` and `Rollouts.check`.

        ``on_finish`` is called with every completion when it finishes.
        """
        self._check_idle()
        params = params or SamplingParams()
        requests = self.requests(prompts, n, params)
        with Session(self, requests, params, keep=False, on_finish=on_finish) as session:
            session.run()
        rollouts = Rollouts(session.finished(), requests.prompts, n, requests.seed)
        for rollout in rollouts.errors if self.unrolled is None else ():  # otherwise this is a trial
            logger.error(rollout.error)
        return rollouts

    @default_torch_settings()
    def open(self, prompts: Sequence[Prompt], n: int = 1, params: SamplingParams | None = None) -> Session:
        """Return a session, which samples like `generate` but lets the caller interrupt it; see `Session`."""
        self._check_idle()
        params = params or SamplingParams()
        return Session(self, self.requests(prompts, n, params), params)

    def begin_session(self, session: Session) -> None:
        """Close the latest session, as there is memory for one."""
        self._close_latest("the engine began another one")
        self._latest = session

    def _close_latest(self, reason: str) -> None:
        self._check_idle()
        if self._latest is not None:
            self._latest.close(reason)

    def _check_idle(self) -> None:
        if self._latest is not None and self._latest.sampling:
            raise RuntimeError(
                "the engine is in the middle of a call and cannot be used in on_finish or in another thread; use it "
                "after the call, or between the steps of Engine.open"
            )

    def on_session_closed(self, session: Session) -> None:
        """Forget a session that was closed."""
        if self._latest is session:
            self._latest = None

    def release(self) -> None:
        """Free the cache, the graphs and the copy of the weights; the next call creates them again.

        An open session is closed.
        """
        self._close_latest("the engine was released")
        self._cast_weights = None
        self._signature = ()
        self.discard_memory()

    def release_if_large(self) -> None:
        """Free everything if it takes more than `MAX_IDLE_SHARE` of the device's memory, for a backward pass.

        Less than that is kept, and with it the graphs, whose capture often takes longer than a call.
        """
        device = next(self.model.parameters()).device
        runner_bytes = 0 if self._runner is None else self._runner.bytes
        weight_bytes = 0 if self._cast_weights is None else self._cast_weights.bytes
        if runner_bytes + weight_bytes > MAX_IDLE_SHARE * total_memory(device):
            self.release()

    def discard_memory(self) -> None:
        """Free the cache and the graphs."""
        self._runner = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has weights of the data type that the engine computes in."""
        return nullcontext() if self._cast_weights is None else self._cast_weights.in_place()

    @default_torch_settings()
    def check(self, longest: int = 0) -> None:
        """Raise `UnsupportedModel` if this model, with sequences of up to ``longest`` tokens, cannot be sampled."""
        self._refresh(next(self.model.parameters()).device)
        self._mode(longest)

    def _mode(self, longest: int) -> ExecutionMode:
        if self.unrolled is not None:
            return ExecutionMode(self.unrolled, self.wants_kernels(next(self.model.parameters()).device))
        return execution_mode(self, reached(self._config(), min(longest, self.context() or longest)))

    def requests(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Requests:
        """Return the requests of a call, tokenized and checked; raise `ValueError` for what cannot be run."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; give SamplingParams, such as SamplingParams(max_tokens=256)")
        self._refresh(next(self.model.parameters()).device)
        seed = params.seed if params.seed is not None else int(torch.randint(2**62, ()).item())
        return prepare(
            prompts,
            n,
            params,
            tokenizer=self.tokenizer,
            vocab=self.input_vocab(),
            context=self.context(),
            eos=eos_token_ids(self.model, self.tokenizer),
            seed=seed,
        )

    def _refresh(self, device: torch.device) -> None:
        """Inspect the model again and drop the graphs if its parameters have moved or its adapters have changed."""
        with model_lock(self.model):
            self._inspect_model(device)

    def _inspect_model(self, device: torch.device) -> None:
        signature = model_signature(self.model)
        if signature == self._signature:
            return
        if self._runner is not None:
            logger.info("the model's parameters have moved or its adapters have changed; capturing graphs again")
        self._runner = self._cast_weights = None
        if self.dtype is not None and self.dtype != weights_dtype(self.model):
            self._cast_weights = CastWeights(self.model, self.dtype)
        try:
            with self.weights():
                self.layers, self.vocab = probe(self.model, device)
        except TypeError as error:
            raise UnsupportedModel(self.model, str(error)) from error
        self._signature = signature

    def wants_kernels(self, device: torch.device) -> bool:
        """Return whether Triton kernels are used on this device if they agree with the model."""
        return kernels_run(device) if self.use_kernels is None else self.use_kernels

    def prepare(self, active: Active, needs: MemoryNeeds, max_slots: int | None = None) -> tuple[Runner, int]:
        """Return a runner with memory for these requests, as far as they fit, and how many of them run together.

        The model must be the one that `version` has inspected. ``max_slots`` is set after a failed allocation, when
        only half of the budget is used.
        """
        device = next(self.model.parameters()).device
        if not self._signature:
            self._refresh(device)
        unrolled, kernels = self._mode(needs.prompt_tokens + needs.tokens)
        graphs = device.type == "cuda" if self.use_graphs is None else self.use_graphs
        if graphs and device.type != "cuda":
            raise ValueError(f"use_graphs needs a CUDA device, but the model is on {device}; leave it None")
        itemsize = self.layers[0].dtype.itemsize
        config = self._config()
        budget = self._budget(device) if max_slots is None else self._budget(device) // 2
        plan = make_plan(
            self.layers,
            needs,
            vocab=self.vocab,
            logit_bytes=(itemsize if kernels else 16 + itemsize) + active.repetition,
            stat_bytes=4 if active.min_p_mass else 0,
            prefill_bytes=itemsize * (8 * config.hidden_size + 3 * (getattr(config, "intermediate_size", 0) or 0)),
            batch_size=self.batch_size if max_slots is None else max_slots,
            budget=budget,
            device=device,
            kernels=kernels,
            before=None if self._runner is None else self._runner.plan,
        )
        if unrolled and device.type == "cpu" and not kernels and needs.tokens >= MIN_TOKENS_TO_COPY:
            copies = copied_bytes(llama_like(self.model)) if self._cast_weights is None else 0
            if plan.bytes + copies <= budget and (self.max_copy_bytes is None or copies <= self.max_copy_bytes):
                plan = replace(plan, weight_bytes=copies)
        self.plan = plan
        if plan.split and not self._warned:
            self._warned = True
            logger.warning(
                "%d requests of up to %d tokens do not fit into memory together; running up to %d at a time",
                needs.requests,
                plan.tokens,
                plan.slots,
            )
        if self._runner is not None:
            same = (self._runner.unrolled, self._runner.use_kernels) == (unrolled, kernels)
            if not same or not self._runner.plan.covers(plan):
                self._runner = None  # free the old memory before allocating the new one
        if self._runner is None:
            logger.info("rollout plan: %s", plan)
            with self.weights():
                self._runner = Runner(
                    self.model,
                    self.layers,
                    self.vocab,
                    plan,
                    device,
                    use_graphs=graphs,
                    use_kernels=kernels,
                    unrolled=unrolled,
                )
        return self._runner, min(plan.slots, self._runner.plan.slots)

    def _budget(self, device: torch.device) -> int:
        """Return the bytes that the engine may hold, including what it holds already."""
        if self.memory_budget is not None:
            return self.memory_budget
        runner_bytes = 0 if self._runner is None else self._runner.bytes
        return (free_memory(device) + runner_bytes) // 2

    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]

    def context(self) -> int | None:
        """Return the most tokens of a sequence, or None if the model does not say."""
        return getattr(self._config(), "max_position_embeddings", None)

    def version(self) -> tuple[Any, ...]:
        """Return a value that changes with the weights.

        On a GPU it depends on torch's version counters, which do not count writes to ``parameter.data``. On a CPU it
        also includes some numbers of each weight, since the counters miss even the steps of fused optimizers there.
        """
        with model_lock(self.model):
            self._refresh(next(self.model.parameters()).device)
            tensors = (tensor for module in _modules(self.model) for tensor in module._parameters.values())
            weights = [tensor for tensor in tensors if tensor is not None]
            # Inference tensors have no version counter.
            versions = sum(tensor._version for tensor in weights if not tensor.is_inference())
            return self._signature, versions, _sampled_bits(weights)

    def most_slots(self) -> int:
        """Return how many sequences are decoded together if memory allows it."""
        return self.batch_size or MAX_SLOTS.get(next(self.model.parameters()).device.type, 256)

    def input_vocab(self) -> int:
        """Return the number of token ids that the model accepts."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def _check(model: Any, batch_size: Any, memory_budget: Any, dtype: Any) -> None:
    """Raise `ValueError` for bad arguments of `Engine`."""
    if isinstance(model, (str, PathLike)):
        raise ValueError(f"model is {model!r}; give the model itself, such as AutoModelForCausalLM.from_pretrained(…)")
    if isinstance(model, nn.Module) and not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"model is a {type(model).__name__}; give the transformers model, such as a wrapper's .module")
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        raise ValueError(f"batch_size is {batch_size!r}; use at least 1, or None to let memory decide")
    number = is_whole(memory_budget) or isinstance(memory_budget, float)
    if memory_budget is not None and not (number and memory_budget >= 1):
        raise ValueError(f"memory_budget is {memory_budget!r}; give bytes, such as {4 << 30}, or None")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; use torch.bfloat16, torch.float16 or torch.float32, or None")


INT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of each size in bytes, to compare the bits of numbers."""
SAMPLED_NUMBERS = 8
"""Numbers of each weight that are compared on a CPU."""


def _sampled_bits(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the bits of a few numbers on the diagonal of each plain tensor on the CPU."""
    diagonals = [
        tensor.detach() if tensor.ndim == 1 else tensor.detach().diagonal()
        for tensor in tensors
        if type(tensor) in (nn.Parameter, Tensor) and tensor.device.type == "cpu" and tensor.ndim in (1, 2)
    ]
    points = [
        diagonal[:: max(1, len(diagonal) // SAMPLED_NUMBERS)]
        for diagonal in diagonals
        if diagonal.dtype.itemsize in INT_TYPES
    ]
    return tuple(torch.cat([part.view(INT_TYPES[part.dtype.itemsize]) for part in points]).tolist()) if points else ()


def model_signature(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes if a captured graph would read the wrong memory or adapter.

    It does not change when weights are updated in place.
    """
    tensors: list[Any] = []
    adapters, hooks, ids = [], [], []
    for module in _modules(model):
        members = (*module._parameters.values(), *module._buffers.values())
        tensors += [(tensor.data_ptr(), tensor.dtype) for tensor in members if tensor is not None]
        hooks.append(touched(module))
        ids.append(id(module))
        if "merged_adapters" in module.__dict__ or hasattr(type(module), "merged_adapters"):
            adapters.append(
                (
                    tuple(module.active_adapters),
                    bool(module.disable_adapters),
                    tuple(module.merged_adapters),
                    tuple(getattr(module, "scaling", {}).items()),
                )
            )
    return tuple(tensors), tuple(adapters), tuple(hooks), tuple(ids)


def _modules(model: nn.Module) -> list[Any]:
    """Return every module once, in a fixed order; several times as fast as ``model.modules()``."""
    modules: dict[int, Any] = {}
    stack: list[Any] = [model]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            stack.extend(module._modules.values())
    return list(modules.values())
