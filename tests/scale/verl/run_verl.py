"""Trains the embedded tiny policy inside verl, on a CPU: ``python run_verl.py OUT [hydra overrides]``.

Everything is verl's own (main_ppo's runner, Ray, TransferQueue, agent loops, rewards, FSDP2) but for the platform and
the server of `cpu_backend`. What the strategies saw and said is kept in OUT/seen-STEP.pt, what was asked of the server
in OUT/requests.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "300",  # Ray allows its own start 30 s, too few on a busy machine
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_backend",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "WANDB_MODE": "disabled",
    "RAY_worker_niceness": "0",
}
OVERRIDES = """
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.resume_mode=disable
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_epochs=1
trainer.project_name=scale trainer.v1.trainer_mode=explorl
data.train_batch_size=4 data.max_prompt_length=96 data.max_response_length=26 data.dataloader_num_workers=0
data.seed=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=eager
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.optim.lr=1e-4
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 actor_rollout_ref.actor.fsdp_config.dtype=float32
actor_rollout_ref.actor.fsdp_config.use_torch_compile=False actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.ref.fsdp_config.model_dtype=fp32
actor_rollout_ref.ref.fsdp_config.dtype=float32 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.use_torch_compile=False
++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
++actor_rollout_ref.ref.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}
actor_rollout_ref.rollout.name=cpu actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.calculate_log_probs=True actor_rollout_ref.rollout.n_gpus_per_node=1
algorithm.adv_estimator=explorl_grpo reward.num_workers=1
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
transfer_queue.backend.SimpleStorage.total_storage_size=1000
ray_kwargs.ray_init.num_cpus=16
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def prepare(out: Path, prompts: int) -> list[str]:
    """Writes the data and a model with a chat template; the overrides that name them."""
    import pandas
    from transformers import AutoTokenizer

    from explorl.models.tiny import tiny_checkpoint
    from explorl.tasks import get_task

    task = get_task("countdown-mini")
    rows = [
        {
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": task.prompt(problem)}],
            "reward_model": {"style": "rule", "ground_truth": json.dumps(dict(problem.data))},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(task.problems("train", limit=prompts))
    ]
    pandas.DataFrame(rows).to_parquet(out / "train.parquet")
    model = out / "model"
    if not model.exists():
        model.mkdir()
        for path in tiny_checkpoint().iterdir():
            (model / path.name).write_bytes(path.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
    return [
        f"data.train_files={out / 'train.parquet'}",
        f"data.val_files={out / 'train.parquet'}",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={HERE / 'countdown_reward.py'}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        "trainer.experiment_name=scale",
    ]


def compose(overrides: list[str]) -> Any:
    """verl's own configuration with these overrides."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=OVERRIDES.split() + overrides)


def watched_runner(out: Path) -> Any:
    """main_ppo's runner, which keeps what the strategies saw and said."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
        def run(self, config: Any) -> None:
            import torch
            from cpu_server import NAME

            from explorl.integrations.verl.trainer import ExplorlTrainer

            original = ExplorlTrainer.apply_strategies

            def shaped(trainer: Any, batch: Any, rows: Any) -> Any:
                shaped_batch = original(trainer, batch, rows)
                columns = {**rows.columns, "lengths": rows.lengths}
                record = {"batch": vars(batch), "shaped": vars(shaped_batch), "columns": columns}
                torch.save(record, out / f"seen-{trainer.global_steps}.pt")
                return shaped_batch

            ExplorlTrainer.apply_strategies = shaped
            super().run(config)
            for name, value in ray.get(ray.get_actor(NAME).told.remote()).items():
                (out / f"{name}.json").write_text(json.dumps(value))

    return ray.remote(Runner)


def main(out: Path, overrides: list[str], prompts: int = 64, runner: Callable[[Path], Any] = watched_runner) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = compose(prepare(out, prompts) + overrides)
    from verl.trainer import main_ppo

    main_ppo.validate_config(config=config, use_reference_policy=True, use_critic=False)
    import ray

    ray.init(
        num_cpus=16, num_gpus=1, include_dashboard=False, object_store_memory=200 * 2**20,
        runtime_env={"env_vars": {**ENVIRONMENT, "TRANSFER_QUEUE_ENABLE": "1"}},
    )  # fmt: skip
    main_ppo.run_ppo(config, task_runner_class=runner(out))
    ray.shutdown()


if __name__ == "__main__":
    if os.environ.get("VERL_PLATFORM") != "cpu":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
