"""Sampling through the engine: when that is possible, with which options, and what it records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import GenerationMixin

from explorl.modeling.precision import has_arithmetic, weights_dtype
from explorl.modeling.proof import inner_model, text_config
from explorl.rollout import Engine, Rollout, Rollouts, UnsupportedModel
from explorl.rollout.branching import branch_rows
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.strategies._lib.validate import name_of
from explorl.training.grpo import refusals, vllm_rows
from explorl.training.grpo.branches import branch_metrics, branch_record, sets_row_sampling
from explorl.training.grpo.conversations import Conversation
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.sampling_plan import (
    HONOURED_OPTIONS,
    SamplingPlan,
    pad_schedules,
    sampling_options,
    unsupported_options,
)
from explorl.training.grpo.stopping import StoppedTokens, end_token
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.grpo.trl_adapter import Sampler, is_sharded, load_vllm_weights, whole_weights
from explorl.training.sharding import autocast_dtype, fsdp_modules, spread_devices, why_not_gathered, zero_stage

_GENERATE = GenerationMixin.generate


class RolloutSampler(Sampler):
    """Samples through the engine if that computes what the model computes, and keeps its token statistics.

    Args:
        trainer: The trainer whose policy samples, already constructed by TRL.
        engine: The requested backend; None for an automatic choice.
        options: Arguments of `Engine`.
        interpreter: The tool that completions may call in text.
    """

    def __init__(
        self, trainer: Any, engine: str | None, options: Mapping[str, Any], interpreter: ToolUse | None
    ) -> None:
        self.trainer, self.interpreter = trainer, interpreter
        self.engine: Engine | None = None
        """None if TRL samples."""
        self.vllm: vllm_rows.VllmRows | None = None
        """Set if vLLM samples and a strategy sets how each row is sampled."""
        self._conversation: tuple[Conversation, SamplingPlan] | None = None
        """With TRL's tools: the conversations that are being sampled turn by turn."""
        why = why_not_engine(trainer)
        refusals.check_sampling(trainer, engine, options, interpreter, why)
        per_row = [name_of(strategy) for strategy in trainer.strategies if sets_row_sampling(strategy)]
        if trainer.use_vllm and engine in (None, "vllm") and per_row:
            self.vllm = vllm_rows.VllmRows(trainer)
            return
        if engine in (None, "explorl") and not why:
            self.engine, why = try_engine(trainer, options)
            if self.engine is None and (engine == "explorl" or interpreter is not None):
                raise ValueError(f"engine='explorl' would not sample as this model does ({why}); use engine=None")
        if self.engine is not None:
            return
        if per_row:
            chosen = "vLLM" if trainer.use_vllm else "model.generate"
            reason, offer = (why, "") if why else (f"engine={engine!r}", "use engine=None, or ")
            raise ValueError(
                f"{per_row[0]} sets how each row is sampled, which {chosen} does not support ({reason}); "
                f"{offer}remove it"
            )
        others = trainer.use_vllm, trainer.rollout_func, trainer.use_transformers_continuous_batching
        if why and not any(others):
            trainer.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {why}")

    @property
    def needs_whole_weights(self) -> bool:
        """True if sampling needs all weights of a sharded model."""
        return self.engine is not None and is_sharded(self.trainer)

    # ---------------------------------------------------------------- sample

    def sample(
        self, sampled: SampledRows, prompt_ids: list[list[int]], rows: Sequence[int] | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """Return a completion for each prompt, with vLLM's log q for TRL's correction; None to have TRL sample.

        Args:
            sampled: What is recorded besides the completions.
            prompt_ids: Tokens of the prompts, each repeated once per completion, or of the conversations so far.
            rows: In a further turn of conversations with tools, the rows of the batch that continue.
        """
        if rows is not None:
            return None if self._conversation is None else (self._conversation[0].continue_rows(rows, prompt_ids), None)
        self._conversation = None
        if sampled.completion_ids is not None:
            return sampled.completion_ids, None
        if self.vllm is not None:
            return self._sample_with_vllm(self.vllm, sampled, prompt_ids)
        plan = self._plan_for_engine(sampled, prompt_ids)
        if plan is None or self.engine is None:
            return None
        if self.trainer.tools:
            conversation = Conversation(self.engine, prompt_ids, plan.params)
            self._conversation = conversation, plan
            return [self._tokens(rollout) for rollout in conversation.rollouts()], None
        rollouts = self.generate(prompt_ids, plan).check()
        if self.interpreter is not None:
            sampled.transcripts = [ToolTranscript.of(rollout) for rollout in rollouts]
        self.record(sampled, rollouts, plan)
        return [self._tokens(rollout) for rollout in rollouts], None

    def _plan_for_engine(self, sampled: SampledRows, prompt_ids: list[list[int]]) -> SamplingPlan | None:
        """Return how the engine samples this batch; None if TRL has to, for example after an option has changed."""
        trainer, engine = self.trainer, self.engine
        if engine is None:
            return None
        per_row = self.interpreter is not None or any(
            sets_row_sampling(strategy) or strategy.needs_min_p_mass is not None for strategy in trainer.strategies
        )
        if _has_own_generate(trainer.model) and not per_row:  # set after the trainer was built
            return None
        slower = "is sampled by model.generate, which is slower than Explorl's engine"
        if why := _why_not_options(trainer):  # changed since the trainer was built
            if per_row:
                raise ValueError(f"rows have individual options, which model.generate does not support ({why})")
            trainer.warn_once(f"a batch {slower}: {why}")
            return None
        options = sampling_options(_generate_options(trainer), trainer.eos_token_ids)
        plan = self._plan({**options, "stop": trainer.stop_strings}, sampled, len(prompt_ids))
        longest = self._longest_prompt(prompt_ids)
        context = getattr(text_config(trainer.model), "max_position_embeddings", None)
        if context is not None and longest >= context and not per_row:
            trainer.warn_once(f"a batch {slower}: a prompt has {longest} tokens and the model's context is {context}")
            return None
        try:
            engine.check(longest + options["max_tokens"])
        except UnsupportedModel as error:  # these prompts are longer than those of the trial
            if per_row:
                raise
            trainer.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}")
            self.engine = None
            return None
        return plan

    def _plan(self, options: dict[str, Any], sampled: SampledRows, rows: int) -> SamplingPlan:
        """Return the plan with the strategies' settings; without them in evaluation and for prompts of a caller."""
        trainer = self.trainer
        strategies = trainer.strategies if trainer.mode == "train" and rows == len(sampled.prompts) else []
        texts = [prompt_text(prompt) for prompt in sampled.prompts] if strategies else []
        plan = SamplingPlan(options, strategies, texts, trainer.state.global_step, self.interpreter is not None)
        plan.set_default_temperature(rows, trainer.temperature)
        return plan

    def _sample_with_vllm(
        self, vllm: vllm_rows.VllmRows, sampled: SampledRows, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """Sample through vLLM with the strategies' settings; leave evaluation batches to TRL."""
        trainer = self.trainer
        if trainer.mode != "train" or len(prompt_ids) != len(sampled.prompts):
            return None
        plan = self._plan(vllm_rows.trl_sampling_options(trainer), sampled, len(prompt_ids))
        load_vllm_weights(trainer)
        rollouts, logps = vllm.sample(prompt_ids, plan.params)
        self.record(sampled, rollouts, plan)
        return [self._tokens(rollout) for rollout in rollouts], logps

    def generate(self, prompt_ids: list[list[int]], plan: SamplingPlan) -> Rollouts:
        """Sample with the engine, with branches and tool calls if the plan has them."""
        trainer, tools = self.trainer, self.interpreter
        assert self.engine is not None
        if plan.branching is not None:
            uses = None if tools is None else plan.calls
            first = trainer.accelerator.process_index * len(prompt_ids)
            group = [(first + row) // trainer.num_generations for row in range(len(prompt_ids))]
            branched = branch_rows(
                self.engine, prompt_ids, plan.params, plan.branching, group=group, tools=tools, uses=uses
            )
            plan.reorder(branched.params_of)
            numbers = branch_metrics(gather_object([branch_record(branched)]))
            trainer.activity.branching(numbers)
            for name, value in numbers.items():
                trainer.record_metric(name, value)
            return branched
        if tools is not None:
            return generate_with_tools(self.engine, prompt_ids, 1, plan.params, tools, uses=plan.calls)
        return self.engine.generate(prompt_ids, 1, plan.params)

    def _tokens(self, rollout: Rollout) -> list[int]:
        """Return the tokens of a rollout, marked if it ended in a way that TRL does not recognize.

        TRL recognizes neither stop strings nor an ``eos_token_id`` in `generation_kwargs`.
        """
        ends, ids = (*self.trainer.eos_token_ids, self.trainer.tokenizer.pad_token_id), list(rollout.token_ids)
        recognized = bool(ids) and ids[-1] in ends
        marked = rollout.finish_reason == "stop" and not recognized
        return StoppedTokens(ids, end_token(self.trainer)) if marked else ids

    def _longest_prompt(self, prompt_ids: list[list[int]]) -> int:
        """Return the length of the longest prompt of all processes, so that they agree on what samples."""
        longest, accelerator = max(len(ids) for ids in prompt_ids), self.trainer.accelerator
        if accelerator.num_processes == 1:
            return longest
        return int(accelerator.gather(torch.tensor(longest, device=accelerator.device)).max().item())

    def record(self, sampled: SampledRows, rollouts: Rollouts, plan: SamplingPlan) -> None:
        """Store the token statistics of the rollouts and the temperatures of their rows."""
        if self.engine is not None:
            self.engine.release_if_large()  # the backward pass needs memory too
        records = rollouts.padded(self.trainer.tokenizer.pad_token_id, self.trainer.accelerator.device)

        def rows(values: Sequence[Any] | None) -> Tensor | None:
            if values is not None and not isinstance(values[0], Real):
                values = pad_schedules(values, records.logps.size(1))
            return None if values is None else torch.tensor(values, dtype=torch.float32, device=records.logps.device)

        sampling = rows(plan.sampling_temperature)
        same = plan.training_temperature is plan.sampling_temperature
        ids = [rollout.token_ids for rollout in rollouts]
        sampled.record(ids, records, sampling, sampling if same else rows(plan.training_temperature))

    # ---------------------------------------------------------------- after sampling

    def finish_conversations(self, sampled: SampledRows, completion_ids: list[list[int]]) -> None:
        """Record the conversations of a batch after their last turn."""
        if self._conversation is None:
            return
        (conversation, plan), self._conversation = self._conversation, None
        rollouts = conversation.close(completion_ids)
        if rollouts is None:
            self._report_changed_tokens("the tokens of a conversation were changed after Explorl's engine sampled them")
            return
        completion_ids[:] = [self._tokens(rollout) for rollout in rollouts]
        self.record(sampled, rollouts, plan)

    def check(self, sampled: SampledRows, completion_ids: list[list[int]]) -> None:
        """Drop the records if a subclass has changed the completions, on any process."""
        accelerator = self.trainer.accelerator
        unchanged = sampled.records is not None and [list(ids) for ids in completion_ids] == sampled.recorded_ids
        unchanged = all(gather_object([unchanged])) if accelerator.num_processes > 1 else unchanged
        if sampled.records is not None and not unchanged:
            self._report_changed_tokens("the tokens of a completion were changed after Explorl's engine sampled them")
            sampled.forget_records()
        sampled.old_logps = self.trainer.logprobs.known_old(sampled, len(completion_ids))

    def _report_changed_tokens(self, problem: str) -> None:
        needs_records = any(
            sets_row_sampling(strategy) or strategy.needs_min_p_mass is not None or strategy.needs_sampling_logps
            for strategy in self.trainer.strategies
        )
        if needs_records:
            raise RuntimeError(f"{problem}, so it is unknown how each row was sampled; leave the tokens unchanged")
        self.trainer.warn_once(f"{problem}; their log-probabilities are computed again")


# -------------------------------------------------------------------- the choice of the engine


def try_engine(trainer: Any, options: Mapping[str, Any]) -> tuple[Engine | None, str]:
    """Return the engine after a trial on the trainer's model, or None and the reason why it can't be used."""
    dtype = autocast_dtype(trainer.accelerator)
    mixed = dtype is not None and weights_dtype(trainer.model) == torch.float32
    half = dtype if mixed and dtype is not None and has_arithmetic(trainer.accelerator.device, dtype) else None
    why = ""
    # Try the type that the training pass computes in first, then that of the weights.
    for candidate_dtype in dict.fromkeys((half, None)):
        engine = Engine(trainer.model, trainer.tokenizer, dtype=candidate_dtype, **options)
        try:
            with whole_weights(trainer) if is_sharded(trainer) else nullcontext():
                engine.check(int(_generate_options(trainer)["max_new_tokens"]))
        except UnsupportedModel as error:
            why = error.reason
        else:
            return engine, ""
    return None, why


def why_not_engine(trainer: Any) -> str:
    """Return why the engine can't be used, or ""; the trial on the model comes later."""
    if trainer.use_vllm:
        return "use_vllm is set"
    if trainer.use_transformers_continuous_batching:
        return "use_transformers_continuous_batching is set"
    if trainer.rollout_func is not None:
        return "a rollout_func samples"
    if is_sharded(trainer) and (why := _why_not_whole(trainer)):
        return why
    if devices := spread_devices(trainer.model):
        return f"its weights are spread over {', '.join(devices)} (device_map)"
    if trainer.sees_images:
        return "the model takes images"
    if _has_own_generate(trainer.model):
        return f"{type(inner_model(trainer.model)).__name__} overrides generate"
    return _why_not_options(trainer)


def _why_not_options(trainer: Any) -> str:
    """Return which options of `generate` the engine does not support, or ""."""
    options = _generate_options(trainer)
    if options["max_new_tokens"] is None:
        return "max_completion_length is None"
    unsupported = unsupported_options(options, trainer.model.generation_config)
    listed = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
    return listed and f"the engine has no {listed}"


def _generate_options(trainer: Any) -> dict[str, Any]:
    """Return the current options of `generate`: a callback may have changed TRL's `generation_config`."""
    config = trainer.generation_config
    honoured = {name: getattr(config, name, None) for name in HONOURED_OPTIONS - {"stop_strings"}}
    return {**config.to_diff_dict(), **honoured}


def _why_not_whole(trainer: Any) -> str:
    """Return why sharded weights can't be gathered for sampling, or ""."""
    if zero_stage(trainer.accelerator) == 3 and not trainer.args.ds3_gather_for_generation:
        return "weights are sharded by ZeRO-3 and ds3_gather_for_generation is False"
    return why_not_gathered(trainer.model, trainer.accelerator)


def _has_own_generate(model: Any) -> bool:
    """Tell whether the model overrides `generate`, which the engine would bypass."""
    inner = inner_model(model)
    if fsdp_modules(inner):  # transformers registers generate with FSDP2, which sets it on the instance
        return getattr(type(inner), "generate", None) is not _GENERATE
    return "generate" in inner.__dict__ or getattr(type(inner), "generate", None) is not _GENERATE
