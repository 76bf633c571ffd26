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
from explorl.rollout import Engine, PaddedRollouts, Rollouts, UnsupportedModel
from explorl.rollout.branching import branch_rows
from explorl.rollout.tool_use import ToolUse, generate_with_tools
from explorl.strategies import Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo import vllm_rows
from explorl.training.grpo.activity import Activity
from explorl.training.grpo.branches import branch_metrics, branch_record, branching_of, sets_row_sampling
from explorl.training.grpo.conversations import Conversation
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.sampling_plan import (
    HONOURED_OPTIONS,
    SamplingPlan,
    pad_schedules,
    sampling_options,
    unsupported_options,
)
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.grpo.trl_adapter import GRPOAdapter
from explorl.training.sharding import fsdp_modules, spread_devices, why_not_gathered, zero_stage

ENGINE_OPTIONS = ("batch_size", "memory_budget")
"""Arguments of `Engine` that ``engine_options`` may contain."""

_GENERATE = GenerationMixin.generate


def _has_own_generate(model: Any) -> bool:
    """Tell whether the model overrides `generate`, which the engine would bypass."""
    inner = inner_model(model)
    if fsdp_modules(inner):  # transformers registers generate with FSDP2, which sets it on the instance
        return getattr(type(inner), "generate", None) is not _GENERATE
    return "generate" in inner.__dict__ or getattr(type(inner), "generate", None) is not _GENERATE


class SamplingTrainer(GRPOAdapter):
    """Samples through the engine if that computes what the model computes, and keeps its token statistics."""

    strategies: list[Strategy]
    activity: Activity
    _engine: Engine | None = None
    _records: PaddedRollouts | None
    """Token statistics of this process's latest generation batch, None if the engine did not sample it."""
    _recorded_ids: list[list[int]]
    """The tokens of the rows in `_records`."""
    _old_logps: Tensor | None
    """log π_old for TRL if the records have it."""
    _sampling_temperature: Tensor | None
    """Temperature of each row, or of each position of it, if a strategy sets it."""
    _row_temperature: Tensor | None
    """Temperature of each row, or of each of its tokens, in the loss."""
    _prompts: list[Any]
    _vllm: vllm_rows.VllmRows | None = None
    """Set if vLLM samples and a strategy sets how each row is sampled."""
    _interpreter: ToolUse | None = None
    """The tool that completions may call in text."""
    _conversation: tuple[Conversation, SamplingPlan] | None = None
    """With TRL's tools: the conversations that are being sampled turn by turn."""

    def _engine_for(self, engine: str | None, options: Mapping[str, Any]) -> Engine | None:
        """Return the engine after a trial on this model, or None if TRL samples.

        ``options`` are arguments of `Engine`.
        """
        unknown = sorted(set(options) - set(ENGINE_OPTIONS))
        if unknown:
            raise ValueError(f"engine_options has {unknown[0]!r}; it may contain {', '.join(ENGINE_OPTIONS)}")
        needing = [name_of(strategy) for strategy in self.strategies if sets_row_sampling(strategy)]
        self._check_recorded(engine)
        self._check_interpreter(engine)
        self._vllm = None
        if self.use_vllm and engine in (None, "vllm") and needing:
            vllm_rows.refuse(self, [strategy for strategy in self.strategies if sets_row_sampling(strategy)])
            self._vllm = vllm_rows.VllmRows(self)
            return None
        why = self._why_not_engine()
        if engine == "explorl" and why:
            raise ValueError(f"engine='explorl' cannot sample here: {why}; use engine=None")
        if engine in (None, "explorl") and not why:
            # Try the type that the training pass computes in first, then that of the weights.
            for dtype in dict.fromkeys((self._engine_dtype(), None)):
                candidate = Engine(self.model, self.tokenizer, dtype=dtype, **options)
                try:
                    with self.whole_weights() if self.sharded else nullcontext():
                        candidate.check(int(self._generation()["max_new_tokens"]))
                except UnsupportedModel as error:
                    why = error.reason
                else:
                    return candidate
            if engine == "explorl" or self.has_interpreter:
                raise ValueError(f"engine='explorl' would not sample as this model does ({why}); use engine=None")
        if needing:
            chosen = "vLLM" if self.use_vllm else "model.generate"
            reason, offer = (why, "") if why else (f"engine={engine!r}", "use engine=None, or ")
            raise ValueError(
                f"{needing[0]} sets how each row is sampled, which {chosen} does not support ({reason}); "
                f"{offer}remove it"
            )
        if why and not self.use_vllm and self.rollout_func is None and not self.use_transformers_continuous_batching:
            self.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {why}")
        return None

    @property
    def has_interpreter(self) -> bool:
        return self._interpreter is not None

    def _check_interpreter(self, engine: str | None) -> None:
        """Check that completions can call the interpreter, and that it is set if a strategy needs it."""
        for strategy in self.strategies:
            if strategy.needs_interpreter and self._interpreter is None:
                raise ValueError(
                    f"{name_of(strategy)} sets how often completions may call a tool, but there is none; set "
                    "interpreter='python' (rollout.tools in a configuration), or remove it"
                )
            if overrides(strategy, "branching") and (self.tools or self.environment_factories):
                raise ValueError(
                    f"{name_of(strategy)} lets completions branch, but conversations with TRL's tools are sampled turn "
                    "by turn; use interpreter='python' instead of tools, or remove it"
                )
        branching = branching_of(self.strategies, 0)
        if branching is not None and branching.at == ("output",) and self._interpreter is None:
            self.warn_once("completions will not branch: they branch after outputs of a tool, and there is none")
        if self._interpreter is None:
            return
        for strategy in self.strategies:
            strategy.check_calls(max_calls=self._interpreter.tool.max_calls)
        why = f"engine={engine!r}" if engine not in (None, "explorl") else self._why_not_engine()
        if why:
            raise ValueError(
                f"interpreter={self._interpreter.tool.name!r} needs Explorl's engine, which does not sample here "
                f"({why}); use engine='explorl', or remove the interpreter"
            )
        name = inner_model(self.model).config._name_or_path or "this model"
        self._interpreter.check(self.tokenizer, name, self.stop_strings)
        with self._interpreter.pool():  # raises if programs cannot be isolated on this machine
            pass

    def _check_recorded(self, engine: str | None) -> None:
        """Check that the token statistics that strategies need will be recorded."""
        for strategy in self.strategies:
            if strategy.needs_min_p_mass is not None:
                why = "vLLM samples" if self.use_vllm else self._why_not_engine() if engine != "generate" else ""
                if why or engine == "generate":
                    raise ValueError(
                        f"{name_of(strategy)} needs the probabilities of other tokens, which only Explorl's engine "
                        f"records ({why or 'model.generate samples'}); use engine='explorl', or remove it"
                    )
            if not strategy.needs_sampling_logps:
                continue
            if self.use_vllm and self.vllm_importance_sampling_correction:
                raise ValueError(
                    f"{strategy.name} would repeat the correction of vllm_importance_sampling_correction; "
                    "remove one of them"
                )
            if not self.use_vllm and (engine == "generate" or self._why_not_engine()):
                raise ValueError(
                    f"{strategy.name} needs the log-probabilities of the sampling distribution, which model.generate "
                    "does not record; use engine='explorl'"
                )

    def _why_not_engine(self) -> str:
        """Return why the engine can't be used, or ""; the trial on the model comes later."""
        if self.use_vllm:
            return "use_vllm is set"
        if self.use_transformers_continuous_batching:
            return "use_transformers_continuous_batching is set"
        if self.rollout_func is not None:
            return "a rollout_func samples"
        if self.sharded and (why := self._why_not_whole()):
            return why
        if devices := spread_devices(self.model):
            return f"its weights are spread over {', '.join(devices)} (device_map)"
        if self.sees_images:
            return "the model takes images"
        if _has_own_generate(self.model):
            return f"{type(inner_model(self.model)).__name__} overrides generate"
        return self._why_not_options()

    def _why_not_options(self) -> str:
        """Return which options of `generate` the engine does not support, or ""."""
        options = self._generation()
        if options["max_new_tokens"] is None:
            return "max_completion_length is None"
        unsupported = unsupported_options(options, self.model.generation_config)
        listed = ", ".join(f"{name}={value!r}" for name, value in unsupported.items())
        return listed and f"the engine has no {listed}"

    def _generation(self) -> dict[str, Any]:
        """Return the current options of `generate`: a callback may have changed TRL's `generation_config`."""
        config = self.generation_config
        return config.to_diff_dict() | {
            name: getattr(config, name, None) for name in HONOURED_OPTIONS - {"stop_strings"}
        }

    def _why_not_whole(self) -> str:
        """Return why sharded weights can't be gathered for sampling, or ""."""
        if zero_stage(self.accelerator) == 3 and not self.args.ds3_gather_for_generation:
            return "weights are sharded by ZeRO-3 and ds3_gather_for_generation is False"
        return why_not_gathered(self.model, self.accelerator)

    @property
    def samples_with_whole_weights(self) -> bool:
        return self._engine is not None and self.sharded

    def _engine_dtype(self) -> torch.dtype | None:
        """Return half precision if the run and the device compute in it, or None for the type of the weights."""
        dtype = self.compute_dtype
        mixed = dtype is not None and weights_dtype(self.model) == torch.float32
        return dtype if mixed and dtype is not None and has_arithmetic(self.accelerator.device, dtype) else None

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        """Sample through the engine; TRL repeats each prompt once per completion."""
        if rows is not None:
            return None if self._conversation is None else self._conversation[0].continue_rows(rows, prompt_ids)
        self._conversation = None
        if self._vllm is not None:
            return self._sampled_by_vllm(self._vllm, prompt_ids)
        if self._engine is None:
            return None
        per_row = any(
            sets_row_sampling(strategy) or strategy.needs_min_p_mass is not None for strategy in self.strategies
        )
        per_row = per_row or self.has_interpreter
        if _has_own_generate(self.model) and not per_row:  # set after the trainer was built
            return None
        if why := self._why_not_options():  # changed since the trainer was built
            if per_row:
                raise ValueError(f"rows have individual options, which model.generate does not support ({why})")
            self.warn_once(f"a batch is sampled by model.generate, which is slower than Explorl's engine: {why}")
            return None
        strategies = self.strategies if self.mode == "train" and len(prompt_ids) == len(self._prompts) else []
        texts = [prompt_text(prompt) for prompt in self._prompts] if strategies else []
        options = {**sampling_options(self._generation(), self.eos_token_ids), "stop": self.stop_strings}
        plan = SamplingPlan(options, strategies, texts, self.current_step, self.has_interpreter)
        plan.set_default_temperature(len(prompt_ids), self.temperature)
        longest = self._longest_prompt(prompt_ids)
        context = getattr(text_config(self.model), "max_position_embeddings", None)
        if context is not None and longest >= context and not per_row:
            self.warn_once(
                f"a batch is sampled by model.generate, which is slower than Explorl's engine: a prompt has {longest} "
                f"tokens and the model's context is {context}"
            )
            return None
        try:
            self._engine.check(longest + options["max_tokens"])
        except UnsupportedModel as error:  # these prompts are longer than those of the trial
            if per_row:
                raise
            self.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}")
            self._engine = None
            return None
        if self.tools:
            conversation = Conversation(self._engine, prompt_ids, plan.params)
            self._conversation = conversation, plan
            return [self.completion_tokens(rollout) for rollout in conversation.rollouts()]
        rollouts = self._sample_with_engine(self._engine, prompt_ids, plan).check()
        if self._interpreter is not None:
            self.transcripts = [ToolTranscript.of(rollout) for rollout in rollouts]
        self._store_rollouts(rollouts, plan)
        return [self.completion_tokens(rollout) for rollout in rollouts]

    def _sampled_by_vllm(self, rows: vllm_rows.VllmRows, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """Sample through vLLM with the strategies' settings; leave evaluation batches to TRL."""
        if self.mode != "train" or len(prompt_ids) != len(self._prompts):
            return None
        texts = [prompt_text(prompt) for prompt in self._prompts]
        plan = SamplingPlan(
            vllm_rows.trl_sampling_options(self), self.strategies, texts, self.current_step, self.has_interpreter
        )
        plan.set_default_temperature(len(prompt_ids), self.temperature)
        self.load_vllm_weights()
        rollouts, self.sampled_logps = rows.sample(prompt_ids, plan.params)
        self._store_rollouts(rollouts, plan)
        return [self.completion_tokens(rollout) for rollout in rollouts]

    def _sample_with_engine(self, engine: Engine, prompt_ids: list[list[int]], plan: SamplingPlan) -> Rollouts:
        tools = self._interpreter
        if plan.branching is not None:
            uses = None if tools is None else plan.calls
            first = self.accelerator.process_index * len(prompt_ids)
            group = [(first + row) // self.num_generations for row in range(len(prompt_ids))]
            branched = branch_rows(engine, prompt_ids, plan.params, plan.branching, group=group, tools=tools, uses=uses)
            plan.reorder(branched.params_of)
            numbers = branch_metrics(gather_object([branch_record(branched)]))
            self.activity.branching(numbers)
            for name, value in numbers.items():
                self.record_metric(name, value)
            return branched
        if tools is not None:
            return generate_with_tools(engine, prompt_ids, 1, plan.params, tools, uses=plan.calls)
        return engine.generate(prompt_ids, 1, plan.params)

    def finish_conversations(self, completion_ids: list[list[int]]) -> None:
        if self._conversation is None:
            return
        (conversation, plan), self._conversation = self._conversation, None
        rollouts = conversation.close(completion_ids)
        if rollouts is not None:
            completion_ids[:] = [self.completion_tokens(rollout) for rollout in rollouts]
            self._store_rollouts(rollouts, plan)
            return
        self._report_changed_tokens("the tokens of a conversation were changed after Explorl's engine sampled them")

    def check_completions(self, completion_ids: list[list[int]]) -> None:
        """Drop the records if a subclass has changed the completions, on any process."""
        unchanged = self._records is not None and [list(ids) for ids in completion_ids] == self._recorded_ids
        unchanged = all(gather_object([unchanged])) if self.accelerator.num_processes > 1 else unchanged
        if self._records is not None and not unchanged:
            self._report_changed_tokens("the tokens of a completion were changed after Explorl's engine sampled them")
            if self._old_logps is self._records.logps:
                self._old_logps = None
            self._records = self._row_temperature = self._sampling_temperature = None

    def _report_changed_tokens(self, problem: str) -> None:
        needs_records = any(
            sets_row_sampling(strategy) or strategy.needs_min_p_mass is not None or strategy.needs_sampling_logps
            for strategy in self.strategies
        )
        if needs_records:
            raise RuntimeError(f"{problem}, so it is unknown how each row was sampled; leave the tokens unchanged")
        self.warn_once(f"{problem}; their log-probabilities are computed again")

    def _longest_prompt(self, prompt_ids: list[list[int]]) -> int:
        """Return the length of the longest prompt of all processes, so that they agree on what samples."""
        longest = max(len(ids) for ids in prompt_ids)
        if self.accelerator.num_processes == 1:
            return longest
        local = torch.tensor(longest, device=self.accelerator.device)
        return int(self.accelerator.gather(local).max().item())

    def _store_rollouts(self, rollouts: Rollouts, plan: SamplingPlan) -> None:
        """Store the token statistics of this process's rollouts and the temperatures of its rows."""
        if self._engine is not None:
            self._engine.release_if_large()  # the backward pass needs memory too
        records = rollouts.padded(self.tokenizer.pad_token_id, self.accelerator.device)

        def rows(values: Sequence[Any] | None) -> Tensor | None:
            if values is not None and not isinstance(values[0], Real):
                values = pad_schedules(values, records.logps.size(1))
            return None if values is None else torch.tensor(values, dtype=torch.float32, device=records.logps.device)

        sampling = rows(plan.sampling_temperature)
        same = plan.training_temperature is plan.sampling_temperature
        ids = [rollout.token_ids for rollout in rollouts]
        self._store_records(ids, records, sampling, sampling if same else rows(plan.training_temperature))

    def _store_records(
        self, ids: list[list[int]], records: PaddedRollouts, sampling: Tensor | None, training: Tensor | None
    ) -> None:
        """Store the token statistics of this process's rows and their temperatures in sampling and in the loss."""
        self._recorded_ids = [list(row) for row in ids]  # copies: a subclass may change the originals
        self._records, self._sampling_temperature, self._row_temperature = records, sampling, training
        same = training is sampling
        # Log-probabilities recorded in float32 can serve as TRL's log π_old. Not with a penalty: it may depend on the
        # difference of two log-probabilities, which then have to come from the same kind of pass.
        exact = self.compute_dtype is None and weights_dtype(self.model) == torch.float32 and not self.has_own_loss
        if self._old_logps is None and self.needs_old_logps and exact and same and not self.has_penalties:
            self._old_logps = records.logps

    def _clear_rollout(self) -> None:
        self._records = self._old_logps = self._row_temperature = self._sampling_temperature = None
        self._prompts = []
        self.transcripts = None

    @property
    def needs_old_logps(self) -> bool:
        """True if TRL computes log π_old: if a generation batch serves more than one optimizer step."""
        every = self.args.steps_per_generation * self.num_iterations
        return self.mode == "train" and self.args.gradient_accumulation_steps % every != 0

    @property
    def old_is_first_pass(self) -> bool:
        """True if every micro-batch is seen before the policy changes: then its first pass gives log π_old."""
        complete = self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0
        return complete and not self.use_vllm and not self.has_own_loss

    @property
    def has_penalties(self) -> bool:
        return any(overrides(strategy, "penalty") for strategy in self.strategies)
