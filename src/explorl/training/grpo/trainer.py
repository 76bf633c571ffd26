"""GRPO with exploration strategies: a drop-in for TRL's `GRPOTrainer`.

    sample ─► reward ─► advantage ─► token statistics ─► strategies ─► micro-batches ─► loss ─► update

TRL samples (through our engine), rewards and normalises; the generation batch of all processes then becomes a `Batch`
(as a whole, or each process's part of it), the strategies act on it, and per-token tensors are put into the
micro-batches for the loss:

    loss_t = −min(r·A, clip(r, 1 − low, 1 + high)·A)·weight + β·k3(π_ref, π_θ)·kl_weight + penalties
    r = exp(log π − log π_old),   k3 = exp(log π_ref − log π) − (log π_ref − log π) − 1

(k3·r instead of k3 with `GRPOConfig.use_bias_correction_kl`, TRL's default; the other loss types are in
`explorl.training.grpo.loss`.) With `strategies=[]` loss and gradients equal those of `GRPOTrainer`.

The trainer is a chain of subclasses: `trl_adapter` (TRL's interface), `sampler`, `logprobs`, `objective`, `inspection`
(what is reported of a step), `refilling` (which prompts are used), and this one, which ties them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig

from explorl.rollout.backends.vllm import keep_weights_in_place
from explorl.rollout.tool_use import ToolUse
from explorl.strategies import ReferenceReset, StepState, Strategy, build_all, warn_inert
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import act_on_parts, overrides
from explorl.training.grpo import checkpoint, construction, options
from explorl.training.grpo.activity import Activity
from explorl.training.grpo.answers import AnswerFunction, answers_of, check_answers
from explorl.training.grpo.batch import TokenStats, engine_token_stats, forward_token_stats, generation_batch, put_back
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.correct import Spec as CorrectSpec
from explorl.training.grpo.dynamic import DynamicSampling, as_option
from explorl.training.grpo.inspection import RolloutListener
from explorl.training.grpo.inspection_schedule import Lens, ObserverLike, build_observers
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.reference import adapter_weights, load_reference, reference_weights
from explorl.training.grpo.refilling import RefillingTrainer, refuse
from explorl.training.grpo.rewards import check_totals
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.solved import SkipSolved
from explorl.training.grpo.tool_transcripts import ToolLike, check_tool_conflicts, tool_call_metrics
from explorl.training.grpo.trl_adapter import IMAGES
from explorl.training.grpo.vllm_rows import refuse_with_vllm
from explorl.training.micro_batches import make_micro_batches
from explorl.training.sharding import accessible_parameters, clear_moments, fsdp_version, ignored_sharding, zero_stage

StrategyLike = Strategy | str | Mapping[str, Any]
ENGINES = ("explorl", "generate", "vllm")


class ExplorationTrainer(RefillingTrainer):
    """`trl.GRPOTrainer` with a list of exploration strategies.

    Args:
        strategies: `Strategy` objects, names ("ppl_shaping") or mappings ({"ppl_shaping": {"alpha": 0.02}}), in the
            order in which they act.
        correct: The reward function that decides whether a completion is correct, for strategies that need it: its
            name, optionally with the minimum value of a correct completion ("accuracy" or ("accuracy", 0.5)). With
            None it is guessed, with a warning.
        answers: Extracts the answers, for strategies that need them: a function with the arguments of a reward function
            that returns one text per completion, equal for equal answers, or None for a completion without an answer.
        engine: Backend that samples: "explorl" (`explorl.rollout.Engine`), "generate" (`model.generate`) or "vllm"
            (TRL's vLLM, with the strategies' options per row). None selects vllm if `args.use_vllm` is set, else
            "explorl" if it computes what the model computes, else "generate" with a warning that gives the reason.
        engine_options: `batch_size` (maximum number of rows decoded together) and `memory_budget` (bytes beside the
            model) of the engine. Between two batches it frees its memory if that is more than a tenth of the device's.
        packed: Compute log-probabilities without padding. None does so if the result equals the model's own pass, True
            raises if it does not, False uses TRL's padded pass.
        interpreter: A tool that completions may call in text: "python" (fenced blocks), "calculator"
            (``<<12*34=408>>``), or one with custom limits, like ``python_tool(max_calls=3)`` of
            `explorl.rollout.tools`. Its outputs are excluded from the loss and from all statistics, and rewards are
            computed for the text without them.
        on_rollouts: Called on the main process with the step that a generation batch is for, and its columns.
        token_records: Number of prompts of each batch whose token records are passed to `on_rollouts`.
        observers: Objects with ``see(step: StepView)`` whose numbers are logged for each generation batch, or their
            import paths (`explorl.training.grpo.inspection_schedule`); `explorl train` uses
            `explorl.training.grpo.observers.statistics()`.
        lens: How many completions are inspected by two additional passes, and how often.
        dynamic_sampling: Replace groups whose rewards are all equal by groups of fresh prompts before the update: True,
            a `DynamicSampling` (`explorl.training.grpo.dynamic`) or a mapping of its settings.
        skip_solved: Sample prompts that are solved every time less often: True, a `SkipSolved`
            (`explorl.training.grpo.solved`) or a mapping of its settings.

    All other arguments are those of `GRPOTrainer`; docs/trl.md lists how each of TRL's options is treated.
    """

    _tag_names = ["explorl", "trl", "grpo"]  # noqa: RUF012 (TRL's own attribute)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *more: Any,
        strategies: Sequence[StrategyLike] = (),
        correct: CorrectSpec = None,
        answers: AnswerFunction | None = None,
        engine: Literal["explorl", "generate", "vllm"] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        packed: bool | None = None,
        interpreter: ToolLike | None = None,
        on_rollouts: RolloutListener | None = None,
        token_records: int = 0,
        observers: Sequence[ObserverLike] = (),
        lens: Lens | None = None,
        dynamic_sampling: DynamicSampling | Mapping[str, Any] | bool | None = None,
        skip_solved: SkipSolved | Mapping[str, Any] | bool | None = None,
        **trl: Any,
    ) -> None:
        if engine not in (None, *ENGINES):
            raise ValueError(
                f"engine is {engine!r}; use {', '.join(map(repr, ENGINES))}, or None for an automatic choice"
            )
        self.strategies: list[Strategy] = build_all(strategies)
        built_observers = build_observers(observers)
        dynamic = as_option(DynamicSampling, dynamic_sampling, "dynamic_sampling")
        skip = as_option(SkipSolved, skip_solved, "skip_solved")
        self._warned: set[str] = set()
        trl = construction.named_arguments(more, trl)
        construction.check_class(type(self), ExplorationTrainer, self.strategies)
        self._interpreter = None if interpreter is None else ToolUse.of(interpreter, "interpreter")
        check_tool_conflicts(self._interpreter, trl)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        for strategy in self.strategies:
            for key, value in strategy.arguments().items():
                setattr(args, key, value)
        options.refuse(args)
        options.refuse_strategies(args, self.strategies)
        check_answers(self.strategies, answers)
        self._answer_function = answers
        if engine == "vllm":
            args.use_vllm = True
        if args.use_vllm:
            refuse_with_vllm(args, self.strategies)
            if args.vllm_mode == "colocate":
                keep_weights_in_place()
        rows: dict[str, Mapping[str, Any]] = {}
        if not trl.get("environment_factory"):
            rows = construction.first_rows(train_dataset, args)
            rows |= construction.first_evaluation_rows(trl.get("eval_dataset"))
        if train_dataset is not None:
            train_dataset = self._ordered(train_dataset)
        refuse(dynamic, skip, args=args, dataset=train_dataset, arguments=trl)
        path = construction.model_path(model)
        super().__init__(path, reward_funcs, args=args, train_dataset=train_dataset, **trl)
        if self.rollout_func is None:
            for where, row in rows.items():
                construction.check_chat_template(row, where, self.processing_class)
        self._init_stop_strings()

        self.correct = Correct.of(correct, self.reward_func_names)
        self._engine = self._engine_for(engine, engine_options or {})
        self._packed = False if self._requires_padding() else packed
        self._init_inspection(lens or Lens(), built_observers, token_records)
        self._init_refilling(dynamic, skip)
        if on_rollouts is not None:
            self.listen(on_rollouts)
        self._clear_rollout()
        self._mean_reward = math.nan
        self._reference_moved = bool(args.sync_ref_model)
        self._warn_of_inert_settings()
        self._check_sharding()
        if any(overrides(strategy, "after_step") for strategy in self.strategies):
            self.add_callback(_AfterStep(self))
        self.activity = Activity(self)
        self.add_callback(self.activity)

    def _ordered(self, dataset: Any) -> Any:
        """Return the data set with the prompts that the strategies select, in their order."""
        for strategy in self.strategies:
            if not overrides(strategy, "order"):
                continue
            if not hasattr(dataset, "select"):
                raise ValueError(
                    f"{strategy.name} orders the prompts, but {type(dataset).__name__} is a stream, which would have "
                    "to be read to its end; use a datasets.Dataset"
                )
            transformed = "prompt" not in dataset.column_names  # a transform makes it when a row is read
            prompts = (row["prompt"] for row in dataset) if transformed else dataset["prompt"]
            order = strategy.order([prompt_text(prompt) for prompt in prompts])
            if order is not None:
                dataset = dataset.select(self._checked_order(strategy, [int(index) for index in order], len(dataset)))
        return dataset

    @staticmethod
    def _checked_order(strategy: Strategy, order: list[int], rows: int) -> list[int]:
        invalid = [index for index in order if not 0 <= index < rows]
        if invalid or not order:
            problem = f"index {invalid[0]}" if invalid else "no prompts"
            raise ValueError(
                f"{name_of(strategy)}.order returns {problem}; return one or more indices from 0 to {rows - 1}"
            )
        return order

    def _warn_of_inert_settings(self) -> None:
        args = self.args
        reused = args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps
        for warning in warn_inert(self.strategies, reused=reused):
            self.warn_once(warning)
        for strategy in self.strategies:
            if isinstance(strategy, ReferenceReset) and self.beta == 0.0:
                self.warn_once(
                    "reference_reset resets only the optimizer's state: beta is 0; set it above 0, such as 0.001"
                )
            if overrides(strategy, "clip") and self.loss_type in ("sapo", "vespo"):
                self.warn_once(f"the clip of {strategy.name} has no effect: loss_type={self.loss_type!r} clips nothing")
        needed = self.skip_solved is not None or (self.dynamic_sampling and self.dynamic_sampling.by == "correct")
        if self.correct.guessed and (needed or any(strategy.needs_correct for strategy in self.strategies)):
            self.warn_once(self.correct.guess)

    def _check_sharding(self) -> None:
        if ignored := ignored_sharding(self.args, self.accelerator):
            self.warn_once(
                f"{ignored} is configured, but accelerate ignores it on a {self.accelerator.device.type} device: "
                "every process holds all weights, gradients and optimizer states"
            )
        zero3 = zero_stage(self.accelerator) == 3
        sharding = "FSDP" if fsdp_version(self.accelerator) else "ZeRO-3" if zero3 and self.ref_model is None else ""
        for strategy in self.strategies:
            if isinstance(strategy, ReferenceReset) and self.beta != 0.0 and sharding:
                raise ValueError(
                    f"{name_of(strategy)} changes the reference, which is not possible if {sharding} shards "
                    f"{'it' if sharding == 'FSDP' else 'the model that it is an adapter of'}; use ZeRO-2, or beta=0"
                )

    # ---------------------------------------------------------------- token statistics, shaping

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a generation batch: sampled, rewarded, and shaped by the strategies."""
        if self.environment_factories is None:
            construction.check_prompts(inputs, "a generation batch")
        if self.mode == "train":
            inputs = self.refill(inputs)
        self._clear_rollout()
        self._prompts = [row.get("prompt", "") for row in inputs]
        if self.needs_old_logps and self.old_is_first_pass:
            self._old_logps = torch.zeros(len(inputs), 0, device=self.accelerator.device)  # TRL need not compute them
        output = super().scored(inputs)
        self._old_logps = None
        self._log_tool_calls()
        if self.mode == "eval":
            return output
        if self.needs_old_logps and self.old_is_first_pass:
            del output["old_per_token_logps"]
        output["made_at"] = torch.tensor(self.current_step)
        if self._row_temperature is not None:
            output["row_temperature"] = self._row_temperature
        rewards = self._rewards()
        self._mean_reward = rewards.nanmean().item()
        advantage = output["advantages"]
        stats: TokenStats | None = None
        if self.strategies:
            stats = self._token_stats(output)
            self._shape(output, stats, rewards)
        elif self._records is not None:
            stats = engine_token_stats(self._records, output["completion_ids"].size(1))
        self._inspect_batch(output, stats, advantage, rewards)
        self.activity.batch(rewards)
        return output

    def _log_tool_calls(self) -> None:
        if self.transcripts is not None:
            for name, value in tool_call_metrics(gather_object(self.transcripts)).items():
                self.record_metric(name, value)

    def _rewards(self) -> Tensor:
        """Return the weighted sums of the reward parts of all processes; NaN if no reward function scored the row."""
        assert self.reward_parts is not None
        return check_totals(self._totals(self.reward_parts), self.reward_weights.tolist())

    def _shape(self, output: dict[str, Any], stats: TokenStats, rewards: Tensor) -> None:
        """Apply the strategies to the generation batch."""
        assert self.reward_parts is not None
        batch = generation_batch(
            self.accelerator,
            stats,
            output,
            prompts=self._prompts,
            parts=self.reward_parts,
            rewards=rewards,
            correct=self.correct,
            ends=[*self.eos_token_ids, self.tokenizer.pad_token_id],
            stopped=self.stopped,
            generations=self.num_generations,
            temperature=self.temperature,
            row_temperature=self._sampling_temperature,
            step=self.current_step,
            answers=self._answers(),
            max_length=self.max_completion_length,
            gathered=self.accelerator.num_processes == 1 or not act_on_parts(self.strategies),
        )
        shaped = shape(self.strategies, batch, self.normalised)
        put_back(shaped, output, batch, process=self.accelerator.process_index, penalties=self.has_penalties)
        for name, value in shaped.metrics.items():
            self.record_metric(name, value)
        self.activity.shaped(shaped.metrics)

    def _answers(self) -> list[str | None] | None:
        """Return the answers of this process's completions; None if no strategy needs them."""
        if self._answer_function is None or not any(strategy.needs_answers for strategy in self.strategies):
            return None
        return answers_of(self._answer_function, {**self.rewarded, "trainer_state": self.state})

    def _token_stats(self, output: Mapping[str, Any]) -> TokenStats:
        """Return the token statistics of this process: recorded by the engine, or from a pass over the batch."""
        length = output["completion_ids"].size(1)
        if self._records is not None:
            stats = engine_token_stats(self._records, length)
            if self._row_temperature is self._sampling_temperature:
                return stats
            logps = output.get("old_per_token_logps")
            if logps is None:  # the temperature of the loss differs from that of sampling
                with self.without_gradient():
                    logps, _, _ = self._logps(output, temperature=self._row_temperature)
            return stats._replace(logps=logps)
        if any(name in output for name in IMAGES):
            with self.without_gradient():
                logps, entropy, _ = self._logps(output, compute_entropy=True)
            assert entropy is not None
            return TokenStats(logps, entropy, None, None)
        rows = self.args.per_device_train_batch_size
        # ZeRO-3 does not survive passes of two kinds between its steps.
        with self.without_gradient(), self.whole_weights() if self.sharded else nullcontext():
            return forward_token_stats(
                self.model,
                output,
                temperature=self.temperature,
                rows=rows,
                autocast=self.accelerator.autocast,
            )

    # ---------------------------------------------------------------- micro-batches

    def micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Split into micro-batches of about equally many tokens, with at most as many rows as TRL would use.

        TRL's own split is used if the loss depends on the composition of micro-batches, or if optimizer steps do not
        end with the generation batch.
        """
        parts, window = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        uneven = parts % window != 0 and window % parts != 0
        depends = self.loss_type == "bnpo" or self.has_entropy_bonus or self.top_entropy_quantile < 1.0
        depends = depends or self.has_own_loss
        if depends or uneven or self.aux_loss_enabled or any(name in batch for name in IMAGES):
            return super().micro_batches(batch)
        windows = max(parts // window, 1)
        needed = self._needed(batch).cpu()
        if needed.sum() < parts:  # every micro-batch needs a row, on every process
            needed.fill_(True)
        # A callback may have lowered the micro-batch size since the batch was planned.
        max_rows = max(self.args.per_device_train_batch_size, -(-len(needed) // parts))
        entropy = None if self._records is None else self._records.entropy
        micro_batches = make_micro_batches(
            batch, windows=windows, parts=parts // windows, needed=needed, max_rows=max_rows, entropy=entropy
        )
        if windows > 1 and self.has_penalties:
            for part in micro_batches[window:]:  # used after the policy has changed: by the pass of the loss
                with self.without_gradient():
                    part["old_per_token_logps"], _, _ = self._logps(
                        part, rows=len(part["completion_ids"]), temperature=part.get("row_temperature")
                    )
        return micro_batches

    def _needed(self, batch: Mapping[str, Any]) -> Tensor:
        """Tell which rows have a gradient; all of them, if anything besides the advantage contributes to it.

        The metrics of the other rows come from the engine's records, if those are of this policy at temperature 1.
        """
        advantages = batch["advantages"]
        reused = self.num_iterations > 1 or self.args.steps_per_generation > self.args.gradient_accumulation_steps
        recorded = self._records is not None and self.temperature == 1.0 and self._row_temperature is None
        weighs = self.loss_type == "vespo"  # logs a weight of every row
        if reused or not recorded or self.beta != 0.0 or self.has_penalties or weighs:
            return torch.ones(len(advantages), dtype=torch.bool, device=advantages.device)
        if advantages.dim() == 1:
            return advantages != 0
        return (advantages * batch["loss_mask"]).abs().sum(1) > 0

    # ---------------------------------------------------------------- after a step

    def reset_reference(self) -> None:
        """Set the reference to the current policy, unless β = 0."""
        if self.beta == 0.0:
            return
        model, reference = self._models()
        with accessible_parameters(model), accessible_parameters(*self._reference_models(), change=True):
            load_reference(model, reference, model.state_dict() if reference is not None else adapter_weights(model))
        self._reference_moved = True

    def _models(self) -> tuple[Any, Any]:
        """Return the policy and the reference model; None if the reference is an adapter of the policy."""
        reference = None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model)
        return self.accelerator.unwrap_model(self.model), reference

    def _reference_models(self) -> list[Any]:
        """Return the reference model as a list; empty if the reference is an adapter of the policy."""
        return [model for model in self._models()[1:] if model is not None]

    def reset_optimizer(self) -> None:
        """Clear the optimizer's moments."""
        clear_moments(self.optimizer)

    def after_step(self) -> None:
        """Call the strategies' hook after an optimizer step."""
        state = StepState(self.current_step, self._mean_reward, self.reset_reference, self.reset_optimizer)
        for strategy in self.strategies:
            strategy.after_step(state)

    # ---------------------------------------------------------------- checkpoints

    def write_state(self, folder: Path) -> None:
        if self.buffered_batches is not None:
            checkpoint.write_batches(folder, self.accelerator.process_index, self.buffered_batches)
        if self.accelerator.is_main_process:
            self._write_inspections(folder)
        if self._reference_moved:
            with accessible_parameters(*self._reference_models()):  # on every process
                if self.args.should_save:
                    checkpoint.write_reference(folder, reference_weights(*self._models()))
        if not self.args.should_save:
            return
        progress = checkpoint.TrainingProgress(self.micro_step, self._mean_reward, self.accelerator.num_processes)
        checkpoint.write_progress(folder, progress, self.strategies)
        self._write_streaks(folder)

    def read_state(self, folder: Path) -> None:
        self._read_inspections(folder)
        self._read_streaks(folder)
        processes = self.accelerator.num_processes
        progress = checkpoint.read_progress(folder, self.strategies, processes)
        if progress is None:
            return
        self.micro_step, self._mean_reward = progress.micro_step, progress.reward
        reference = checkpoint.read_reference(folder)
        if reference is not None:
            with accessible_parameters(*self._reference_models(), change=True):
                load_reference(*self._models(), reference)
            self._reference_moved = True
        batches = checkpoint.read_batches(folder, self.accelerator.process_index, self.accelerator.device)
        if batches is not None and progress.processes != processes:
            self.warn_once(
                f"{folder} was written by {progress.processes} processes, now there are {processes}: the generation "
                "batch that was in use is dropped, and a new one is sampled"
            )
            batches = None
        if batches is None:  # continue with the first micro-batch of a new batch, also if batches have more of them now
            self.micro_step = -(-self.micro_step // self._micro_batches_of_batch) * self._micro_batches_of_batch
        else:
            if len(batches) != self.args.steps_per_generation:
                raise ValueError(
                    f"{folder} has a generation batch in {len(batches)} parts, but steps_per_generation is "
                    f"{self.args.steps_per_generation}; resume with steps_per_generation={len(batches)}"
                )
            self.buffered_batches = batches


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: ExplorationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.after_step()
