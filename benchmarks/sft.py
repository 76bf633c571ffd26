"""Compare supervised fine-tuning with TRL's `SFTTrainer` and with `PackedSFTTrainer`, in one process.

    python benchmarks/sft.py                      SmolLM2-135M's shape on a GPU, random weights
    python benchmarks/sft.py --compile            with TRL's trainer under torch.compile too, which takes minutes
    python benchmarks/sft.py --small              a tiny shape, on a CPU, in under a minute

Rows have prompts of about 64 tokens and completions of log-normal lengths up to 512; only completions are trained on.
All trainers see the same rows, the same number per optimizer step, compute in bfloat16 over float32 weights (float32 on
a CPU) and use fused AdamW. TRL's trainer runs with its defaults (8 rows at a time, gradient checkpointing), and in the
settings that make it fast: no checkpointing, rows sorted by length, larger micro-batches, padding-free, compiled.
Padding is not counted as tokens. The losses of all trainers on the same batch are compared, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does; must be set before torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from explorl.models import tiny_tokenizer
from explorl.training.run_setup import disabled_progress, quiet
from explorl.training.sft.trainer import PackedSFTTrainer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 103, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 4},
    "smollm2-135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip


@dataclass
class Candidate:
    """One trainer with its settings."""

    name: str
    cls: Any
    rows: int
    """Rows at a time; the rest of an optimizer step is accumulated."""
    config: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None


class Clock(TrainerCallback):
    """Measures seconds and tokens from the end of warm-up to the last step."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.trainer: Any = None
        self.begin = self.end = (0.0, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.warmup, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            counted = getattr(self.trainer, "_counts", [0])[0] + self.trainer._total_train_tokens
            moment = time.perf_counter(), counted
            self.begin, self.end = (moment, self.end) if state.global_step == self.warmup else (self.begin, moment)


def make_rows(count: int, vocab: int, longest: int) -> Dataset:
    """Return rows of random tokens: prompts of about 64, completions with a median of 160 (`longest` 512)."""
    draw = np.random.default_rng(0)
    prompts = draw.integers(longest // 11, longest // 6, count)
    completions = np.exp(draw.normal(np.log(longest / 3.2), 0.6, count)).clip(8, longest).astype(int)
    ids = [draw.integers(5, vocab, total).tolist() for total in prompts + completions]
    labels = [[-100] * prompt + row[prompt:] for prompt, row in zip(prompts, ids, strict=True)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def build(candidate: Candidate, weights: dict[str, Any], rows: Dataset, options: Any, folder: str) -> Any:
    model = LlamaForCausalLM(options.model_config)
    model.load_state_dict(weights)
    config: dict[str, Any] = {
        "per_device_train_batch_size": candidate.rows,
        "gradient_accumulation_steps": options.rows // candidate.rows,
        "max_steps": options.warmup + (candidate.steps or options.steps),
        "bf16": options.gpu,
        "use_cpu": not options.gpu,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        **candidate.config,
    }
    extra = {"packed": True} if candidate.cls is PackedSFTTrainer else {}
    trainer = candidate.cls(
        model=model.to("cuda" if options.gpu else "cpu"),
        args=SFTConfig(output_dir=folder, **config),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        **extra,
    )
    quiet(trainer)
    return trainer


def loss_of(trainer: Any, rows: Dataset, count: int) -> float:
    """Return the loss on the first rows, computed as in training."""
    trainer.model.train()
    if isinstance(trainer, PackedSFTTrainer):
        trainer.get_train_dataloader()
        held = trainer._rows
        inputs = held.packed(np.argsort(held.lengths[:count], kind="stable"), trainer.args.device)
    else:
        inputs = trainer.data_collator([rows[row] for row in range(count)])
        inputs = {
            key: value.to(trainer.args.device) if torch.is_tensor(value) else value for key, value in inputs.items()
        }
    with torch.no_grad(), trainer.accelerator.autocast():
        loss = float(trainer.compute_loss(trainer.model, inputs))
    for metrics in trainer._metrics.values():
        metrics.clear()
    trainer._total_train_tokens = 0
    if isinstance(trainer, PackedSFTTrainer):
        trainer._reset_sums()
    return loss


def measure(candidate: Candidate, weights: dict[str, Any], rows: Dataset, options: Any, folder: str) -> dict[str, Any]:
    gc.collect()
    if options.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = build(candidate, weights, rows, options, folder)
    loss = loss_of(trainer, rows, 8)
    clock = Clock(options.warmup)
    clock.trainer = trainer
    trainer.add_callback(clock)
    if options.profile and isinstance(trainer, PackedSFTTrainer):
        profile(trainer)
    else:
        trainer.train()
    seconds, tokens = (after - before for before, after in zip(clock.begin, clock.end, strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.gpu else None
    return {"tokens/s": tokens / seconds, "loss": loss, "peak GiB": peak}


def profile(trainer: Any) -> None:
    """Train, and print where the time goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.train()
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=60))


def candidates(options: argparse.Namespace) -> list[Candidate]:
    fast = {"gradient_checkpointing": False, "train_sampling_strategy": "group_by_length"}
    chosen = [Candidate("SFTTrainer, defaults", SFTTrainer, 8, steps=max(options.steps // 4, 1))]
    for rows in options.micro:
        chosen.append(Candidate(f"SFTTrainer, fast settings, {rows} rows", SFTTrainer, rows, fast))
    free = {"gradient_checkpointing": False, "padding_free": True, "max_length": None}
    chosen.append(
        Candidate(
            f"SFTTrainer, padding-free, {options.free} rows", SFTTrainer, options.free, free, max(options.steps // 4, 1)
        )
    )
    chosen.append(Candidate("PackedSFTTrainer", PackedSFTTrainer, options.rows, {"gradient_checkpointing": False}))
    if options.compile:
        chosen.append(Candidate("SFTTrainer, compiled", SFTTrainer, options.micro[-1], {**fast, "torch_compile": True}))
    return chosen


def report(results: dict[str, Any], facts: dict[str, Any], share: float) -> None:
    table = Table(title=f"SFT: {facts['shape']}, {facts['rows']} rows a step, {facts['device']}")
    for column in ("trainer", "tokens/s", "learnt tokens/s", "ratio", "peak GiB", "loss on one batch"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    base = next((entry["tokens/s"] for entry in results.values() if "tokens/s" in entry), None)
    for name, entry in results.items():
        if "failed" in entry:
            table.add_row(name, "failed", "", "", "", entry["failed"])
            continue
        peak = "" if entry["peak GiB"] is None else f"{entry['peak GiB']:.1f}"
        speed = entry["tokens/s"]
        table.add_row(
            name, f"{speed:,.0f}", f"{speed * share:,.0f}", f"{speed / base:.2f}", peak, f"{entry['loss']:.6f}"
        )
    Console(width=130).print(table)
    theirs = [entry["tokens/s"] for name, entry in results.items() if "Packed" not in name and "tokens/s" in entry]
    ours = results.get("PackedSFTTrainer", {}).get("tokens/s")
    if theirs and ours:
        print(f"PackedSFTTrainer: {ours / theirs[0]:.1f} × defaults, {ours / max(theirs):.2f} × TRL's best setting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny shape and few rows, on a CPU")
    parser.add_argument("--shape", choices=SHAPES, default=None)
    parser.add_argument("--rows", type=int, default=None, help="rows per optimizer step")
    parser.add_argument("--micro", type=int, nargs="+", default=None, help="rows at a time for TRL's fast settings")
    parser.add_argument("--steps", type=int, default=None, help="number of timed steps")
    parser.add_argument("--warmup", type=int, default=None, help="number of warm-up steps")
    parser.add_argument("--compile", action="store_true", help="TRL's trainer with torch_compile as well, at the end")
    parser.add_argument("--only", help="run only candidates whose name contains this")
    parser.add_argument("--profile", action="store_true", help="print where the time of PackedSFTTrainer goes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.gpu = torch.cuda.is_available() and not options.small
    shape = options.shape or ("smollm2-135m" if options.gpu else "tiny")
    options.rows = options.rows or (256 if options.gpu else 16)
    options.micro = options.micro or ([64, 128] if options.gpu else [16])
    options.free = 32 if options.gpu else 8
    options.steps = options.steps or (16 if options.gpu else 3)
    options.warmup = options.warmup or (4 if options.gpu else 1)
    tokenizer = tiny_tokenizer()
    options.model_config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = LlamaForCausalLM(options.model_config).state_dict()
    rows = make_rows(
        options.rows * (options.steps + options.warmup), SHAPES[shape]["vocab_size"], 512 if options.gpu else 192
    )
    labels = np.concatenate([np.asarray(row) for row in rows["labels"]])
    share = float((labels != -100).mean())
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name() if options.gpu else "cpu",
        "shape": shape, "rows": options.rows, "tokens of a row": len(labels) / len(rows), "learnt": share,
        "torch": torch.__version__,
    }  # fmt: skip
    results: dict[str, Any] = {}
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as folder, disabled_progress():
        for candidate in candidates(options):
            if options.only and options.only not in candidate.name:
                continue
            begin = time.perf_counter()
            try:
                results[candidate.name] = measure(candidate, weights, rows, options, folder)
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                results[candidate.name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
            took = time.perf_counter() - begin
            print(f"{candidate.name}: {results[candidate.name]} ({took:.0f} s in all)", flush=True)
    report(results, facts, share)
    if options.json:
        options.json.write_text(json.dumps({**facts, "results": results}, indent=2))


if __name__ == "__main__":
    main()
