"""verl's synchronous trainer with exploration strategies.

    sample ─► old log-probabilities, entropy ─► reference ─► advantages ─► strategies ─► update

verl's driver runs these steps in sequence on a batch in TransferQueue; each is a method of its trainer. The strategies
are called before the first one (`sampling`), after the advantages (everything else) and in the workers' loss, which
receives their columns with the rows.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_from_nested, response_to_nested

from explorl.integrations.verl import memory, sampling_params
from explorl.integrations.verl.agent_loop import row_sampling_loop
from explorl.integrations.verl.check import acts_in_loss, check_config
from explorl.integrations.verl.conversion import (
    batch_of_columns,
    correctness_rule,
    extract_answers,
    group_indices,
    loss_columns,
    reward_names,
    reward_parts,
    scatter_rows,
)
from explorl.integrations.verl.policy_loss import STEP, ExplorlLoss
from explorl.integrations.verl.run_folder import VerlRecorder, completion_columns
from explorl.integrations.verl.settings import SECTION, VerlSettings
from explorl.integrations.verl.step_rows import READ, StepRows, as_list
from explorl.strategies import Batch
from explorl.strategies.base import overrides
from explorl.training.grpo.batch import truncated_rows
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.shaping import Shaped, shape


@register_trainer(SECTION)
class ExplorlTrainer(PPOTrainerSync):
    """`PPOTrainerSync` with the strategies of the section `explorl`."""

    actor_rollout_wg: Any
    ref_policy_wg: Any
    recorder: VerlRecorder | None = None

    def __init__(self, config: Any) -> None:
        container: Any = OmegaConf.to_container(config, resolve=True)
        settings = check_config(container) or VerlSettings()
        self._prepare(settings)
        self.recorder = None if settings.run is None else VerlRecorder(settings, container)
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl checks for this name in the synchronous trainer
            if self._in_loss:
                config.actor_rollout_ref.actor.policy_loss.loss_mode = SECTION
            for strategy in self.strategies:
                if "entropy_coef" in strategy.arguments():
                    config.actor_rollout_ref.actor.entropy_coeff = strategy.arguments()["entropy_coef"]
        super().__init__(config)

    def _prepare(self, settings: VerlSettings) -> None:
        self.settings, self.strategies = settings, list(settings.strategies)
        self._in_loss = acts_in_loss(self.strategies)
        self._selecting = any(overrides(strategy, "select") for strategy in self.strategies)
        self._sampling = any(overrides(strategy, "sampling") for strategy in self.strategies)
        self._penalties = any(overrides(strategy, "penalty") for strategy in self.strategies)
        self._submitted_prompts: list[str] = []
        """verl's identifiers of the step's prompts, in the order of submission."""
        self._rows: dict[str, list[dict[str, Any]]] = {}
        """Sampling parameters of each completion, by prompt."""
        self._masks: tuple[Any, Any] | None = None
        """Masks of the tokens in the loss and of the counted tokens, as columns of verl's batch."""
        self._end_tokens: list[int] | None = None
        self._warned: set[str] = set()

    # ---------------------------------------------------------------- setup and checkpoints

    def _setup(self) -> None:
        super()._setup()
        if self._in_loss or self._selecting:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(ExplorlLoss(actor, self.strategies))
        self._whole_group = self.actor_rollout_wg
        if self._sampling:
            groups = {id(group): _RowTemperature(group) for group in self._groups()}
            self.actor_rollout_wg = groups[id(self.actor_rollout_wg)]
            if self.use_reference_policy:
                self.ref_policy_wg = groups[id(self.ref_policy_wg)]
        if self.recorder is not None:
            self.recorder.begin(self.global_steps)

    def _groups(self) -> list[Any]:
        return [self.actor_rollout_wg, *([self.ref_policy_wg] if self.use_reference_policy else [])]

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        memory.save(folder, self.strategies)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        path = self.config.trainer.resume_from_path if self.config.trainer.resume_mode == "resume_path" else None
        folder = Path(path or Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}")
        memory.restore(folder, self.strategies)

    # ---------------------------------------------------------------- sampling

    def prepare_step(self) -> dict[str, Any]:
        self._submitted_prompts, self._rows = [], {}
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        uids = [str(uid) for uid in as_list(batch["uid"])]
        self._submitted_prompts += uids
        if self._sampling:
            default_counts = [int(self.config.actor_rollout_ref.rollout.n)] * len(uids)
            counts = as_list(batch["__rollout_n__"]) if "__rollout_n__" in batch else default_counts
            texts = [prompt_text(prompt) for prompt in as_list(batch["raw_prompt"])]
            prompts = [text for text, count in zip(texts, counts, strict=True) for _ in range(int(count))]
            parameters = sampling_params.collect_parameters(self.strategies, prompts, self.strategy_step)
            rows = iter(sampling_params.split_rows(parameters, len(prompts)))
            by_prompt = [[next(rows) for _ in range(int(count))] for count in counts]
            self._rows |= dict(zip(uids, by_prompt, strict=True))
            tu.assign_non_tensor_stack(batch, sampling_params.FIELD, [json.dumps(params) for params in by_prompt])
            names = as_list(batch["agent_name"]) if "agent_name" in batch else None
            default = str(self.config.actor_rollout_ref.rollout.agent.default_agent_loop)
            loops = [row_sampling_loop(str(name)) for name in names or [default] * len(uids)]
            tu.assign_non_tensor_stack(batch, "agent_name", loops)
        return super()._submit_batch_to_rollout(batch)

    @property
    def strategy_step(self) -> int:
        """Number of verl's steps before this batch, each of which may have several updates."""
        return int(self.global_steps) - 1

    def _temperatures(self, keys: Sequence[str], of: Any) -> Tensor:
        """Return one temperature per row; the run's if no strategy sets it."""
        default = float(self.config.actor_rollout_ref.rollout.temperature)
        temperatures = []
        for key in keys:
            prompt, completion, _ = key.rsplit("_", 2)
            rows = self._rows.get(prompt)
            temperatures.append(default if rows is None else of(rows[int(completion)], default))
        return torch.tensor(temperatures, dtype=torch.float32)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute log π_old at each row's temperature, and the entropy at temperature 1."""
        temperatures = self._temperatures(batch.keys, sampling_params.training_temperature)
        if self._sampling:
            batch = _put(batch, {"temperature": temperatures})
        batch = super()._compute_old_log_prob(batch, metrics)
        return self._with_entropy(batch) if self.strategies and bool((temperatures != 1).any()) else batch

    def _with_entropy(self, batch: Any) -> Any:
        batch.extra_info.update({"calculate_entropy": True, "compute_loss": False, "temperature": 1.0})
        self._whole_group.compute_log_prob(batch)
        data = self._read(batch, "entropy", "response_mask")
        return _put(batch, {"entropy": response_from_nested(data["entropy"], data["response_mask"])})

    # ---------------------------------------------------------------- shaping

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute verl's advantages, then apply the strategies to the batch."""
        batch = super()._compute_advantage(batch, metrics)
        self._masks = None
        if not self.strategies and self.recorder is None:
            return batch
        data = self._read(batch, *READ)
        rows = StepRows.from_batch(data, batch.keys, batch.tags, self._submitted_prompts, single=bool(self.strategies))
        step_batch = self.build_strategy_batch(rows)
        metrics["explorl/correct"] = float(step_batch.correct.float().mean())
        advantages = step_batch.advantages
        if self.strategies:
            shaped = self.apply_strategies(step_batch, rows)
            metrics.update(shaped.metrics)
            batch = self._write_results(batch, data, shaped, step_batch, rows.order)
            advantages = shaped.advantages
        if self.recorder is not None:
            texts = self.tokenizer.batch_decode(rows.columns["responses"], skip_special_tokens=True)
            self.recorder.record_rollouts(int(self.global_steps), completion_columns(step_batch, advantages, texts))
        return batch

    def build_strategy_batch(self, rows: StepRows) -> Batch:
        """Return the batch for the strategies."""
        correct, names = correctness_rule(self.settings, rows.extras), reward_names(rows.extras)
        if correct.guessed and any(strategy.needs_correct for strategy in self.strategies):
            self._warn_once(
                f"assuming that an answer is correct if {correct.name!r} is at least 1; set the number that decides, "
                f"such as explorl.correct=[{correct.name},1.0]"
            )
        needs_answers = any(strategy.needs_answers for strategy in self.strategies)
        placeholder = {} if self.strategies else {"entropy": torch.zeros_like(rows.columns["rm_scores"])}
        return batch_of_columns(
            {**placeholder, **rows.columns},
            group=group_indices(rows.uids),
            rewards=rows.rewards,
            parts=reward_parts(names, rows.rewards, rows.extras),
            correct=correct,
            truncated=truncated_rows(rows.columns["responses"], rows.lengths, self._ends()),
            temperature=self._temperatures(rows.keys, lambda row, default: row.get("temperature", default)),
            step=self.strategy_step,
            prompts=[prompt_text(prompt) for prompt in rows.prompts],
            answers=extract_answers(str(self.settings.answers), rows.extras) if needs_answers else (),
            max_length=int(self.config.actor_rollout_ref.rollout.response_length),
        )

    def apply_strategies(self, batch: Batch, rows: StepRows) -> Shaped:
        """Return the results of the strategies for the whole batch."""
        return shape(self.strategies, batch, lambda rewards: self._normalised(rows, rewards))

    def _ends(self) -> list[int]:
        """Return the tokens that end a completion."""
        if self._end_tokens is None:
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
            sources = [getattr(model, "generation_config", None), getattr(model, "hf_config", None), self.tokenizer]
            ids = [getattr(source, "eos_token_id", None) for source in sources] + [self.tokenizer.pad_token_id]
            flat = [token for entry in ids for token in (entry if isinstance(entry, list | tuple) else [entry])]
            self._end_tokens = sorted({int(token) for token in flat if token is not None})
        return self._end_tokens

    def _normalised(self, rows: StepRows, rewards: Tensor) -> Tensor:
        """Return advantages of new total rewards, one per row, computed by verl's own estimator."""
        mask, algorithm = rows.columns["response_mask"], self.config.algorithm
        uids = np.empty(len(rewards), dtype=object)
        uids[:] = rows.uids
        data = DataProto.from_dict(
            tensors={"response_mask": mask, "token_level_rewards": rows.token_rewards_with(rewards)},
            non_tensors={"uid": uids},
        )
        advantages = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=rows.keys,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        ).batch["advantages"]
        return advantages.gather(1, mask.long().argmax(1, keepdim=True)).squeeze(1)

    def _write_results(self, batch: Any, data: Any, shaped: Shaped, step_batch: Batch, order: Sequence[int]) -> Any:
        """Write the strategies' results into verl's batch; empty rows get zeros."""
        rows, counted = len(batch), data["response_mask"]

        def column(values: Tensor, fill: float = 0.0) -> Tensor:
            scattered = scatter_rows(values, order, rows, fill=fill)
            return scattered if scattered.dim() == 1 else response_to_nested(scattered, counted)

        fields = {"advantages": column(shaped.advantages)}
        if self._in_loss:
            columns = loss_columns(shaped, step_batch, penalties=self._penalties)
            fields |= {name: column(values, fill=float("weights" in name)) for name, values in columns.items()}
        if self._selecting:
            self._masks = column(shaped.loss_mask.to(counted.dtype)), counted
        return _put(batch, fields)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Update the actor; tokens that a strategy removed are excluded from its loss only."""
        batch.extra_info[STEP] = self.strategy_step
        if self._masks is None:
            return super()._update_actor(batch, metrics)
        selected, counted = self._masks
        self._put_masks(batch, selected)
        try:
            return super()._update_actor(batch, metrics)
        finally:
            self._put_masks(batch, counted)

    def _put_masks(self, batch: Any, mask: Any) -> None:
        _put(batch, {"response_mask": mask, "loss_mask": mask})

    # ---------------------------------------------------------------- metrics

    def _compute_metrics(self, batch: Any, metrics: Any, timing_raw: Any, global_steps: int, epoch: int) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.recorder is not None:
            self.recorder.log(int(global_steps), metrics)

    def _read(self, batch: Any, *names: str) -> Any:
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            warnings.warn(message, stacklevel=3)
        self._warned.add(message)


def _put(batch: Any, fields: dict[str, Any]) -> Any:
    """Store columns of a batch for the workers and return the batch."""
    columns = TensorDict(fields, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=columns)


class _RowTemperature:
    """A worker group whose passes use each row's temperature column instead of the batch's temperature."""

    PASSES = ("compute_log_prob", "compute_ref_log_prob", "update_actor")

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in self.PASSES:
            return method

        def call(batch: Any) -> Any:
            batch.extra_info.pop("temperature", None)
            return method(batch)

        return call
