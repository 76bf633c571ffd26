"""SFT on two processes takes the steps that one process takes. Run as a module, it is one of the two."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from trl import SFTConfig

from explorl.models import tiny_tokenizer
from explorl.training.sft.trainer import PackedSFTTrainer
from tests.training.test_sft_trainer import Watch, ready, text_rows

LIMIT = 120
"""Seconds after which the processes are taken to hang."""


def trained(policy: Path, out: Path, accumulation: int) -> Any:
    """A training of two steps of eight rows, in passes of few tokens, of which the processes have different numbers."""
    rows = text_rows(12, longest=8) + text_rows(12, seed=1, longest=90)
    rows = [rows[(row % 2) * 12 + row // 2] for row in range(24)]
    trainer = PackedSFTTrainer(
        model=LlamaForCausalLM.from_pretrained(policy, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(out), per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_steps=2,
            logging_steps=1, learning_rate=1e-3, save_strategy="no", report_to="none", disable_tqdm=True, bf16=False,
            gradient_checkpointing=False, use_cpu=True, dataset_kwargs={"skip_prepare_dataset": True}, max_grad_norm=0,
            dataloader_pin_memory=False, train_sampling_strategy="sequential",
        ),
        train_dataset=ready(rows),
        processing_class=tiny_tokenizer(),
        packed=True,
        tokens_per_pass=130,
    )  # fmt: skip
    trainer.watch = Watch()
    trainer.add_callback(trainer.watch)
    trainer.train()
    return trainer


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(small_policy: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launch, "-m", "tests.training.test_sft_two_processes", str(small_policy), str(tmp_path)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    one = trained(small_policy, tmp_path / "one", 4)
    for rank in range(2):
        steps, log = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert len(steps) == 2
        for got, expected in zip(steps, one.watch.steps, strict=True):
            for name, gradient in expected.items():
                difference = (got[name] - gradient).norm()
                assert difference <= 1e-5 * gradient.norm() + 1e-7, name
        for got, expected in zip(log[:-1], one.state.log_history[:-1], strict=True):
            for key in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
                assert got[key] == pytest.approx(expected[key], rel=1e-4), key


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    policy, out = map(Path, sys.argv[1:])
    trainer = trained(policy, out / "two", 2)
    torch.save((trainer.watch.steps, trainer.state.log_history), out / f"{trainer.accelerator.process_index}.pt")
