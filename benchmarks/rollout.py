"""Measure tokens per second of `generate` as TRL calls it, `generate` with a static cache, and the engine.

    python benchmarks/rollout.py --shape tiny                                  # the embedded policy, its own lengths
    python benchmarks/rollout.py --shape smollm2-135m --requests 32 --samples 8 --prompt-tokens 80 --max-tokens 64
    OMP_NUM_THREADS=1 python benchmarks/rollout.py --shape tiny --processor-time   # on shared cores
    python benchmarks/rollout.py --shape smollm2-135m --device cuda --dtype bfloat16 --requests 512 --max-tokens 256
    python benchmarks/rollout.py --shape smollm2-135m --device cuda --dtype bfloat16 --requests 512 --lengths skewed
    python benchmarks/rollout.py --shape smollm2-135m --device cuda --dtype bfloat16 --requests 512 --parts
    python benchmarks/rollout.py --shape smollm2-135m --device cuda --dtype bfloat16 --layers     # and then edit TILES
    python benchmarks/rollout.py --shape smollm2-135m --device cuda --dtype bfloat16 --requests 8 --samples 8 --profile
    python benchmarks/rollout.py --shape qwen2.5-1.5b --device cuda --dtype bfloat16 --requests 256 --lengths lognormal

Only requested tokens count: `generate` continues every row until the longest is done, and tokens beyond a row's own
length are not counted. The engine records all token statistics, `generate` none. "mixed" is the engine on float32
weights, as in mixed precision: each call first copies them to the type that it samples in.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from explorl.rollout import Engine, SamplingParams

SHAPES = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}
"""Shapes of the released models; the weights are random."""


@dataclass
class Load:
    """The load that every contender samples."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    samples: int
    lengths: list[int] | None
    """Tokens of each request; None: until the policy ends it."""
    max_tokens: int

    @property
    def requests(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


@dataclass
class Result:
    """The results of one contender."""

    name: str
    tokens: int
    seconds: list[float]
    peak: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        return self.tokens / self.median


SPREADS = {"skewed": (128.0, 1024), "lognormal": (2048.0, 16384)}
"""Mean and maximum of the lengths."""


def skewed_lengths(count: int, mean: float, most: int) -> list[int]:
    """Return log-normal lengths (σ = 1) with this mean and the maximum ``most``, in a fixed shuffled order."""
    normal = statistics.NormalDist()
    shape = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def scaled(factor: float) -> list[int]:
        return [*(max(1, min(most, round(factor * x))) for x in shape[:-1]), most]

    low, high = 0.0, 2.0 * mean
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) < mean * count else (low, middle)
    lengths = scaled(low)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[i] for i in order]


def random_model(shape: str, dtype: torch.dtype, device: str) -> Any:
    """Create a random model on its device and in its type, because large ones would take minutes elsewhere."""
    config_of, model_of = (Qwen2Config, Qwen2ForCausalLM) if "qwen" in shape else (LlamaConfig, LlamaForCausalLM)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_of(config_of(**SHAPES[shape]))
    finally:
        torch.set_default_dtype(before)


def build(args: argparse.Namespace) -> Load:
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    count = args.requests // args.samples
    if args.shape == "tiny":
        from transformers import AutoModelForCausalLM

        from explorl.models import tiny_checkpoint, tiny_tokenizer
        from explorl.tasks import get_task

        task = get_task("countdown-mini")
        tokenizer = tiny_tokenizer()
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), dtype=dtype, trust_remote_code=False)
        prompts = [
            tokenizer(task.prompt(problem, "terse"))["input_ids"] for problem in task.problems("holdout", limit=count)
        ]
        lengths = None
    else:
        tokenizer = None
        model = random_model(args.shape, dtype, args.device)
        prompts = torch.randint(10, 40000, (count, args.prompt_tokens)).tolist()
        lengths = [args.max_tokens] * args.requests
    if args.lengths in SPREADS:
        lengths = skewed_lengths(args.requests, *SPREADS[args.lengths])
        args.max_tokens = max(lengths)
    return Load(model.to(args.device).eval(), tokenizer, prompts, args.samples, lengths, args.max_tokens)


# Contenders


def generate_with(load: Load, static: bool) -> Callable[[], int]:
    """Sample with `model.generate` as TRL calls it: prompts repeated, padded on the left, until all rows are done."""
    model, device = load.model, load.device
    longest = max(len(prompt) for prompt in load.prompts)
    rows = [prompt for prompt in load.prompts for _ in range(load.samples)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    eos = model.generation_config.eos_token_id if load.lengths is None else None
    config = GenerationConfig(
        max_new_tokens=load.max_tokens,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=0,
        cache_implementation="static" if static else None,
    )
    if load.lengths is not None:
        model.generation_config.eos_token_id = None  # random weights: only the length ends a row

    def run() -> int:
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:].tolist()
        if load.lengths is not None:
            return sum(min(length, len(row)) for length, row in zip(load.lengths, out, strict=True))
        ends = {eos} if isinstance(eos, int) else set(eos)
        return sum(next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in out)

    return run


def engine_with(load: Load, engine: Engine) -> Callable[[], int]:
    params = SamplingParams(
        max_tokens=load.lengths if load.lengths is not None else load.max_tokens,
        stop_token_ids=() if load.lengths is not None else None,
        seed=0,
    )
    return lambda: engine.generate(load.prompts, load.samples, params).check().tokens


def mixed_engine(load: Load) -> Engine:
    """Return the engine on float32 weights, which it copies to the type of the others' weights."""
    weights = copy.deepcopy(load.model).float()
    return Engine(weights, load.tokenizer, dtype=next(load.model.parameters()).dtype)


def in_turn(runs: dict[str, Callable[[], int]], repeats: int, clock: Callable[[], float]) -> list[Result]:
    """Measure contenders in turns, repeatedly, so that other load on the machine affects all of them."""
    results = [Result(name, run(), [], None) for name, run in runs.items()]  # warm-up
    for _ in range(repeats):
        for result, run in zip(results, runs.values(), strict=True):
            start = clock()
            run()
            result.seconds.append(clock() - start)
    return results


def measure(
    name: str, run: Callable[[], int], repeats: int, device: torch.device, warm_up: Callable[[], int] | None = None
) -> Result:
    seconds, peak, tokens = [], None, 0
    gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if gpu else 0
    for repeat in range(repeats + 1):
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        tokens = run() if repeat or warm_up is None else warm_up()
        if gpu:
            torch.cuda.synchronize()
            peak = max(peak or 0, torch.cuda.max_memory_allocated() - before)
        elapsed = time.perf_counter() - start
        if repeat:  # the first run compiles, captures and fills caches
            seconds.append(elapsed)
        else:
            print(f"  {name}: first run {elapsed:.2f} s", flush=True)
    return Result(name, tokens, seconds, peak)


# Roofline


def copy_bandwidth() -> float:
    """Return the bytes per second of a large copy on the device, counting read and written bytes."""
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times)


def least_bytes(load: Load) -> int:
    """Return what a perfect engine reads: the weights once per step, each row's own keys and values once per token,
    and those of a prompt once per step for all of its samples."""
    assert load.lengths is not None
    config = load.model.config
    itemsize = next(load.model.parameters()).dtype.itemsize
    weights = sum(p.numel() for p in load.model.parameters()) * itemsize
    head = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize
    own = sum(n * (n - 1) // 2 for n in load.lengths)
    groups = [load.lengths[i : i + load.samples] for i in range(0, len(load.lengths), load.samples)]
    shared = sum(len(prompt) * max(lengths) for prompt, lengths in zip(load.prompts, groups, strict=True))
    return weights * max(load.lengths) + token * (own + shared)


# The step's parts


def parts(load: Load) -> None:
    """Time one decode step and, for several launch settings, its attention and sampling kernels; see also `layers`."""
    from triton.testing import do_bench, do_bench_cudagraph

    from explorl.rollout.memory import triton_attention
    from explorl.rollout.sampling import Active
    from explorl.rollout.sampling import kernel as triton_sampling
    from explorl.rollout.state import POSITION, RUNNING, STATUS, STEP

    def timed(run: Callable[[], Any]) -> float:
        return float(do_bench(run, warmup=20, rep=100, return_mode="median"))

    def in_graph(run: Callable[[], Any]) -> float:
        """Return the time in a CUDA graph, without the time to launch kernels."""
        with torch.cuda.stream(torch.cuda.Stream()):
            return float(do_bench_cudagraph(run, return_mode="median"))

    engine = Engine(load.model)
    engine_with(load, engine)()
    runner = engine._runner
    assert runner is not None
    ints, rows, middle = runner.state.ints, runner.state.slots, load.max_tokens // 2
    prompt = len(load.prompts[0]) - 1
    cache, page = runner.cache, runner.plan.page
    # Samples of a prompt share its full pages; each row has its own pages after them.
    shared = prompt // page
    own = torch.arange(rows * (cache.table.shape[1] - shared), device="cuda").view(rows, -1)
    first = torch.arange(rows, device="cuda")[:, None] // load.samples * shared + torch.arange(shared, device="cuda")
    cache.table.copy_((torch.cat([first, own + rows * shared], 1) % (runner.plan.pages - 2) + 2).int())

    def place() -> None:
        ints[STATUS], ints[STEP], ints[POSITION] = RUNNING, middle, prompt + middle

    place()
    for (graph_rows, _, active), graph in sorted(runner.graphs.items(), key=lambda item: -item[0][0]):

        def step(graph: Any = graph) -> None:
            place()
            graph.replay()

        print(f"step of {graph_rows:4d} rows, {middle} tokens in, {active}: {timed(step) - timed(place):.3f} ms")
    place()
    shape = runner.layers[0]
    heads = load.model.config.num_attention_heads
    query = torch.randn(rows, heads, 1, shape.key_size, device="cuda", dtype=shape.dtype)
    new = torch.randn(rows, shape.heads, 1, shape.key_size, device="cuda", dtype=shape.dtype)

    def attend(launch: Any) -> None:
        layer = attend.calls % len(cache.keys)  # another layer each time, so that the cache cannot hold it
        attend.calls += 1
        triton_attention.decode_attention(
            query,
            new,
            new,
            cache.keys[layer],
            cache.values[layer],
            cache.table,
            ints,
            0.1,
            launch=launch,
        )

    attend.calls = 0
    for block in (16, 32, 64):
        for warps in (1, 2, 4, 8):
            for stages in (2, 3, 4):
                launch = triton_attention.Launch(block, warps, stages)
                took = in_graph(lambda launch=launch: attend(launch))
                print(f"attention block {block:3d} warps {warps} stages {stages}: {took * 1e3:7.1f} us")
    logits = torch.randn(rows, load.model.config.vocab_size, device="cuda").to(shape.dtype)
    warped = Active(temperature=True, top_p=True, bottom_p=True)
    for block in (1024, 2048, 4096):
        for warps in (4, 8, 16):
            triton_sampling.BLOCK, triton_sampling.WARPS, triton_sampling.SEARCH_WARPS = block, warps, warps
            times = []
            for active in (Active(), warped):

                def sample(active: Active = active) -> None:
                    place()
                    triton_sampling.sample_step_kernel(logits, runner.state, active)

                times.append((in_graph(sample) - in_graph(place)) * 1e3)
            print(f"sampling block {block} warps {warps:2d}: plain {times[0]:7.1f} us, {warped} {times[1]:7.1f} us")


def layers(args: argparse.Namespace) -> None:
    from layers import time_layers

    config_of = Qwen2Config if "qwen" in args.shape else LlamaConfig
    time_layers(config_of(**SHAPES[args.shape]), getattr(torch, args.dtype))


def profile(load: Load, top: int = 30) -> None:
    """Print the time of a decode step by kernel, and the share of a call in which the GPU is busy."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    run = engine_with(load, Engine(load.model))
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = run()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    with profiled(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total, event.count, event.key) for event in profiler.key_averages()]
    rows = sorted((row for row in rows if row[0] > 0), reverse=True)
    steps = max((count for _, count, name in rows if "_sample_kernel" in name), default=load.max_tokens)
    busy = sum(row[0] for row in rows) / 1e6
    print(f"{tokens / wall:.0f} tokens/s; GPU busy {busy:.3f} s / wall {wall:.3f} s = {busy / wall:.0%}; {steps} steps")
    print(f"{'us/step':>9} {'calls/step':>10} {'us/call':>8}  kernel")
    for total, count, name in rows[:top]:
        print(f"{total / steps:9.2f} {count / steps:10.2f} {total / count:8.2f}  {name[:90]}")
    print(f"{1e6 * busy / steps:9.2f} {sum(row[1] for row in rows) / steps:10.2f} {'':8}  all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--shape", default="tiny", choices=["tiny", *SHAPES])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16, help="requests that share a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--lengths", default="equal", choices=["equal", *SPREADS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processor-time", action="store_true", help="count processor time of all threads; on a CPU")
    parser.add_argument("--batch-size", type=int, help="rows that the engine decodes together")
    parser.add_argument("--skip", nargs="*", default=[], choices=["generate", "static", "engine", "mixed"])
    parser.add_argument("--no-kernels", action="store_true", help="the engine without Triton")
    parser.add_argument("--parts", action="store_true", help="time the step and its kernels instead")
    parser.add_argument("--layers", action="store_true", help="time the products of a layer instead, in a minute")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()

    if args.layers:
        return layers(args)
    load = build(args)
    if args.parts:
        return parts(load)
    if args.profile:
        return profile(load)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"{torch.get_num_threads()} CPU threads"
    print(f"{args.shape}, {args.dtype}, {name}; torch {torch.__version__}, transformers {transformers.__version__}")
    print(
        f"{len(load.prompts)} prompts × {load.samples} samples, up to {load.max_tokens} tokens, {args.lengths} lengths"
    )
    engine = Engine(
        load.model, load.tokenizer, batch_size=args.batch_size, use_kernels=False if args.no_kernels else None
    )
    contenders = {
        "generate": lambda: generate_with(load, static=False),
        "static": lambda: generate_with(load, static=True),
        "engine": lambda: engine_with(load, engine),
        "mixed": lambda: engine_with(load, mixed_engine(load)),
    }
    # Plain `generate` compiles nothing for a length: a few tokens warm it up.
    short = replace(load, max_tokens=min(32, load.max_tokens))
    warm_up = {"generate": generate_with(short, static=False)}
    runs = {key: make() for key, make in contenders.items() if key not in args.skip}
    if load.device.type == "cuda":
        results = [measure(key, run, args.repeats, load.device, warm_up.get(key)) for key, run in runs.items()]
    else:
        results = in_turn(runs, args.repeats, time.process_time if args.processor_time else time.perf_counter)
    report = table(results)
    if args.device.startswith("cuda") and load.lengths is not None and "engine" not in args.skip:
        bandwidth = copy_bandwidth()
        floor = least_bytes(load) / bandwidth
        engine_seconds = next(result.median for result in results if result.name == "engine")
        report["roofline"] = {"bytes_per_second": bandwidth, "seconds": floor, "fraction": floor / engine_seconds}
        print(
            f"roofline: {least_bytes(load) / 1e9:.1f} GB at {bandwidth / 1e12:.2f} TB/s are {floor:.3f} s, "
            f"{100 * floor / engine_seconds:.0f} % of the engine's time"
        )
    if engine.plan is not None:
        print(f"engine's plan: {engine.plan}")
        report["planned_bytes"] = engine.plan.bytes
    if args.json:
        report["arguments"] = {key: str(value) for key, value in vars(args).items()}
        args.json.write_text(json.dumps(report, indent=2))


def table(results: list[Result]) -> dict[str, Any]:
    """Print the results, and return them for the file."""
    print(f"\n{'':10} {'tokens/s':>10} {'ratio':>7} {'seconds':>9} {'spread':>8} {'tokens':>8} {'peak MiB':>9}")
    for r in results:
        ratio = r.rate / results[0].rate
        spread = (max(r.seconds) - min(r.seconds)) / r.median
        peak = "–" if r.peak is None else f"{r.peak / 2**20:.0f}"
        print(f"{r.name:10} {r.rate:10.0f} {ratio:6.2f}x {r.median:9.3f} {spread:7.0%} {r.tokens:8d} {peak:>9}")
    return {
        "results": [
            {"name": r.name, "tokens_per_second": r.rate, "ratio": r.rate / results[0].rate, "seconds": r.seconds,
             "tokens": r.tokens, "peak_bytes": r.peak}
            for r in results
        ]
    }  # fmt: skip


if __name__ == "__main__":
    main()
