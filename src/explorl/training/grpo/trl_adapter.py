"""TRL's `GRPOTrainer` behind public names: the only module that knows TRL's private names.

What is overridden (the numbers are lines of trl/trainer/grpo_trainer.py in TRL 1.16), and what is called instead:

    _generate_single_turn               1763  sampler.sample(sampled, prompt_ids, rows)
    _tool_call_loop                     1945  sampler.finish_conversations(sampled, completion_ids)
    _generate                           2193  with all weights if sampler.needs_whole_weights; with sampler.interpreter
                                              as a rollout_func, which can return a mask of the policy's tokens
    _get_per_token_logps_and_entropies  1419  logprobs.compute(model, ids, mask, completion, ...)
    _calculate_rewards                  1579  the same, with checks of what reward functions return
    _generate_and_score_completions     2324  scored(rows), which calls score(rows)
    _prepare_inputs                     1522  micro_batches(batch)
    _compute_loss                       3020  loss(model, batch)
    _get_train_sampler                  1280  the same order of prompts in a resumed run
    _save_checkpoint                    3384  write_state(folder)
    _load_optimizer_and_scheduler       3397  read_state(folder)
    _load_from_checkpoint                     the trained adapter, not the reference's (transformers.Trainer)

What is read or set: _step, _buffered_inputs, _metrics, _logs, _pending_extra_logs, _tokenizer, _is_vlm,
_signature_columns, _entropy_bonus_enabled, _last_world_entropy, _entropy_window_stats, _last_loaded_step,
_get_output_dir; and called: _generate, _calculate_rewards, _tokenize_prompts, _set_signature_columns_if_needed.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import (
    RepeatSampler,
    add_fused_lm_head,
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from explorl.modeling.proof import inner_model
from explorl.rollout.tool_use import ToolUse
from explorl.training.checkpoint_faults import restoring_optimizer
from explorl.training.grpo.conversations import RowTokens, row_numbers
from explorl.training.grpo.logged_columns import prompt_text
from explorl.training.grpo.loss import OVER_TOKENS
from explorl.training.grpo.rewards import check_finite, checked_function
from explorl.training.grpo.sampled_rows import SampledRows
from explorl.training.grpo.stopping import (
    StoppedTokens,
    cut_at_stops,
    end_token,
    mark_stopped,
    plain_lists,
    without_model_stops,
)
from explorl.training.grpo.tool_transcripts import ToolTranscript
from explorl.training.sharding import gathered_weights, has_sharded_weights

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
LogpsAndEntropy = tuple[Tensor, Tensor | None, Tensor | None]
"""log π, entropy and a router's auxiliary loss."""

_LOSS_METHODS = ("compute_loss", "_compute_loss", "_prepare_inputs", "_get_per_token_logps_and_entropies")
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that reward functions get under other names or not at all."""


class Sampler:
    """Samples and checks completions for the adapter. This one leaves everything to TRL."""

    interpreter: ToolUse | None = None
    """The tool that completions may call in text."""

    @property
    def needs_whole_weights(self) -> bool:
        """True if sampling needs all weights of a sharded model."""
        return False

    def sample(
        self, sampled: SampledRows, prompt_ids: list[list[int]], rows: Sequence[int] | None = None
    ) -> tuple[list[list[int]], list[list[float]] | None] | None:
        """Return a completion for each prompt, with vLLM's log q for TRL's correction; None to have TRL sample."""
        return None

    def finish_conversations(self, sampled: SampledRows, completion_ids: list[list[int]]) -> None:
        """Record the conversations of a batch after their last turn."""

    def check(self, sampled: SampledRows, completion_ids: list[list[int]]) -> None:
        """Check the completions of a batch in their final form."""


class LogProbabilities(Protocol):
    """What the adapter needs of the object that computes log-probabilities."""

    def compute(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> LogpsAndEntropy: ...


class GRPOAdapter(GRPOTrainer):
    """`GRPOTrainer` whose steps call the methods and objects named above."""

    sampler = Sampler()
    logprobs: LogProbabilities
    sampled: SampledRows
    """The generation batch that TRL is scoring, or has scored last: this process's rows as they were sampled."""
    rollout_func: Any
    reward_funcs: list[Any]
    generation_kwargs: dict[str, Any]
    stop_strings: tuple[str, ...] = ()
    """Strings that end a completion."""
    epsilon_low: float
    epsilon_high: float
    entropy_coef: float
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
    def has_entropy_bonus(self) -> bool:
        return self._entropy_bonus_enabled

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

    def warn_once(self, message: str) -> None:
        """Issue a warning on the main process unless it was issued before."""
        if message not in self._warned and self.accelerator.is_main_process:
            warnings.warn(message, UserWarning, stacklevel=3)
        self._warned.add(message)

    def record_metric(self, name: str, value: float, mode: Mode | None = None) -> None:
        """Add a value whose mean TRL logs at the next logging step."""
        self._metrics[mode or self.mode][name].append(value)

    # ---------------------------------------------------------------- sample

    def _generate(self, prompts: list[Any]) -> Any:
        rollout_func = self.rollout_func
        if self.sampler.interpreter is not None:
            self.rollout_func = partial(_rollouts_with_mask, self)
        elif rollout_func is not None and self.stop_strings:
            self.rollout_func = partial(_marked_rollouts, self, rollout_func)
        try:
            with whole_weights(self) if self.sampler.needs_whole_weights else nullcontext():
                return super()._generate(prompts)
        finally:
            self.rollout_func = rollout_func

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, *more: Any, **options: Any
    ) -> Any:
        if images is None and not multimodal_fields:
            rows = row_numbers(prompt_ids)
            completions = self.sampler.sample(self.sampled, [list(ids) for ids in prompt_ids], rows)
            if completions is not None:
                return completions
        with without_model_stops(inner_model(self.model)):
            completion_ids, logps = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, *more, **options
            )
        if self.stop_strings:
            options = self.args.generation_kwargs or {}
            min_tokens = int(options.get("min_tokens") or 0)  # vLLM ignores strings in these
            completion_ids = cut_at_stops(
                completion_ids, self.stop_strings, self._tokenizer, end_token(self), min_tokens=min_tokens
            )
            if logps is not None:
                logps = [values[: len(ids)] for ids, values in zip(completion_ids, logps, strict=True)]
        return completion_ids, logps

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *more: Any, **options: Any) -> Any:
        numbered = [RowTokens(ids, row) for row, ids in enumerate(prompt_ids)]
        result = super()._tool_call_loop(prompts, numbered, *more, **options)
        self.sampler.finish_conversations(self.sampled, result[2])
        return result

    # ---------------------------------------------------------------- score

    def sample_and_reward(self, inputs: list[dict[str, Any]]) -> SampledRows:
        """Sample and reward rows, equally many on each process.

        Of the metrics, only those that reward functions log by `log_metric` are kept, which count every call.
        """
        sampled = self.sampled = SampledRows([row["prompt"] for row in inputs])
        metrics = {name: list(values) for name, values in self._metrics[self.mode].items()}
        completion_ids, _, completions = self._generate(list(sampled.prompts))[1:4]
        self.sampler.check(sampled, completion_ids)
        self._metrics[self.mode].clear()
        self._metrics[self.mode].update(metrics)
        # Prompts and tokens are still needed for the batch: reward functions get copies, which they may change.
        completions = blank_outputs(completions, sampled.transcripts, self._tokenizer)
        copies = copy.deepcopy(sampled.prompts), completions, [list(ids) for ids in completion_ids]
        sampled.reward_parts = check_finite(self._calculate_rewards(inputs, *copies), self.reward_func_names)
        sampled.extra = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        sampled.completion_ids = completion_ids
        return sampled

    def score(self, inputs: list[dict[str, Any]], sampled: SampledRows | None = None) -> dict[str, Any]:
        """Return TRL's generation batch of these rows, and store what else is known of them in `sampled`.

        Rows in ``sampled`` are already sampled and rewarded; TRL only turns them into tensors and logs them.
        """
        calculate_rewards, generate = self._calculate_rewards, self._generate
        tokens_seen = self.state.num_input_tokens_seen
        is_rewarded = sampled is not None
        sampled = self.sampled = sampled or SampledRows([row.get("prompt", "") for row in inputs])

        def reward_and_store(
            inputs: Any, prompts: Any, completions: Any, ids: Any, *more: Any, **options: Any
        ) -> Tensor:
            completions = blank_outputs(completions, sampled.transcripts, self._tokenizer)
            sampled.stopped = [isinstance(tokens, StoppedTokens) for tokens in ids]
            ids = plain_lists(ids)
            if is_rewarded:
                self._pending_extra_logs.update(sampled.extra)
            else:
                parts = calculate_rewards(inputs, prompts, completions, ids, *more, **options)
                sampled.reward_parts = check_finite(parts, self.reward_func_names)
            columns = {key: [row[key] for row in inputs] for key in inputs[0] if key not in _NOT_COLUMNS}
            sampled.rewarded = {"prompts": prompts, "completions": completions, "completion_ids": ids, **columns}
            return sampled.reward_parts

        def generate_and_check(prompts: list[Any]) -> Any:
            result = generate(prompts)
            self.sampler.check(sampled, result[1])
            return result

        # On the instance, so that they wrap overrides of a subclass: TRL uses what those return, and so do we.
        with (
            _instance_method(self, "_calculate_rewards", reward_and_store),
            _instance_method(self, "_generate", generate_and_check),
        ):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        sampled.completion_ids = sampled.old_logps = None  # what is sampled or computed from now on is something else
        if is_rewarded:  # its tokens were counted when they were sampled
            self.state.num_input_tokens_seen = tokens_seen
            self._metrics[self.mode]["num_tokens"] = [int(tokens_seen)]
        return output

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Tensor:
        functions, names = self.reward_funcs, self.reward_func_names
        self.reward_funcs = [checked_function(*pair) for pair in zip(functions, names, strict=True)]
        try:
            return super()._calculate_rewards(*arguments, **options)
        finally:
            self.reward_funcs = functions

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.scored(inputs)

    # ---------------------------------------------------------------- micro-batches, log-probabilities, loss

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return the next micro-batch; make a new generation batch if the last one is used up."""
        if self.mode == "eval":
            return self._generate_and_score_completions(generation_batch)
        if self.buffered_batches is None:
            self._buffered_inputs = self.micro_batches(self._generate_and_score_completions(generation_batch))
        assert self._buffered_inputs is not None
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def padded_log_probabilities(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> LogpsAndEntropy:
        """Return log π and, on request, entropy and auxiliary loss, from TRL's own pass over ``rows`` at a time."""
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
    ) -> LogpsAndEntropy:
        options = {name: value for name, value in options.items() if value is not None}
        return self.logprobs.compute(
            model, input_ids, attention_mask, logits_to_keep, rows=batch_size or len(input_ids), **options
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self.loss(model, inputs)

    # ---------------------------------------------------------------- order of the prompts, checkpoints

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


# -------------------------------------------------------------------- rollout functions


def _marked_rollouts(trainer: GRPOAdapter, rollout_func: Any, prompts: list[Any], _: Any) -> dict[str, Any]:
    """Call a user's rollout function and mark the completions that end with a stop string."""
    output = dict(rollout_func(prompts, trainer))
    if "completion_ids" in output:
        rows = output["completion_ids"]
        output["completion_ids"] = mark_stopped(rows, trainer.stop_strings, trainer.tokenizer, end_token(trainer))
    return output


def _rollouts_with_mask(trainer: GRPOAdapter, prompts: list[Any], _: Any) -> dict[str, Any]:
    """Sample with the interpreter, in the form of TRL's ``rollout_func``."""
    prompt_ids = [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
    completions = trainer.sampler.sample(trainer.sampled, prompt_ids)
    assert completions is not None
    assert trainer.sampled.transcripts is not None
    pairs = zip(trainer.sampled.transcripts, completions[0], strict=True)
    mask = [transcript.mask(len(ids)) for transcript, ids in pairs]
    return {"prompt_ids": prompt_ids, "completion_ids": completions[0], "logprobs": None, "env_mask": mask}


def blank_outputs(completions: list[Any], transcripts: Sequence[ToolTranscript] | None, tokenizer: Any) -> list[Any]:
    """Return the completions for the reward functions: with the outputs of tools called in text left blank."""
    if transcripts is None:
        return completions
    return [
        _with_text(completion, transcript.blanked_text, tokenizer) if transcript.calls else completion
        for completion, transcript in zip(completions, transcripts, strict=True)
    ]


def _with_text(completion: Any, text: str, tokenizer: Any) -> Any:
    if isinstance(completion, str):
        return text
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return [parse_response(tokenizer, tokenizer.encode(text, add_special_tokens=False))]
    return [{**completion[0], "content": text}]


@contextmanager
def _instance_method(trainer: Any, name: str, method: Any) -> Iterator[None]:
    """Set a method on the instance for a while, and restore what was there."""
    previous = vars(trainer).get(name)
    setattr(trainer, name, method)
    try:
        yield
    finally:
        delattr(trainer, name)
        if previous is not None:
            setattr(trainer, name, previous)


# -------------------------------------------------------------------- functions of a trainer


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


def split_like_trl(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Shuffle and split into equal-sized micro-batches."""
    batch = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
    return [unsplit_pixel_values_by_grid(part) for part in split_tensor_dict(batch, parts)]


def training_row(trainer: GRPOAdapter, index: int) -> dict[str, Any]:
    """Return a row of the training data as `GRPOAdapter.scored` gets it."""
    row = dict(trainer.train_dataset[index])
    if not trainer.args.remove_unused_columns:
        return row
    trainer._set_signature_columns_if_needed()
    return {name: value for name, value in row.items() if name in trainer._signature_columns}


def has_own_loss(trainer: GRPOAdapter) -> bool:
    """Tell whether a subclass, another base class or the instance overrides a method that computes the loss.

    Such a loss may rely on micro-batches as TRL makes them: equally many rows in each, with TRL's log π_old.
    """

    def is_overridden(name: str) -> bool:
        method = getattr(trainer, name)
        packages = ("explorl", "trl", "transformers")
        patched = method.__module__.partition(".")[0] not in packages
        return patched or getattr(type(trainer), name) is not getattr(GRPOAdapter, name)

    return any(map(is_overridden, _LOSS_METHODS))


def load_vllm_weights(trainer: GRPOAdapter) -> None:
    """Update vLLM's weights to those of this step if they are older."""
    if trainer.state.global_step != trainer._last_loaded_step:
        trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step


def is_sharded(trainer: GRPOAdapter) -> bool:
    """Tell whether no process holds all weights."""
    return has_sharded_weights(trainer.model, trainer.accelerator)


@contextmanager
def whole_weights(trainer: GRPOAdapter) -> Iterator[None]:
    """Gather all weights on every process; must be entered by all processes."""
    args = trainer.args
    setting, args.ds3_gather_for_generation = args.ds3_gather_for_generation, False
    try:
        with gathered_weights(trainer.model_wrapped, trainer.accelerator):
            yield
    finally:
        args.ds3_gather_for_generation = setting


@contextmanager
def without_gradient(trainer: GRPOAdapter) -> Iterator[None]:
    """Disable gradients, and gradient checkpointing, whose reentrant variant would warn that there are none."""
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        yield


def with_entropy_bonus(trainer: GRPOAdapter, loss: Tensor, entropies: Tensor, mask: Tensor) -> Tensor:
    """Add TRL's entropy bonus: loss − coef · mean H, with a coefficient that may adapt to a target entropy."""
    args, accelerator, training = trainer.args, trainer.accelerator, trainer.mode == "train"
    accumulated = trainer.current_gradient_accumulation_steps if training else 1.0
    bonus = (entropies * mask).sum() / mask.sum().clamp(min=1.0) / accumulated
    active = not trainer.use_adaptive_entropy or trainer._last_world_entropy <= args.entropy_target
    policy_loss = loss.detach() * (1.0 if trainer.loss_type in OVER_TOKENS else accumulated)
    trainer.record_metric("policy_loss", accelerator.gather(policy_loss).nanmean().item())
    total = loss - (trainer.entropy_coef if active else 0.0) * bonus
    if training and trainer.use_adaptive_entropy:
        stats = torch.stack([(entropies * mask).sum(), mask.sum()]).detach()
        window = trainer._entropy_window_stats
        trainer._entropy_window_stats = stats if window is None else window + stats
        if accelerator.sync_gradients:
            entropy_sum, tokens = accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
            trainer._last_world_entropy = (entropy_sum / tokens.clamp(min=1.0)).item()
            trainer._entropy_window_stats = None
            low = trainer._last_world_entropy <= args.entropy_target
            coefficient = trainer.entropy_coef + (args.entropy_coef_delta if low else -args.entropy_coef_delta)
            trainer.entropy_coef = min(max(coefficient, args.entropy_coef_min), args.entropy_coef_max)
    if training and accelerator.sync_gradients:
        trainer.record_metric("entropy_coef", trainer.entropy_coef)
    return total
