"""Compare a whole GRPO step of TRL's `GRPOTrainer` and of `ExplorationTrainer`, in one process.

    python benchmarks/step.py --device cuda --shape smollm2-135m        512 × 256 tokens, β > 0
    python benchmarks/step.py --device cpu --shape tiny

Same model, same prompts, same reward, TRL's default precision on both sides: float32 weights, bfloat16 autocast and
gradient checkpointing (`--precision pure` has bfloat16 weights and no checkpointing). With `--lengths skewed` a bias on
the end token makes lengths geometric, so that the longest completion is many times the mean. The loss of both trainers
on the same batch is compared, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from explorl.models import tiny_tokenizer
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_setup import disabled_progress, quiet

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 103, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 4},
    "smollm2-135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip


def make_policy(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """Return a policy of this shape with random weights."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def set_mean_length(policy: Any, token: int, mean: int | None) -> None:
    """Bias the end token so that it is sampled about once in `mean` tokens, or never if `mean` is None."""
    head = policy.lm_head
    bias = torch.zeros(head.out_features, device=head.weight.device, dtype=head.weight.dtype)
    bias[token] = -100.0 if mean is None else math.log(head.out_features / mean)
    head.bias = torch.nn.Parameter(bias, requires_grad=False)


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return a cheap reward that has variance in every group."""
    return [float(sum(ids[:8]) % 7) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--precision", choices=["mixed", "pure", "float32"], default="mixed")
    parser.add_argument("--sequences", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=None, help="longest completion")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--lengths", choices=["equal", "skewed"], default="equal")
    parser.add_argument("--steps", type=int, default=4, help="the first is warm-up")
    parser.add_argument("--beta", type=float, default=0.04)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gpu = options.device == "cuda"
    shape = options.shape or ("smollm2-135m" if gpu else "tiny")
    dtype = torch.bfloat16 if options.precision == "pure" else torch.float32  # dtype of the weights
    sequences = options.sequences or (512 if gpu else 256)
    tokens = options.tokens or {"equal": 256 if gpu else 32, "skewed": 1024 if gpu else 128}[options.lengths]
    mean = max(tokens // 8, 2) if options.lengths == "skewed" else None

    results: dict[str, dict[str, Any]] = {}
    batch: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, disabled_progress():
        folder = Path(temporary) / "policy"
        make_policy(folder, shape, dtype)
        prompts = [f"{i} {i + 1} {i + 2}={i * 7 + 100000000 + i}\n" * 3 for i in range(1, 400)]
        for name, cls in (("GRPOTrainer", GRPOTrainer), ("ExplorationTrainer", ExplorationTrainer)):
            model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
            arguments = GRPOConfig(
                output_dir=temporary, per_device_train_batch_size=options.micro_batch, num_generations=16,
                gradient_accumulation_steps=sequences // options.micro_batch, max_completion_length=tokens,
                beta=options.beta, max_steps=options.steps, logging_steps=1, save_strategy="no", report_to="none",
                disable_tqdm=True, bf16=options.precision != "float32",
                gradient_checkpointing=options.precision == "mixed", use_cpu=not gpu,
                learning_rate=1e-6, loss_type="dapo", seed=0,
            )  # fmt: skip
            trainer = cls(
                model=model, reward_funcs=reward, args=arguments, processing_class=tiny_tokenizer(),
                train_dataset=Dataset.from_dict({"prompt": prompts}),
            )  # fmt: skip
            for policy in filter(None, (trainer.model, trainer.ref_model)):
                set_mean_length(policy, tiny_tokenizer().eos_token_id, mean)
            quiet(trainer)
            if gpu:
                torch.cuda.reset_peak_memory_stats()
            trainer.train()
            log = [entry for entry in trainer.state.log_history if "step_time" in entry]
            seconds = statistics.median(entry["step_time"] for entry in log[1:])
            results[name] = {
                "seconds": seconds,
                "tokens": statistics.mean(entry["completions/mean_length"] for entry in log) * sequences,
                "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,
            }
            batch = batch or copy.deepcopy(trainer._buffered_inputs[0])
            model.load_state_dict(LlamaForCausalLM.from_pretrained(folder, dtype=dtype).state_dict(), strict=False)
            trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
            with torch.no_grad():
                results[name]["loss"] = trainer._compute_loss(trainer.model, dict(batch)).item()
            del trainer, model
            if gpu:
                torch.cuda.empty_cache()
    stock, ours = results["GRPOTrainer"], results["ExplorationTrainer"]
    facts = {
        "time": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name() if gpu else "cpu", "shape": shape,
        "precision": options.precision, "sequences": sequences,
        "lengths": options.lengths, "tokens": tokens, "beta": options.beta,
        "ratio": stock["seconds"] / ours["seconds"], "loss difference": abs(stock["loss"] - ours["loss"]),
        "results": results,
    }  # fmt: skip
    size = f"{sequences} × {tokens} tokens ({options.lengths})"
    table = Table(title=f"one GRPO step: {shape}, {options.precision}, {size}, {facts['device']}")
    for column in ("trainer", "s / step", "mean tokens", "peak GiB", "loss on one batch"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for name, entry in results.items():
        peak = "" if entry["peak GiB"] is None else f"{entry['peak GiB']:.1f}"
        mean_tokens = f"{entry['tokens'] / sequences:.0f}"
        table.add_row(name, f"{entry['seconds']:.2f}", mean_tokens, peak, f"{entry['loss']:.6f}")
    Console(width=110).print(table)
    print(f"ExplorationTrainer is {facts['ratio']:.2f} times as fast")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
