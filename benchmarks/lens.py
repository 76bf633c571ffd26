"""Measure the cost of the lens in a training step: two trainers in one process, in alternating steps.

    python benchmarks/lens.py                                              # the embedded policy on the CPU
    python benchmarks/lens.py --model smollm2-shape --tokens 256           # SmolLM2-135M's shape in bfloat16, on a GPU
    python benchmarks/lens.py --rate 0.25 --steps 40 --json lens.json

One trainer has the lens as in `explorl train`: its statistics, a closer inspection of a share of the completions before
and after the update, and their columns in the file of rollouts. The other has no lens; both write their rollouts, with
the token records of four prompts. Each has its own random numbers, and the lens uses none, so both sample the same
completions and make the same updates: their times for a step differ only by the lens, and other load on the machine
affects both. At the end their weights are compared bitwise; on a GPU this needs ``--deterministic``, since torch's
attention otherwise adds gradients in no fixed order.

There are two results, each over as many steps as there are between closer inspections. The first is the median of the
ratios of their times, with the middle half. The lens takes less time than a busy machine adds to a step, so the second
is the time that the two trainers spend on recording and reporting, as a share of a step without the lens; on a CPU it
is processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig

from explorl.core.store import RunStore
from explorl.models import load_policy, tiny_tokenizer
from explorl.tasks import get_task
from explorl.training.grpo import observers
from explorl.training.grpo.inspection_schedule import Lens
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_setup import disabled_progress, quiet

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def digits_of(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return rewards that differ between completions, for a policy with random weights."""
    return [(sum(ids) % 5) / 4 for ids in completion_ids]


class Turns:
    """Alternates between the trainers, each with its own random numbers."""

    def __init__(self, players: int) -> None:
        self.turn, self.players, self.changed = 0, players, threading.Condition()
        self.random = [random_state()] * players

    def take(self, player: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == player)
        set_random_state(self.random[player])

    def give(self, player: int) -> None:
        self.random[player] = random_state()
        with self.changed:
            self.turn = (player + 1) % self.players
            self.changed.notify_all()


def random_state() -> Any:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def set_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class Clock(TrainerCallback):
    """Times whole steps, from the start of a turn to its end."""

    def __init__(self, player: int, turns: Turns) -> None:
        self.player, self.turns = player, turns
        self.seconds, self.busy, self.looking = list[float](), list[float](), list[float]()
        self.looked, self.begun = 0.0, (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step:  # logging of the previous step belongs to that step
            self.seconds.append(now() - self.begun[0])
            self.busy.append(spent() - self.begun[1])
            self.looking.append(self.looked)
            self.turns.give(self.player)
            self.turns.take(self.player)
        self.begun, self.looked = (now(), spent()), 0.0


def time_inspection(trainer: ExplorationTrainer, clock: Clock) -> None:
    """Time the recording of each batch, and the reporting."""

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            begun = spent()
            method(*args, **options)
            clock.looked += spent() - begun

        return call

    inspector: Any = trainer.inspector
    inspector.see, inspector.finish = timed(inspector.see), timed(inspector.finish)


def spent() -> float:
    """Return the seconds spent; on a CPU the processor time of this process, which other load does not affect."""
    return now() if torch.cuda.is_available() else time.process_time()


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_trainer(args: argparse.Namespace, folder: Path, clock: Clock, looking: bool) -> ExplorationTrainer:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    task = get_task("countdown-mini")
    rows = task.rows("train", template="terse", limit=args.prompts * (args.steps + 2))
    if args.model == "tiny":
        policy = load_policy("tiny", device="cuda" if gpu else "cpu")
        model, tokenizer, rewards, correct = policy.model, policy.tokenizer, task.reward_functions(), task.correct_part
    else:
        tokenizer, rewards, correct = tiny_tokenizer(), [digits_of], "digits_of"
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, **ends)).to("cuda" if gpu else "cpu", torch.bfloat16)
    trainer = ExplorationTrainer(
        model=model,
        reward_funcs=rewards,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
        correct=correct,
        observers=observers.statistics() if looking else [],
        lens=Lens(every=args.every, rate=args.rate),
        args=GRPOConfig(
            str(folder),
            max_steps=args.steps + 2,  # the first step compiles and fills caches
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.prompts * args.generations // args.micro_batch,
            num_generations=args.generations,
            max_completion_length=args.tokens,
            learning_rate=1e-5,
            beta=0.0,
            logging_steps=1,
            remove_unused_columns=False,
            bf16=args.model != "tiny",
            gradient_checkpointing=False,
            use_cpu=not gpu,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        ),
    )
    time_inspection(trainer, clock)
    keep = RunStore(folder).write_rollouts
    trainer.listen(keep, 4, after=keep if looking else None)
    quiet(trainer)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "smollm2-shape"], default="tiny")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument(
        "--rate", type=float, default=Lens().rate, help="share of completions that are inspected closely"
    )
    parser.add_argument("--every", type=int, default=Lens().every, help="steps between inspections")
    parser.add_argument("--deterministic", action="store_true", help="use no kernel whose order of additions varies")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps < 3 * args.every:
        parser.error(f"--steps is {args.steps}; with --every {args.every} give {3 * args.every} or more")
    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
    turns, failures = Turns(2), list[BaseException]()
    clocks = [Clock(player, turns) for player in range(2)]
    with tempfile.TemporaryDirectory() as temporary, disabled_progress():
        trainers = [make_trainer(args, Path(temporary) / str(player), clocks[player], player == 1) for player in (0, 1)]
        turns.random = [random_state()] * 2

        def play(player: int) -> None:
            turns.take(player)
            try:
                trainers[player].train()
            except BaseException as error:
                failures.append(error)
            turns.give(player)

        threads = [threading.Thread(target=play, args=(player,)) for player in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    # alternate steps, so that each sum has its share of closer inspections; the first few warm up
    spans = range(args.every, args.steps + 1 - args.every, args.every)
    off, on, busy, looked_off, looked_on = (
        [sum(values[start : start + args.every]) / args.every for start in spans]
        for values in (clocks[0].seconds, clocks[1].seconds, clocks[0].busy, clocks[0].looking, clocks[1].looking)
    )
    low, ratio, high = statistics.quantiles([lensed / other for lensed, other in zip(on, off, strict=True)], n=4)
    weights = [trainer.model.state_dict() for trainer in trainers]
    same = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    size = f"{args.prompts} × {args.generations} answers of up to {args.tokens} tokens"
    print(f"{args.model} on {device}, {size}, {args.rate:.0%} of them inspected closely in 1 of {args.every} steps")
    print(f"a step without the lens {statistics.median(off):.3f} s, with it {statistics.median(on):.3f} s")
    print(f"ratio {ratio:.3f} (middle half of {len(on)}: {low:.3f} to {high:.3f}); goal at most 1.05")
    added = [lensed - other for lensed, other in zip(looked_on, looked_off, strict=True)]
    share = statistics.median(added) / statistics.median(busy)
    print(f"recording and reporting take {statistics.median(added):.3f} s more, {share:.1%} of a step without the lens")
    print(f"weights after {args.steps + 2} steps bitwise equal: {'yes' if same else 'no'}")
    if args.json:
        facts = {
            "model": args.model,
            "device": device,
            "rate": args.rate,
            "off": off,
            "on": on,
            "ratio": ratio,
            "share": share,
        }
        args.json.write_text(json.dumps({**facts, "quartiles": [low, high], "same weights": same}, indent=2))


if __name__ == "__main__":
    main()
