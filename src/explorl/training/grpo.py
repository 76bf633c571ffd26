"""GRPO with exploration strategies: a drop-in for TRL's `GRPOTrainer`.

    sample ─► reward ─► advantage ─► record ─► strategies ─► micro-batches ─► loss ─► update

TRL samples (through our engine), rewards and normalises; the whole generation batch of all processes then becomes a
`Batch`, the strategies act on it, and per-token tensors go back into the micro-batches for the loss:

    loss_t = −min(r·A, clip(r, 1 − low, 1 + high)·A)·weight + β·k3(π_ref, π_θ)·kl_weight + penalties
    r = exp(log π − log π_old),   k3 = exp(log π_ref − log π) − (log π_ref − log π) − 1

(k3·r instead of k3 where `GRPOConfig.use_bias_correction_kl` says so, which is TRL's default; the other loss types are
in `explorl.training.loss`.) With `strategies=[]` loss and gradients equal those of `GRPOTrainer`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig

from explorl.modeling import passes
from explorl.modeling.packed import is_linear, packed_logps, scaled_states
from explorl.modeling.precision import weights_dtype
from explorl.rollout import Engine, PaddedRollouts, UnsupportedModel
from explorl.strategies import ReferenceReset, StepState, Strategy, build_all, warn_inert
from explorl.strategies.base import overrides
from explorl.training import checkpoints, options
from explorl.training.batch import Recorded, by_engine, by_pass, gathered, padded_to, penalties, put_back
from explorl.training.correct import Correct
from explorl.training.correct import Spec as CorrectSpec
from explorl.training.dealing import dealt
from explorl.training.loss import (
    Bounds,
    Surrogate,
    importance_ratio,
    k3,
    normalised,
    sequence_means,
    sums_and_counts,
    surrogate,
)
from explorl.training.records import counted_tokens, logged_columns, prompt_text, token_columns
from explorl.training.reference import adapter_weights, load_reference, reference_weights
from explorl.training.sampling import Draw, beyond_the_engine, sampling_options
from explorl.training.shaping import shape
from explorl.training.trl_trainer import IMAGES, NamedGRPOTrainer

StrategyLike = Strategy | str | Mapping[str, Any]


class ExplorationTrainer(NamedGRPOTrainer):
    """`trl.GRPOTrainer` with a list of exploration strategies.

    Args:
        strategies: `Strategy` objects, names ("ppl_shaping") or mappings ({"ppl_shaping": {"alpha": 0.02}}), in the
            order in which they act.
        correct: what a correct answer is, for strategies that ask: the name of a reward function, or that and the least
            value that it gives one ("accuracy" or ("accuracy", 0.5)). None guesses, and says so.
        engine: what samples: "explorl" (`explorl.rollout.Engine`), "generate" (`model.generate`) or "vllm" (TRL's own
            path). None is vllm where `args.use_vllm` says so, else "explorl" where it computes what the model computes,
            else "generate", with a warning that says why.
        packed: compute log-probabilities without padding. None is yes where that gives what the model's own pass gives,
            True insists, False is TRL's padded pass.
        on_rollouts: called on the main process with the step that a generation batch is for, and its columns.
        token_records: so many prompts of each batch come to `on_rollouts` with what was recorded of every token.

    All other arguments are those of `GRPOTrainer`; docs/trl.md lists what becomes of each of TRL's options.
    """

    _tag_names = ["explorl", "trl", "grpo"]  # noqa: RUF012 (TRL's own attribute)
    _records: PaddedRollouts | None
    """What the engine recorded of this process's latest generation batch."""
    _old_logps: Tensor | None
    """log π_old for TRL, where the records have it."""
    _sampling_temperature: Tensor | None
    """One per row, where a strategy sets it."""
    _row_temperature: Tensor | None
    """That at which the loss looks at each row."""
    _prompts: list[Any]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        strategies: Sequence[StrategyLike] = (),
        correct: CorrectSpec = None,
        engine: Literal["explorl", "generate", "vllm"] | None = None,
        packed: bool | None = None,
        on_rollouts: Callable[[int, dict[str, list[Any]]], None] | None = None,
        token_records: int = 0,
        **trl: Any,
    ) -> None:
        self.strategies: list[Strategy] = build_all(strategies)
        self._warned: set[str] = set()
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        for strategy in self.strategies:
            for key, value in strategy.arguments().items():
                setattr(args, key, value)
        options.refuse(args)
        for strategy in self.strategies:
            strategy.check(num_generations=args.num_generations)
        if engine == "vllm":
            args.use_vllm = True
        if train_dataset is not None:
            train_dataset = self._ordered(train_dataset)
        super().__init__(model, reward_funcs, args, train_dataset, *more, **trl)

        # What autocast makes of float32: accelerate leaves it out where the device has none, such as fp16 on a CPU.
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self._dtype = kinds.get(self.accelerator.mixed_precision) if self.accelerator.native_amp else None
        self.correct = Correct.of(correct, self.reward_func_names)
        self._engine = self._engine_for(engine)
        self._packed = False if self._only_padded() else packed
        self._on_rollouts, self._token_records = on_rollouts, token_records
        self._token_texts: dict[int, str] = {}
        self._forget_rollout()
        self._mean_reward = math.nan
        self._reference_moved = bool(args.sync_ref_model)
        self._say_what_is_inert()
        if any(overrides(strategy, "after_step") for strategy in self.strategies):
            self.add_callback(_AfterStep(self))

    def _ordered(self, dataset: Any) -> Any:
        """The data set as the strategies want it: which prompts, in which order."""
        for strategy in self.strategies:
            if not overrides(strategy, "order"):
                continue
            if not hasattr(dataset, "select"):
                raise ValueError(
                    f"{strategy.name} orders the prompts, and {type(dataset).__name__} is a stream, which would have "
                    "to be read to its end; give a datasets.Dataset"
                )
            order = strategy.order([prompt_text(prompt) for prompt in dataset["prompt"]])
            if order is not None:
                dataset = dataset.select(list(order))
        return dataset

    def _say_what_is_inert(self) -> None:
        args = self.args
        reused = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
        for warning in warn_inert(self.strategies, reused=reused):
            self._warn(warning)
        for strategy in self.strategies:
            if isinstance(strategy, ReferenceReset) and self.beta == 0.0:
                self._warn(
                    "reference_reset empties only the optimizer's state: beta is 0; set it above 0, say to 0.001"
                )
            if overrides(strategy, "clip") and self.loss_type in ("sapo", "vespo"):
                self._warn(f"the clip of {strategy.name} has no effect: loss_type={self.loss_type!r} clips nothing")
        if self.correct.guessed and any(strategy.needs_correct for strategy in self.strategies):
            self._warn(self.correct.guess)

    def _warn(self, message: str) -> None:
        """Once, on the main process."""
        if message not in self._warned and self.accelerator.is_main_process:
            warnings.warn(message, UserWarning, stacklevel=3)
        self._warned.add(message)

    # ---------------------------------------------------------------- what may be fast

    def _engine_for(self, engine: str | None) -> Engine | None:
        """The engine, tried out on this model; None where TRL samples."""
        needing = [strategy.name for strategy in self.strategies if overrides(strategy, "sampling")]
        why = self._why_not_engine()
        if engine == "explorl" and why:
            raise ValueError(f"engine='explorl' cannot sample here: {why}; use engine=None")
        if engine in (None, "explorl") and not why:
            # In the type that the training pass computes in; if the model does not take that, as its weights are.
            for dtype in dict.fromkeys((self._engine_dtype(), None)):
                found = Engine(self.model, self.tokenizer, dtype=dtype)
                try:
                    found.check(self.max_completion_length)
                except UnsupportedModel as error:
                    why = error.reason
                else:
                    if needing and (self.tools or self.environment_factories):
                        raise ValueError(
                            f"{needing[0]} sets how each row is sampled, and a conversation with tools is sampled turn "
                            f"by turn; leave out {needing[0]}, or the tools"
                        )
                    return found
            if engine == "explorl":
                raise ValueError(f"engine='explorl' would not sample as this model does ({why}); use engine=None")
        if needing:
            chosen = "vLLM" if self.use_vllm else "model.generate"
            reason = why or f"engine={engine!r}"
            raise ValueError(f"{needing[0]} sets how each row is sampled, which {chosen} cannot do ({reason})")
        if why and not self.use_vllm and self.rollout_func is None and not self.use_transformers_continuous_batching:
            self._warn(f"sampling by model.generate, which is slower than Explorl's engine: {why}")
        return None

    def _why_not_engine(self) -> str:
        """What stands against the engine, before it is tried; empty where nothing does."""
        if self.use_vllm:
            return "use_vllm is set"
        if self.use_transformers_continuous_batching:
            return "use_transformers_continuous_batching is set"
        if self.rollout_func is not None:
            return "a rollout_func samples"
        if self._sharded:
            return "weights are sharded over processes (FSDP or DeepSpeed)"
        if self.sees_images:
            return "it sees images"
        beyond = beyond_the_engine(self.generation_kwargs, self.model.generation_config)
        if beyond:
            return "the engine has no " + ", ".join(f"{name}={value!r}" for name, value in beyond.items())
        return ""

    @property
    def _sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _engine_dtype(self) -> torch.dtype | None:
        return self._dtype if weights_dtype(self.model) == torch.float32 else None

    def _only_padded(self) -> bool:
        if self.sees_images or self.aux_loss_enabled or self.args.torch_compile or self._sharded:
            if self.aux_loss_enabled:
                self._warn(
                    f"router_aux_loss_coef is {self.router_aux_loss_coef}: the router's loss counts the tokens of "
                    "padded rows, so TRL's padded pass is used; set it to 0 for the faster packed one"
                )
            return True
        return False

    def _kind(self, model: Any, longest: int) -> passes.Kind:
        """How log-probabilities are computed: as fast as is proven right on this model."""
        if self._packed is False:
            return "padded"
        inner = self.accelerator.unwrap_model(model)
        choice = passes.choose(inner, longest, dtype=self._dtype, head_temperature=self.temperature)
        if choice.kind == "padded":
            if self._packed:
                raise ValueError(f"packed=True does not work for this model ({choice.why}); use packed=None")
            self._warn(f"log-probabilities are computed with padding, which is slower: {choice.why}")
        return choice.kind

    # ---------------------------------------------------------------- sample

    def sample(self, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """Through the engine; TRL calls it with the tokens of each prompt once for every sample."""
        if self._engine is None:
            return None
        strategies = self.strategies if self.mode == "train" and len(prompt_ids) == len(self._prompts) else []
        texts = [prompt_text(prompt) for prompt in self._prompts] if strategies else []
        draw = Draw(sampling_options(self.generation_kwargs, self.eos_token_ids), strategies, texts, self._now)
        try:
            self._engine.check(self._everywhere_longest(prompt_ids) + self.max_completion_length)
        except UnsupportedModel as error:  # prompts are longer than what it was tried with
            if any(overrides(strategy, "sampling") for strategy in self.strategies):
                raise
            self._warn(f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}")
            self._engine = None
            return None
        rollouts = self._engine.generate(prompt_ids, 1, draw.params).check()
        if not self.tools:
            self._remember(rollouts.padded(self.tokenizer.pad_token_id, self.accelerator.device), draw)
        return [rollout.token_ids for rollout in rollouts]

    def _everywhere_longest(self, prompt_ids: list[list[int]]) -> int:
        """The longest prompt of all processes, so that they agree on what samples."""
        longest = max(len(ids) for ids in prompt_ids)
        if self.accelerator.num_processes == 1 or self.tools:
            return longest
        here = torch.tensor(longest, device=self.accelerator.device)
        return int(self.accelerator.gather(here).max().item())

    def _remember(self, records: PaddedRollouts, draw: Draw) -> None:
        def rows(values: Sequence[float] | None) -> Tensor | None:
            return None if values is None else torch.tensor(values, dtype=torch.float32, device=records.logps.device)

        self._records = records
        self._sampling_temperature, self._row_temperature = (
            rows(draw.sampling_temperature),
            rows(draw.training_temperature),
        )
        # Where TRL asks for log π_old, what was recorded in float32 is just that; but a penalty may act on the
        # difference of two log-probabilities, which then have to come from one and the same pass.
        exact = self._dtype is None and weights_dtype(self.model) == torch.float32
        same = draw.training_temperature is draw.sampling_temperature
        if self._old_logps is None and self._asked_for_old and exact and same and not self._has_penalties:
            self._old_logps = records.logps

    def _forget_rollout(self) -> None:
        self._records = self._old_logps = self._row_temperature = self._sampling_temperature = None
        self._prompts = []

    @property
    def _now(self) -> int:
        """Optimizer steps taken."""
        return int(self.state.global_step)

    @property
    def _asked_for_old(self) -> bool:
        """Whether TRL asks for log π_old: where a batch outlives an optimizer step."""
        every = self.args.steps_per_generation * self.num_iterations
        return self.mode == "train" and self.args.gradient_accumulation_steps % every != 0

    @property
    def _old_is_first_pass(self) -> bool:
        """Whether every micro-batch is seen before the policy moves: then log π_old is what its first pass gives."""
        return self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0 and not self.use_vllm

    @property
    def _has_penalties(self) -> bool:
        return any(overrides(strategy, "penalty") for strategy in self.strategies)

    # ---------------------------------------------------------------- record, shape

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation batch: sampled, rewarded, and shaped by the strategies."""
        self._forget_rollout()
        self._prompts = [row.get("prompt", "") for row in inputs]
        if self._asked_for_old and self._old_is_first_pass:
            self._old_logps = torch.zeros(len(inputs), 0, device=self.accelerator.device)  # TRL need not compute them
        output = super().scored(inputs)
        self._old_logps = None
        if self.mode == "eval":
            return output
        if self._asked_for_old and self._old_is_first_pass:
            del output["old_per_token_logps"]
        output["made_at"] = torch.tensor(self._now)
        if self._row_temperature is not None:
            output["row_temperature"] = self._row_temperature
        rewards = self._rewards()
        self._mean_reward = rewards.nanmean().item()
        if self.strategies:
            self._shape(output, rewards)
        if self._on_rollouts is not None and self.accelerator.is_main_process:
            self._on_rollouts(self._now + 1, self._columns(output))
        return output

    def _rewards(self) -> Tensor:
        """Weighted sum of the reward parts of all processes; NaN where no reward function scored the row."""
        parts = self.reward_parts
        assert parts is not None
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(dim=1)
        return torch.where(parts.isnan().all(dim=1), torch.nan, rewards)

    def _shape(self, output: dict[str, Any], rewards: Tensor) -> None:
        assert self.reward_parts is not None
        batch = gathered(
            self.accelerator,
            self._recorded(output),
            output,
            prompts=self._prompts,
            parts=self.reward_parts,
            rewards=rewards,
            correct=self.correct,
            ends=[*self.eos_token_ids, self.tokenizer.pad_token_id],
            generations=self.num_generations,
            temperature=self.temperature,
            row_temperature=self._sampling_temperature,
            step=self._now,
        )
        shaped = shape(self.strategies, batch)
        put_back(shaped, output, batch, process=self.accelerator.process_index, penalties=self._has_penalties)
        for name, value in shaped.metrics.items():
            self.record_metric(name, value)

    def _recorded(self, output: Mapping[str, Any]) -> Recorded:
        """log π at the sampling temperature, entropy and branching factor at 1, of every completion token."""
        length = output["completion_ids"].size(1)
        if self._records is not None:
            recorded = by_engine(self._records, length)
            if self._row_temperature is not self._sampling_temperature and "old_per_token_logps" not in output:
                with torch.no_grad():  # the loss looks at the rows at another temperature than they were sampled at
                    own, _, _ = self._logps(output, temperature=self._row_temperature)
                return recorded._replace(logps=own)
            return recorded
        if any(name in output for name in IMAGES):
            with torch.no_grad():
                logps, entropy, _ = self._logps(output, compute_entropy=True)
            assert entropy is not None
            return Recorded(logps, entropy, None, None)
        rows = self.args.per_device_train_batch_size
        autocast = self.accelerator.autocast
        return by_pass(self.model, output, temperature=self.temperature, rows=rows, autocast=autocast)

    def _columns(self, output: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The latest generation batch as TRL logged it, with token records of its first prompts."""
        count = len(self.reward_parts) if self.reward_parts is not None else 0
        tokens: dict[str, list[Any]] = {}
        rows = min(self._token_records * self.num_generations, len(output["completion_ids"]))
        if rows and self._records is not None:
            tokens = token_columns(output, self._records, rows, self._token_text)
        return logged_columns(self.logs, count) | {
            name: [*values, *[None] * (count - rows)] for name, values in tokens.items()
        }

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self.tokenizer.decode([token])
        return self._token_texts[token]

    # ---------------------------------------------------------------- micro-batches

    def micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """As many tokens in each, and at most as many rows as TRL would take; by chance, as TRL does it, where the loss
        looks at what is in a micro-batch or where optimizer steps do not end with the generation batch."""
        parts, window = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        uneven = parts % window != 0 and window % parts != 0
        looks = self.loss_type == "bnpo" or self.has_entropy_bonus or self.top_entropy_quantile < 1.0
        if looks or uneven or self.aux_loss_enabled or any(name in batch for name in IMAGES):
            return super().micro_batches(batch)
        windows = max(parts // window, 1)
        needed = self._needed(batch).cpu()
        if needed.sum() < parts:  # every micro-batch gets a row, and all processes one at a time
            needed.fill_(True)
        if not needed.all():
            assert self._records is not None
            tokens = counted_tokens(batch)[~needed]
            entropy = padded_to(self._records.entropy, tokens.size(1))[~needed]
            batch["left_out"] = torch.stack([(entropy * tokens).sum(), tokens.sum()]) / parts
        most = self.args.per_device_train_batch_size
        found = dealt(batch, windows=windows, parts=parts // windows, needed=needed, most=most)
        if windows > 1 and self._has_penalties:
            for part in found[window:]:  # seen after the policy has moved: by the pass that will see it
                with torch.no_grad():
                    part["old_per_token_logps"], _, _ = self._logps(
                        part, rows=len(part["completion_ids"]), temperature=part.get("row_temperature")
                    )
        return found

    def _needed(self, batch: Mapping[str, Any]) -> Tensor:
        """Which rows have a gradient; all of them, where something besides the advantage makes one.

        What is logged of the others is in the engine's records, if those are of this very policy at temperature 1.
        """
        advantages = batch["advantages"]
        reused = self.num_iterations > 1 or self.args.steps_per_generation > self.args.gradient_accumulation_steps
        recorded = self._records is not None and self.temperature == 1.0 and self._row_temperature is None
        if reused or not recorded or self.beta != 0.0 or self._has_penalties:
            return torch.ones(len(advantages), dtype=torch.bool, device=advantages.device)
        if advantages.dim() == 1:
            return advantages != 0
        return (advantages * batch["loss_mask"]).abs().sum(1) > 0

    # ---------------------------------------------------------------- loss

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch."""
        logps, entropies, aux_loss = self._logps(
            batch,
            model=model,
            temperature=batch.get("row_temperature"),
            compute_entropy=True,
            **({"compute_aux_loss": True} if self.aux_loss_enabled else {}),
        )
        assert entropies is not None
        mask = batch.get("loss_mask", counted_tokens(batch))
        advantages = batch["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old_logps = self._old(batch, logps)

        ratio = importance_ratio(logps, old_logps, mask, self.importance_sampling_level)
        found = self._surrogate(batch, ratio, advantages, logps, old_logps, mask)
        token_loss = found.loss
        if "token_weights" in batch:
            token_loss = token_loss * batch["token_weights"]
        if self.off_policy_mask_threshold is not None:
            token_loss = token_loss * self.get_off_policy_mask(
                advantages=advantages,
                per_token_logps=logps,
                sampling_per_token_logps=batch.get("sampling_per_token_logps", old_logps),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        effective = mask
        if self.top_entropy_quantile < 1.0:
            chosen = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            token_loss, effective = token_loss * chosen, mask * chosen
        if "importance_sampling_ratio" in batch and self.loss_type != "vespo":
            token_loss = token_loss * batch["importance_sampling_ratio"]
        values = {"entropy": entropies, **found.values}
        if self.beta != 0.0:
            kl = k3(logps, batch["ref_per_token_logps"])
            kl = kl * ratio if self.args.use_bias_correction_kl else kl
            token_loss = token_loss + self.beta * kl * batch.get("kl_weights", 1.0)
            values["kl"] = kl
        for penalty in penalties(
            self.strategies,
            batch,
            logps=logps,
            old_logps=old_logps,
            mask=mask,
            advantages=advantages,
            temperature=self.temperature,
            step=self._now,
        ):
            token_loss = token_loss + penalty

        loss = self._normalised(token_loss, mask, batch)
        if self.has_entropy_bonus:
            loss = self.with_entropy_bonus(loss, entropies, effective)
        if aux_loss is not None:
            accumulated = self.current_gradient_accumulation_steps if self.mode == "train" else 1.0
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulated
            self.record_metric("aux_loss", self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self._log(found, values, batch)
        return loss

    def _logps(
        self, batch: Mapping[str, Any], *, model: Any = None, rows: int | None = None, **asked: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """log π, entropy and auxiliary loss of a batch's completions, with gradients where they are on."""
        ids, mask = (
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        )
        images = {name: batch[name] for name in IMAGES if batch.get(name) is not None}
        rows = rows or (len(ids) if torch.is_grad_enabled() else self.args.per_device_train_batch_size)
        completion = batch["completion_ids"].size(1)
        model = self.model if model is None else model
        return self.log_probabilities(model, ids, mask, completion, rows=rows, **asked, **images)

    def log_probabilities(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        *,
        rows: int,
        temperature: Tensor | None = None,
        **asked: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Packed where that is right for the model, padded else; at each row's own temperature, where it has one."""
        no_gradient = not torch.is_grad_enabled()
        if self._old_logps is not None and model is self.model and no_gradient:
            recorded, self._old_logps = padded_to(self._old_logps, completion), None
            return recorded, None, None
        if temperature is None and no_gradient:
            temperature = self._row_temperature
        entropy = bool(asked.get("compute_entropy"))
        kind = "padded" if asked.keys() - {"compute_entropy"} else self._kind(model, input_ids.size(1))
        if kind == "padded" and temperature is None:
            return self.padded_log_probabilities(model, input_ids, attention_mask, completion, rows=rows, **asked)
        found = []
        for some in torch.arange(len(input_ids), device=input_ids.device).split(rows):
            ids, mask = input_ids[some], attention_mask[some]
            own = None if temperature is None else temperature[some]
            if kind == "padded":
                assert own is not None
                found.append(self._tempered(model, ids, mask, completion, own))
                continue
            with self.accelerator.autocast():
                found.append(
                    packed_logps(
                        model,
                        ids,
                        mask,
                        completion,
                        temperature=own,
                        head_temperature=self.temperature,
                        written_out=kind == "written out",
                    )
                )
        logps, entropies = (torch.cat(values) for values in zip(*found, strict=True))
        return logps, entropies if entropy else None, None

    def _tempered(
        self, model: Any, ids: Tensor, mask: Tensor, completion: int, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The padded pass with a temperature per row."""
        if not is_linear(model):
            with self.accelerator.autocast():
                return passes.tempered_logps(model, ids, mask, completion, temperature)
        with scaled_states(model, (self.temperature / temperature).view(-1, 1, 1)):
            logps, entropy, _ = self.padded_log_probabilities(
                model, ids, mask, completion, rows=len(ids), compute_entropy=True
            )
        assert entropy is not None
        return logps, entropy

    def _old(self, batch: dict[str, Any], logps: Tensor) -> Tensor:
        """log π_old. Until the policy has moved that is log π, without the rounding between two passes."""
        old: Tensor | None = batch.get("old_per_token_logps")
        unmoved = self.mode == "train" and "made_at" in batch and int(batch["made_at"]) == self._now
        if old is None or unmoved:
            old = logps.detach()
            if self.mode == "train" and self._asked_for_old:
                batch["old_per_token_logps"] = old  # for when this micro-batch comes again
        return old

    def _surrogate(
        self, batch: Mapping[str, Any], ratio: Tensor, advantages: Tensor, logps: Tensor, old: Tensor, mask: Tensor
    ) -> Surrogate:
        own = "clip_high" in batch
        bounds = Bounds(
            batch.get("clip_low", self.epsilon_low),
            batch.get("clip_high", self.epsilon_high),
            1 + batch["clip_high"] if own else self.epsilon_high,
        )
        weight = None
        if self.loss_type == "vespo":
            weight = self.get_gamma_weights(
                advantages=advantages,
                log_ratio_per_token=logps - old,
                mask=mask,
                importance_sampling_ratio=batch.get("importance_sampling_ratio"),
                k_pos=self.args.vespo_k_pos,
                lambda_pos=self.args.vespo_lambda_pos,
                k_neg=self.args.vespo_k_neg,
                lambda_neg=self.args.vespo_lambda_neg,
            )
        return surrogate(self.loss_type, ratio, advantages, logps, bounds, self.args, weight)

    def _normalised(self, token_loss: Tensor, mask: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """From token losses to one number, as TRL's loss types do it, scaled for gradient accumulation."""
        training = self.mode == "train"
        accumulated = self.current_gradient_accumulation_steps if training else 1.0
        tokens = batch["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return normalised(
            token_loss,
            mask,
            self.loss_type,
            rows=batch.get("mean_rows", len(token_loss)),
            longest=self.max_completion_length,
            tokens=tokens,
            accumulated=accumulated,
        )

    def _log(self, found: Surrogate, values: dict[str, Tensor], batch: Mapping[str, Any]) -> None:
        """Logs means over counted tokens, whether or not a strategy took them out of the loss, of all processes."""
        counted, gather = counted_tokens(batch), self.accelerator.gather
        if found.low_clipped is not None and found.high_clipped is not None:
            low, high = found.low_clipped.float(), found.high_clipped.float()
            region = (found.low_clipped | found.high_clipped).float()
            values |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": region}
            for name, clipped, most in (("low_min", low, torch.min), ("high_max", high, torch.max)):
                # One number per process: they may have different numbers of rows.
                of_rows = sequence_means(clipped, counted)
                of_rows = of_rows[~of_rows.isnan()]
                here = most(of_rows) if len(of_rows) else torch.tensor(torch.nan, device=counted.device)
                everywhere = gather(here)
                everywhere = everywhere[~everywhere.isnan()]
                self.record_metric(f"clip_ratio/{name}", most(everywhere).item() if len(everywhere) else math.nan)
        sums_counts = sums_and_counts(values, counted)
        if "left_out" in batch:  # rows that need no pass: their entropy is known, and nothing of them is clipped
            sums, counts = batch["left_out"]
            per_token = torch.tensor([value.size(1) > 1 for value in values.values()], device=sums_counts.device)
            sums_counts[1] += counts * per_token
            sums_counts[0, list(values).index("entropy")] += sums
        total_sums, total_counts = self.accelerator.reduce(sums_counts, "sum")
        for name, mean in zip(values, (total_sums / total_counts.clamp(min=1.0)).tolist(), strict=True):
            self.record_metric(name, mean)

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
        state = StepState(self._now, self._mean_reward, self.reset_reference, self.reset_optimizer)
        for strategy in self.strategies:
            strategy.after_step(state)

    # ---------------------------------------------------------------- checkpoints

    def write_state(self, folder: Path) -> None:
        if self.waiting is not None:
            checkpoints.write_batches(folder, self.accelerator.process_index, self.waiting)
        if not self.args.should_save:
            return
        progress = checkpoints.Progress(self.micro_step, self._mean_reward)
        checkpoints.write_progress(folder, progress, self.strategies)
        if self._reference_moved:
            checkpoints.write_reference(folder, reference_weights(*self._models()))

    def read_state(self, folder: Path) -> None:
        progress = checkpoints.read_progress(folder, self.strategies)
        if progress is None:
            return
        self.micro_step, self._mean_reward = progress.micro_step, progress.reward
        reference = checkpoints.read_reference(folder)
        if reference is not None:
            load_reference(*self._models(), reference)
            self._reference_moved = True
        batches = checkpoints.read_batches(folder, self.accelerator.process_index, self.accelerator.device)
        if batches is not None:
            self.waiting = batches


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: ExplorationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.after_step()
