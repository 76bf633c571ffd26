"""SmolLM2-135M learns Countdown on one GPU: fine-tuning on searches, GRPO, evaluation.

    python scripts/countdown_gpu.py OUT --data DATA --model SmolLM2-135M-Instruct.Q4_1.gguf
    python scripts/countdown_gpu.py OUT --data DATA --stages rl eval --arm NSR --seed 1 --rl-seconds 150

OUT stores the models for later commands: OUT/base (the model of a GGUF file), OUT/sft/model, OUT/<arm>-<seed>/model.
DATA is a folder with countdown-3to4-train.jsonl and countdown-3to4-test.jsonl. Arms are those of
studies/countdown-gpu.yaml. Each stage ends when its time budget is spent. Every result is printed as a line of JSON
and appended to OUT/results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tools.countdown_corpus import corpus

from explorl.core.config import ConfigError, load_config
from explorl.core.merge import deep_merge
from explorl.core.store import RunStore, StoreError, atomic_folder, file_name, write_json
from explorl.models import ModelError, resolve_model
from explorl.study.spec import load_study
from explorl.tasks.base import Problem
from explorl.tasks.countdown.generator import Key
from explorl.tasks.countdown.task import Countdown

if TYPE_CHECKING:
    from explorl.evaluation import Evaluation

# torch, transformers and TRL are imported inside functions, because the processes that write searches do not need them

STUDY = Path(__file__).parents[1] / "studies" / "countdown-gpu.yaml"
STAGES = ("sft", "rl", "eval")
SETS = ("test", "synthetic", "validation")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if "sft" in options.stages:
        tell(options, fine_tuned(options))
    if "rl" in options.stages:
        tell(options, reinforced(options))
    if "eval" in options.stages:
        for result in evaluated(options):
            tell(options, result)


def tell(options: argparse.Namespace, result: dict[str, Any]) -> None:
    line = json.dumps({**result, "seed": options.seed, "style": options.style})
    print(line, flush=True)
    with (options.out / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")


# -------------------------------------------------------------------- fine-tuning


def fine_tuned(options: argparse.Namespace) -> dict[str, Any]:
    """Run stage sft: fine-tune the initial model on searches for generated problems, into OUT/sft/model."""
    begun = time.monotonic()
    if (options.out / "sft" / "model").exists():
        raise ConfigError(
            f"{options.out / 'sft' / 'model'} is there already; leave out the stage sft, or give a new OUT"
        )
    start = starting_model(options)
    resolve_model(start)  # fail early: the next step takes minutes
    rows = corpus(
        options.examples,
        style=options.style,
        template=options.template,
        seed=options.seed,
        exclude=held_out(options.data),
        processes=options.processes,
    )
    say(f"{len(rows):,} searches in {time.monotonic() - begun:.0f} s")

    from datasets import Dataset
    from timed_sft import Clock, Ending, TimedSFTTrainer
    from trl import SFTConfig

    from explorl.models import load_policy
    from explorl.training.run_setup import disabled_progress, quiet

    policy = load_policy(start)
    clock = Clock(options.sft_seconds)
    with disabled_progress():
        trainer = TimedSFTTrainer(
            model=policy.model,
            args=SFTConfig(
                output_dir=str(options.out / "sft"),
                max_steps=options.sft_steps,
                per_device_train_batch_size=options.sft_rows,
                learning_rate=options.sft_rate,
                adam_beta2=0.98,
                weight_decay=0.01,
                max_length=1280,
                completion_only_loss=True,
                gradient_checkpointing=False,
                logging_steps=max(1, min(25, options.sft_steps // 4)),
                logging_nan_inf_filter=False,
                save_strategy="no",
                seed=options.seed,
                bf16=has_gpu(),
                use_cpu=not has_gpu(),
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            callbacks=[Ending(clock, say)],
        )
        trainer.clock = clock
        quiet(trainer)
        say(f"ready to fine-tune after {time.monotonic() - begun:.0f} s")
        trainer.train()
    with atomic_folder(options.out / "sft" / "model") as folder:
        trainer.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    selected = [
        {key: log[key] for key in ("step", "loss", "mean_token_accuracy", "num_tokens") if key in log} for log in logs
    ]
    write_json(options.out / "sft" / "log.json", selected)
    last = logs[-1]
    return {
        "stage": "sft",
        "steps": trainer.state.global_step,
        "rows": len(rows),
        "epochs": trainer.state.epoch,
        "tokens": last.get("num_tokens"),
        "loss": last["loss"],
        "accuracy": last.get("mean_token_accuracy"),
        "rate": options.sft_rate,
        "seconds": round(clock.elapsed, 1),
        "seconds_in_all": round(time.monotonic() - begun, 1),
    }


def starting_model(options: argparse.Namespace) -> str:
    """Return the model as a name for `load_policy`; convert a GGUF file to a folder, once."""
    if not options.model.endswith(".gguf"):
        return str(options.model)
    from explorl.models.smollm2 import convert_gguf

    folder = options.out / "base"
    if not (folder / "config.json").is_file():
        gguf = Path(options.model).resolve()
        if not gguf.is_file():
            raise ConfigError(f"--model {options.model}: there is no such file")
        with atomic_folder(folder) as staging:
            convert_gguf(gguf, staging)
    return str(folder)


def held_out(data: Path) -> set[Key]:
    """Return the keys of all real problems and of the synthetic test problems."""
    real, generated = Countdown(data_dir=data), Countdown(source="generated")
    puzzles = [*real.problems("train"), *real.problems("holdout"), *generated.problems("holdout")]
    return {(tuple(sorted(puzzle.data["nums"])), puzzle.data["target"]) for puzzle in puzzles}


# -------------------------------------------------------------------- GRPO


def reinforced(options: argparse.Namespace) -> dict[str, Any]:
    """Run stage rl: train an arm of the study from OUT/sft/model, into OUT/<arm>-<seed>/model."""
    from rich.console import Console
    from timed_sft import Clock

    from explorl.training.grpo.run import run_grpo

    start = options.out / "sft" / "model"
    if not start.is_dir():
        raise ConfigError(f"{start} is missing; run the stage sft first")
    changes = {
        "seed": options.seed,
        "model": {"name": str(start), "dtype": "bfloat16" if has_gpu() else "float32"},
        "task": {"data_dir": str(options.data), "template": options.template},
        "rollout": {"max_tokens": options.max_tokens},
        "training": {"steps": options.rl_steps},
        "evaluation": {"every": 0, "ends": 0},
    }
    folder = run_folder(options)
    if (folder / "model").exists():
        raise ConfigError(f"{folder / 'model'} is there already; give another --run or --seed")
    file = options.out / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(deep_merge(load_study(STUDY).arm(options.arm).config, changes)), encoding="utf-8")
    config = load_config(file, overrides=options.set)
    clock = Clock(options.rl_seconds)
    store = RunStore(folder)
    begun = time.monotonic()
    run_grpo(config, store, console=Console(stderr=True), label=options.arm, on_step=clock.over)
    steps = [record for record in store.metrics() if record["kind"] == "train"]
    tail = steps[-10:]
    return {
        "stage": "rl",
        "arm": options.arm,
        "set": options.set,
        "steps": len(steps),
        **{
            f"last_{name}": sum(float(record[name]) for record in tail) / len(tail)
            for name in ("reward", "entropy", "completions/mean_length", "completions/clipped_ratio")
            if tail and all(name in record for record in tail)
        },
        "seconds": round(clock.elapsed, 1),
        "seconds_in_all": round(time.monotonic() - begun, 1),
    }


def run_folder(options: argparse.Namespace) -> Path:
    return options.out / f"{file_name(options.run or options.arm)}-{options.seed}"


# -------------------------------------------------------------------- evaluation


def evaluated(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run stage eval: all models under the paper's protocol on each set, then pass@k at temperature 1 on the first."""
    from timed_sft import Clock

    from explorl.evaluation import evaluate, protocol
    from explorl.models import load_policy

    clock = Clock(options.eval_seconds)
    clock.start()
    paper = {"repetition_penalty": options.repetition_penalty}
    plans: list[tuple[str, str, dict[str, Any], int | None]] = [
        (chosen, "mecklenburg", paper, options.problems) for chosen in options.sets
    ]
    passk = [(options.sets[0], "plain", {"samples": options.passk}, options.passk_problems)] if options.passk else []
    for some in (plans, passk):  # the paper's protocol for all models first, because the time may run out
        for name, path in asked_models(options).items():
            policy = load_policy(path, dtype="bfloat16" if has_gpu() else "float32")
            for chosen, protocol_name, changes, limit in some:
                if clock.over():
                    say(f"{name} on {chosen} by {protocol_name} is left out: the {options.eval_seconds:g} s are spent")
                    continue
                begun = time.monotonic()
                result = evaluate(
                    policy,
                    Countdown(),
                    asked_problems(options, chosen)[:limit],
                    protocol(protocol_name, max_tokens=options.max_tokens, **changes),
                    name=protocol_name,
                    template=options.template,
                    seed=options.seed,
                )
                result.save(options.out / "evaluations", file_name(f"{name}-{chosen}-{protocol_name}"))
                yield measured(name, chosen, result, time.monotonic() - begun)
            del policy


def measured(model: str, problems: str, result: Evaluation, seconds: float) -> dict[str, Any]:
    summary = result.summary()
    return {
        "stage": "eval",
        "model": model,
        "problems_of": problems,
        "protocol": result.protocol,
        **{key: summary[key] for key in ("problems", "samples", "well_formed", "truncated", "mean_tokens", "entropy")},
        "pass": {f"pass@{k}": round(result.pass_at(k).mean, 4) for k in result.ks},
        "interval": [round(value, 4) for value in list(asdict(result.pass_at(1)).values())[:3]],
        "repetition_penalty": result.sampling.repetition_penalty,
        "seconds": round(seconds, 1),
    }


def asked_models(options: argparse.Namespace) -> dict[str, str]:
    """Return labels and folders of the models to evaluate: those of --models, or those that this command trained."""
    folders = {
        "base": options.out / "base",
        "sft": options.out / "sft" / "model",
        run_folder(options).name: run_folder(options) / "model",
    }
    made = [name for name, stage in zip(folders, ("sft", "sft", "rl"), strict=True) if stage in options.stages]
    if not folders["base"].is_dir():  # fine-tuning started from a folder or a name
        made = [name for name in made if name != "base"]
    chosen = options.models or made or ["sft"]
    paths = {name: folders.get(name, options.out / name / "model") for name in chosen}
    for name, path in paths.items():
        if not path.is_dir():
            raise ConfigError(f"--models {name}: there is no folder {path}")
    return {name: str(path) for name, path in paths.items()}


def asked_problems(options: argparse.Namespace, chosen: str) -> list[Problem]:
    if chosen == "synthetic":
        return Countdown(source="generated").problems("holdout")
    return Countdown(data_dir=options.data, validation=chosen == "validation").problems("holdout")


# -------------------------------------------------------------------- options


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path)
    add("--data", type=Path, required=True, help="folder with the two files of problems")
    add("--model", default="smollm2-135m", help="initial model: a GGUF file, a folder or a name")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--seed", type=int, default=0)
    add("--template", default="paper-opened")
    add("--max-tokens", type=int, default=1024)
    add("--style", default="systematic", help="order of a search: systematic, shuffled or guided")
    add("--examples", type=int, default=120_000)
    add("--processes", type=int, default=None, help="number of processes that write searches; default: one per core")
    add("--sft-seconds", type=float, default=215)
    add("--sft-steps", type=int, default=1_000_000)
    add("--sft-rows", type=int, default=128, help="examples per optimizer step")
    add("--sft-rate", type=float, default=1e-3)
    add("--arm", default="GRPO", help="an arm of studies/countdown-gpu.yaml")
    add("--run", help="name of the folder; default: arm and seed")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the configuration of GRPO")
    add("--rl-seconds", type=float, default=300)
    add("--rl-steps", type=int, default=100_000)
    add("--models", nargs="+", help="models to evaluate: base, sft, GRPO-0, …")
    add("--sets", nargs="+", choices=SETS, default=["test", "synthetic"])
    add("--problems", type=int, help="maximum number of problems per set")
    add("--passk", type=int, default=64, help="samples at temperature 1; 0 skips pass@k")
    add("--passk-problems", type=int, default=256)
    add("--repetition-penalty", type=float, default=None, help="replaces the protocol's 1.1")
    add("--eval-seconds", type=float, default=600)
    options = parser.parse_args(arguments)
    if options.sft_seconds <= 0 or options.sft_steps < 1 or options.examples < 1:
        parser.error("--sft-seconds, --sft-steps and --examples must be above 0, like 180, 1000 and 100000")
    return options


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ModelError, StoreError, FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
