"""Generation with a tool against the slower of its two halves: sampling the same tokens, and making the same calls.

    python benchmarks/tools.py                               200 rollouts, 3 calls each
    python benchmarks/tools.py --rollouts 64 --work 20000    code that takes less time
    python benchmarks/tools.py --device cuda

The policy is planted: every rollout writes some tokens and a call, three times over, and then some more tokens. Nothing
it computes is left out for that. "sampling alone" draws as many tokens by `Engine.generate`; "calls alone" opens the
interpreters and has them run the same code, all at once. The goal is at most 1.5 times the slower of the two. Each
round times all three in turn; what counts is the median of the rounds' ratios, and the least times are given beside it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from explorl.metrics import Table
from explorl.rollout import Engine, Rollouts, SamplingParams
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.rollout.tools import calculator_tool

CALLS = 3
CHARACTERS = "0123456789<>=()+*,.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ [];:'\"_-\n"
GOAL = 1.5


def planted(words: int, code: str, layers: int, device: str) -> tuple[Any, Any]:
    """A Llama that writes w0, w1, … and a call, over and over, and its tokenizer.

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


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def calls_alone(tools: ToolUse, rollouts: int, code: str) -> None:
    """Every interpreter is opened with its first call and makes the next when it has the output."""
    with tools.pool() as pool:
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
                    call.interpreter.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--words", type=int, default=40, help="tokens before each call")
    parser.add_argument("--work", type=int, default=200_000, help="numbers that each call adds up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    code = f"sum(range({args.work}))"
    output = len(str(sum(range(args.work)))) + len(">>")
    model, tokenizer = planted(args.words, code, args.layers, args.device)
    engine = Engine(model, tokenizer)
    tools = ToolUse(calculator_tool(max_calls=CALLS, seconds=30.0))
    prompts = [  # all different, so that nothing is computed once for several of them
        [*tokenizer(f"{index:05d}")["input_ids"], tokenizer.convert_tokens_to_ids("go")]
        for index in range(args.rollouts)
    ]
    own = CALLS * (args.words + 2) + args.words // 2
    params = SamplingParams(temperature=1.0, max_tokens=own + CALLS * output, seed=1)

    def alone() -> Rollouts:
        return engine.generate(prompts, 1, SamplingParams(max_tokens=own, seed=1, stop_token_ids=()))

    def together() -> Rollouts:
        return generate_with_tools(engine, prompts, 1, params, tools)

    alone()  # the model is tried, graphs are captured
    calls_alone(tools, 4, code)  # what interpreters come from is started
    times: dict[str, list[float]] = {"sampling alone": [], "calls alone": [], "together": []}
    for _ in range(args.rounds):
        times["sampling alone"].append(timed(alone)[0])
        times["calls alone"].append(timed(lambda: calls_alone(tools, args.rollouts, code))[0])
        seconds, found = timed(together)
        times["together"].append(seconds)
        assert all([call.status for call in rollout.calls] == ["ok"] * CALLS for rollout in found)
        assert all(rollout.model_tokens == own for rollout in found)
    ratios = [t / max(a, b) for a, b, t in zip(*times.values(), strict=True)]
    rows: list[list[Any]] = [[name, min(each), statistics.median(each)] for name, each in times.items()]
    rows.append(["together / the slower half", min(ratios), statistics.median(ratios)])
    title = f"{args.rollouts} rollouts of {own} sampled tokens and {CALLS} calls, {args.device}"
    table = Table(["seconds", "least", "median"], rows, title=title, number=".2f")
    table.print()
    verdict = "holds" if statistics.median(ratios) <= GOAL else "is missed"
    print(f"the goal of at most {GOAL} times {verdict}")
    if args.json is not None:
        table.write(args.json)


if __name__ == "__main__":
    main()
