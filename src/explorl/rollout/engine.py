"""`Engine`: samples completions from a transformers model, and records what exploration needs to know about them.

Each different prompt is computed once, and its samples share its keys and values. Rows that finish are replaced at
once, so the longest completion holds up nobody. The model's weights are read where they are: after an optimizer step
the next call samples from the new policy.

Before a model is sampled from, the engine is tried on it: see `explorl.rollout.trial`. A model that the engine would
not compute as it computes itself is refused with `UnsupportedModel`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from explorl.modeling.attention import model_lock
from explorl.modeling.gpu import kernels_run
from explorl.modeling.llama import llama_like
from explorl.modeling.onednn_ops import copied_bytes
from explorl.modeling.precision import CastWeights, default_torch_settings, weights_dtype
from explorl.modeling.proof import TAIL, reached, touched
from explorl.rollout.memory.page_memory import PageMemory
from explorl.rollout.memory.slots import probe
from explorl.rollout.memory.spans import SpanMemory
from explorl.rollout.memory_plan import ROWS, Plan, free_memory, make_plan, total_memory
from explorl.rollout.requests import Prompt, Requests, eos_token_ids, prepare
from explorl.rollout.rollouts import Rollout, Rollouts
from explorl.rollout.runner import Runner
from explorl.rollout.sampling import Active, SamplingParams
from explorl.rollout.sampling.constraints import is_whole
from explorl.rollout.sequences import PromptTokens
from explorl.rollout.session import Session
from explorl.rollout.trial import Admitted, UnsupportedModel, admitted

logger = logging.getLogger(__name__)

HELD = 0.1
"""Part of a device's memory that an engine at rest may hold."""
COPY_FROM = TAIL
"""Tokens from which it is worth while to copy the weights for a call: what that takes, five steps save. As many as the
engine is tried out with, so that copies are tried out too."""


class Engine:
    """Samples from any decoder-only transformers model that uses the attention interface, peft adapters included.

    Args:
        model: The model, in any mode; it is left as it was found.
        tokenizer: Its tokenizer; None where prompts are token ids and no text is wanted.
        batch_size: Most rows decoded together; None lets memory decide, up to a few hundred.
        memory_budget: Bytes that the engine may hold beside the model and its copy in another ``dtype``; None is half
            of what is free.
        use_graphs: Decode in CUDA graphs; None is yes on CUDA.
        use_kernels: Use the Triton kernels; None is yes on CUDA where they run and give what the model gives.
        dtype: Type of computation; None is that of the weights. Where it is another one, the engine holds a copy of the
            weights in it, refreshed at each call.
        unrolled: Run Llama-like layers unrolled; None does so if that gives the same results as the model.
        keep_prefixes: Keep the keys and values of prompts for later calls, while the weights are the same and nobody
            needs the memory. A prompt is then computed in other company than in a fresh engine, which may change the
            last bits of what is recorded.
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
        keep_prefixes: bool = False,
    ) -> None:
        _check(model, batch_size, memory_budget, dtype)
        self.model, self.tokenizer = model, tokenizer
        self.batch_size, self.memory_budget = batch_size, memory_budget
        self.use_graphs, self.use_kernels = use_graphs, use_kernels
        self.dtype, self.unrolled, self.keep_prefixes = dtype, unrolled, keep_prefixes
        self.plan: Plan | None = None
        """Sizes and memory of the latest call."""
        self._runner: Runner | None = None
        self._cast_weights: CastWeights | None = None
        self._signature: tuple[Any, ...] = ()
        self._admitted: dict[Any, Admitted] = {}
        """What was found when the model was tried, by how the engine was to compute and the turning points reached."""
        self.copies_within = memory_budget
        """Most bytes that copies of the weights may take; None is no limit of their own."""
        self._warned = False
        self._latest: Session | None = None
        """The session that is open, if any: it has to be closed before the next, also where nobody has it any more."""
        self._prompts: WeakValueDictionary[tuple[int, ...], PromptTokens] = WeakValueDictionary()
        self._memory: PageMemory | SpanMemory | None = None
        """The memory of the latest session, where prompts are kept for the next."""
        self._stamp: tuple[Any, ...] = ()
        """Of the weights that those prompts were computed with."""

    @default_torch_settings()
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
        self._check_idle()
        params = params or SamplingParams()
        requests = self.requests(prompts, n, params)
        with self._session(keep=False, on_finish=on_finish) as session:
            session._add(requests, params)
            session.run()
        rollouts = Rollouts(session.finished(), requests.prompts, n, requests.seed)
        for rollout in rollouts.errors if self.unrolled is None else ():  # else it is only being tried out
            logger.error(rollout.error)
        return rollouts

    @default_torch_settings()
    def open(self, prompts: Sequence[Prompt], n: int = 1, params: SamplingParams | None = None) -> Session:
        """Begins to sample as `generate` does, with the caller in between; see `Session`."""
        self._check_idle()
        params = params or SamplingParams()
        requests = self.requests(prompts, n, params)
        session = self._session(keep=True)
        session._add(requests, params)
        return session

    def _session(self, **how: Any) -> Session:
        self._close_latest("the engine began another one")
        session = Session(self, **how)
        self._latest = session
        return session

    def _close_latest(self, why: str) -> None:
        self._check_idle()
        if self._latest is not None:
            self._latest.close(why)

    def _check_idle(self) -> None:
        if self._latest is not None and self._latest.sampling:
            raise RuntimeError(
                "the engine is in the middle of a call and cannot begin or release anything; do not use it in "
                "on_finish or in another thread, but after the call, or between the steps of Engine.open"
            )

    def is_over(self, session: Session) -> None:
        """A session was closed."""
        if self._latest is session:
            self._latest = None

    def release(self) -> None:
        """Gives the cache, the graphs and the copy of the weights back; the next call makes them anew.

        A session that is open is closed.
        """
        self._close_latest("the engine was released")
        self._cast_weights = None
        self._signature = ()
        self.forget_memory()

    def rest(self) -> None:
        """Gives everything back where it is more than `HELD` of the device's memory, which a backward pass may need.

        Less than that stays, and with it the graphs, whose capture takes longer than many a call.
        """
        device = next(self.model.parameters()).device
        held = (0 if self._runner is None else self._runner.bytes) + (
            0 if self._cast_weights is None else self._cast_weights.bytes
        )
        if held > HELD * total_memory(device):
            self.release()

    def forget_memory(self) -> None:
        """Gives the cache and the graphs back."""
        self._runner = self._memory = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def weights(self) -> AbstractContextManager[None]:
        """The model with weights of the type that the engine computes in."""
        return nullcontext() if self._cast_weights is None else self._cast_weights.in_place()

    @default_torch_settings()
    def check(self, longest: int = 0) -> None:
        """Raises `UnsupportedModel` where this model, with sequences of up to ``longest`` tokens, cannot be sampled."""
        self._refresh(next(self.model.parameters()).device)
        self._tried(longest)

    def _tried(self, longest: int) -> Admitted:
        if self.unrolled is not None:
            return Admitted(self.unrolled, self.kernels(next(self.model.parameters()).device))
        points = reached(self._config(), min(longest, self.context() or longest))
        how = self.dtype, self.use_kernels, points
        if how not in self._admitted:
            self._admitted[how] = admitted(self, points)
        return self._admitted[how]

    def prompt(self, ids: Sequence[int]) -> PromptTokens:
        """Tokens of a prompt; the same object for equal ones, as long as anybody has it."""
        return self._prompts.setdefault(tuple(ids), PromptTokens(tuple(ids)))

    def recall(self) -> PageMemory | SpanMemory | None:
        """The memory of the latest session with its prompts, where the weights are still the same."""
        if not self.keep_prefixes:
            return None
        stamp = self.version(), fingerprint(self.model)
        memory = self._memory if stamp == self._stamp else None
        self._stamp, self._memory = stamp, None
        return memory

    def remember(self, memory: PageMemory | SpanMemory) -> None:
        """Keeps the prompts of a session that is over for the next."""
        if self.keep_prefixes and memory.runner is self._runner:
            self._memory = memory
        else:
            memory.clean()

    def requests(self, prompts: Sequence[Prompt], n: int, params: SamplingParams) -> Requests:
        """The prompts as tokens, with everything that is to be known of each request."""
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
            outputs=self.vocab,
        )

    def _refresh(self, device: torch.device) -> None:
        """Looks at the model anew where its parameters moved or its adapters changed; keeps the graphs otherwise."""
        with model_lock(self.model):
            self._look_at_model(device)

    def _look_at_model(self, device: torch.device) -> None:
        signature = model_signature(self.model)
        if signature == self._signature:
            return
        self._memory, self._admitted = None, {}
        if self._runner is not None:
            logger.info("the model's parameters or adapters moved; graphs will be captured anew")
        self._runner = self._cast_weights = None
        if self.dtype is not None and self.dtype != weights_dtype(self.model):
            self._cast_weights = CastWeights(self.model, self.dtype)
        try:
            with self.weights():
                self.layers, self.vocab = probe(self.model, device)
        except TypeError as error:
            raise UnsupportedModel(self.model, str(error)) from error
        self._signature = signature

    def kernels(self, device: torch.device) -> bool:
        """Whether Triton kernels are to be used on this device, if they are right for the model."""
        return kernels_run(device) if self.use_kernels is None else self.use_kernels

    def prepare(
        self,
        active: Active,
        *,
        requests: int,
        prompts: int,
        prompt_tokens: int,
        tokens: int,
        table_bytes: int = 0,
        rows: int | None = None,
    ) -> tuple[Runner, int]:
        """A runner with memory for so many requests, as far as they fit, and how many of them run together.

        The model is the one that `version` has looked at. ``rows`` is the most of them after an allocation has failed,
        when half of the budget has to do.
        """
        device = next(self.model.parameters()).device
        if not self._signature:
            self._refresh(device)
        unrolled, kernels = self._tried(prompt_tokens + tokens)
        graphs = device.type == "cuda" if self.use_graphs is None else self.use_graphs
        if graphs and device.type != "cuda":
            raise ValueError(f"use_graphs needs a CUDA device and the model is on {device}; leave it None")
        itemsize = self.layers[0].dtype.itemsize
        config = self._config()
        budget = (self._budget(device) if rows is None else self._budget(device) // 2) - table_bytes
        plan = make_plan(
            self.layers,
            requests=requests,
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            vocab=self.vocab,
            logit_bytes=(itemsize if kernels else 16 + itemsize) + active.repetition,
            record_bytes=8 * active.logprobs + (4 if active.min_p_mass else 0),
            prefill_bytes=itemsize * (8 * config.hidden_size + 3 * (getattr(config, "intermediate_size", 0) or 0)),
            batch_size=self.batch_size if rows is None else rows,
            budget=budget,
            device=device,
            kernels=kernels,
            before=None if self._runner is None else self._runner.plan,
        )
        if unrolled and device.type == "cpu" and not kernels and tokens >= COPY_FROM:
            copies = copied_bytes(llama_like(self.model)) if self._cast_weights is None else 0
            if plan.bytes + copies <= budget and (self.copies_within is None or copies <= self.copies_within):
                plan = replace(plan, weight_bytes=copies)
        self.plan = plan
        if plan.split and not self._warned:
            self._warned = True
            logger.warning(
                "%d requests of up to %d tokens do not fit into memory together; running up to %d at a time",
                requests,
                plan.tokens,
                plan.slots,
            )
        if self._runner is not None:
            same = (self._runner.unrolled, self._runner.use_kernels) == (unrolled, kernels)
            if not same or not self._runner.plan.covers(plan):
                self._runner = None  # frees the old memory before the new is taken
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
        """Bytes that the engine may hold, what it holds already included."""
        if self.memory_budget is not None:
            return self.memory_budget
        held = 0 if self._runner is None else self._runner.bytes
        return (free_memory(device) + held) // 2

    def _config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]

    def context(self) -> int | None:
        """Most tokens of a sequence; None where the model does not say."""
        return getattr(self._config(), "max_position_embeddings", None)

    def version(self) -> tuple[Any, ...]:
        """Changes where the weights do.

        On a GPU as far as torch notices: not where somebody writes to ``parameter.data``. On a CPU some numbers of each
        weight are looked at too, since not even the steps of fused optimizers are noticed there.
        """
        with model_lock(self.model):
            self._refresh(next(self.model.parameters()).device)
            tensors = (tensor for module in _modules(self.model) for tensor in module._parameters.values())
            held = [tensor for tensor in tensors if tensor is not None]
            versions = sum(tensor._version for tensor in held if not tensor.is_inference())  # which have no version
            return self._signature, versions, _probe(held)

    def most_rows(self) -> int:
        """Rows decoded together where memory does not matter."""
        return self.batch_size or ROWS.get(next(self.model.parameters()).device.type, 256)

    def input_vocab(self) -> int:
        """Token ids that the model takes."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def _check(model: Any, batch_size: Any, memory_budget: Any, dtype: Any) -> None:
    if isinstance(model, (str, PathLike)):
        raise ValueError(f"model is {model!r}; give the model itself, such as one of AutoModelForCausalLM's")
    if isinstance(model, nn.Module) and not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"model is a {type(model).__name__}; give the transformers model, a wrapper's .module")
    if batch_size is not None and not (is_whole(batch_size) and batch_size >= 1):
        raise ValueError(f"batch_size is {batch_size!r}; use at least 1, or None to let memory decide")
    number = is_whole(memory_budget) or isinstance(memory_budget, float)
    if memory_budget is not None and not (number and memory_budget >= 1):
        raise ValueError(f"memory_budget is {memory_budget!r}; give bytes, such as {4 << 30}, or None")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; use torch.bfloat16, torch.float16 or torch.float32, or None")


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The bits of a number of so many bytes, as a whole number."""
PROBES = 8
"""Numbers of each weight that are looked at."""


def _probe(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Bits of a few numbers of each plain tensor on the CPU, from its diagonal."""
    lines = [
        tensor.detach() if tensor.ndim == 1 else tensor.detach().diagonal()
        for tensor in tensors
        if type(tensor) in (nn.Parameter, Tensor) and tensor.device.type == "cpu" and tensor.ndim in (1, 2)
    ]
    points = [line[:: max(1, len(line) // PROBES)] for line in lines if line.dtype.itemsize in WORDS]
    return tuple(torch.cat([line.view(WORDS[line.dtype.itemsize]) for line in points]).tolist()) if points else ()


def fingerprint(model: nn.Module) -> tuple[int, ...]:
    """The sum of the bits of every tensor of the model, in which each row counts by its place: one pass over the
    weights, which sees what torch does not."""
    sums = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.numel():
            bits = tensor.detach().contiguous().view(WORDS.get(tensor.dtype.itemsize, torch.int8))
            rows = bits.view(len(bits) if bits.ndim else 1, -1).sum(1, dtype=torch.int64)
            sums.append((rows * torch.arange(1, 1 + len(rows), device=rows.device)).sum().cpu())
    return tuple(torch.stack(sums).tolist())


def model_signature(model: nn.Module) -> tuple[Any, ...]:
    """Changes where a captured graph would read the wrong memory or adapter; not where weights are updated in place."""
    tensors: list[Any] = []
    adapters, hooks, ids = [], [], []
    for module in _modules(model):
        held = (*module._parameters.values(), *module._buffers.values())
        tensors += [(tensor.data_ptr(), tensor.dtype) for tensor in held if tensor is not None]
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
    """Every module once, in an order that is always the same: several times as fast as ``model.modules()``."""
    found: dict[int, Any] = {}
    todo: list[Any] = [model]
    while todo:
        module = todo.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            todo.extend(module._modules.values())
    return list(found.values())
