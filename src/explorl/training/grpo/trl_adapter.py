"""TRL's `GRPOTrainer` behind public names: the only module that knows TRL's private names.

What is overridden, and what a subclass uses instead:

    _generate_single_turn                 sample(prompt_ids, rows)
    _tool_call_loop                       finish_conversations(completion_ids)
    _generate                             has_interpreter, transcripts; samples_with_whole_weights
    _get_per_token_logps_and_entropies    log_probabilities(model, ids, mask, completion, ...)
    _calculate_rewards                    reward_parts, rewarded; known_rewards(); checks what functions return
    _generate_and_score_completions       scored(inputs)
    _prepare_inputs                       micro_batches(batch)
    _compute_loss                         loss(model, batch)
    _get_train_sampler                    (the same order of prompts in a resumed run)
    _save_checkpoint, _load_from_checkpoint, _load_optimizer_and_scheduler    write_state(folder), read_state(folder)

What is read: _step, _buffered_inputs, _metrics, _logs, _pending_extra_logs, _tokenizer, _is_vlm,
_entropy_bonus_enabled, _last_world_entropy, _entropy_window_stats, _get_output_dir, _last_loaded_step; and called:
_generate, _calculate_rewards, _tokenize_prompts, _set_signature_columns_if_needed.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    nanstd,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from explorl.modeling.proof import inner_model
from explorl.rollout import Rollout
from explorl.training.grpo.checkpoint import restoring_optimizer
from explorl.training.grpo.conversations import RowTokens, row_numbers
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.loss import OVER_TOKENS
from explorl.training.grpo.rewards import check_finite, checked_function
from explorl.training.grpo.stopping import (
    StoppedTokens,
    cut_at_stops,
    mark_stopped,
    plain_lists,
    stop_strings_of,
    without_model_stops,
    without_stop_keys,
)
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.sharding import autocast_dtype, gathered_weights, has_sharded_weights

IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Keys of a micro-batch for a vision-language model."""

Mode = Literal["train", "eval"]

_LOSS_METHODS = ("compute_loss", "_compute_loss", "_prepare_inputs", "_get_per_token_logps_and_entropies")


class RewardedRows(NamedTuple):
    """Rows that were sampled and rewarded."""

    completion_ids: list[list[int]]
    """Completions of this process."""
    extra: dict[str, list[Any]]
    """What reward functions logged per completion of this process (``log_extra``), by column."""
    reward_parts: Tensor
    """Rewards of all processes, (rows, reward functions), NaN if a function returned None."""
    transcripts: list[ToolTranscript] | None = None
    """Transcripts of the completions of this process if the trainer has an interpreter."""


_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that reward functions get under other names or not at all."""


def add_head(model: Any) -> None:
    """Add the trainer's fused head to a model: log-probabilities and entropies without storing all logits."""
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))


def logs_of(trainer: GRPOTrainer) -> Mapping[str, Any]:
    """Return the latest prompts, completions and rewards that a trainer has logged, by name."""
    logs: Mapping[str, Any] = trainer._logs
    return logs


def rendered_prompt(trainer: GRPOTrainer, prompt: Any) -> str:
    """Return a prompt as the model sees it: messages through the chat template, with TRL's arguments.

    With environments, which have different tools for each prompt, and with images the result is the messages' contents.
    """
    if isinstance(prompt, str) or getattr(trainer, "environment_factories", None) or getattr(trainer, "_is_vlm", False):
        return prompt_text(prompt)
    text = trainer.processing_class.apply_chat_template(
        prompt,
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=False,
        **getattr(trainer, "chat_template_kwargs", {}),
    )
    return str(text)


class GRPOAdapter(GRPOTrainer):
    """`GRPOTrainer` whose steps a subclass overrides under the names above."""

    rollout_func: Any
    reward_funcs: list[Any]
    epsilon_low: float
    epsilon_high: float
    entropy_coef: float
    reward_parts: Tensor | None = None
    """Rewards of the latest generation batch of all processes, (rows, reward functions); NaN means not scored."""
    rewarded: Mapping[str, Any]
    """Arguments of the reward functions on this process, by name: prompts, completions and columns."""
    _warned: set[str]
    _last_loaded_step: int
    _last_world_entropy: float
    _entropy_window_stats: Tensor | None
    _buffered_inputs: list[dict[str, Any]] | None

    # ---------------------------------------------------------------- state of TRL's trainer

    @property
    def mode(self) -> Mode:
        return "train" if self.model.training else "eval"

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def sees_images(self) -> bool:
        """True for a vision-language model."""
        return self._is_vlm

    @property
    def logs(self) -> Mapping[str, Any]:
        """TRL's log of the latest generation batches."""
        return self._logs

    @property
    def has_entropy_bonus(self) -> bool:
        return self._entropy_bonus_enabled

    @property
    def has_own_loss(self) -> bool:
        """True if a subclass, another base class or the instance overrides a method that computes the loss.

        Such a loss may rely on micro-batches as TRL makes them: equally many rows in each, with TRL's log π_old.
        """

        def is_overridden(name: str) -> bool:
            method = getattr(self, name)
            packages = ("explorl", "trl", "transformers")
            patched = method.__module__.partition(".")[0] not in packages
            return patched or getattr(type(self), name) is not getattr(GRPOAdapter, name)

        return any(map(is_overridden, _LOSS_METHODS))

    @property
    def micro_step(self) -> int:
        """Number of micro-batches seen so far."""
        return self._step

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self._step = value

    @property
    def buffered_batches(self) -> list[dict[str, Any]] | None:
        """The micro-batches of a generation batch that is still in use, else None."""
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return None if used_up else self._buffered_inputs

    @buffered_batches.setter
    def buffered_batches(self, batches: list[dict[str, Any]]) -> None:
        self._buffered_inputs = batches

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The type that autocast uses for float32; None without autocast."""
        return autocast_dtype(self.accelerator)

    @property
    def sharded(self) -> bool:
        """True if no process holds all weights."""
        return has_sharded_weights(self.model, self.accelerator)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gather all weights on every process; must be entered by all processes."""
        setting, self.args.ds3_gather_for_generation = self.args.ds3_gather_for_generation, False
        try:
            with gathered_weights(self.model_wrapped, self.accelerator):
                yield
        finally:
            self.args.ds3_gather_for_generation = setting

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """Disable gradients, and gradient checkpointing, whose reentrant variant would warn that there are none."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            yield

    @property
    def current_step(self) -> int:
        """Number of optimizer steps taken."""
        return int(self.state.global_step)

    def warn_once(self, message: str) -> None:
        """Issue a warning on the main process unless it was issued before."""
        if message not in self._warned and self.accelerator.is_main_process:
            warnings.warn(message, UserWarning, stacklevel=3)
        self._warned.add(message)

    def record_metric(self, name: str, value: float, mode: Mode | None = None) -> None:
        """Add a value whose mean TRL logs at the next logging step."""
        self._metrics[mode or self.mode][name].append(value)

    # ---------------------------------------------------------------- sample

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        """Return one completion for each prompt, or None to have TRL sample them.

        Args:
            prompt_ids: Tokens of the prompts, or of the conversations so far.
            rows: In a further turn of conversations with tools, the rows of the batch that continue.
        """
        return None

    sampled_logps: list[list[float]] | None = None
    """Set by `sample` for TRL's importance sampling correction: vLLM's log q of every token."""

    def load_vllm_weights(self) -> None:
        """Update vLLM's weights to those of this step if they are older."""
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def finish_conversations(self, completion_ids: list[list[int]]) -> None:
        """Handle the end of the last turn of a batch of conversations; a hook for subclasses."""

    def check_completions(self, completion_ids: list[list[int]]) -> None:
        """Check the completions of a batch in their final form; a hook for subclasses."""

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *more: Any, **options: Any) -> Any:
        numbered = [RowTokens(ids, row) for row, ids in enumerate(prompt_ids)]
        result = super()._tool_call_loop(prompts, numbered, *more, **options)
        self.finish_conversations(result[2])
        return result

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *more: Any, **options: Any
    ) -> Any:
        if images is None and not multimodal_fields:
            rows, ids = row_numbers(prompt_ids), [list(ids) for ids in prompt_ids]
            self.sampled_logps = None
            completion_ids = self.sample(ids) if rows is None else self.sample(ids, rows)
            if completion_ids is not None:
                return completion_ids, self.sampled_logps
        with without_model_stops(inner_model(self.model)):
            completion_ids, logps = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, *more, **options
            )
        if self.stop_strings:
            min_tokens = int(self.generation_kwargs.get("min_tokens") or 0)  # vLLM ignores strings in these
            completion_ids = cut_at_stops(
                completion_ids, self.stop_strings, self._tokenizer, self.end_token, min_tokens=min_tokens
            )
            if logps is not None:
                logps = [values[: len(ids)] for ids, values in zip(completion_ids, logps, strict=True)]
        return completion_ids, logps

    def _init_stop_strings(self) -> None:
        """Move the stop strings out of the options of `model.generate`, which TRL calls without a tokenizer."""
        self.stop_strings = stop_strings_of(self.args.generation_kwargs, inner_model(self.model))
        if not self.use_vllm and without_stop_keys(self.generation_kwargs) != self.generation_kwargs:
            self.generation_kwargs = without_stop_keys(self.generation_kwargs)
            self.generation_config = GenerationConfig(**self.generation_kwargs, disable_compile=True)

    @property
    def end_token(self) -> int:
        """An end-of-sequence token."""
        return int([*self.eos_token_ids, self._tokenizer.pad_token_id][0])

    def completion_tokens(self, rollout: Rollout) -> list[int]:
        """Return the tokens of a rollout, marked if it ended in a way that TRL does not recognize.

        TRL recognizes neither stop strings nor an ``eos_token_id`` in `generation_kwargs`.
        """
        ids = list(rollout.token_ids)
        recognized = bool(ids) and ids[-1] in (*self.eos_token_ids, self._tokenizer.pad_token_id)
        return StoppedTokens(ids, self.end_token) if rollout.finish_reason == "stop" and not recognized else ids

    @property
    def has_interpreter(self) -> bool:
        """True if completions may call a tool in text; `sample` then sets `transcripts`."""
        return False

    transcripts: list[ToolTranscript] | None = None
    """Transcripts of this process's rows in the latest generation batch."""

    generation_kwargs: dict[str, Any]
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion."""
    stopped: list[bool]
    """True if a stop string has ended the completion, for each row of this process in the latest generation batch."""

    @property
    def samples_with_whole_weights(self) -> bool:
        """True if `sample` needs all weights of a sharded model."""
        return False

    def _generate(self, prompts: list[Any]) -> Any:
        with self.whole_weights() if self.samples_with_whole_weights else nullcontext():
            return self._generate_with_hooks(prompts)

    def _generate_with_hooks(self, prompts: list[Any]) -> Any:
        rollout_func = self.rollout_func
        if self.has_interpreter:  # only a rollout_func can return a mask of the policy's tokens
            self.rollout_func = self._rollouts_with_mask
        elif rollout_func is not None and self.stop_strings:
            self.rollout_func = partial(self._marked_rollouts, rollout_func)
        try:
            return super()._generate(prompts)
        finally:
            self.rollout_func = rollout_func

    def _marked_rollouts(self, rollout_func: Any, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Call a user's rollout function and mark the completions that end with a stop string."""
        output = dict(rollout_func(prompts, trainer))
        if "completion_ids" in output:
            rows = output["completion_ids"]
            output["completion_ids"] = mark_stopped(rows, self.stop_strings, self._tokenizer, self.end_token)
        return output

    def _rollouts_with_mask(self, prompts: list[Any], _: Any) -> dict[str, Any]:
        """Sample with the interpreter, in the form of TRL's ``rollout_func``."""
        prompt_ids = [list(ids) for ids in self._tokenize_prompts(prompts)[0]]
        completion_ids = self.sample(prompt_ids)
        assert completion_ids is not None
        assert self.transcripts is not None
        mask = [script.mask(len(ids)) for script, ids in zip(self.transcripts, completion_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": mask}

    def completions_to_reward(self, completions: list[Any]) -> list[Any]:
        """Return the completions for the reward functions: with the outputs of tools called in text left blank."""
        if self.transcripts is None:
            return completions
        return [
            self._with_text(completion, transcript.blanked_text) if transcript.calls else completion
            for completion, transcript in zip(completions, self.transcripts, strict=True)
        ]

    def _with_text(self, completion: Any, text: str) -> Any:
        if isinstance(completion, str):
            return text
        tokenizer = self._tokenizer
        if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
            return [parse_response(tokenizer, tokenizer.encode(text, add_special_tokens=False))]
        return [{**completion[0], "content": text}]

    # ---------------------------------------------------------------- score

    def sample_and_reward(self, inputs: list[dict[str, Any]]) -> RewardedRows:
        """Sample and reward rows, equally many on each process.

        Of the metrics, only those that reward functions log by `log_metric` are kept, which count every call.
        """
        prompts = [row["prompt"] for row in inputs]
        metrics = {name: list(values) for name, values in self._metrics[self.mode].items()}
        completion_ids, _, completions = self._generate(prompts)[1:4]
        self.check_completions(completion_ids)
        self._metrics[self.mode].clear()
        self._metrics[self.mode].update(metrics)
        # Prompts and tokens are still needed for the batch: reward functions get copies, which they may change.
        copies = copy.deepcopy(prompts), self.completions_to_reward(completions), [list(ids) for ids in completion_ids]
        parts = check_finite(self._calculate_rewards(inputs, *copies), self.reward_func_names)
        extra = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        return RewardedRows(completion_ids, extra, parts, self.transcripts)

    @property
    def tokens_seen(self) -> int:
        """Number of tokens of all prompts and completions so far."""
        return int(self.state.num_input_tokens_seen)

    @tokens_seen.setter
    def tokens_seen(self, count: int) -> None:
        self.state.num_input_tokens_seen = count
        self._metrics[self.mode]["num_tokens"] = [count]

    def known_rewards(self) -> RewardedRows | None:
        """Return the generation batch if it is already rewarded; with None, the reward functions are called."""
        return None

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample, reward and normalise a generation batch."""
        calculate_rewards, generate = self._calculate_rewards, self._generate

        def calculate_and_store(
            inputs: Any, prompts: Any, completions: Any, ids: Any, *more: Any, **options: Any
        ) -> Tensor:
            rewarded, completions = self.known_rewards(), self.completions_to_reward(completions)
            self.stopped = [isinstance(tokens, StoppedTokens) for tokens in ids]
            ids = plain_lists(ids)
            if rewarded is None:
                parts = calculate_rewards(inputs, prompts, completions, ids, *more, **options)
                self.reward_parts = check_finite(parts, self.reward_func_names)
            else:
                self.reward_parts = rewarded.reward_parts
                self._pending_extra_logs.update(rewarded.extra)
            columns = {key: [row[key] for row in inputs] for key in inputs[0] if key not in _NOT_COLUMNS}
            self.rewarded = {"prompts": prompts, "completions": completions, "completion_ids": ids, **columns}
            return self.reward_parts

        def generate_and_check(prompts: list[Any]) -> Any:
            result = generate(prompts)
            self.check_completions(result[1])
            return result

        # On the instance, so that they wrap overrides of a subclass: TRL uses what those return, and so do we.
        with (
            self._with_method("_calculate_rewards", calculate_and_store),
            self._with_method("_generate", generate_and_check),
        ):
            return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        functions, names = self.reward_funcs, self.reward_func_names
        self.reward_funcs = [checked_function(*pair) for pair in zip(functions, names, strict=True)]
        try:
            return super()._calculate_rewards(*arguments, **options)
        finally:
            self.reward_funcs = functions

    @contextmanager
    def _with_method(self, name: str, method: Any) -> Iterator[None]:
        """Set a method on the instance for a while, and restore what was there."""
        previous = vars(self).get(name)
        setattr(self, name, method)
        try:
            yield
        finally:
            delattr(self, name)
            if previous is not None:
                setattr(self, name, previous)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.scored(inputs)

    def normalised(self, rewards: Tensor) -> Tensor:
        """Return the advantages of the total rewards of all processes as TRL does ("sum_then_normalize")."""
        grouped = rewards.view(-1, self.num_generations)
        advantages = rewards - grouped.nanmean(dim=1).repeat_interleave(self.num_generations, dim=0)
        if self.scale_rewards != "none":
            batch = self.scale_rewards == "batch"
            std = nanstd(rewards).expand_as(rewards) if batch else nanstd(grouped, dim=1)
            std = std if batch else std.repeat_interleave(self.num_generations, dim=0)
            advantages = advantages / (std + 1e-4)
        return torch.nan_to_num(advantages, nan=0.0)

    # ---------------------------------------------------------------- split

    def micro_batches(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """Shuffle and split into equal-sized micro-batches."""
        batch = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
        return [unsplit_pixel_values_by_grid(part) for part in split_tensor_dict(batch, self.args.steps_per_generation)]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return the next micro-batch; make a new generation batch if the last one is used up."""
        if self.mode == "eval":
            return self._generate_and_score_completions(generation_batch)
        if self.buffered_batches is None:
            self._buffered_inputs = self.micro_batches(self._generate_and_score_completions(generation_batch))
        assert self._buffered_inputs is not None
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # ---------------------------------------------------------------- log-probabilities

    def log_probabilities(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log π and, on request, entropy and a router's auxiliary loss, computed ``rows`` at a time."""
        return self.padded_log_probabilities(model, input_ids, attention_mask, completion, rows=rows, **options)

    def padded_log_probabilities(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the same from TRL's own pass."""
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, completion, batch_size=rows, **options
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        options = {name: value for name, value in options.items() if value is not None}
        return self.log_probabilities(
            model, input_ids, attention_mask, logits_to_keep, rows=batch_size or len(input_ids), **options
        )

    # ---------------------------------------------------------------- loss

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch."""
        return super()._compute_loss(model, batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self.loss(model, inputs)

    def with_entropy_bonus(self, loss: Tensor, entropies: Tensor, mask: Tensor) -> Tensor:
        """Add TRL's entropy bonus: loss − coef · mean H, with a coefficient that may adapt to a target entropy."""
        training = self.mode == "train"
        accumulated = self.current_gradient_accumulation_steps if training else 1.0
        bonus = (entropies * mask).sum() / mask.sum().clamp(min=1.0) / accumulated
        active = not self.use_adaptive_entropy or self._last_world_entropy <= self.args.entropy_target
        policy_loss = loss.detach() * (1.0 if self.loss_type in OVER_TOKENS else accumulated)
        self.record_metric("policy_loss", self.accelerator.gather(policy_loss).nanmean().item())
        total = loss - (self.entropy_coef if active else 0.0) * bonus
        if training and self.use_adaptive_entropy:
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
        if training and self.accelerator.sync_gradients:
            self.record_metric("entropy_coef", self.entropy_coef)
        return total

    # ---------------------------------------------------------------- order of the prompts, checkpoints

    def row_at(self, index: int) -> dict[str, Any]:
        """Return a row of the training data as `scored` gets it."""
        row = dict(self.train_dataset[index])
        if not self.args.remove_unused_columns:
            return row
        self._set_signature_columns_if_needed()
        return {name: value for name, value in row.items() if name in self._signature_columns}

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

    def write_state(self, folder: Path) -> None:
        """Write the state that a checkpoint needs beyond TRL's; called on every process."""

    def read_state(self, folder: Path) -> None:
        """Read the state that `write_state` has written."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.write_state(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # if there are adapters in subfolders ("ref"), transformers reads those and not the trained one
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy = self.accelerator.unwrap_model(self.model)
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with restoring_optimizer(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.read_state(Path(checkpoint))


class _ResumableSampler(RepeatSampler):
    """TRL's order of the prompts, but a resumed run continues with the order of its epoch instead of the first."""

    def set_epoch(self, epoch: int) -> None:
        """Advance the generator to the order of this epoch."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)
