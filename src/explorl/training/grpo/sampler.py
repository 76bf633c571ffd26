"""Sampling through the engine: where that is possible, by what, and what it records."""

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
from explorl.strategies._lib.validate import title
from explorl.strategies.base import overrides
from explorl.training.grpo import vllm_rows
from explorl.training.grpo.activity import Activity
from explorl.training.grpo.branches import branch_numbers, branching_of, sets_rows, told
from explorl.training.grpo.conversations import Conversation
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.sampling_plan import KNOWN, Draw, beyond_the_engine, by_position, sampling_options
from explorl.training.grpo.tool_transcripts import Said
from explorl.training.grpo.trl_adapter import NamedGRPOTrainer
from explorl.training.sharding import fsdp_modules, spread_devices, why_not_gathered, zero_stage

ENGINE_OPTIONS = ("batch_size", "memory_budget")
"""Arguments of `Engine` that a trainer takes in ``engine_options``."""

_GENERATE = GenerationMixin.generate


def _has_own_generate(model: Any) -> bool:
    """Whether somebody has written another `generate` for this model, which the engine would pass by."""
    inner = inner_model(model)
    if fsdp_modules(inner):  # transformers registers it with FSDP2, which puts it into the instance
        return getattr(type(inner), "generate", None) is not _GENERATE
    return "generate" in inner.__dict__ or getattr(type(inner), "generate", None) is not _GENERATE


class SamplingTrainer(NamedGRPOTrainer):
    """Samples through the engine where that computes what the model computes, and keeps what it recorded."""

    strategies: list[Strategy]
    activity: Activity
    _engine: Engine | None = None
    _records: PaddedRollouts | None
    """What the engine recorded of this process's latest generation batch."""
    _recorded_ids: list[list[int]]
    """The tokens of these rows."""
    _old_logps: Tensor | None
    """log π_old for TRL, where the records have it."""
    _sampling_temperature: Tensor | None
    """One per row, or one per position of each, where a strategy sets it."""
    _row_temperature: Tensor | None
    """That at which the loss looks at each row, or at each of its tokens."""
    _prompts: list[Any]
    _vllm: vllm_rows.VllmRows | None = None
    """Where vLLM samples and a strategy says how each row is."""
    _interpreter: ToolUse | None = None
    """The tool that answers may call in text."""
    _conversation: tuple[Conversation, Draw] | None = None
    """With TRL's tools: what is being sampled turn by turn."""

    def _engine_for(self, engine: str | None, options: Mapping[str, Any]) -> Engine | None:
        """The engine, tried out on this model; None where TRL samples. ``options`` are arguments of `Engine`."""
        unknown = sorted(set(options) - set(ENGINE_OPTIONS))
        if unknown:
            raise ValueError(f"engine_options has {unknown[0]!r}; it may have {', '.join(ENGINE_OPTIONS)}")
        needing = [title(strategy) for strategy in self.strategies if sets_rows(strategy)]
        self._check_recorded(engine)
        self._check_interpreter(engine)
        self._vllm = None
        if self.use_vllm and engine in (None, "vllm") and needing:
            vllm_rows.refuse(self, [strategy for strategy in self.strategies if sets_rows(strategy)])
            self._vllm = vllm_rows.VllmRows(self)
            return None
        why = self._why_not_engine()
        if engine == "explorl" and why:
            raise ValueError(f"engine='explorl' cannot sample here: {why}; use engine=None")
        if engine in (None, "explorl") and not why:
            # In the type that the training pass computes in; if the model does not take that, as its weights are.
            for dtype in dict.fromkeys((self._engine_dtype(), None)):
                found = Engine(self.model, self.tokenizer, dtype=dtype, **options)
                try:
                    with self.whole_weights() if self.sharded else nullcontext():
                        found.check(int(self._generation()["max_new_tokens"]))
                except UnsupportedModel as error:
                    why = error.reason
                else:
                    return found
            if engine == "explorl" or self.interprets:
                raise ValueError(f"engine='explorl' would not sample as this model does ({why}); use engine=None")
        if needing:
            chosen = "vLLM" if self.use_vllm else "model.generate"
            reason, offer = (why, "") if why else (f"engine={engine!r}", "use engine=None, or ")
            raise ValueError(
                f"{needing[0]} sets how each row is sampled, which {chosen} cannot do ({reason}); {offer}leave it out"
            )
        if why and not self.use_vllm and self.rollout_func is None and not self.use_transformers_continuous_batching:
            self.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {why}")
        return None

    @property
    def interprets(self) -> bool:
        return self._interpreter is not None

    def _check_interpreter(self, engine: str | None) -> None:
        """That answers can call their tool, and that strategies that speak of one have it."""
        for strategy in self.strategies:
            if strategy.needs_interpreter and self._interpreter is None:
                raise ValueError(
                    f"{title(strategy)} says how often answers may call a tool, and there is none; give "
                    "interpreter='python' (rollout.tools in a configuration), or leave it out"
                )
            if overrides(strategy, "branching") and (self.tools or self.environment_factories):
                raise ValueError(
                    f"{title(strategy)} lets answers branch, and a conversation with TRL's tools is sampled turn by "
                    "turn; use interpreter='python' in their place, or leave it out"
                )
        branching = branching_of(self.strategies, 0)
        if branching is not None and branching.at == ("output",) and self._interpreter is None:
            self.warn_once("answers will not branch: they do so behind outputs of a tool, and there is none")
        if self._interpreter is None:
            return
        for strategy in self.strategies:
            strategy.check_calls(max_calls=self._interpreter.tool.max_calls)
        why = f"engine={engine!r}" if engine not in (None, "explorl") else self._why_not_engine()
        if why:
            raise ValueError(
                f"interpreter={self._interpreter.tool.name!r} needs Explorl's engine, which does not sample here "
                f"({why}); use engine='explorl', or leave out the interpreter"
            )
        name = inner_model(self.model).config._name_or_path or "this model"
        self._interpreter.check(self.tokenizer, name, self.stop_strings)
        with self._interpreter.pool():  # refused where nothing would isolate what the model writes
            pass

    def _check_recorded(self, engine: str | None) -> None:
        """That what strategies need to know of sampling will be recorded."""
        for strategy in self.strategies:
            if strategy.needs_min_p_mass is not None:
                why = "vLLM samples" if self.use_vllm else self._why_not_engine() if engine != "generate" else ""
                if why or engine == "generate":
                    raise ValueError(
                        f"{title(strategy)} needs to know how likely other tokens were, which only Explorl's engine "
                        f"records ({why or 'model.generate samples'}); use engine='explorl', or leave it out"
                    )
            if not strategy.needs_sampling_logps:
                continue
            if self.use_vllm and self.vllm_importance_sampling_correction:
                raise ValueError(
                    f"{strategy.name} would correct once more what vllm_importance_sampling_correction corrects; "
                    "leave out one of them"
                )
            if not self.use_vllm and (engine == "generate" or self._why_not_engine()):
                raise ValueError(
                    f"{strategy.name} needs the log-probabilities that were sampled from, which model.generate does "
                    "not record; use engine='explorl'"
                )

    def _why_not_engine(self) -> str:
        """What stands against the engine, before it is tried; empty where nothing does."""
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
            return "it sees images"
        if _has_own_generate(self.model):
            return f"{type(inner_model(self.model)).__name__} has a generate of its own"
        return self._why_not_options()

    def _why_not_options(self) -> str:
        """What the engine does not have of all that `generate` is asked for; empty where it has everything."""
        given = self._generation()
        if given["max_new_tokens"] is None:
            return "max_completion_length is None"
        beyond = beyond_the_engine(given, self.model.generation_config)
        named = ", ".join(f"{name}={value!r}" for name, value in beyond.items())
        return named and f"the engine has no {named}"

    def _generation(self) -> dict[str, Any]:
        """Options of `generate` as they stand: a callback may have changed TRL's `generation_config`."""
        config = self.generation_config
        return config.to_diff_dict() | {name: getattr(config, name, None) for name in KNOWN - {"stop_strings"}}

    def _why_not_whole(self) -> str:
        """What keeps sharded weights from being gathered for sampling; empty where nothing does."""
        if zero_stage(self.accelerator) == 3 and not self.args.ds3_gather_for_generation:
            return "weights are sharded by ZeRO-3 and ds3_gather_for_generation is False"
        return why_not_gathered(self.model, self.accelerator)

    @property
    def samples_whole(self) -> bool:
        return self._engine is not None and self.sharded

    def _engine_dtype(self) -> torch.dtype | None:
        """Half precision where the run computes in it and the device can; else that of the weights."""
        dtype = self.compute_dtype
        mixed = dtype is not None and weights_dtype(self.model) == torch.float32
        return dtype if mixed and dtype is not None and has_arithmetic(self.accelerator.device, dtype) else None

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        """Through the engine; TRL calls it with the tokens of each prompt once for every sample."""
        if rows is not None:
            return None if self._conversation is None else self._conversation[0].go_on(rows, prompt_ids)
        self._conversation = None
        if self._vllm is not None:
            return self._sampled_by_vllm(self._vllm, prompt_ids)
        if self._engine is None:
            return None
        per_row = any(sets_rows(strategy) or strategy.needs_min_p_mass is not None for strategy in self.strategies)
        per_row = per_row or self.interprets
        if _has_own_generate(self.model) and not per_row:  # it came after the trainer was built
            return None
        if why := self._why_not_options():  # of late
            if per_row:
                raise ValueError(f"rows are sampled each by itself, which model.generate cannot do ({why})")
            self.warn_once(f"a batch is sampled by model.generate, which is slower than Explorl's engine: {why}")
            return None
        strategies = self.strategies if self.mode == "train" and len(prompt_ids) == len(self._prompts) else []
        texts = [prompt_text(prompt) for prompt in self._prompts] if strategies else []
        options = {**sampling_options(self._generation(), self.eos_token_ids), "stop": self.stop_strings}
        draw = Draw(options, strategies, texts, self.now, self.interprets)
        draw.spread(len(prompt_ids), self.temperature)
        longest = self._everywhere_longest(prompt_ids)
        context = getattr(text_config(self.model), "max_position_embeddings", None)
        if context is not None and longest >= context and not per_row:
            self.warn_once(
                f"a batch is sampled by model.generate, which is slower than Explorl's engine: a prompt has {longest} "
                f"tokens and the model's context is {context}"
            )
            return None
        try:
            self._engine.check(longest + options["max_tokens"])
        except UnsupportedModel as error:  # prompts are longer than what it was tried with
            if per_row:
                raise
            self.warn_once(f"sampling by model.generate, which is slower than Explorl's engine: {error.reason}")
            self._engine = None
            return None
        if self.tools:
            conversation = Conversation(self._engine, prompt_ids, draw.params)
            self._conversation = conversation, draw
            return [self.ended(rollout) for rollout in conversation.rollouts()]
        rollouts = self._drawn_by_engine(self._engine, prompt_ids, draw).check()
        if self._interpreter is not None:
            self.said = [Said.of(rollout) for rollout in rollouts]
        self._remember(rollouts, draw)
        return [self.ended(rollout) for rollout in rollouts]

    def _sampled_by_vllm(self, rows: vllm_rows.VllmRows, prompt_ids: list[list[int]]) -> list[list[int]] | None:
        """As strategies say; an evaluation is sampled as TRL does it."""
        if self.mode != "train" or len(prompt_ids) != len(self._prompts):
            return None
        texts = [prompt_text(prompt) for prompt in self._prompts]
        draw = Draw(vllm_rows.options(self), self.strategies, texts, self.now, self.interprets)
        draw.spread(len(prompt_ids), self.temperature)
        self.load_vllm_weights()
        rollouts, self.sampled_logps = rows.draw(prompt_ids, draw.params)
        self._remember(rollouts, draw)
        return [self.ended(rollout) for rollout in rollouts]

    def _drawn_by_engine(self, engine: Engine, prompt_ids: list[list[int]], draw: Draw) -> Rollouts:
        tools = self._interpreter
        if draw.branching is not None:
            uses = None if tools is None else draw.calls
            first = self.accelerator.process_index * len(prompt_ids)
            group = [(first + row) // self.num_generations for row in range(len(prompt_ids))]
            branched = branch_rows(engine, prompt_ids, draw.params, draw.branching, group=group, tools=tools, uses=uses)
            draw.settled(branched.params_of)
            numbers = branch_numbers(gather_object([told(branched)]))
            self.activity.branching(numbers)
            for name, value in numbers.items():
                self.record_metric(name, value)
            return branched
        if tools is not None:
            return generate_with_tools(engine, prompt_ids, 1, draw.params, tools, uses=draw.calls)
        return engine.generate(prompt_ids, 1, draw.params)

    def conversed(self, completion_ids: list[list[int]]) -> None:
        if self._conversation is None:
            return
        (conversation, draw), self._conversation = self._conversation, None
        rollouts = conversation.close(completion_ids)
        if rollouts is not None:
            completion_ids[:] = [self.ended(rollout) for rollout in rollouts]
            self._remember(rollouts, draw)
            return
        self._say_changed("a conversation is not what Explorl's engine sampled: somebody has changed its tokens")

    def generated(self, completion_ids: list[list[int]]) -> None:
        """What was recorded is of the answers that were sampled; a subclass may have made others of them. Where that is
        so on one process, nothing counts as recorded on any."""
        known = self._records is not None and [list(ids) for ids in completion_ids] == self._recorded_ids
        known = all(gather_object([known])) if self.accelerator.num_processes > 1 else known
        if self._records is not None and not known:
            self._say_changed("an answer is not what Explorl's engine sampled: somebody has changed its tokens")
            if self._old_logps is self._records.logps:
                self._old_logps = None
            self._records = self._row_temperature = self._sampling_temperature = None

    def _say_changed(self, said: str) -> None:
        needs = (sets_rows(one) or one.needs_min_p_mass is not None for one in self.strategies)
        if any(needs) or any(one.needs_sampling_logps for one in self.strategies):
            raise RuntimeError(f"{said}, and how each row was sampled is not known any more; leave them as they are")
        self.warn_once(f"{said}; what was recorded of them is computed again")

    def _everywhere_longest(self, prompt_ids: list[list[int]]) -> int:
        """The longest prompt of all processes, so that they agree on what samples."""
        longest = max(len(ids) for ids in prompt_ids)
        if self.accelerator.num_processes == 1:
            return longest
        here = torch.tensor(longest, device=self.accelerator.device)
        return int(self.accelerator.gather(here).max().item())

    def _remember(self, rollouts: Rollouts, draw: Draw) -> None:
        if self._engine is not None:
            self._engine.release_if_large()  # the backward pass needs memory too
        records = rollouts.padded(self.tokenizer.pad_token_id, self.accelerator.device)

        def rows(values: Sequence[Any] | None) -> Tensor | None:
            if values is not None and not isinstance(values[0], Real):
                values = by_position(values, records.logps.size(1))
            return None if values is None else torch.tensor(values, dtype=torch.float32, device=records.logps.device)

        sampling = rows(draw.sampling_temperature)
        same = draw.training_temperature is draw.sampling_temperature
        ids = [rollout.token_ids for rollout in rollouts]
        self._keep(ids, records, sampling, sampling if same else rows(draw.training_temperature))

    def _keep(
        self, ids: list[list[int]], records: PaddedRollouts, sampling: Tensor | None, training: Tensor | None
    ) -> None:
        """Takes down what was recorded of this process's rows, and their temperatures in sampling and in the loss."""
        self._recorded_ids = [list(row) for row in ids]  # copies: a subclass may change what it is given
        self._records, self._sampling_temperature, self._row_temperature = records, sampling, training
        same = training is sampling
        # Where TRL asks for log π_old, what was recorded in float32 is just that; but a penalty may act on the
        # difference of two log-probabilities, which then have to come from one and the same pass.
        exact = self.compute_dtype is None and weights_dtype(self.model) == torch.float32 and not self.has_own_loss
        if self._old_logps is None and self.asked_for_old and exact and same and not self.has_penalties:
            self._old_logps = records.logps

    def _forget_rollout(self) -> None:
        self._records = self._old_logps = self._row_temperature = self._sampling_temperature = None
        self._prompts = []
        self.said = None

    @property
    def asked_for_old(self) -> bool:
        """Whether TRL asks for log π_old: where a batch outlives an optimizer step."""
        every = self.args.steps_per_generation * self.num_iterations
        return self.mode == "train" and self.args.gradient_accumulation_steps % every != 0

    @property
    def old_is_first_pass(self) -> bool:
        """Whether every micro-batch is seen before the policy moves: then log π_old is what its first pass gives."""
        whole = self.args.gradient_accumulation_steps % self.args.steps_per_generation == 0
        return whole and not self.use_vllm and not self.has_own_loss

    @property
    def has_penalties(self) -> bool:
        return any(overrides(strategy, "penalty") for strategy in self.strategies)
