"""Time the products of a decoder layer with several launch settings, and the modules that they replace.

Part of `benchmarks/rollout.py --layers`. Every figure is one layer's share of a CUDA graph over all layers, so that the
weights come from memory as in a decode step. The fastest settings belong in `triton_layers.TILES`.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from explorl.modeling import triton_layers
from explorl.modeling.triton_fused import add_rms_norm, gated, rms_norm
from explorl.modeling.triton_layers import Norm, Tile, Weight, gated_products, products

CANDIDATES = {
    8: [
        Tile(16, 16, 64, 4, 8), Tile(16, 16, 128, 4, 5), Tile(16, 16, 256, 4, 3), Tile(16, 32, 64, 4, 8),
        Tile(16, 32, 128, 4, 5), Tile(16, 16, 64, 2, 8), Tile(16, 16, 128, 8, 5),
    ],
    64: [
        Tile(64, 16, 64, 4, 6), Tile(64, 16, 128, 4, 4), Tile(64, 32, 64, 4, 5), Tile(64, 32, 128, 4, 3),
        Tile(32, 16, 128, 4, 5), Tile(32, 32, 64, 4, 6), Tile(16, 32, 128, 4, 5),
    ],
    512: [
        Tile(64, 64, 64, 4, 4), Tile(64, 32, 64, 4, 5), Tile(64, 128, 64, 4, 3), Tile(128, 64, 64, 4, 4),
        Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3),
    ],
}  # fmt: skip
WORKERS = 12
"""Number of processes that compile."""


@dataclass(frozen=True)
class Product:
    """One of the four products of a layer."""

    name: str
    kind: str
    depth: int
    columns: tuple[int, ...]
    bias: bool

    @property
    def normed(self) -> bool:
        """Return whether its input is the output of a norm."""
        return self.kind != triton_layers.ADDED


def products_of(config: Any, bias: bool) -> list[Product]:
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    return [
        Product("query, key, value", triton_layers.HEADS, width, (query, key, key), bias),
        Product("output", triton_layers.ADDED, query, (width,), False),
        Product("gate, up", triton_layers.GATED, width, (inner, inner), False),
        Product("down", triton_layers.ADDED, inner, (width,), False),
    ]


class Layers:
    """Inputs and weights of one product in several layers."""

    def __init__(self, product: Product, rows: int, count: int, dtype: torch.dtype) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=dtype)

        self.product, self.rows = product, rows
        self.x, self.residual = draw(rows, product.depth), draw(rows, product.columns[0])
        self.norms = [Norm(draw(product.depth), 1e-5) for _ in range(count)]
        self.joined = [draw(sum(product.columns), product.depth) for _ in range(count)]
        self.weights = [
            [Weight(part, draw(len(part)) if product.bias else None) for part in joined.split(list(product.columns))]
            for joined in self.joined
        ]

    def kernel(self, layer: int, tile: Tile) -> None:
        norm = self.norms[layer] if self.product.normed and self.rows <= triton_layers.FEW else None
        weights = self.weights[layer]
        if self.product.kind == triton_layers.GATED:
            gated_products(self.x, weights[0], weights[1], tile, norm)
        else:
            residual = None if self.product.normed else self.residual
            products(self.x, weights, tile, norm, residual)

    def modules(self, layer: int) -> None:
        """Run the modules, with a sum and the norm after it in one kernel, as in the pass."""
        outs = [F.linear(self.x, *weight) for weight in self.weights[layer]]
        if self.product.kind == triton_layers.GATED:
            gated(outs[0], outs[1], False)
        elif self.product.kind == triton_layers.ADDED:
            add_rms_norm(self.residual, outs[0], self.residual[0], 1e-5)

    def one_product(self, layer: int) -> None:
        F.linear(self.x, self.joined[layer])

    def norm(self, layer: int) -> None:
        rms_norm(self.x, self.norms[layer].weight, self.norms[layer].eps, 0.0, True)

    def time(self, run: Callable[..., None], *args: Any) -> float:
        """Return the microseconds of one layer, in a graph of all layers."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(0, *args)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for layer in range(len(self.norms)):
                    run(layer, *args)
            times = []
            for _ in range(12):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(1e3 * start.elapsed_time(end) / len(self.norms))
        return statistics.median(times[2:])


def cases(config: Any, bias: bool) -> Iterator[tuple[Product, int, Tile]]:
    for rows, tiles in CANDIDATES.items():
        for product in products_of(config, bias):
            for tile in tiles:
                yield product, rows, tile


def compile_one(product: Product, rows: int, tile: Tile, dtype: torch.dtype) -> str:
    """Compile a tile into Triton's cache on disk; return the error, if any."""
    try:
        Layers(product, rows, 1, dtype).kernel(0, tile)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def time_layers(config: Any, dtype: torch.dtype) -> None:
    bias = config.model_type == "qwen2"
    everything = list(cases(config, bias))
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        reports = list(pool.map(compile_one, *zip(*everything, strict=True), [dtype] * len(everything)))
    wrong = dict(zip(everything, reports, strict=True))
    for rows, tiles in CANDIDATES.items():
        modules = kernels = 0.0
        for product in products_of(config, bias):
            layers = Layers(product, rows, min(config.num_hidden_layers, 32), dtype)
            of_modules, joined = layers.time(layers.modules), layers.time(layers.one_product)
            print(f"{rows:4d} rows, {product.name}: modules {of_modules:.2f} us, one product of cuBLAS {joined:.2f} us")
            took = {tile: layers.time(layers.kernel, tile) for tile in tiles if not wrong[product, rows, tile]}
            fastest = min(took, key=lambda tile: took[tile], default=None)
            for tile in tiles:
                figure = f"{took[tile]:6.2f} us" if tile in took else wrong[product, rows, tile]
                print(f"    {tuple(tile)!s:22} {figure}{'  <' if tile == fastest else ''}", flush=True)
            modules += of_modules
            kernels += min([*took.values()], default=of_modules)
        norm = Layers(products_of(config, bias)[0], rows, 8, dtype)
        apart = f" and two norms of {norm.time(norm.norm):.2f} us" if rows > triton_layers.FEW else ""
        print(f"{rows:4d} rows, a layer without attention: modules {modules:.2f} us, kernels {kernels:.2f} us{apart}")
