"""Compare generation with a tool with the slower of its halves: sampling the same tokens, and making the same calls.

    python benchmarks/tools.py                               200 rollouts, 3 calls each
    python benchmarks/tools.py --rollouts 64 --work 20000    code that takes less time
    python benchmarks/tools.py --device cuda

The policy is constructed: every rollout writes some tokens and a call, three times, and then some more tokens. The
model still computes everything. The halves:

    sampling alone   the same rollouts with `Engine.open` and `Session.extend`, with outputs known in advance
    calls alone      opens the interpreters and runs the same code in them, all at once

The goal is at most 1.5 times the slower of the two. "one turn" samples the same number of tokens with
`Engine.generate`, without outputs in between: less work than any rollout with calls, and reported because it was the
earlier measure.

Each round times all of them in turn. The result is the median of the rounds' ratios; the minimum times are reported as
well. "processor" is the processor time of this process, over all threads. Two halves that both need all processors
cannot overlap, so the lowest ratio that this machine allows is reported, too: the processor time of sampling, with one
thread, and of the calls, with all processes of the interpreters, divided by the number of processors.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from explorl.rollout import Engine, SamplingParams
from explorl.rollout.session import Session
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import calculator_tool
from explorl.sandbox.fork_client import fork_server_client
from explorl.sandbox.interpreter import Interpreter
from explorl.sandbox.interpreter_pool import InterpreterPool
from explorl.stats import Table

CALLS = 3
CHARACTERS = "0123456789<>=()+*,.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ [];:'\"_-\n"
GOAL = 1.5


def planted(words: int, code: str, layers: int, device: str) -> tuple[Any, Any]:
    """Return a Llama that writes w0, w1, … and a call, repeatedly, and its tokenizer.

    Each token follows from the last one: embeddings are unit vectors, and neither attention nor the rest of a layer,
    though computed, adds anything to them.
    """
    chain = ["go", *(f"w{i} " for i in range(words)), f"<<{code}", "="]
    names = list(dict.fromkeys(["<pad>", "<eos>", "<unk>", *CHARACTERS, *chain]))
    ids = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    size = len(names) + -len(names) % 64
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=ids["<eos>"],
        pad_token_id=ids["<pad>"],
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    follow = {ids[a]: ids[b] for a, b in itertools.pairwise(chain)} | {ids[">"]: ids[chain[1]]}
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(len(names), size))
        model.lm_head.weight.zero_()
        for before, after in follow.items():
            model.lm_head.weight[after, before] = 10.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model.to(device), tokenizer


class Times:
    """Wall time and processor time of each round, in seconds."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.processor: list[float] = []

    def of(self, work: Callable[[], Any]) -> Any:
        start, used = time.perf_counter(), time.process_time()
        value = work()
        self.clock.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - used)
        return value


def interpreters_time() -> float:
    """Return the processor seconds of all descendants of the fork server."""
    total, waiting = 0.0, [fork_server_client._running[0].pid] if fork_server_client._running is not None else []
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return total


def in_turns(engine: Engine, prompts: list[list[int]], params: SamplingParams, output: list[int]) -> Session:
    """Sample the rollouts of `generate_with_tools`, with each output available as soon as the row has called."""
    with engine.open(prompts, 1, params) as session:
        calls = [0] * len(prompts)
        while session.running:
            for rollout in session.step():
                if rollout.stop is not None and calls[rollout.request] < CALLS:
                    calls[rollout.request] += 1
                    session.extend(rollout.request, output)
        assert calls == [CALLS] * len(prompts)
    return session


def calls_alone(tools: ToolUse, rollouts: int, code: str) -> None:
    """Open every interpreter with its first call, and make each further call when the output has arrived."""
    with tools.pool() as pool:
        for interpreter in _called(pool, rollouts, code):
            interpreter.close()


def calls_processor_time(tools: ToolUse, rollouts: int, code: str) -> float:
    """Return the processor seconds of the same calls, here and in the interpreters, which stay open until then."""
    used, before = time.process_time(), interpreters_time()
    with tools.pool() as pool:
        _ended = list(_called(pool, rollouts, code))
        return time.process_time() - used + interpreters_time() - before


def _called(pool: InterpreterPool, rollouts: int, code: str) -> Iterator[Interpreter]:
    """Return interpreters that have made their calls."""
    waiting = {index: pool.open().submit(code) for index in range(rollouts)}
    left = dict.fromkeys(waiting, CALLS - 1)
    while waiting:
        pool.poll(1.0)
        for index in [index for index, call in waiting.items() if call.done]:
            call = waiting.pop(index)
            assert call.result().status == "ok", call.result()
            if left[index]:
                left[index] -= 1
                waiting[index] = call.interpreter.submit(code)
            else:
                yield call.interpreter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--words", type=int, default=40, help="tokens before each call")
    parser.add_argument("--work", type=int, default=200_000, help="how many numbers each call adds up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    code = f"sum(range({args.work}))"
    model, tokenizer = planted(args.words, code, args.layers, args.device)
    output = tokenizer.encode(f"{sum(range(args.work))}>>")
    engine = Engine(model, tokenizer)
    tools = ToolUse(calculator_tool(max_calls=CALLS, seconds=30.0))
    prompts = [  # all different, so that no computation is shared between them
        [*tokenizer(f"{index:05d}")["input_ids"], tokenizer.convert_tokens_to_ids("go")]
        for index in range(args.rollouts)
    ]
    own = CALLS * (args.words + 2) + args.words // 2
    params = SamplingParams(temperature=1.0, max_tokens=own + CALLS * len(output), seed=1)
    works: dict[str, Callable[[], Any]] = {
        "one turn": lambda: engine.generate(prompts, 1, SamplingParams(max_tokens=own, seed=1, stop_token_ids=())),
        "sampling alone": lambda: in_turns(engine, prompts, replace(params, stop=tools.tool.fence.stop), output),
        "calls alone": lambda: calls_alone(tools, args.rollouts, code),
        "together": lambda: generate_with_tools(engine, prompts, 1, params, tools),
    }
    together, alone = (
        works["together"](),
        works["sampling alone"](),
    )  # warm-up: the model is checked and graphs are captured
    assert all([call.status for call in rollout.calls] == ["ok"] * CALLS for rollout in together)
    assert all(rollout.model_tokens == own for rollout in together)
    assert [r.token_ids for r in alone.finished()] == [r.token_ids for r in together]
    works["one turn"]()
    needed = processor_needed(args.device, works["sampling alone"], tools, args.rollouts, code)

    times = {name: Times() for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            times[name].of(work)
    rows: list[list[Any]] = [
        [name, *(figure(each) for each in (taken.clock, taken.processor) for figure in (min, statistics.median))]
        for name, taken in times.items()
    ]
    plain, sampled, called, both = (np.array(taken.clock) for taken in times.values())
    slower = np.maximum(sampled, called)
    for name, ratio in (
        ("together / the slower half", both / slower),
        ("together / the slower of one turn and calls", both / np.maximum(plain, called)),
        ("the least that these processors allow", np.maximum(1, needed / len(os.sched_getaffinity(0)) / slower)),
    ):
        rows.append([name, float(ratio.min()), float(np.median(ratio)), None, None])
    title = f"{args.rollouts} rollouts of {own} sampled tokens and {CALLS} calls, {args.device}"
    columns = ["seconds", "least", "median", "processor, least", "processor, median"]
    table = Table(columns, rows, title=title, number=".2f")
    table.print()
    print(f"the goal of at most {GOAL} times {'holds' if np.median(both / slower) <= GOAL else 'is missed'}")
    if args.json is not None:
        table.write(args.json)


def processor_needed(device: str, alone: Callable[[], Any], tools: ToolUse, rollouts: int, code: str) -> float:
    """Return the processor seconds of both halves; torch gets one thread, because waiting threads spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sampling = Times()
    sampling.of(alone)
    torch.set_num_threads(threads)
    return (sampling.processor[0] if device == "cpu" else 0.0) + calls_processor_time(tools, rollouts, code)


if __name__ == "__main__":
    main()
