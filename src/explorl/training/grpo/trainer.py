"""GRPO with exploration strategies: a drop-in for TRL's `GRPOTrainer`.

    sample ─► reward ─► advantage ─► token statistics ─► strategies ─► micro-batches ─► loss ─► update

TRL samples (through our engine), rewards and normalises; the generation batch of all processes then becomes a `Batch`
(as a whole, or each process's part of it), the strategies act on it, and per-token tensors are put into the
micro-batches for the loss:

    loss_t = −min(r·A, clip(r, 1 − low, 1 + high)·A)·weight + β·k3(π_ref, π_θ)·kl_weight + penalties
    r = exp(log π − log π_old),   k3 = exp(log π_ref − log π) − (log π_ref − log π) − 1

(k3·r instead of k3 with `GRPOConfig.use_bias_correction_kl`, TRL's default; the other loss types are in
`explorl.training.grpo.loss`.) With `strategies=[]` loss and gradients equal those of `GRPOTrainer`.

The trainer owns the objects that do the work, and passes values between them (docs/how-a-step-works.md):

    prompts      which prompts are used: dynamic sampling, skip_solved
    sampler      how rows are sampled: engine, generate, vLLM
    logprobs     log-probabilities and token statistics: packed, padded or unrolled pass
    inspector    what is reported of a batch to listeners and observers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
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
from explorl.strategies.base import act_on_parts, overrides
from explorl.training.grpo import checkpoint, construction, refusals
from explorl.training.grpo.activity import Activity
from explorl.training.grpo.batch import TokenStats, generation_batch, put_back
from explorl.training.grpo.correct import Correct
from explorl.training.grpo.correct import Spec as CorrectSpec
from explorl.training.grpo.dynamic import DynamicSampling, as_option
from explorl.training.grpo.inspection import InspectionCallback, Inspector, RolloutListener
from explorl.training.grpo.inspection_schedule import Lens, ObserverLike, build_observers
from explorl.training.grpo.logprobs import LogProbs
from explorl.training.grpo.objective import LossMetrics, accumulation, grpo_loss
from explorl.training.grpo.prompt_source import PromptSource
from explorl.training.grpo.reference import Reference
from explorl.training.grpo.rewards import AnswerFunction, answers_of, check_totals, group_advantages
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.sampler import RolloutSampler
from explorl.training.grpo.shaping import shape
from explorl.training.grpo.solved import SkipSolved
from explorl.training.grpo.stopping import take_stop_strings
from explorl.training.grpo.tool_transcripts import ToolLike, tool_call_metrics
from explorl.training.grpo.trl_adapter import IMAGES, GRPOAdapter, has_own_loss, split_like_trl, without_gradient
from explorl.training.micro_batches import make_micro_batches
from explorl.training.sharding import clear_moments, ignored_sharding

StrategyLike = Strategy | str | Mapping[str, Any]


class ExplorationTrainer(GRPOAdapter):
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

    sampler: RolloutSampler
    logprobs: LogProbs
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
        refusals.check_engine_name(engine)
        self.strategies: list[Strategy] = build_all(strategies)
        built_observers = build_observers(observers)
        dynamic = as_option(DynamicSampling, dynamic_sampling, "dynamic_sampling")
        skip = as_option(SkipSolved, skip_solved, "skip_solved")
        self._warned: set[str] = set()
        trl = construction.named_arguments(more, trl)
        construction.check_class(type(self), ExplorationTrainer, self.strategies)
        tool = None if interpreter is None else ToolUse.of(interpreter, "interpreter")
        refusals.check_interpreter_alone(tool, trl)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = GRPOConfig(f"{name.rstrip('/').split('/')[-1]}-GRPO")
        for strategy in self.strategies:
            for key, value in strategy.arguments().items():
                setattr(args, key, value)
        args.use_vllm = args.use_vllm or engine == "vllm"
        refusals.check_arguments(args, self.strategies, answers)
        if args.use_vllm and args.vllm_mode == "colocate":
            keep_weights_in_place()
        rows = {}
        if not trl.get("environment_factory"):
            rows = construction.first_rows(train_dataset, args)
            rows |= construction.first_evaluation_rows(trl.get("eval_dataset"))
        if train_dataset is not None:
            train_dataset = construction.ordered(train_dataset, self.strategies)
        refusals.check_prompt_source(dynamic, skip, args=args, dataset=train_dataset, arguments=trl)
        path = construction.model_path(model)
        super().__init__(path, reward_funcs, args=args, train_dataset=train_dataset, **trl)
        if self.rollout_func is None:
            for where, row in rows.items():
                construction.check_chat_template(row, where, self.processing_class)
        self.stop_strings = take_stop_strings(self)

        self.correct = Correct.of(correct, self.reward_func_names)
        self.answers = answers
        self.sampled = SampledRows()
        self.sampler = RolloutSampler(self, engine, engine_options or {}, tool)
        self.logprobs = LogProbs(self, packed)
        self.inspector = Inspector(self, lens or Lens(), built_observers, token_records)
        self.prompts = PromptSource(self, dynamic, skip)
        self.reference = Reference(self)
        self.loss_metrics = LossMetrics(self)
        self.activity = Activity(self)
        self.mean_reward = math.nan
        """Mean reward of the latest generation batch."""
        if on_rollouts is not None:
            self.listen(on_rollouts)
        self._warn_of_inert_settings()
        refusals.check_reference(self)
        self.add_callback(InspectionCallback(self))
        if any(overrides(strategy, "after_step") for strategy in self.strategies):
            self.add_callback(_AfterStep(self))
        self.add_callback(self.activity)

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
        dynamic = self.prompts.dynamic_sampling
        needed = self.prompts.skip_solved is not None or (dynamic is not None and dynamic.by == "correct")
        if self.correct.guessed and (needed or any(strategy.needs_correct for strategy in self.strategies)):
            self.warn_once(self.correct.guess)
        if ignored := ignored_sharding(args, self.accelerator):
            self.warn_once(
                f"{ignored} is configured, but accelerate ignores it on a {self.accelerator.device.type} device: "
                "every process holds all weights, gradients and optimizer states"
            )

    def listen(self, listener: RolloutListener, token_records: int = 0, after: RolloutListener | None = None) -> None:
        """Add a listener like ``on_rollouts``, with token records of at least ``token_records`` prompts.

        Args:
            listener: Called with each generation batch before its first update.
            token_records: Number of prompts whose token records are among the columns.
            after: Called after the last update on a batch with inspected completions, with the same columns and
                ``logp_after``; switches inspection on.
        """
        self.inspector.listen(listener, token_records, after)

    # ---------------------------------------------------------------- a generation batch

    def scored(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a generation batch of these rows: sampled, rewarded, and shaped by the strategies."""
        if self.environment_factories is None:
            construction.check_prompts(rows, "a generation batch")
        if self.mode == "eval":
            return self._scored_by_trl(rows)[0]
        rows, sampled, keys = self.prompts.next(rows)
        output, sampled = self._scored_by_trl(rows, sampled)
        self.prompts.record_visits(keys, sampled.reward_parts)
        rewards, advantages = self.total_rewards(sampled.reward_parts), output["advantages"]
        stats = self.logprobs.statistics(output, sampled, required=bool(self.strategies))
        if self.strategies and stats is not None:
            self.shape_batch(output, sampled, stats, rewards)
        self.inspector.see(output, sampled, stats, advantages, rewards)
        self.activity.batch(rewards)
        self.mean_reward = rewards.nanmean().item()
        return output

    def _scored_by_trl(
        self, rows: list[dict[str, Any]], sampled: SampledRows | None = None
    ) -> tuple[dict[str, Any], SampledRows]:
        """Return TRL's generation batch with what the loss needs besides, and how its rows were sampled."""
        output, sampled = self.score(rows, sampled), self.sampled
        if sampled.transcripts is not None:
            for name, value in tool_call_metrics(gather_object(sampled.transcripts)).items():
                self.record_metric(name, value)
        if self.mode == "eval":
            return output, sampled
        if self.logprobs.old_is_first_pass:
            del output["old_per_token_logps"]
        output["made_at"] = torch.tensor(self.state.global_step)
        if sampled.training_temperature is not None:
            output["row_temperature"] = sampled.training_temperature
        return output, sampled

    def total_rewards(self, parts: Tensor) -> Tensor:
        """Return the weighted sum of the reward parts of each row; NaN if no reward function scored it."""
        rewards = (parts * self.reward_weights.to(parts.device)).nansum(dim=1)
        rewards = torch.where(parts.isnan().all(dim=1), torch.nan, rewards)
        return check_totals(rewards, self.reward_weights.tolist())

    def shape_batch(self, output: dict[str, Any], sampled: SampledRows, stats: TokenStats, rewards: Tensor) -> None:
        """Apply the strategies to TRL's generation batch: to the batch of all processes, or to this one's part."""
        answers = None
        if self.answers is not None and any(strategy.needs_answers for strategy in self.strategies):
            answers = answers_of(self.answers, {**sampled.rewarded, "trainer_state": self.state})
        batch = generation_batch(
            self.accelerator,
            stats,
            output,
            prompts=sampled.prompts,
            parts=sampled.reward_parts,
            rewards=rewards,
            correct=self.correct,
            ends=[*self.eos_token_ids, self.tokenizer.pad_token_id],
            stopped=sampled.stopped,
            generations=self.num_generations,
            temperature=self.temperature,
            row_temperature=sampled.sampling_temperature,
            step=self.state.global_step,
            answers=answers,
            max_length=self.max_completion_length,
            gathered=self.accelerator.num_processes == 1 or not act_on_parts(self.strategies),
        )
        advantages = partial(group_advantages, generations=self.num_generations, scale=self.scale_rewards)
        shaped = shape(self.strategies, batch, advantages)
        put_back(shaped, output, batch, process=self.accelerator.process_index, penalties=self.has_penalties)
        for name, value in shaped.metrics.items():
            self.record_metric(name, value)
        self.activity.shaped(shaped.metrics)

    @property
    def has_penalties(self) -> bool:
        """True if a strategy adds a term to the loss."""
        return any(overrides(strategy, "penalty") for strategy in self.strategies)

    # ---------------------------------------------------------------- micro-batches

    def micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Split into micro-batches of about equally many tokens, with at most as many rows as TRL would use.

        TRL's own split is used if the loss depends on the composition of micro-batches, or if optimizer steps do not
        end with the generation batch.
        """
        parts, window = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        uneven = parts % window != 0 and window % parts != 0
        depends = self.loss_type == "bnpo" or self.has_entropy_bonus or self.top_entropy_quantile < 1.0
        depends = depends or self.aux_loss_enabled or has_own_loss(self)
        if depends or uneven or any(name in batch for name in IMAGES):
            return split_like_trl(batch, parts)
        windows = max(parts // window, 1)
        needed = self._needed(batch).cpu()
        if needed.sum() < parts:  # every micro-batch needs a row, on every process
            needed.fill_(True)
        # A callback may have lowered the micro-batch size since the batch was planned.
        max_rows = max(self.args.per_device_train_batch_size, -(-len(needed) // parts))
        entropy = None if self.sampled.records is None else self.sampled.records.entropy
        micro_batches = make_micro_batches(
            batch, windows=windows, parts=parts // windows, needed=needed, max_rows=max_rows, entropy=entropy
        )
        if windows > 1 and self.has_penalties:
            for part in micro_batches[window:]:  # used after the policy has changed: by the pass of the loss
                with without_gradient(self):
                    part["old_per_token_logps"], _, _ = self.logprobs.of(
                        part, rows=len(part["completion_ids"]), temperature=part.get("row_temperature")
                    )
        return micro_batches

    def _needed(self, batch: Mapping[str, Any]) -> Tensor:
        """Tell which rows have a gradient; all of them, if anything besides the advantage contributes to it.

        The metrics of the other rows come from the engine's records, if those are of this policy at temperature 1.
        """
        advantages, sampled = batch["advantages"], self.sampled
        reused = self.num_iterations > 1 or self.args.steps_per_generation > self.args.gradient_accumulation_steps
        recorded = sampled.records is not None and self.temperature == 1.0 and sampled.training_temperature is None
        weighs = self.loss_type == "vespo"  # logs a weight of every row
        if reused or not recorded or self.beta != 0.0 or self.has_penalties or weighs:
            return torch.ones(len(advantages), dtype=torch.bool, device=advantages.device)
        if advantages.dim() == 1:
            return advantages != 0
        return (advantages * batch["loss_mask"]).abs().sum(1) > 0

    # ---------------------------------------------------------------- loss

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch."""
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        logps, entropies, aux_loss = self.logprobs.of(
            batch, model=model, temperature=batch.get("row_temperature"), compute_entropy=True, **options
        )
        assert entropies is not None
        loss, values = grpo_loss(self, batch, logps, entropies)
        if aux_loss is not None:
            loss = loss + self.router_aux_loss_coef * aux_loss / accumulation(self)
            self.record_metric("aux_loss", self.accelerator.gather_for_metrics(aux_loss).mean().item())
        self.loss_metrics.add(values, batch)
        return loss

    # ---------------------------------------------------------------- after a step, checkpoints

    def after_step(self) -> None:
        """Call the strategies' hook after an optimizer step."""
        reset_optimizer = partial(clear_moments, self.optimizer)
        state = StepState(self.state.global_step, self.mean_reward, self.reference.reset, reset_optimizer)
        for strategy in self.strategies:
            strategy.after_step(state)

    def write_state(self, folder: Path) -> None:
        """Write the state that a checkpoint needs beyond TRL's; called on every process."""
        checkpoint.write_state(self, folder)

    def read_state(self, folder: Path) -> None:
        """Read the state that `write_state` has written."""
        checkpoint.read_state(self, folder)


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: ExplorationTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.after_step()
