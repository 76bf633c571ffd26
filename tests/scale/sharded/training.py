"""One of two processes that train under DDP, DeepSpeed or FSDP2 and write down what happened.

torchrun --nproc-per-node 2 -m tests.scale.sharded.training POLICY FOLDER BACKEND CASE...
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import DistributedType, PartialState
from datasets import Dataset
from trl import GRPOConfig

from explorl.models import load_policy
from explorl.rollout import Rollouts, SamplingParams
from explorl.training.grpo.batch import padded_to
from explorl.training.grpo.trainer import ExplorationTrainer
from explorl.training.grpo.trl_adapter import whole_weights
from explorl.training.sharding import accessible_parameters

SHAPED = [{"ppl_shaping": {"alpha": 0.2}}, {"forking_tokens": {"fraction": 0.5}}, {"clip_cov": {"fraction": 0.1}}]


@dataclass(frozen=True)
class Case:
    strategies: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None


CASES = {
    # A batch is used twice, so that ratios are not 1 and Clip-Cov acts; per-row sampling needs the engine.
    "shaped": Case([*SHAPED, {"bottom_p": {"p": 0.9}}], {"num_iterations": 2, "max_steps": 6}),
    "reset": Case([{"egsw": {}}, {"reference_reset": {"every": 2}}], {"beta": 0.05, "max_steps": 5}),
    "half": Case([{"egsw": {}}], {"bf16": True, "max_steps": 2}),
    "checkpointed": Case([{"egsw": {}}], {"gradient_checkpointing": True, "max_steps": 2}),
    "generate": Case(SHAPED, {"max_steps": 2}, engine="generate"),
    "apart": Case(SHAPED, {"max_steps": 2, "ds3_gather_for_generation": False}),
    "kept": Case(
        [{"egsw": {}}, {"reference_reset": {"every": 1}}],
        {"beta": 0.05, "max_steps": 4, "save_strategy": "steps", "save_steps": 2},
    ),
    "resumed": Case(
        [{"egsw": {}}, {"reference_reset": {"every": 1}}],
        {"beta": 0.05, "max_steps": 4, "save_strategy": "steps", "save_steps": 2},
    ),
}


@dataclass
class Outcome:
    """What a process has to say about a run."""

    losses: list[float]
    entropies: list[float]
    completions: list[list[list[int]]]
    weights: list[float]
    """The sum of each parameter at the end, and of each one's squares."""
    reference: list[float]
    """The same of the reference."""
    drift: list[float]
    """Of each batch: the largest difference between log-probabilities that the engine recorded and the model's own."""
    sampled_by_engine: bool
    packed: bool
    said: list[str]
    """Warnings."""


def digits(completions: list[str], **columns: Any) -> list[float]:
    return [round(sum(c.isdigit() for c in text) / max(len(text), 1), 1) for text in completions]


def deepspeed_config(stage: int) -> dict[str, Any]:
    """Nothing is small enough to stay whole in ZeRO-3."""
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }


def sharding(backend: str) -> dict[str, Any]:
    """Arguments of `GRPOConfig`."""
    if backend == "ddp":
        return {"use_cpu": True}
    if backend == "fsdp2":
        wrap = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, **wrap}}
    return {"deepspeed": deepspeed_config(int(backend.removeprefix("zero")))}


def trainer_of(policy: Path, folder: Path, backend: str, case: Case, recorded: list[Any]) -> ExplorationTrainer:
    loaded = load_policy(str(policy), device="cpu")

    def score(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        recorded.append(completion_ids)
        return digits(completions)

    arguments: dict[str, Any] = {
        "output_dir": str(folder / f"{backend}-kept"),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "seed": 3,
        **sharding(backend),
        **case.config,
    }
    prompts = [f"{a} {b} {a + b}={2 * (a + b)}\n" for a in range(1, 5) for b in range(5, 9)]
    return ExplorationTrainer(
        model=loaded.model,
        reward_funcs=score,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=loaded.tokenizer,
        strategies=case.strategies,
        engine=case.engine,
    )


def seed_of(trainer: Any) -> int:
    """Of a batch that is to be the same whatever else has used chance before."""
    return 100 * trainer.state.global_step + trainer.accelerator.process_index


def with_fixed_seeds(trainer: Any) -> None:
    if trainer.sampler.engine is None:
        generated = trainer._generate

        def seeded(prompts: list[Any]) -> Any:
            torch.manual_seed(seed_of(trainer))
            return generated(prompts)

        trainer._generate = seeded
        return
    generate = trainer.sampler.engine.generate

    def drawn(prompt_ids: list[list[int]], n: int, params: SamplingParams) -> Rollouts:
        return generate(prompt_ids, n, replace(params, seed=seed_of(trainer)))

    trainer.sampler.engine.generate = drawn


def with_drift(trainer: Any, drift: list[float]) -> None:
    """Compares what the engine recorded with the model's own pass, before anything is learnt."""
    scored = trainer.scored

    def compared(inputs: Any) -> Any:
        output = scored(inputs)
        if trainer.sampled.records is not None:
            with torch.no_grad(), whole_weights(trainer):
                own = trainer.padded_log_probabilities(
                    trainer.model,
                    torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                    torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                    output["completion_ids"].size(1),
                    rows=len(output["completion_ids"]),
                )[0]
            off = (own - padded_to(trainer.sampled.records.logps, own.size(1))) * output["completion_mask"]
            drift.append(float(off.abs().max()))
        return output

    trainer.scored = compared


def materialized(tensor: Any) -> torch.Tensor:
    """FSDP2's are in parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sums(model: Any) -> list[float]:
    if model is None:
        return []
    with accessible_parameters(model):
        whole = [materialized(parameter.detach()).double() for parameter in model.parameters()]
        return [float(value) for tensor in whole for value in (tensor.sum(), tensor.square().sum())]


def train(policy: Path, folder: Path, backend: str, name: str) -> Outcome:
    case, recorded = CASES[name], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer: Any = trainer_of(policy, folder, backend, case, recorded)
        with_fixed_seeds(trainer)
        with_drift(trainer, drift := [])
        resumed = str(folder / f"{backend}-kept" / "checkpoint-2") if name == "resumed" else None
        trainer.train(resume_from_checkpoint=resumed)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    model, reference = trainer.reference.models()
    return Outcome(
        losses=[entry["loss"] for entry in logged],
        entropies=[entry["entropy"] for entry in logged],
        completions=recorded,
        weights=sums(model),
        reference=sums(reference),
        drift=drift,
        sampled_by_engine=trainer.sampler.engine is not None,
        packed=trainer.logprobs.packed is not False,
        said=[str(one.message) for one in caught if issubclass(one.category, UserWarning)],
    )


def use_deepspeed_on_cpus() -> None:
    """Over gloo: accelerate has DeepSpeed on GPUs only, and DeepSpeed would compile a transport of its own first."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend: Any = lambda self, *args, **options: ("gloo", DistributedType.NO)  # noqa: E731
    PartialState._prepare_backend = backend
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True


def use_fsdp_on_cpus() -> None:
    """Over gloo: accelerate has FSDP on GPUs only, so it is told that these are some."""
    backend: Any = lambda self, *args, **options: ("gloo", DistributedType.MULTI_GPU)  # noqa: E731
    PartialState._prepare_backend = backend

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device


def prepare(backend: str) -> None:
    """Lets this process train so on a CPU."""
    if backend == "fsdp2":
        use_fsdp_on_cpus()
    elif backend != "ddp":
        use_deepspeed_on_cpus()


def main(policy: Path, folder: Path, backend: str, names: list[str]) -> None:
    prepare(backend)
    gc.freeze()  # every trainer collects garbage, and looking at all modules for it takes longer than to train
    for name in names:
        outcome = train(policy, folder, backend, name)
        (folder / f"{backend}-{name}-{os.environ['RANK']}.json").write_text(json.dumps(asdict(outcome)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
