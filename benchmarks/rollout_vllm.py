"""Tokens per second of vLLM on the loads of benchmarks/rollout.py, with random weights, without and with log π.

    python benchmarks/rollout_vllm.py --shape smollm2-135m --requests 512 --max-tokens 256
    python benchmarks/rollout_vllm.py --shape qwen2.5-1.5b --requests 256 --lengths lognormal

Every request has its own length and ends nowhere else; requests that share a prompt find it in vLLM's prefix cache.
"logprobs" asks for log π of the sampled token, the least of what the engine records.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16, help="requests that share a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--lengths", default="equal", choices=["equal", *SPREADS])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    lengths = [args.max_tokens] * args.requests
    if args.lengths in SPREADS:
        lengths = skewed_lengths(args.requests, *SPREADS[args.lengths])
    prompts = torch.randint(10, 40000, (args.requests // args.samples, args.prompt_tokens)).tolist()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(args.samples)]
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model("llama", **SHAPES[args.shape], architectures=["LlamaForCausalLM"])
        config.save_pretrained(folder)
        llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=args.requests,
            max_model_len=args.prompt_tokens + max(lengths) + 1,
            gpu_memory_utilization=args.memory,
        )
        results: dict[str, Any] = {}
        for name, logprobs in (("plain", None), ("logprobs", 0)):
            params = [
                SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=logprobs, detokenize=False)
                for n in lengths
            ]
            seconds = []
            for repeat in range(args.repeats + 1):
                start = time.perf_counter()
                out = llm.generate(requests, params, use_tqdm=False)
                if repeat:
                    seconds.append(time.perf_counter() - start)
            tokens = sum(len(one.outputs[0].token_ids) for one in out)
            rate = tokens / statistics.median(seconds)
            results[name] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": rate}
            print(f"vLLM {name:9} {rate:10.0f} tokens/s  {statistics.median(seconds):.3f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, **results}, indent=2))


if __name__ == "__main__":
    main()
