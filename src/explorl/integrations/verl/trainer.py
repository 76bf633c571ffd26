"""verl's synchronous trainer with exploration strategies.

    sample ─► old log-probabilities, entropy ─► reference ─► advantages ─► strategies ─► update

verl's driver runs these steps one after the other, on a batch that lies in TransferQueue; each is a method of its
trainer. Here the strategies speak before the first (`sampling`), after the advantages (everything else), and in the
workers' loss, which gets their columns with the rows.
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
from explorl.integrations.verl.agent_loop import loop_for
from explorl.integrations.verl.check import checked, in_loss
from explorl.integrations.verl.conversion import (
    answers_of,
    batch_of,
    carried,
    correct_of,
    groups_of,
    numbers_of,
    parts_of,
    spread,
    truncated_rows,
)
from explorl.integrations.verl.policy_loss import STEP, ExplorlLoss
from explorl.integrations.verl.run_folder import Recorder, answer_columns
from explorl.integrations.verl.settings import SECTION, Settings
from explorl.integrations.verl.step_rows import READ, Rows, listed
from explorl.strategies import Batch
from explorl.strategies.base import overrides
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.shaping import Shaped, shape


@register_trainer(SECTION)
class ExplorlTrainer(PPOTrainerSync):
    """`PPOTrainerSync` with the strategies of the section `explorl`."""

    actor_rollout_wg: Any
    ref_policy_wg: Any
    recorder: Recorder | None = None

    def __init__(self, config: Any) -> None:
        plain: Any = OmegaConf.to_container(config, resolve=True)
        settings = checked(plain) or Settings()
        self._prepare(settings)
        self.recorder = None if settings.run is None else Recorder(settings, plain)
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl asks for this name where it means this trainer
            if self._in_loss:
                config.actor_rollout_ref.actor.policy_loss.loss_mode = SECTION
            for strategy in self.strategies:
                if "entropy_coef" in strategy.arguments():
                    config.actor_rollout_ref.actor.entropy_coeff = strategy.arguments()["entropy_coef"]
        super().__init__(config)

    def _prepare(self, settings: Settings) -> None:
        self.settings, self.strategies = settings, list(settings.strategies)
        self._in_loss = in_loss(self.strategies)
        self._selecting = any(overrides(one, "select") for one in self.strategies)
        self._sampling = any(overrides(one, "sampling") for one in self.strategies)
        self._penalties = any(overrides(one, "penalty") for one in self.strategies)
        self._asked: list[str] = []
        """Prompts of the step, by verl's identifiers, in the order in which they were asked."""
        self._rows: dict[str, list[dict[str, Any]]] = {}
        """What the strategies said of the sampling of each answer, by prompt."""
        self._masks: tuple[Any, Any] | None = None
        """The tokens in the loss and those that count, as columns of verl's batch."""
        self._end_tokens: list[int] | None = None
        self._warned: set[str] = set()

    # ---------------------------------------------------------------- beginning, checkpoints

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
        memory.keep(folder, self.strategies)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        given = self.config.trainer.resume_from_path if self.config.trainer.resume_mode == "resume_path" else None
        folder = Path(given or Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}")
        memory.restore(folder, self.strategies)

    # ---------------------------------------------------------------- sampling

    def prepare_step(self) -> dict[str, Any]:
        self._asked, self._rows = [], {}
        return super().prepare_step()

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        uids = [str(uid) for uid in listed(batch["uid"])]
        self._asked += uids
        if self._sampling:
            usual = [int(self.config.actor_rollout_ref.rollout.n)] * len(uids)
            counts = listed(batch["__rollout_n__"]) if "__rollout_n__" in batch else usual
            texts = [prompt_text(prompt) for prompt in listed(batch["raw_prompt"])]
            prompts = [text for text, count in zip(texts, counts, strict=True) for _ in range(int(count))]
            said = iter(
                sampling_params.rows_of(sampling_params.said(self.strategies, prompts, self.step_now), len(prompts))
            )
            own = [[next(said) for _ in range(int(count))] for count in counts]
            self._rows |= dict(zip(uids, own, strict=True))
            tu.assign_non_tensor_stack(batch, sampling_params.FIELD, [json.dumps(rows) for rows in own])
            named = listed(batch["agent_name"]) if "agent_name" in batch else None
            default = str(self.config.actor_rollout_ref.rollout.agent.default_agent_loop)
            loops = [loop_for(str(name)) for name in named or [default] * len(uids)]
            tu.assign_non_tensor_stack(batch, "agent_name", loops)
        return super()._submit_batch_to_rollout(batch)

    @property
    def step_now(self) -> int:
        """verl's steps taken before this batch; each has as many updates as the actor's mini-batches and epochs say."""
        return int(self.global_steps) - 1

    def _temperatures(self, keys: Sequence[str], of: Any) -> Tensor:
        """One value per row; the run's temperature where nobody spoke of the row."""
        default = float(self.config.actor_rollout_ref.rollout.temperature)
        found = []
        for key in keys:
            prompt, answer, _ = key.rsplit("_", 2)
            rows = self._rows.get(prompt)
            found.append(default if rows is None else of(rows[int(answer)], default))
        return torch.tensor(found, dtype=torch.float32)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """log π_old at each row's own temperature, and the entropy at temperature 1."""
        own = self._temperatures(batch.keys, sampling_params.training_temperature)
        if self._sampling:
            batch = _put(batch, {"temperature": own})
        batch = super()._compute_old_log_prob(batch, metrics)
        return self._with_entropy(batch) if self.strategies and bool((own != 1).any()) else batch

    def _with_entropy(self, batch: Any) -> Any:
        batch.extra_info.update({"calculate_entropy": True, "compute_loss": False, "temperature": 1.0})
        self._whole_group.compute_log_prob(batch)
        data = self._read(batch, "entropy", "response_mask")
        return _put(batch, {"entropy": response_from_nested(data["entropy"], data["response_mask"])})

    # ---------------------------------------------------------------- shaping

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's advantages, and what the strategies make of the batch."""
        batch = super()._compute_advantage(batch, metrics)
        self._masks = None
        if not self.strategies and self.recorder is None:
            return batch
        data = self._read(batch, *READ)
        rows = Rows.of(data, batch.keys, batch.tags, self._asked, single=bool(self.strategies))
        seen = self.seen(rows)
        metrics["explorl/correct"] = float(seen.correct.float().mean())
        advantages = seen.advantages
        if self.strategies:
            shaped = self.shaped(seen, rows)
            metrics.update(shaped.metrics)
            batch = self._put_back(batch, data, shaped, seen, rows.order)
            advantages = shaped.advantages
        if self.recorder is not None:
            texts = self.tokenizer.batch_decode(rows.columns["responses"], skip_special_tokens=True)
            self.recorder.keep(int(self.global_steps), answer_columns(seen, advantages, texts))
        return batch

    def seen(self, rows: Rows) -> Batch:
        """The batch that the strategies see."""
        correct, names = correct_of(self.settings, rows.extras), numbers_of(rows.extras)
        if correct.guessed and any(one.needs_correct for one in self.strategies):
            self._warn_once(
                f"an answer is taken to be correct where {correct.name!r} is at least 1; say which number decides, "
                f"such as explorl.correct=[{correct.name},1.0]"
            )
        asked = any(one.needs_answers for one in self.strategies)
        unread = {} if self.strategies else {"entropy": torch.zeros_like(rows.columns["rm_scores"])}
        return batch_of(
            {**unread, **rows.columns},
            group=groups_of(rows.uids),
            rewards=rows.rewards,
            parts=parts_of(names, rows.rewards, rows.extras),
            correct=correct,
            truncated=truncated_rows(rows.columns["responses"], rows.lengths, self._ends()),
            temperature=self._temperatures(rows.keys, lambda row, default: row.get("temperature", default)),
            step=self.step_now,
            prompts=[prompt_text(prompt) for prompt in rows.prompts],
            answers=answers_of(str(self.settings.answers), rows.extras) if asked else (),
            max_length=int(self.config.actor_rollout_ref.rollout.response_length),
        )

    def shaped(self, batch: Batch, rows: Rows) -> Shaped:
        """What the strategies say of the whole batch."""
        return shape(self.strategies, batch, lambda rewards: self._normalised(rows, rewards))

    def _ends(self) -> list[int]:
        """Tokens that end an answer."""
        if self._end_tokens is None:
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
            given = [getattr(model, "generation_config", None), getattr(model, "hf_config", None), self.tokenizer]
            found = [getattr(one, "eos_token_id", None) for one in given] + [self.tokenizer.pad_token_id]
            flat = [token for one in found for token in (one if isinstance(one, list | tuple) else [one])]
            self._end_tokens = sorted({int(token) for token in flat if token is not None})
        return self._end_tokens

    def _normalised(self, rows: Rows, rewards: Tensor) -> Tensor:
        """Advantages of new total rewards, one per row, by verl's own estimator."""
        mask, algorithm = rows.columns["response_mask"], self.config.algorithm
        uids = np.empty(len(rewards), dtype=object)
        uids[:] = rows.uids
        data = DataProto.from_dict(
            tensors={"response_mask": mask, "token_level_rewards": rows.with_rewards(rewards)},
            non_tensors={"uid": uids},
        )
        found = compute_advantage_for_multi_trajectories(
            data,
            batch_keys=rows.keys,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        ).batch["advantages"]
        return found.gather(1, mask.long().argmax(1, keepdim=True)).squeeze(1)

    def _put_back(self, batch: Any, data: Any, shaped: Shaped, seen: Batch, order: Sequence[int]) -> Any:
        """The batch with what the strategies said; empty rows get nothing to learn."""
        rows, counted = len(batch), data["response_mask"]

        def column(values: Tensor, fill: float = 0.0) -> Tensor:
            whole = spread(values, order, rows, fill=fill)
            return whole if whole.dim() == 1 else response_to_nested(whole, counted)

        fields = {"advantages": column(shaped.advantages)}
        if self._in_loss:
            found = carried(shaped, seen, penalties=self._penalties)
            fields |= {name: column(values, fill=float("weights" in name)) for name, values in found.items()}
        if self._selecting:
            self._masks = column(shaped.loss_mask.to(counted.dtype)), counted
        return _put(batch, fields)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """The update; tokens that a strategy took out are out of the actor's loss, and of nothing else."""
        batch.extra_info[STEP] = self.step_now
        if self._masks is None:
            return super()._update_actor(batch, metrics)
        chosen, counted = self._masks
        self._put_masks(batch, chosen)
        try:
            return super()._update_actor(batch, metrics)
        finally:
            self._put_masks(batch, counted)

    def _put_masks(self, batch: Any, mask: Any) -> None:
        _put(batch, {"response_mask": mask, "loss_mask": mask})

    # ---------------------------------------------------------------- telling

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
    """The batch with these columns, which workers see from here on."""
    put = TensorDict(fields, batch_size=len(batch))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=put)


class _RowTemperature:
    """A worker group whose passes take the temperature from each row's column, not from the batch."""

    PASSES = ("compute_log_prob", "compute_ref_log_prob", "update_actor")

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in self.PASSES:
            return found

        def call(batch: Any) -> Any:
            batch.extra_info.pop("temperature", None)
            return found(batch)

        return call
