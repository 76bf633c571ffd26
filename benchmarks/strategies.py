"""Measure what each strategy adds to a training step, in one process. The result is a ratio, not seconds.

    python benchmarks/strategies.py                                        # the embedded policy on the CPU
    python benchmarks/strategies.py --shape smollm2-135m --device cuda --dtype bfloat16 --prompts 32 --max-tokens 256
    python benchmarks/strategies.py --only egsw kl_cov --json overhead.json

Whole steps without strategies are timed first. Then, on the batch of the last step and for each strategy alone, the
additional work of the trainer is timed: to gather the token statistics into a `Batch`, apply the strategy and put the
result back (record), and to compute the loss of all micro-batches, forward and backward (loss). If the strategy has
such hooks, also to sample differently (sample), to compute other log-probabilities (update) or to act after the step
(after). All except the first and the last are differences from the same work without the strategy: the two run in
turns, and the result is the median of the differences, since other load on the machine affects both. On a CPU the
compared pieces are short for the same reason: single steps of sampling from the same logits, and a few rows of a
micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig
from trl.trainer.utils import split_tensor_dict

from explorl.models import load_policy, tiny_tokenizer
from explorl.rollout.sampling import Active
from explorl.strategies import REGISTRY, StepState, Strategy, build
from explorl.strategies.base import overrides
from explorl.tasks import get_task
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.sampling_plan import pad_schedules
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.run_setup import disabled_progress, quiet

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
RESET_EVERY = 200
FEW_ROWS = 64
"""Number of rows that are compared at a time on a CPU."""


@dataclass
class Overhead:
    """The time that one strategy adds to a step, in seconds, by part; and the sum relative to a step without it."""

    strategy: str
    parts: dict[str, float]
    step: float = field(repr=False)

    @property
    def ratio(self) -> float:
        return sum(self.parts.values()) / self.step


class Probe(TrainerCallback):
    """Times whole steps, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self.ends.append(time.perf_counter())

    @property
    def steps(self) -> list[float]:
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


class ProbedTrainer(ExplorationTrainer):
    """Keeps its latest generation batch."""

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super().scored(inputs)
        self.latest = inputs, dict(output)
        return output


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def least(run: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest run."""
    run()
    return min(timed(run) for _ in range(repeats))


def added(run: Callable[[], Any], without: Callable[[], Any], repeats: int) -> float:
    """Return how much longer one takes than the other; they run in turns, in alternating order."""
    run(), without()
    times = []
    for _ in range(-(-repeats // 2)):
        times += [timed(run) - timed(without), -(timed(without) - timed(run))]
    return statistics.median(times)


def digits_of(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return rewards that differ between completions, for a policy with random weights."""
    return [(sum(ids) % 5) / 4 for ids in completion_ids]


def last_characters(completions: list[str], **columns: Any) -> list[str | None]:
    """Return the answers of such a policy: the last characters."""
    return [text[-2:] or None for text in completions]


def make_trainer(args: argparse.Namespace, folder: str, probe: Probe) -> ProbedTrainer:
    torch.manual_seed(0)
    task = get_task("countdown-mini")
    rows = task.rows("train", template="terse", limit=args.prompts * (args.steps + 2))
    if args.shape == "tiny":
        policy = load_policy("tiny", dtype=args.dtype, device=args.device)
        model, tokenizer, (rewards, answers) = policy.model, policy.tokenizer, task.scorers()
    else:
        tokenizer, rewards, answers = tiny_tokenizer(), [digits_of], last_characters
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, **ends)).to(args.device, getattr(torch, args.dtype))
    trainer = ProbedTrainer(
        model=model,
        reward_funcs=rewards,
        answers=answers,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[probe],
        args=GRPOConfig(
            folder,
            max_steps=args.steps + 1,  # the first step compiles and fills caches
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=args.prompts * args.generations // args.micro_batch,
            num_generations=args.generations,
            max_completion_length=args.max_tokens,
            learning_rate=1e-5,
            beta=0.0,
            remove_unused_columns=False,
            bf16=args.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=args.device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=0,
        ),
    )
    quiet(trainer)
    return trainer


def settings(name: str, prompts: list[str]) -> dict[str, Any]:
    """Return hyperparameters that make a strategy use all of its features."""
    rates = {prompt: (row % 4) / 4 for row, prompt in enumerate(dict.fromkeys(prompts))}
    special: dict[str, dict[str, Any]] = {
        "importance_correction": {},
        "element_wise_temperature": {"solve_rates": rates},
        "curriculum": {"solve_rates": rates},
        "position_shaping": {"start": 0},
        "passk_training": {"k": 4},
        "pkpo": {"k": 4},
        "reference_reset": {"every": RESET_EVERY},
    }
    return special.get(name, {})


class Bench:
    """A trained trainer, on whose last batch each strategy is measured."""

    def __init__(self, trainer: ProbedTrainer, step: float, repeats: int) -> None:
        self.trainer, self.step, self.repeats = trainer, step, repeats
        self.inputs, self.output = trainer.latest
        self.prompts = [row["prompt"] for row in self.inputs]
        self.prompt_ids = trainer.tokenizer(self.prompts)["input_ids"]
        self.rewards = trainer.total_rewards(trainer.sampled.reward_parts)
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps

    def overhead(self, name: str) -> Overhead:
        strategy = build({name: settings(name, self.prompts)})
        self.trainer.strategies = [strategy]
        sampled = self.trainer.sampled
        records = sampled.records
        assert records is not None
        try:
            if strategy.needs_min_p_mass is not None:
                sampled.records = replace(records, min_p_mass=torch.ones_like(records.logps))
            parts = {"record": least(lambda: self.shaped(strategy), self.repeats)}
            parts["loss"] = added(self.losses(self.shaped(strategy)), self.losses(self.output), self.repeats)
            if overrides(strategy, "sampling") or strategy.needs_min_p_mass is not None:
                parts["sample"] = self.sampling(strategy)
            if "entropy_coef" in strategy.arguments() or self.temperatures(strategy, 1) is not None:
                parts["update"] = self.updates(strategy)
            if overrides(strategy, "after_step"):
                parts["after"] = self.after_steps(strategy)
        finally:
            self.trainer.strategies, self.trainer.sampled, sampled.records = [], sampled, records
        return Overhead(name, parts, self.step)

    def shaped(self, strategy: Strategy) -> dict[str, Any]:
        """Return the generation batch after the strategy."""
        output = dict(self.output)
        self.trainer.strategies = [strategy]
        sampled = self.trainer.sampled
        stats = self.trainer.logprobs.statistics(output, sampled, required=True)
        assert stats is not None
        self.trainer.shape_batch(output, sampled, stats, self.rewards)
        return output

    def losses(self, output: dict[str, Any]) -> Callable[[], None]:
        """Compute the loss of all micro-batches from log-probabilities, forward and backward."""
        trainer, forward = self.trainer, "compute"
        batches = split_tensor_dict(output, trainer.args.steps_per_generation)
        logps = [torch.full(batch["completion_ids"].shape, -1.0, device=trainer.model.device) for batch in batches]

        def run() -> None:
            for batch, values in zip(batches, logps, strict=True):
                leaf = values.detach().requires_grad_()
                setattr(trainer.logprobs, forward, lambda *_, leaf=leaf, **__: (leaf, -leaf.detach(), None))
                trainer.loss(trainer.model, batch).backward()
            delattr(trainer.logprobs, forward)  # the class defines its own method

        return run

    def sampling(self, strategy: Strategy) -> float:
        trainer = self.trainer
        ends = trainer.generation_kwargs["eos_token_id"]
        measure = self.sampling_by_steps if trainer.model.device.type == "cpu" else self.sampling_by_rollouts
        seconds = measure(strategy)
        trainer.generation_kwargs["eos_token_id"] = ends
        return seconds

    def rollout(self, strategies: list[Strategy]) -> Callable[[], None]:
        def run() -> None:
            self.trainer.strategies = strategies
            self.trainer.sampler.sample(SampledRows(list(self.prompts)), self.prompt_ids)

        return run

    def sampling_by_rollouts(self, strategy: Strategy) -> float:
        """Time rollouts with and without it, of full length since it may change where they end; then rescale."""
        self.trainer.generation_kwargs["eos_token_id"] = []
        difference = added(self.rollout([strategy]), self.rollout([]), self.repeats)
        return difference * float(self.output["completion_mask"].float().mean())

    def sampling_by_steps(self, strategy: Strategy) -> float:
        """Time rollouts whose every step samples with and without it from the same logits; sum over the steps."""
        engine, run = self.trainer.sampler.engine, self.rollout([strategy])
        self.rollout([])()
        run()  # allocate the memory that it needs
        assert engine is not None
        assert engine._runner is not None
        sample, state = engine._runner.sample_step, engine._runner.state
        sums: list[float] = []

        def both(logits: Tensor, _: Any, active: Active, row_of: Tensor | None) -> None:
            before = state.ints.clone()

            def ways(active: Active) -> Callable[[], None]:
                def sample_again() -> None:
                    state.ints.copy_(before)
                    if active.by_position:
                        state.apply_curves()
                    sample(logits, state, active, row_of)

                return sample_again

            sums[-1] += added(ways(active), ways(Active()), self.repeats)
            ways(active)()

        engine._runner.sample_step = both
        for _ in range(3):
            sums.append(least(lambda: strategy.sampling(self.prompts, 0), self.repeats))
            run()
        engine._runner.sample_step = sample
        return statistics.median(sums)

    def temperatures(self, strategy: Strategy, rows: int) -> Tensor | None:
        """Return the temperatures that a strategy sets for some rows, or for each of their positions."""
        sampling: Any = strategy.sampling(self.prompts[:rows], 0)
        if "temperature_by_position" in sampling:
            return torch.tensor(
                pad_schedules(sampling["temperature_by_position"], self.output["completion_ids"].size(1))
            )
        return torch.tensor(sampling["temperature"]) if "temperature" in sampling else None

    def updates(self, strategy: Strategy) -> float:
        """Time forward and backward of a part of the batch with the entropy's gradient, or with a temperature for each
        row, and without; multiply by the number of parts. The part is a micro-batch, or, on a CPU, ``FEW_ROWS``."""
        trainer = self.trainer
        on_cpu = trainer.model.device.type == "cpu"
        size = min(trainer.args.per_device_train_batch_size, FEW_ROWS if on_cpu else len(self.prompts))
        batches = split_tensor_dict(self.output, len(self.prompts) // size)
        plain, changed = dict(batches[0]), dict(batches[0])
        temperatures = self.temperatures(strategy, size)
        if temperatures is not None:
            changed["row_temperature"] = temperatures.to(trainer.model.device)
        bonus = strategy.arguments().get("entropy_coef", 0.0)

        def update(batch: dict[str, Any], bonus: float) -> Callable[[], None]:
            def run() -> None:
                trainer._entropy_bonus_enabled, trainer.entropy_coef = bonus > 0, bonus
                trainer.loss(trainer.model, batch).backward()
                trainer.model.zero_grad()

            return run

        difference = added(update(changed, bonus), update(plain, 0.0), self.repeats * (8 if on_cpu else 1))
        trainer._entropy_bonus_enabled, trainer.entropy_coef = False, 0.0
        return difference * len(batches)

    def after_steps(self, strategy: Strategy) -> float:
        """Time one step out of many; a reset copies the weights, as it would to a reference."""
        model = self.trainer.model
        reference = {name: value.clone() for name, value in model.state_dict().items()}

        def copy_weights() -> None:
            for name, value in model.state_dict().items():
                reference[name].copy_(value)

        def steps() -> None:
            for step in range(1, RESET_EVERY + 1):
                strategy.after_step(StepState(step, 0.5, copy_weights, lambda: None))

        return least(steps, min(self.repeats, 3)) / RESET_EVERY


def show(overheads: list[Overhead], title: str) -> None:
    names = list(dict.fromkeys(part for overhead in overheads for part in overhead.parts))
    table = Table(title=title)
    table.add_column("strategy", no_wrap=True)
    for name in [*names, "of a step"]:
        table.add_column(name, justify="right", no_wrap=True)
    for overhead in sorted(overheads, key=lambda overhead: -overhead.ratio):
        cells = [f"{1e3 * overhead.parts[name]:.2f}" if name in overhead.parts else "" for name in names]
        table.add_row(overhead.strategy, *cells, f"{overhead.ratio:.2%}")
    console = Console()
    Console(width=console.width if console.is_terminal else 110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=["tiny", "smollm2-135m"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the weights")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="number of whole steps to time, after one of warm-up")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(REGISTRY), choices=list(REGISTRY))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    probe = Probe()
    with tempfile.TemporaryDirectory() as folder, disabled_progress():
        trainer = make_trainer(args, folder, probe)
        trainer.train()
        trainer.model.train()
        step = min(probe.steps)
        bench = Bench(trainer, step, args.repeats)
        overheads = [bench.overhead(name) for name in args.only]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "CPU"
    size = f"{args.prompts * args.generations} answers of up to {args.max_tokens} tokens"
    where = f"{args.shape}, {args.dtype}, {name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    spread = f"{step:.2f} s, the longest of {len(probe.steps)} {max(probe.steps):.2f} s"
    show(overheads, f"{where}\na step of {size}: {spread}\nparts in ms")
    if args.json:
        report = {
            "settings": {key: value for key, value in vars(args).items() if key != "json"},
            "device": name,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps": probe.steps,
            "strategies": [{**asdict(overhead), "ratio": overhead.ratio} for overhead in overheads],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
