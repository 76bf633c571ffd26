"""TRL's `GRPOTrainer` with names for its moments: the one module that knows TRL's private names.

What is overridden, and what a subclass finds in its place:

    _generate_single_turn                 sample(prompt_ids, rows)
    _tool_call_loop                       conversed(completion_ids)
    _generate                             interprets, said; samples_whole
    _get_per_token_logps_and_entropies    log_probabilities(model, ids, mask, completion, ...)
    _calculate_rewards                    reward_parts, rewarded; known_rewards(); checks what functions return
    _generate_and_score_completions       scored(inputs)
    _prepare_inputs                       micro_batches(batch)
    _compute_loss                         loss(model, batch)
    _get_train_sampler                    (the same order of prompts, also in a resumed run)
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
"""What a micro-batch may hold for a vision-language model."""

Mode = Literal["train", "eval"]

_OF_LOSS = ("compute_loss", "_compute_loss", "_prepare_inputs", "_get_per_token_logps_and_entropies")


class RewardedRows(NamedTuple):
    """Rows that were sampled and rewarded."""

    completion_ids: list[list[int]]
    """Of this process."""
    extra: dict[str, list[Any]]
    """What reward functions logged of each, by column (``log_extra``); of this process."""
    reward_parts: Tensor
    """Of all processes, (rows, reward functions), NaN where one said None."""
    transcripts: list[ToolTranscript] | None = None
    """The same answers with their calls, where the trainer has an interpreter; of this process."""


_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns of a data set that reward functions get under other names, or not at all."""


def add_head(model: Any) -> None:
    """Give a model the fused head that the trainer gives it: log-probabilities and entropies without all logits."""
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))


def logs_of(trainer: GRPOTrainer) -> Mapping[str, Any]:
    """The prompts, completions and rewards that a trainer has logged of late, by name."""
    logs: Mapping[str, Any] = trainer._logs
    return logs


def prompt_seen(trainer: GRPOTrainer, prompt: Any) -> str:
    """Return a prompt as the model saw it: messages through the chat template, with all that TRL gives it.

    An environment has tools of its own for each prompt, and images have no text: then messages are their contents.
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
    """`GRPOTrainer` whose moments a subclass overrides by the names above."""

    rollout_func: Any
    reward_funcs: list[Any]
    epsilon_low: float
    epsilon_high: float
    entropy_coef: float
    reward_parts: Tensor | None = None
    """Rewards of the latest generation batch of all processes, (rows, reward functions), NaN where one said None."""
    rewarded: Mapping[str, Any]
    """What the reward functions of this process were called with, by name: prompts, completions and columns."""
    _warned: set[str]
    _last_loaded_step: int
    _last_world_entropy: float
    _entropy_window_stats: Tensor | None
    _buffered_inputs: list[dict[str, Any]] | None

    # ---------------------------------------------------------------- what TRL knows

    @property
    def mode(self) -> Mode:
        return "train" if self.model.training else "eval"

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def sees_images(self) -> bool:
        """Whether the model is a vision-language model."""
        return self._is_vlm

    @property
    def logs(self) -> Mapping[str, Any]:
        """TRL's log of the latest generation batch."""
        return self._logs

    @property
    def has_entropy_bonus(self) -> bool:
        return self._entropy_bonus_enabled

    @property
    def has_own_loss(self) -> bool:
        """Return whether a subclass, another base class or the trainer itself overrides what a loss is computed by.

        It may count on micro-batches as TRL makes them: as many rows in each, with log π_old where TRL has it.
        """

        def is_own(name: str) -> bool:
            method = getattr(self, name)
            packages = ("explorl", "trl", "transformers")
            patched = method.__module__.partition(".")[0] not in packages
            return patched or getattr(type(self), name) is not getattr(GRPOAdapter, name)

        return any(map(is_own, _OF_LOSS))

    @property
    def micro_step(self) -> int:
        """Micro-batches seen so far."""
        return self._step

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self._step = value

    @property
    def waiting(self) -> list[dict[str, Any]] | None:
        """The micro-batches of a generation batch that is still in use."""
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        return None if used_up else self._buffered_inputs

    @waiting.setter
    def waiting(self, batches: list[dict[str, Any]]) -> None:
        self._buffered_inputs = batches

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """What autocast makes of float32; None without it: where a device has none, accelerate leaves it out."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return kinds.get(self.accelerator.mixed_precision) if self.accelerator.native_amp else None

    @property
    def sharded(self) -> bool:
        """Whether no process holds all weights."""
        return has_sharded_weights(self.model, self.accelerator)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Every process holds all weights, whoever samples; called on all of them."""
        gathers, self.args.ds3_gather_for_generation = self.args.ds3_gather_for_generation, False
        try:
            with gathered_weights(self.model_wrapped, self.accelerator):
                yield
        finally:
            self.args.ds3_gather_for_generation = gathers

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """Nor with gradient checkpointing, whose reentrant kind would warn that there is none."""
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            yield

    @property
    def now(self) -> int:
        """Optimizer steps taken."""
        return int(self.state.global_step)

    def warn_once(self, message: str) -> None:
        """On the main process."""
        if message not in self._warned and self.accelerator.is_main_process:
            warnings.warn(message, UserWarning, stacklevel=3)
        self._warned.add(message)

    def record_metric(self, name: str, value: float, mode: Mode | None = None) -> None:
        self._metrics[mode or self.mode][name].append(value)

    # ---------------------------------------------------------------- sample

    def sample(self, prompt_ids: list[list[int]], rows: Sequence[int] | None = None) -> list[list[int]] | None:
        """Completions of these prompts, one for each; None leaves it to TRL.

        ``rows``: in a further turn of a conversation with tools, which rows of the batch go on; their prompts hold the
        conversation so far.
        """
        return None

    sampled_logps: list[list[float]] | None = None
    """What `sample` leaves for TRL's correction of what vLLM sampled: log q of every token, as vLLM computed it."""

    def load_vllm_weights(self) -> None:
        """Gives vLLM the weights of this step, where it has older ones."""
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def finish_conversations(self, completion_ids: list[list[int]]) -> None:
        """Called when the last turn of a batch of conversations is over."""

    def generated(self, completion_ids: list[list[int]]) -> None:
        """Called with the answers of a batch, once nobody changes them any more."""

    def _tool_call_loop(self, prompts: Any, prompt_ids: list[list[int]], *more: Any, **options: Any) -> Any:
        known = [RowTokens(ids, row) for row, ids in enumerate(prompt_ids)]
        found = super()._tool_call_loop(prompts, known, *more, **options)
        self.finish_conversations(found[2])
        return found

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
            min_tokens = int(self.generation_kwargs.get("min_tokens") or 0)  # vLLM looks for no string in them
            how = (self.stop_strings, self._tokenizer, self.end_token)
            completion_ids = cut_at_stops(completion_ids, *how, min_tokens=min_tokens)
            if logps is not None:
                logps = [values[: len(ids)] for ids, values in zip(completion_ids, logps, strict=True)]
        return completion_ids, logps

    def _take_stop_strings(self) -> None:
        """Keeps the strings that end an answer from `model.generate`, which TRL calls without a tokenizer."""
        self.stop_strings = stop_strings_of(self.args.generation_kwargs, inner_model(self.model))
        if not self.use_vllm and without_stop_keys(self.generation_kwargs) != self.generation_kwargs:
            self.generation_kwargs = without_stop_keys(self.generation_kwargs)
            self.generation_config = GenerationConfig(**self.generation_kwargs, disable_compile=True)

    @property
    def end_token(self) -> int:
        """A token that ends a sequence."""
        return int([*self.eos_token_ids, self._tokenizer.pad_token_id][0])

    def ended(self, rollout: Rollout) -> list[int]:
        """The tokens of an answer; TRL knows of no stop string, nor of an ``eos_token_id`` in `generation_kwargs`."""
        ids = list(rollout.token_ids)
        known = bool(ids) and ids[-1] in (*self.eos_token_ids, self._tokenizer.pad_token_id)
        return StoppedTokens(ids, self.end_token) if rollout.finish_reason == "stop" and not known else ids

    @property
    def has_interpreter(self) -> bool:
        """Whether answers may call a tool in text; then `sample` keeps what they `said`."""
        return False

    transcripts: list[ToolTranscript] | None = None
    """What the rows of this process have said in the latest generation batch."""

    generation_kwargs: dict[str, Any]
    stop_strings: tuple[str, ...] = ()
    """Strings that end an answer."""
    stopped: list[bool]
    """Whether one of them has ended each row of this process in the latest generation batch."""

    @property
    def samples_whole(self) -> bool:
        """Whether `sample` needs all weights of a model that is sharded."""
        return False

    def _generate(self, prompts: list[Any]) -> Any:
        with self.whole_weights() if self.samples_whole else nullcontext():
            return self._generated(prompts)

    def _generated(self, prompts: list[Any]) -> Any:
        given = self.rollout_func
        if self.has_interpreter:  # TRL counts tokens by its mask, and leaves the rest to it
            self.rollout_func = self._rolled_out
        elif given is not None and self.stop_strings:
            self.rollout_func = partial(self._marked, given)
        try:
            return super()._generate(prompts)
        finally:
            self.rollout_func = given

    def _marked(self, rollout: Any, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What a user's function has sampled; that answers end at `stop_strings` is up to it."""
        output = dict(rollout(prompts, trainer))
        if "completion_ids" in output:
            rows = output["completion_ids"]
            output["completion_ids"] = mark_stopped(rows, self.stop_strings, self._tokenizer, self.end_token)
        return output

    def _rolled_out(self, prompts: list[Any], _: Any) -> dict[str, Any]:
        prompt_ids = [list(ids) for ids in self._tokenize_prompts(prompts)[0]]
        completion_ids = self.sample(prompt_ids)
        assert completion_ids is not None
        assert self.transcripts is not None
        own = [one.mask(len(ids)) for one, ids in zip(self.transcripts, completion_ids, strict=True)]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": own}

    def judged(self, completions: list[Any]) -> list[Any]:
        """What rewards are given for: outputs of tools that were called in text are left blank."""
        if self.transcripts is None:
            return completions
        return [
            self._with_text(completion, one.blanked_text) if one.calls else completion
            for completion, one in zip(completions, self.transcripts, strict=True)
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
        """Samples and rewards rows, as many on each process. What is logged of them is what reward functions log by
        `log_metric`, as each of their calls counts."""
        prompts = [row["prompt"] for row in inputs]
        metrics = {name: list(values) for name, values in self._metrics[self.mode].items()}
        completion_ids, _, completions = self._generate(prompts)[1:4]
        self.generated(completion_ids)
        self._metrics[self.mode].clear()
        self._metrics[self.mode].update(metrics)
        # The batch is yet to be made of prompts and tokens: a reward function that changes them changes copies.
        said = copy.deepcopy(prompts), self.judged(completions), [list(ids) for ids in completion_ids]
        parts = check_finite(self._calculate_rewards(inputs, *said), self.reward_func_names)
        extra = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        return RewardedRows(completion_ids, extra, parts, self.transcripts)

    @property
    def tokens_seen(self) -> int:
        """Tokens of all prompts and answers so far."""
        return int(self.state.num_input_tokens_seen)

    @tokens_seen.setter
    def tokens_seen(self, count: int) -> None:
        self.state.num_input_tokens_seen = count
        self._metrics[self.mode]["num_tokens"] = [count]

    def known_rewards(self) -> RewardedRows | None:
        """Answers of the generation batch where it is rewarded already; None has the reward functions called."""
        return None

    def scored(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Samples, rewards and normalises a generation batch."""
        rewards = self._calculate_rewards

        def kept(inputs: Any, prompts: Any, completions: Any, ids: Any, *more: Any, **options: Any) -> Tensor:
            known, completions = self.known_rewards(), self.judged(completions)
            self.stopped = [isinstance(one, StoppedTokens) for one in ids]
            ids = plain_lists(ids)
            if known is None:
                parts = rewards(inputs, prompts, completions, ids, *more, **options)
                self.reward_parts = check_finite(parts, self.reward_func_names)
            else:
                self.reward_parts = known.reward_parts
                self._pending_extra_logs.update(known.extra)
            columns = {key: [row[key] for row in inputs] for key in inputs[0] if key not in _NOT_COLUMNS}
            self.rewarded = {"prompts": prompts, "completions": completions, "completion_ids": ids, **columns}
            return self.reward_parts

        def told(prompts: list[Any]) -> Any:
            found = generate(prompts)
            self.generated(found[1])
            return found

        generate = self._generate
        # In front of whatever a subclass has: TRL goes by the last word, and so do we.
        with self._with_method("_calculate_rewards", kept), self._with_method("_generate", told):
            return super()._generate_and_score_completions(inputs)

    def _calculate_rewards(self, *given: Any, **options: Any) -> Tensor:
        functions, names = self.reward_funcs, self.reward_func_names
        self.reward_funcs = [checked_function(*pair) for pair in zip(functions, names, strict=True)]
        try:
            return super()._calculate_rewards(*given, **options)
        finally:
            self.reward_funcs = functions

    @contextmanager
    def _with_method(self, name: str, method: Any) -> Iterator[None]:
        """For a while the trainer has this method; then the one it had, be it of its class or somebody's own."""
        own = vars(self).get(name)
        setattr(self, name, method)
        try:
            yield
        finally:
            delattr(self, name)
            if own is not None:
                setattr(self, name, own)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.scored(inputs)

    def normalised(self, rewards: Tensor) -> Tensor:
        """Advantages of total rewards of all processes, one per row, as TRL makes them ("sum_then_normalize")."""
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
        """As many rows in each, by chance."""
        batch = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
        return [unsplit_pixel_values_by_grid(part) for part in split_tensor_dict(batch, self.args.steps_per_generation)]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """The next micro-batch; a new generation batch where the last one is used up."""
        if self.mode == "eval":
            return self._generate_and_score_completions(generation_batch)
        if self.waiting is None:
            self._buffered_inputs = self.micro_batches(self._generate_and_score_completions(generation_batch))
        assert self._buffered_inputs is not None
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # ---------------------------------------------------------------- log-probabilities

    def log_probabilities(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """log π, entropy and a router's auxiliary loss, the last two where asked for, ``rows`` at a time."""
        return self.padded_log_probabilities(model, input_ids, attention_mask, completion, rows=rows, **options)

    def padded_log_probabilities(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, *, rows: int, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL's own pass."""
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
        given = {name: value for name, value in options.items() if value is not None}
        return self.log_probabilities(
            model, input_ids, attention_mask, logits_to_keep, rows=batch_size or len(input_ids), **given
        )

    # ---------------------------------------------------------------- loss

    def loss(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch."""
        return super()._compute_loss(model, batch)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return self.loss(model, inputs)

    def with_entropy_bonus(self, loss: Tensor, entropies: Tensor, mask: Tensor) -> Tensor:
        """TRL's bonus: loss − coef · mean H; adaptive, the coefficient seeks a target between optimizer steps."""
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

    def row_at(self, place: int) -> dict[str, Any]:
        """A row of the training data as it comes to `scored`."""
        row = dict(self.train_dataset[place])
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
        """Writes what a checkpoint needs beyond TRL's; called on every process."""

    def read_state(self, folder: Path) -> None:
        """Reads it."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self.write_state(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # transformers reads the adapters in subfolders, where there are any ("ref"), and then not the trained one
        if os.path.isdir(os.path.join(resume_from_checkpoint, "ref")):
            policy = self.accelerator.unwrap_model(self.model)
            policy.load_adapter(resume_from_checkpoint, "default", is_trainable=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.read_state(Path(checkpoint))


class _ResumableSampler(RepeatSampler):
    """TRL's order of the prompts, which in a resumed run would begin with that of the first epoch again."""

    def set_epoch(self, epoch: int) -> None:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)
