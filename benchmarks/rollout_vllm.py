"""Measure tokens per second of vLLM on the loads of benchmarks/rollout.py, with random weights, without and with log π.

    python benchmarks/rollout_vllm.py 512x256                          # requests × tokens; --shape smollm2-135m
    python benchmarks/rollout_vllm.py 512x256 512xskewed 64x1024 --tuned
    python benchmarks/rollout_vllm.py 256xlognormal --shape qwen2.5-1.5b

Every request ends exactly at its own length; requests that share a prompt find it in vLLM's prefix cache. "logprobs"
requests log π of the sampled token, the minimum of what the engine records. All loads run in one vLLM, with its
defaults or, with --tuned, with the settings that should be fastest for a batch whose requests all arrive at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch

from rollout import SHAPES, SPREADS, skewed_lengths

TUNED: dict[str, Any] = {"async_scheduling": True, "max_num_batched_tokens": 32768}
"""Steps are scheduled while the GPU computes, and all prompts are computed in one step."""


def lengths_of(load: str) -> list[int]:
    """Return the lengths of a load: 512x256 is 512 requests of 256 tokens; 512xskewed uses one of `SPREADS`."""
    requests, _, tokens = load.partition("x")
    if tokens in SPREADS:
        return skewed_lengths(int(requests), *SPREADS[tokens])
    return [int(tokens)] * int(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="+", metavar="REQUESTSxTOKENS")
    parser.add_argument("--shape", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--samples", type=int, default=16, help="requests that share a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tuned", action="store_true", help="use the fastest settings instead of the defaults")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    from transformers import AutoConfig
    from vllm import LLM

    loads = {load: lengths_of(load) for load in args.loads}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model("llama", **SHAPES[args.shape], architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=args.dtype,
            max_num_seqs=max(map(len, loads.values())),
            max_model_len=args.prompt_tokens + max(map(max, loads.values())) + 1,
            gpu_memory_utilization=args.memory,
            **(TUNED if args.tuned else {}),
        )
        for load, lengths in loads.items():
            results[load] = measured(llm, load, lengths, args)
            if args.json:
                arguments = {key: str(value) for key, value in vars(args).items()}
                args.json.write_text(json.dumps({"arguments": arguments, "loads": results}, indent=2))


def measured(llm: Any, load: str, lengths: list[int], args: argparse.Namespace) -> dict[str, Any]:
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 40000, (len(lengths) // args.samples, args.prompt_tokens), generator=generator)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts.tolist() for _ in range(args.samples)]
    results: dict[str, Any] = {}
    for name, logprobs in (("plain", None), ("logprobs", 0)):
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=logprobs, detokenize=False)
            for n in lengths
        ]
        seconds, tokens = [], 0
        for repeat in range(args.repeats + 1):
            start = time.perf_counter()
            out = llm.generate(requests, params, use_tqdm=False)
            if repeat:  # the first run fills caches
                seconds.append(time.perf_counter() - start)
            tokens = sum(len(request.outputs[0].token_ids) for request in out)
        rate = tokens / statistics.median(seconds)
        results[name] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": rate}
        median = statistics.median(seconds)
        print(f"vLLM {args.shape} {load} {name:9} {rate:10.0f} tokens/s  {median:.3f} s", flush=True)
    return results


if __name__ == "__main__":
    main()
