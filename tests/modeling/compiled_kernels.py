"""Compiles every Triton kernel for a GPU that is not there, as it is launched for models that people have.

    TRITON_INTERPRET=0 python -m tests.modeling.compiled_kernels 89 [--all]

Prints a line of JSON per launch: where it comes from, the kernel, and its bytes of shared memory or what the compiler
said. Nothing runs. Triton's interpreter, under which the other tests run the kernels, takes much that a compiler does
not: types that change in a loop, say; and it knows no limits of memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a block may have, by compute capability: T4, A100, RTX 30, RTX 40, H100, B200, RTX 50."""


class Heads(NamedTuple):
    """Attention of a model."""

    query: int
    kv: int
    size: int
    value: int


MODELS = {
    "SmolLM2-135M": Heads(9, 3, 64, 64),
    "Qwen2.5-7B": Heads(28, 4, 128, 128),
    "Gemma-2-2B": Heads(8, 4, 256, 256),
    "Falcon-7B": Heads(71, 1, 64, 64),
    "DeepSeek-V2-Lite": Heads(16, 16, 192, 128),
}
HALF, SINGLE = torch.bfloat16, torch.float32


def compile_all(capability: int, everything: bool) -> None:
    """Calls whatever launches kernels; each launch is compiled instead, and told of."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from explorl.rollout.memory import triton_attention

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(  # type: ignore[arg-type]
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    triton_attention.shared_memory = lambda device: SHARED[capability] * 1024
    own, now = JITFunction.run, {"of": ""}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        told: dict[str, Any] = {"of": now["of"], "kernel": kernel.__name__}
        try:
            told["shared"] = own(kernel, *args, grid=grid, warmup=True, **options).metadata.shared
        except Exception as error:  # is what is looked for
            told["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(told), flush=True)

    JITFunction.run = run
    for now["of"], launch in launches(everything):
        launch()


def launches(everything: bool) -> Iterator[tuple[str, Any]]:
    yield from _attention(everything)
    yield from _products(everything)
    yield from _sampling(everything)
    yield from _records(everything)
    yield from _layers(everything)


def _attention(everything: bool) -> Iterator[tuple[str, Any]]:
    from explorl.rollout.memory import triton_attention as attention
    from explorl.rollout.state import SlotState

    rows, page = 4, 64
    ints = SlotState(rows, 4, 10, torch.device("cpu")).ints
    table = torch.zeros(rows, 3, dtype=torch.int32)
    for (name, heads), dtype, few in product(MODELS.items(), (HALF, SINGLE), (True, False)):
        if not everything and (few is False or (dtype == SINGLE and name == "Falcon-7B")):
            continue
        query, key = torch.empty(rows, heads.query, 1, heads.size), torch.empty(rows, heads.kv, 1, heads.size)
        value = torch.empty(rows, heads.kv, 1, heads.value)
        pages = [torch.empty(10, page, heads.kv, size, dtype=dtype) for size in (heads.size, heads.value)]
        given = [tensor.to(dtype) for tensor in (query, key, value)]
        rotary = (torch.empty(99, heads.size),) * 2 if heads.size == heads.value else None
        how = attention.launch_for(1 if few else 10**6, heads.size)
        for splits, window, cap in [(4, None, None), (1, 40, 5.0)] if everything else [(4, 40, None)]:
            yield (
                f"attention of {name}, {dtype}, {how}, splits {splits}",
                lambda given=given, pages=pages, splits=splits, window=window, cap=cap, rotary=rotary, how=how: (
                    attention.decode_attention(
                        *given, *pages, table, ints, 0.1, window, cap, splits=splits, rotary=rotary, launch=how
                    )
                ),
            )


def _products(everything: bool) -> Iterator[tuple[str, Any]]:
    from explorl.modeling import triton_layers as layers

    width, inner = 576, 1536
    for dtype in (torch.bfloat16, torch.float16) if everything else (HALF,):
        square = layers.Weight(torch.empty(width, width, dtype=dtype), torch.empty(width, dtype=dtype))
        narrow = layers.Weight(torch.empty(192, width, dtype=dtype), torch.empty(192, dtype=dtype))
        wide = layers.Weight(torch.empty(inner, width, dtype=dtype))
        norm = layers.Norm(torch.empty(width, dtype=dtype), 1e-5)
        for kind, tiles in layers.TILES.items():
            for rows, tile in tiles if everything else (tiles[0], tiles[-1]):
                x = torch.empty(rows, width, dtype=dtype)
                inside = norm if rows <= layers.FEW else None
                of = f"{kind} for up to {rows} rows, {dtype}"
                if kind == layers.HEADS:
                    weights = [square, narrow, narrow]
                    yield of, lambda x=x, tile=tile, n=inside, w=weights: layers.products(x, w, tile, n)
                elif kind == layers.ADDED:
                    yield of, lambda x=x, tile=tile, w=square: layers.products(x, [w], tile, residual=x)
                else:
                    yield of, lambda x=x, tile=tile, n=inside, w=wide: layers.gated_products(x, w, w, tile, n)


def _sampling(everything: bool) -> Iterator[tuple[str, Any]]:
    from explorl.rollout.sampling import Active
    from explorl.rollout.sampling.kernel import sample_step_kernel
    from explorl.rollout.state import SlotState

    cuts = {"top_k": True, "top_p": True, "min_p": True, "bottom_p": True, "temperature": True}
    chance = {"bottom_p": True, "bottom_p_chance": True, "greedy": True}
    edited = {"repetition": True, "min_p_mass": 0.1, "top_p": True}
    for vocab, dtype in [(49152, HALF), (151_936, SINGLE)] if everything else [(49152, HALF)]:
        for of, active in {"nothing": {}, "cuts": cuts, "chance": chance, "edited": edited}.items():
            state = SlotState(4, 8, vocab, torch.device("cpu"))
            if of == "edited":
                state.seen = torch.zeros(4, vocab, dtype=torch.bool)
                state.out_mass = torch.zeros(4, 8)
            logits = torch.empty(4, vocab, dtype=dtype)
            how = Active(**active)
            yield f"sampling with {of}, {dtype}", lambda s=state, x=logits, a=how: sample_step_kernel(x, s, a)


def _records(everything: bool) -> Iterator[tuple[str, Any]]:
    from explorl.modeling.logit_blocks import DTYPES
    from explorl.modeling.triton_records import record

    for dtype in (torch.bfloat16, torch.float16, torch.float32) if everything else (HALF,):
        for warm in (None, torch.ones(4)):
            out = tuple(torch.empty(4, dtype=kind) for kind in DTYPES)
            logits, targets = torch.empty(4, 49152, dtype=dtype), torch.zeros(4, dtype=torch.int64)
            yield (
                f"records of {dtype}, {'one' if warm is None else 'own'} temperature",
                lambda x=logits, t=targets, warm=warm, out=out: record(x, t, warm, 0.95, out),
            )


def _layers(everything: bool) -> Iterator[tuple[str, Any]]:
    from explorl.modeling import triton_fused as fused
    from explorl.modeling import triton_training as training

    for dtype in (HALF, SINGLE) if everything else (HALF,):
        for width in (576, 4096) if everything else (576,):
            x, weight = torch.empty(8, width, dtype=dtype), torch.empty(width, dtype=dtype)
            of = f"of width {width}, {dtype}"
            yield f"norm {of}", lambda x=x, w=weight: fused.rms_norm(x, w, 1e-5, 1.0, True)
            yield f"gate {of}", lambda x=x: (fused.gated(x, x, False), fused.gated(x, x, True))
            left, right = (torch.empty(8, width, dtype=dtype, requires_grad=True) for _ in range(2))
            yield f"gate in training {of}", lambda a=left, b=right: training.Gated.apply(a, b).sum().backward()
            yield (
                f"norm of a sum in training {of}",
                lambda a=left, b=right, w=weight: sum(
                    part.float().sum() for part in training.AddedNorm.apply(a, b, w, 1e-5, None)
                ).backward(),
            )
        heads = [torch.empty(1, count, 6, 64, dtype=dtype, requires_grad=True) for count in (9, 3, 3)]
        rotary = torch.empty(1, 6, 64), torch.empty(1, 6, 64)
        yield f"rotation, {dtype}", lambda h=heads, a=rotary: fused.rotary(h[0], h[1], *a)
        rows = SimpleNamespace(
            rows=2,
            longest=4,
            source=torch.arange(8),
            slots=torch.arange(6),
            by_token=(torch.arange(8), torch.arange(7)),
        )
        yield (
            f"rotation in training, {dtype}",
            lambda h=heads, a=rotary, r=rows: sum(
                part.float().sum() for part in training.RotatedRows.apply(*h, *a, r, None)
            ).backward(),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int, choices=SHARED)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    compile_all(given.capability, given.all)
