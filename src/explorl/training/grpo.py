"""GRPO with exploration strategies: a drop-in for TRL's `GRPOTrainer`, and the only module that knows it.

    sample ─► reward ─► advantage ─► record ─► strategies ─► loss ─► update

TRL samples, rewards and normalises; `_generate_and_score_completions` then gathers the whole generation batch of all
processes into a `Batch`, lets the strategies act on it, and puts per-token tensors back for the loss:

    loss_t = −min(r·A, clip(r, 1 − low, 1 + high)·A)·weight + β·k3(π_ref, π_θ)·kl_weight + penalties
    r = exp(log π − log π_old),   k3 = exp(log π_ref − log π) − (log π_ref − log π) − 1

(k3·r instead of k3 where `GRPOConfig.use_bias_correction_kl` says so, which is TRL's default.)
With `strategies=[]` loss and gradients equal those of `GRPOTrainer`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import send_to_device
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, shuffle_sequence_dict, split_tensor_dict

from explorl.metrics.tokens import branching_factor, token_entropy
from explorl.rollout import Engine, PaddedRollouts, SamplingParams
from explorl.strategies import Batch, ReferenceReset, StepState, Strategy, build_all, warn_inert
from explorl.strategies.base import overrides
from explorl.training.dealing import dealt
from explorl.training.loss import clipped_surrogate, importance_ratio, k3, normalised, sums_and_counts
from explorl.training.packed import packed_logps
from explorl.training.records import counted_tokens, logged_columns, prompt_text, token_columns
from explorl.training.reference import adapter_weights, load_reference, reference_weights
from explorl.training.shaping import Shaped, shape

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
STRATEGY_STATE, REFERENCE_STATE, BUFFER_STATE = "strategies.json", "reference.safetensors", "generation_batch_{}.pt"

StrategyLike = Strategy | str | Mapping[str, Any]


class ExplorationTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with a list of exploration strategies.

    Args:
        strategies: `Strategy` objects, names ("ppl_shaping") or mappings ({"ppl_shaping": {"alpha": 0.02}}), in the
            order in which they act.
        engine: what samples: "explorl" (`explorl.rollout.Engine`), "generate" (`model.generate`) or "vllm" (TRL's own
            path). None is vllm where `args.use_vllm` says so, TRL's path for tools, environments, a `rollout_func` of
            your own or weights that are sharded over processes, and else "explorl".
        packed: compute log-probabilities without padding. None is yes, but for gradient checkpointing.
        on_rollouts: called on the main process with the step that a generation batch is for, and its columns.
        token_records: so many prompts of each batch come to `on_rollouts` with what was recorded of every token.

    All other arguments are those of `GRPOTrainer`. The loss types are grpo, bnpo, dr_grpo and dapo.
    """

    _tag_names = ["explorl", "trl", "grpo"]  # noqa: RUF012 (TRL's own attribute)
    rollout_func: Any
    _records: PaddedRollouts | None
    _old_logps: Tensor | None
    _row_temperature: Tensor | None
    epsilon_low: float
    epsilon_high: float
    entropy_coef: float
    _last_world_entropy: float
    _entropy_window_stats: Tensor | None
    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        strategies: Sequence[StrategyLike] = (),
        engine: Literal["explorl", "generate", "vllm"] | None = None,
        packed: bool | None = None,
        on_rollouts: Callable[[int, dict[str, list[Any]]], None] | None = None,
        token_records: int = 0,
        **options: Any,
    ) -> None:
        self.strategies: list[Strategy] = build_all(strategies)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        for strategy in self.strategies:
            for key, value in strategy.arguments().items():
                setattr(args, key, value)
        _refuse_unsupported(args)
        for strategy in self.strategies:
            strategy.check(num_generations=args.num_generations)
        if engine == "vllm":
            args.use_vllm = True
        if train_dataset is not None:
            train_dataset = self._ordered(train_dataset)
        super().__init__(model, reward_funcs, args, train_dataset, *more, **options)
        self._use_engine(engine)
        self._packed = not args.gradient_checkpointing if packed is None else packed

        if self.aux_loss_enabled:
            raise ValueError("the router's auxiliary loss of a mixture of experts is not supported; set it to 0")
        reused = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
        for warning in warn_inert(self.strategies, reused=reused):
            self._warn(warning)
        if self.beta == 0.0 and any(isinstance(strategy, ReferenceReset) for strategy in self.strategies):
            self._warn("reference_reset empties only the optimizer's state: beta is 0; set it above 0, say to 0.001")
        self._on_rollouts, self._token_records = on_rollouts, token_records
        self._token_texts: dict[int, str] = {}
        self._forget_rollout()
        self._gathered_rewards: Tensor | None = None
        self._mean_reward = math.nan
        self._reference_moved = False
        if any(overrides(strategy, "after_step") for strategy in self.strategies):
            self.add_callback(_AfterStep(self))

    def _use_engine(self, engine: str | None) -> None:
        """Hangs the engine on TRL's `rollout_func`, unless something else samples."""
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        own = self.rollout_func is not None or bool(self.tools) or self.environment_factories is not None
        if engine is None:
            elsewhere = self.use_vllm or self.use_transformers_continuous_batching or own or sharded
            engine = "generate" if elsewhere else "explorl"
        self._engine: Engine | None = None
        if engine == "explorl":
            if own or sharded:
                raise ValueError(
                    "engine='explorl' has no tools, environments, rollout_func or sharded weights; use None"
                )
            self._engine = Engine(self.model, self._tokenizer)
            self.rollout_func = self._rollout
        for strategy in self.strategies:
            if overrides(strategy, "sampling") and self._engine is None:
                raise ValueError(
                    f"{strategy.name} changes how each row is sampled; use engine='explorl', not {engine!r}"
                )

    def _warn(self, message: str) -> None:
        if self.accelerator.is_main_process:
            import warnings

            warnings.warn(message, UserWarning, stacklevel=3)

    def _ordered(self, dataset: Any) -> Any:
        """The data set as the strategies want it: which prompts, in which order."""
        for strategy in self.strategies:
            order = strategy.order([prompt_text(prompt) for prompt in dataset["prompt"]])
            if order is not None:
                dataset = dataset.select(list(order))
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        return _ResumableSampler(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    # ---------------------------------------------------------------- sample, reward, record, shape
    def _rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Samples through the engine; TRL calls it with each prompt once for every sample."""
        assert self._engine is not None
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
        }
        if self.model.training:
            texts = [prompt_text(prompt) for prompt in prompts]
            for strategy in self.strategies:
                options.update(strategy.sampling(texts))
        if any(options.pop("bottom_p_per_sequence", [])):
            options["bottom_p_per"] = "sequence"
        params = SamplingParams(**options, max_tokens=self.max_completion_length, stop_token_ids=self.eos_token_ids)
        rollouts = self._engine.generate(prompts, 1, params).check()
        device = self.accelerator.device
        self._records = rollouts.padded(self._tokenizer.pad_token_id, device)
        rows = torch.as_tensor(options["temperature"], dtype=torch.float32, device=device).expand(len(prompts))
        self._row_temperature = None if (rows == self.temperature).all() else rows
        # TRL asks for log π_old where a batch is reused; what was recorded in float32 is just that.
        exact = self.model.dtype == torch.float32 and not self.args.bf16 and not self.args.fp16
        reused = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0
        self._old_logps = self._records.logps if exact and reused and self.model.training else None
        return {
            "prompt_ids": rollouts.prompt_ids,
            "completion_ids": [rollout.token_ids for rollout in rollouts],
            "logprobs": [rollout.sampling_logps.tolist() for rollout in rollouts],
        }

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        temperature: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Packed, at each row's own temperature; TRL's padded pass where neither is wanted."""
        if self._old_logps is not None and model is self.model and not torch.is_grad_enabled():
            recorded, self._old_logps = _padded_to(self._old_logps, logits_to_keep), None
            return recorded, None, None
        if temperature is None and not torch.is_grad_enabled():
            temperature = self._row_temperature
        if not self._packed and temperature is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **more
            )
        parts = []
        for rows in torch.arange(len(input_ids), device=input_ids.device).split(batch_size or len(input_ids)):
            with self.accelerator.autocast():
                parts.append(
                    packed_logps(
                        model,
                        input_ids[rows],
                        attention_mask[rows],
                        logits_to_keep,
                        temperature=None if temperature is None else temperature[rows],
                        head_temperature=self.temperature,
                    )
                )
        return torch.cat([logps for logps, _ in parts]), torch.cat([entropy for _, entropy in parts]), None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._gathered_rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._gathered_rewards

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """The next micro-batch; a new generation batch where the last one is used up."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._micro_batches(self._generate_and_score_completions(generation_batch))
        batch: dict[str, Any] = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return batch

    def _micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """As many tokens in each; as many rows, where the loss divides by what is in a micro-batch."""
        parts = self.args.steps_per_generation
        if self.loss_type == "bnpo" or self._entropy_bonus_enabled:
            return split_tensor_dict(shuffle_sequence_dict(batch), parts)
        windows = max(parts // self.args.gradient_accumulation_steps, 1)
        needed = self._needed(batch).cpu()
        if needed.sum() < parts:  # every micro-batch gets a row, and all processes one at a time
            needed.fill_(True)
        if not needed.all():
            assert self._records is not None
            tokens = counted_tokens(batch)[~needed]
            entropy = _padded_to(self._records.entropy, tokens.size(1))[~needed]
            batch["left_out"] = torch.stack([(entropy * tokens).sum(), tokens.sum()]) / parts
        return dealt(batch, windows=windows, parts=parts // windows, needed=needed)

    def _needed(self, batch: Mapping[str, Any]) -> Tensor:
        """Which rows have a gradient; all of them, where something besides the advantage makes one.

        What is logged of the others is in the engine's records, if those are of this very policy at temperature 1.
        """
        advantages = batch["advantages"]
        reused = self.num_iterations > 1 or self.args.steps_per_generation > self.args.gradient_accumulation_steps
        recorded = self._records is not None and self.temperature == 1.0 and self._row_temperature is None
        if reused or not recorded or self.beta != 0.0 or any(overrides(s, "penalty") for s in self.strategies):
            return torch.ones(len(advantages), dtype=torch.bool, device=advantages.device)
        if advantages.dim() == 1:
            return advantages != 0
        return (advantages * batch["loss_mask"]).abs().sum(1) > 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._forget_rollout()
        output = super()._generate_and_score_completions(inputs)
        self._old_logps = None
        if not self.model.training:
            return output
        if self._row_temperature is not None:
            output["row_temperature"] = self._row_temperature
        rewards = self._rewards()
        self._mean_reward = rewards.nanmean().item()
        if self.strategies:
            batch = self._gathered_batch(output, inputs, rewards)
            self._apply(shape(self.strategies, batch), output, batch)
        if self._on_rollouts is not None and self.accelerator.is_main_process:
            self._on_rollouts(self.state.global_step + 1, self._rollout_columns(output))
        return output

    def _forget_rollout(self) -> None:
        self._records = self._old_logps = self._row_temperature = None

    def _rewards(self) -> Tensor:
        """Weighted sum of the reward parts of all processes; NaN where no reward function scored the row."""
        parts = self._gathered_rewards
        assert parts is not None
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(dim=1)
        return torch.where(parts.isnan().all(dim=1), torch.nan, rewards)

    @torch.no_grad()
    def _record(self, output: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """log π at the sampling temperature, entropy and branching factor at 1, of every completion token.

        The engine has recorded them while sampling; after `model.generate` or vLLM it takes a pass over the batch.
        """
        if self._records is not None:
            length = output["completion_ids"].size(1)
            values = (self._records.logps, self._records.entropy, self._records.branching.float())
            logps, entropy, branching = (_padded_to(value, length) for value in values)
            return logps, entropy, branching
        input_ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention_mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].size(1)
        parts = []
        for rows in torch.arange(len(input_ids)).split(self.args.per_device_train_batch_size):
            with self.accelerator.autocast():
                logits = self.model(
                    input_ids=input_ids[rows], attention_mask=attention_mask[rows], logits_to_keep=length + 1
                ).logits[:, :-1]
            logits = logits.float()
            tokens = output["completion_ids"][rows].unsqueeze(-1)
            own = torch.log_softmax(logits / self.temperature, dim=-1).gather(-1, tokens).squeeze(-1)
            parts.append((own, token_entropy(logits), branching_factor(logits).to(logits.dtype)))
        logps, entropy, branching = (torch.cat(values) for values in zip(*parts, strict=True))
        return logps, entropy, branching

    def _gathered_batch(self, output: Mapping[str, Any], inputs: list[dict[str, Any]], rewards: Tensor) -> Batch:
        """The generation batch of all processes."""
        from accelerate.utils import gather_object

        logps, entropy, branching = self._record(output)
        mask = counted_tokens(output).to(logps.dtype)
        lengths = output["completion_mask"].sum(1)
        last = output["completion_ids"].gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        ends = torch.tensor([*self.eos_token_ids, self._tokenizer.pad_token_id], device=last.device)
        truncated = ~torch.isin(last, ends) | (lengths == 0)
        old = output.get("old_per_token_logps")
        everywhere = self._everywhere
        return Batch(
            logps=everywhere(logps),
            old_logps=everywhere(logps if old is None else old),
            ref_logps=everywhere(output["ref_per_token_logps"]) if "ref_per_token_logps" in output else None,
            sampling_logps=(
                everywhere(output["sampling_per_token_logps"]) if "sampling_per_token_logps" in output else None
            ),
            entropy=everywhere(entropy),
            branching=everywhere(branching),
            mask=everywhere(mask),
            advantages=everywhere(output["advantages"].unsqueeze(1) * mask),
            rewards=rewards,
            group=torch.arange(len(rewards), device=rewards.device) // self.num_generations,
            truncated=self.accelerator.gather(truncated),
            temperature=(
                torch.full_like(rewards, self.temperature)
                if self._row_temperature is None
                else self.accelerator.gather(self._row_temperature)
            ),
            step=self.state.global_step,
            prompts=gather_object([prompt_text(row["prompt"]) for row in inputs]),
        )

    def _everywhere(self, tensor: Tensor) -> Tensor:
        """A per-token tensor of all processes, padded on the right to the longest."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=1))

    def _apply(self, shaped: Shaped, output: dict[str, Any], batch: Batch) -> None:
        """Puts this process's rows of what the strategies said into the dictionary that TRL splits and shuffles."""
        rows, length = output["completion_ids"].shape
        start = self.accelerator.process_index * rows
        here = slice(start, start + rows)
        output["advantages"] = shaped.advantages[here, :length]
        output["loss_mask"] = shaped.loss_mask[here, :length]
        output["token_weights"] = shaped.weights[here, :length]
        output["kl_weights"] = shaped.kl_weights[here, :length]
        if shaped.clip is not None:
            output["clip_low"], output["clip_high"] = (bound[here, :length] for bound in shaped.clip)
        if any(overrides(strategy, "penalty") for strategy in self.strategies):
            output["recorded_entropy"] = batch.entropy[here, :length]
            for name in ("rewards", "group", "truncated"):
                output[f"row_{name}"] = getattr(batch, name)[here]
            for name, tensor in shaped.kept.items():
                output[f"kept/{name}"] = tensor[here, :length]
        output["num_items_in_batch"] = shaped.loss_mask.sum()
        for name, value in shaped.metrics.items():
            self._metrics["train"][name].append(value)

    def _rollout_columns(self, output: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The latest generation batch as TRL logged it, with token records of its first prompts."""
        count = len(self._gathered_rewards) if self._gathered_rewards is not None else 0
        tokens: dict[str, list[Any]] = {}
        rows = min(self._token_records * self.num_generations, len(output["completion_ids"]))
        if rows and self._records is not None:
            tokens = token_columns(output, self._records, rows, self._token_text)
        return logged_columns(self._logs, count) | {
            name: [*values, *[None] * (count - rows)] for name, values in tokens.items()
        }

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self._tokenizer.decode([token])
        return self._token_texts[token]

    # ---------------------------------------------------------------- loss
    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            temperature=inputs.get("row_temperature"),
        )
        assert entropies is not None
        mask = inputs.get("loss_mask", counted_tokens(inputs))
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old_logps = inputs.get("old_per_token_logps")
        old_logps = logps.detach() if old_logps is None else old_logps

        ratio = importance_ratio(logps, old_logps, mask, self.importance_sampling_level)
        low, high = inputs.get("clip_low", self.epsilon_low), inputs.get("clip_high", self.epsilon_high)
        surrogate = clipped_surrogate(ratio, advantages, low, high, self.args.delta)
        token_loss = surrogate.loss
        if "token_weights" in inputs:
            token_loss = token_loss * inputs["token_weights"]
        if self.use_vllm and self.vllm_importance_sampling_correction:
            token_loss = token_loss * inputs["importance_sampling_ratio"]
        if self.beta != 0.0:
            kl = k3(logps, inputs["ref_per_token_logps"])
            kl = kl * ratio if self.args.use_bias_correction_kl else kl
            token_loss = token_loss + self.beta * kl * inputs.get("kl_weights", 1.0)
        for penalty in self._penalties(inputs, logps, old_logps, mask, advantages):
            token_loss = token_loss + penalty

        loss = self._normalised(token_loss, mask, inputs, mode)
        if self._entropy_bonus_enabled:
            loss = self._with_entropy_bonus(loss, entropies, mask, mode)

        values = {
            "entropy": entropies,
            "clip_ratio/low_mean": surrogate.low_clipped.float(),
            "clip_ratio/high_mean": surrogate.high_clipped.float(),
            "clip_ratio/region_mean": (surrogate.low_clipped | surrogate.high_clipped).float(),
            **({"kl": kl} if self.beta != 0.0 else {}),
        }
        self._log_means(values, inputs, mode)
        return loss

    def _log_means(self, values: dict[str, Tensor], inputs: dict[str, Any], mode: str) -> None:
        """Logs means over counted tokens, whether or not a strategy took them out of the loss, of all processes."""
        found = sums_and_counts(values, counted_tokens(inputs))
        if "left_out" in inputs:  # rows that need no pass: their entropy is known, and nothing of them is clipped
            sums, counts = inputs["left_out"]
            per_token = torch.tensor([value.size(1) > 1 for value in values.values()], device=found.device)
            found[1] += counts * per_token
            found[0, list(values).index("entropy")] += sums
        total_sums, total_counts = self.accelerator.reduce(found, "sum")
        for name, mean in zip(values, (total_sums / total_counts.clamp(min=1.0)).tolist(), strict=True):
            self._metrics[mode][name].append(mean)

    def _penalties(
        self, inputs: dict[str, Any], logps: Tensor, old_logps: Tensor, mask: Tensor, advantages: Tensor
    ) -> list[Tensor]:
        """The strategies' terms with gradient, for a micro-batch."""
        if "recorded_entropy" not in inputs:
            return []
        batch = Batch(
            logps=logps,
            old_logps=old_logps,
            ref_logps=inputs.get("ref_per_token_logps"),
            sampling_logps=inputs.get("sampling_per_token_logps"),
            entropy=inputs["recorded_entropy"],
            branching=None,
            mask=mask,
            advantages=advantages,
            rewards=inputs["row_rewards"],
            group=inputs["row_group"],
            truncated=inputs["row_truncated"],
            temperature=inputs.get("row_temperature", torch.full_like(inputs["row_rewards"], self.temperature)),
            step=self.state.global_step,
        )
        terms = []
        for index, strategy in enumerate(self.strategies):
            prefix = f"kept/{index}/"
            kept = {key.removeprefix(prefix): value for key, value in inputs.items() if key.startswith(prefix)}
            terms.append(strategy.penalty(batch, kept))
        return [term for term in terms if term is not None]

    def _normalised(self, token_loss: Tensor, mask: Tensor, inputs: dict[str, Any], mode: str) -> Tensor:
        """From token losses to one number, as TRL's loss types do it, scaled for gradient accumulation."""
        accumulated = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if mode == "train":
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normalised(
            token_loss,
            mask,
            self.loss_type,
            rows=inputs.get("mean_rows", len(token_loss)),
            longest=self.max_completion_length,
            tokens=tokens,
            accumulated=accumulated,
        )

    def _with_entropy_bonus(self, loss: Tensor, entropies: Tensor, mask: Tensor, mode: str) -> Tensor:
        """TRL's bonus: loss − coef · mean H; adaptive, the coefficient seeks a target between optimizer steps."""
        accumulated = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        bonus = (entropies * mask).sum() / mask.sum().clamp(min=1.0) / accumulated
        active = not self.use_adaptive_entropy or self._last_world_entropy <= self.args.entropy_target
        policy_loss = loss.detach() * (1.0 if self.loss_type == "dapo" else accumulated)
        self._metrics[mode]["policy_loss"].append(self.accelerator.gather(policy_loss).nanmean().item())
        total = loss - (self.entropy_coef if active else 0.0) * bonus
        if mode == "train" and self.use_adaptive_entropy:
            stats = torch.stack([(entropies * mask).sum(), mask.sum()]).detach()
            window = self._entropy_window_stats
            self._entropy_window_stats = stats if window is None else window + stats
            if self.accelerator.sync_gradients:
                entropy_sum, tokens = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
                self._last_world_entropy = (entropy_sum / tokens.clamp(min=1.0)).item()
                self._entropy_window_stats = None
                delta = self.args.entropy_coef_delta
                delta = delta if self._last_world_entropy <= self.args.entropy_target else -delta
                bounds = self.args.entropy_coef_min, self.args.entropy_coef_max
                self.entropy_coef = min(max(self.entropy_coef + delta, bounds[0]), bounds[1])
        if mode == "train" and self.accelerator.sync_gradients:
            self._metrics[mode]["entropy_coef"].append(self.entropy_coef)
        return total

    # ---------------------------------------------------------------- what strategies may do after a step
    def reset_reference(self) -> None:
        """π_ref ← π_θ; nothing to do where β = 0."""
        if self.beta == 0.0:  # no reference is in use
            return
        model, reference = self._models()
        load_reference(model, reference, model.state_dict() if reference is not None else adapter_weights(model))
        self._reference_moved = True

    def _models(self) -> tuple[Any, Any]:
        """The policy, and the model of the reference where that is not an adapter of the policy."""
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        return self.accelerator.unwrap_model(self.model), reference

    def reset_optimizer(self) -> None:
        """Empties the optimizer's moments."""
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        optimizer.state.clear()

    def after_step(self) -> None:
        """Lets the strategies act once an optimizer step is done."""
        state = StepState(self.state.global_step, self._mean_reward, self.reset_reference, self.reset_optimizer)
        for strategy in self.strategies:
            strategy.after_step(state)

    # ---------------------------------------------------------------- checkpoints
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self._buffered_inputs is not None and self._step % (self.args.steps_per_generation * self.num_iterations):
            torch.save(self._buffered_inputs, folder / BUFFER_STATE.format(self.accelerator.process_index))
        if not self.args.should_save:
            return
        memories = [{"name": strategy.name, "memory": strategy.memory} for strategy in self.strategies]
        state = {"step": self._step, "reward": self._mean_reward, "strategies": memories}
        (folder / STRATEGY_STATE).write_text(json.dumps(state))
        if self._reference_moved:
            weights = reference_weights(*self._models())
            save_file({key: value.detach().cpu().clone() for key, value in weights.items()}, folder / REFERENCE_STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # transformers reads the adapters in subfolders, where there are any ("ref"), and then not the trained one
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy = self.accelerator.unwrap_model(self.model)
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not os.path.exists(os.path.join(checkpoint, STRATEGY_STATE)):
            return
        folder = Path(checkpoint)
        saved = json.loads((folder / STRATEGY_STATE).read_text())
        names = [entry["name"] for entry in saved["strategies"]]
        if names != [strategy.name for strategy in self.strategies]:
            own = [strategy.name for strategy in self.strategies]
            raise ValueError(f"{checkpoint} was written with the strategies {names}, this trainer has {own}")
        for strategy, entry in zip(self.strategies, saved["strategies"], strict=True):
            strategy.memory.clear()
            strategy.memory.update(entry["memory"])
        self._step, self._mean_reward = saved["step"], saved.get("reward", math.nan)
        if (folder / REFERENCE_STATE).exists():
            load_reference(*self._models(), load_file(folder / REFERENCE_STATE))
            self._reference_moved = True
        batch = folder / BUFFER_STATE.format(self.accelerator.process_index)
        if batch.exists():  # via the CPU: torch cannot map to the "cpu:0" of a process among several
            rows = torch.load(batch, map_location="cpu", weights_only=True)
            self._buffered_inputs = send_to_device(rows, self.accelerator.device)


class _ResumableSampler(RepeatSampler):
    """TRL's order of the prompts, which in a resumed run would begin with that of the first epoch again."""

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: ExplorationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.after_step()


def _padded_to(values: Tensor, length: int) -> Tensor:
    """Zeros on the right up to `length`, which TRL may round up."""
    return torch.nn.functional.pad(values, (0, length - values.size(1)))


def _refuse_unsupported(args: GRPOConfig) -> None:
    """TRL options that our loss does not have, each with what to use instead."""
    if args.loss_type not in LOSSES:
        raise ValueError(f"loss_type is {args.loss_type!r}; use one of {', '.join(LOSSES)}")
    if args.top_entropy_quantile < 1.0:
        raise ValueError(
            f"top_entropy_quantile is {args.top_entropy_quantile}; use the strategy forking_tokens, which takes the "
            "quantile over the whole batch"
        )
    if args.off_policy_mask_threshold is not None:
        raise ValueError(f"off_policy_mask_threshold is {args.off_policy_mask_threshold}; leave it at None")
