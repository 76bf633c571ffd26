"""Run the model: prompts in batches, and decode steps, on CUDA as graphs of whole steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explorl.modeling.attention import attending
from explorl.modeling.fused import Fusion
from explorl.modeling.fused_ops_triton import FusedTritonOps
from explorl.modeling.llama import LlamaForward, TorchOps, llama_like
from explorl.modeling.onednn_ops import OneDnnOps
from explorl.modeling.proof import keeps_logits
from explorl.rollout.memory.cache import LayerShape, Layout, Prefill
from explorl.rollout.memory.pages import PageCache
from explorl.rollout.memory.spans import PromptCache, SpanCache
from explorl.rollout.memory_plan import Plan
from explorl.rollout.sampling import Active
from explorl.rollout.sampling.sample import Scratch, sample_step
from explorl.rollout.state import POSITION, TOKEN, SlotState

logger = logging.getLogger(__name__)

PREFILL_BUCKET, PREFILL_TOKENS, PREFILL_GRAPHS = 16, 4096, 8
"""Batches of prompts whose shape repeats run as a graph. Lengths are rounded up to a multiple of the first number; the
others limit the tokens in a graph and the number of graphs. More tokens keep the GPU busy without a graph."""
LENGTH_BUCKET = 256
"""Without our attention kernel a graph reads a fixed number of columns, a multiple of this."""


class Runner:
    """The memory of a plan and the model's forward passes over it."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerShape],
        vocab: int,
        plan: Plan,
        device: torch.device,
        *,
        use_graphs: bool,
        use_kernels: bool,
        unrolled: bool,
    ) -> None:
        self.model, self.layers, self.plan, self.device = model, layers, plan, device
        self.use_graphs, self.use_kernels, self.unrolled = use_graphs, use_kernels, unrolled
        self.state = SlotState(plan.slots, plan.tokens, vocab, device)
        self.sample_step: Callable[[Tensor, SlotState, Active, Tensor | None], None] = partial(
            sample_step, scratch=Scratch()
        )
        page_cache: type[PageCache] = PageCache
        if use_kernels:
            from explorl.rollout.memory.triton_attention import KernelPages
            from explorl.rollout.sampling.kernel import sample_step_kernel

            page_cache, self.sample_step = KernelPages, sample_step_kernel
        self.cache: PageCache | SpanCache
        prompts: PageCache | PromptCache
        if plan.pages:
            self.cache = prompts = page_cache(layers, plan.slots, plan.pages, plan.slot_pages, plan.page, self.state)
        else:
            prompts = PromptCache(layers, plan.entries, plan.prompt_tokens)
            self.cache = SpanCache(layers, plan.slots, plan.tokens, self.state, prompts)
        self.prefill_cache = Prefill(prompts)
        """The cache that a prompt pass writes to."""
        self.graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._warm_up: Any = None
        self._prefills: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None] = {}
        root = llama_like(model) if unrolled else None
        self._unrolled = None if root is None else LlamaForward(root, _ops(root, device, use_kernels))
        self._copied_for: object = None
        """The session for which weights were last copied."""
        self._fusion = Fusion(model, layers[0].dtype, use_kernels) if self._unrolled is None else nullcontext
        logger.info("forward pass: %s", "unrolled" if self._unrolled is not None else "the model's own")
        self._keep = {"logits_to_keep": 1} if keeps_logits(model) else {}

    def drop_graphs(self) -> None:
        self.graphs.clear()
        self._prefills.clear()
        self._pool = None

    @property
    def bytes(self) -> int:
        """Memory that it holds, without the model."""
        ops = None if self._unrolled is None else self._unrolled.ops
        copied = isinstance(ops, OneDnnOps) and bool(ops.copies)
        return self.plan.bytes - (0 if copied else self.plan.weight_bytes)

    def copy_weights(self, session: object, enabled: bool) -> None:
        """Copy the weights if ``enabled`` and if they are read from a copy, once per session; else drop the copies."""
        ops = None if self._unrolled is None else self._unrolled.ops
        if isinstance(ops, OneDnnOps) and session is not self._copied_for:
            self._copied_for = session
            ops.renew() if enabled else ops.forget()

    def fused(self) -> AbstractContextManager[None]:
        """Return a context in which small operations of the model are fused."""
        return self._fusion()

    def _logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return the logits (rows, vocab) of each row's last token."""
        if self._unrolled is not None:
            return self._unrolled(ids, positions, cache)
        with attending(cache):
            return self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **self._keep
            ).logits[:, -1]

    # Prompts

    def prefill(self, at: Sequence[Any], prompts: Sequence[Sequence[int]]) -> None:
        """Compute prompts into the entries or pages ``at``, without their last token, the first input of decoding."""
        # On a CPU shorter prompts get another pass, as their padding would cost more than that.
        share = 0.75 if self.device.type == "cpu" else 0.0
        for batch in self._batches([len(prompt) - 1 for prompt in prompts], share):
            self._prefill([at[i] for i in batch], [prompts[i][:-1] for i in batch])

    def _batches(self, lengths: Sequence[int], share: float = 0.0) -> Iterator[list[int]]:
        """Yield indices of sequences to compute together, the longest first.

        Sequences without tokens are left out; others are at least ``share`` as long as the longest of their batch.
        """
        order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i])
        while order:
            longest = lengths[order[-1]]
            batch = [i for i in order[-max(1, self.plan.prefill_tokens // longest) :] if lengths[i] >= share * longest]
            del order[-len(batch) :]
            yield batch

    def _prefill(self, at: Any, prompts: Sequence[Sequence[int]]) -> None:
        length = len(prompts[-1])  # the longest
        graphs = self.use_graphs and self._unrolled is not None and self.device.type == "cuda"
        graphs = graphs and len(prompts) * length <= PREFILL_TOKENS
        if graphs:
            length = min(-(-length // PREFILL_BUCKET) * PREFILL_BUCKET, self.plan.prompt_tokens)
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=self.device)
        at = self.prefill_cache.cache.places(at, prompts, length)
        shape = len(prompts), length
        if graphs and shape in self._prefills:  # the shape repeats
            graph = self._prefills[shape]
            if graph is None and sum(entry is not None for entry in self._prefills.values()) < PREFILL_GRAPHS:
                graph = self._prefills[shape] = self._capture_prefill(ids, at)
            if graph is not None:
                graph[1].copy_(ids)
                graph[2].copy_(at)
                return graph[0].replay()
        self._prefills[shape] = None
        self._prefill_eagerly(ids, at)

    def _prefill_eagerly(self, ids: Tensor, at: Tensor) -> None:
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        self.prefill_cache.at = at
        self._compute(ids, positions, self.prefill_cache)

    def extend(self, at: Sequence[Any], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
        """Compute tokens ``ids[i]`` at positions ``starts[i]`` and up, of rows whose earlier tokens are computed."""
        for batch in self._batches([len(tokens) for tokens in ids]):
            longest = len(ids[batch[-1]])
            begin, lengths = [starts[i] for i in batch], [len(ids[i]) for i in batch]
            rows = self.cache.extension([at[i] for i in batch], begin, lengths)
            padded = torch.tensor([[*ids[i], *[0] * (longest - len(ids[i]))] for i in batch], device=self.device)
            first, count = (torch.tensor(values, device=self.device)[:, None] for values in (begin, lengths))
            # Padding repeats the last position, as there may be no position embedding beyond it.
            positions = first + torch.arange(longest, device=self.device).minimum(count - 1)
            self._compute(padded, positions, rows)

    def _compute(self, ids: Tensor, positions: Tensor, cache: Any) -> None:
        """Compute the keys and values of whole sequences."""
        if self._unrolled is not None:
            self._unrolled.hidden(ids, positions, cache)
        else:
            self._logits(ids, positions, cache)

    def _capture_prefill(self, ids: Tensor, at: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        logger.info("capturing a graph for %d prompts of %d tokens", *ids.shape)
        ids, at = ids.clone(), at.clone()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._prefill_eagerly(ids, at)
        return graph, ids, at

    # Decoding

    def run(self, layout: Layout, even: bool, steps: int, active: Active) -> None:
        """Decode ``steps`` steps; ``even`` means that all rows have filled as many columns as the longest."""
        if self._unrolled is not None:
            self._unrolled.table.refresh()
        for step in range(steps):
            if self.use_graphs:
                self._replay(layout.rows, self._bucket(layout.length + steps), active)
            else:
                self._step(layout, min(layout.length + step + 1, self.cache.capacity), even and step == 0, active)

    def _bucket(self, length: int) -> int:
        if self.use_kernels:
            return self.cache.capacity
        return min(-(-length // LENGTH_BUCKET) * LENGTH_BUCKET, self.cache.capacity)

    def _step(self, layout: Layout, length: int, even: bool, active: Active) -> None:
        ints, row_of = self.state.ints[:, : layout.rows], None
        if layout.lead is not None and layout.row_of is not None:
            ints, row_of = self.state.ints[:, torch.from_numpy(layout.lead)], torch.from_numpy(layout.row_of)
        self.cache.begin_step(ints, length, even)
        logits = self._logits(ints[TOKEN, :, None], ints[POSITION, :, None], self.cache)
        if active.by_position:
            self.state.apply_curves()
        self.sample_step(logits, self.state, active, row_of)

    def _replay(self, rows: int, length: int, active: Active) -> None:
        key = (rows, length, active)
        graph = self.graphs.get(key)
        if graph is None:
            try:
                graph = self.graphs[key] = self._capture(rows, length, active)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                logger.warning("this model cannot be captured as a CUDA graph (%s); decoding step by step", error)
                self.use_graphs = False
                return self._step(Layout(rows, rows, length), length, False, active)
        graph.replay()

    def _capture(self, rows: int, length: int, active: Active) -> torch.cuda.CUDAGraph:
        logger.info("capturing a graph for %d rows, %d columns, %s", rows, length, active)
        # The warm-up compiles kernels and creates library handles. It decodes for real, so the state is restored after
        # it; the replay will write the same to the cache and the outputs again.
        changed = [tensor for tensor in (self.state.ints, self.state.seen) if tensor is not None]
        before = [tensor.clone() for tensor in changed]
        # One stream for all warm-ups, as cuBLAS keeps 32 MiB for each stream.
        if self._warm_up is None:
            self._warm_up = torch.cuda.Stream(self.device)
        stream = self._warm_up
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(Layout(rows, rows, length), length, False, active)
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(old)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(Layout(rows, rows, length), length, False, active)
        return graph


def _ops(root: Any, device: torch.device, use_kernels: bool) -> TorchOps:
    if use_kernels:
        return FusedTritonOps()
    return OneDnnOps(root) if device.type == "cpu" else TorchOps()
