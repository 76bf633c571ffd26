"""What `ExplorationTrainer` makes of the batches that strategies saw inside verl: ``python same_batch.py OUT``.

The same completions, rewards and records go into TRL's own normalisation and into the trainer's own path from a
generation batch to what the loss multiplies with. Prints the largest difference of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from explorl import ExplorationTrainer
from explorl.models.tiny import tiny_checkpoint
from explorl.training.grpo.batch import TokenStats
from explorl.training.grpo.rewards import group_advantages
from explorl.training.grpo.sampled_rows import SampledRows

GENERATIONS = 4


def trainer_for(out: Path, strategies: list[Any], rows: int) -> ExplorationTrainer:
    def correctness(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    args = GRPOConfig(
        str(out / "trl"), num_generations=GENERATIONS, per_device_train_batch_size=rows, report_to=[], use_cpu=True,
        max_completion_length=26, beta=0.01, bf16=False, num_iterations=2,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "x"}] * rows)
    return ExplorationTrainer(
        str(tiny_checkpoint()), correctness, args, data, strategies=strategies, correct=("correctness", 1.0)
    )


def differences(trainer: ExplorationTrainer, record: dict[str, Any]) -> dict[str, float]:
    """Of TRL's advantages, and of everything that the strategies say, between the two trainers."""
    batch, shaped, columns = record["batch"], record["shaped"], record["columns"]
    rewards = batch["rewards"]
    base = group_advantages(rewards, trainer.num_generations, trainer.scale_rewards)
    lengths = columns["lengths"]
    output = {
        "completion_ids": columns["responses"],
        "completion_mask": (torch.arange(columns["responses"].size(1)) < lengths.unsqueeze(1)).long(),
        "advantages": base,
        "old_per_token_logps": batch["old_logps"],
        "ref_per_token_logps": batch["ref_logps"],
    }
    sampled = SampledRows(list(batch["prompts"]), sampling_temperature=batch["temperature"])
    sampled.reward_parts, sampled.stopped = batch["correctness"].unsqueeze(1), [False] * len(sampled.prompts)
    trainer.state.global_step = batch["step"]
    recorded = TokenStats(batch["logps"], batch["entropy"], None, batch["sampling_logps"])
    trainer.shape_batch(output, sampled, recorded, rewards)
    pairs = {
        "base": (base.unsqueeze(1) * batch["mask"], batch["advantages"]),
        "advantages": (output["advantages"], shaped["advantages"]),
        "loss_mask": (output["loss_mask"], shaped["loss_mask"]),
        "weights": (output["token_weights"], shaped["weights"]),
        "kl_weights": (output["kl_weights"], shaped["kl_weights"]),
        **{f"kept/{name}": (output[f"kept/{name}"], value) for name, value in shaped["kept"].items()},
    }
    return {name: float((ours - theirs).abs().max()) for name, (ours, theirs) in pairs.items()}


def main(out: Path) -> None:
    records = [torch.load(path, weights_only=False) for path in sorted(out.glob("seen-*.pt"))]
    strategies = json.loads((out / "strategies.json").read_text())
    trainer = trainer_for(out, strategies, len(records[0]["batch"]["rewards"]))
    print("DIFFERENCES " + json.dumps([differences(trainer, record) for record in records]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
