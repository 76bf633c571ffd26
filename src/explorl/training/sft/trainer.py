"""TRL's `SFTTrainer` without padding: packed rows, the unrolled pass if the model has one, no waiting for the GPU.

Overridden methods of TRL and transformers:

    _prepare_dataset       tokenises a thousand rows at a time
    get_train_dataloader   yields row indices, in TRL's order
    get_batch_samples      packs them: micro-batches of equal tokens, in passes of at most `tokens_per_pass`
    training_step          runs forward and backward, pass by pass
    compute_loss           computes TRL's mean over all labelled tokens of the optimizer step
    log                    adds entropy and accuracy, summed on the device until then

If the packed pass is not proven equal to the model's own, or an option needs padded rows, all of them are TRL's.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from explorl.modeling import passes
from explorl.modeling.packed import causal, packed_rows
from explorl.rollout.tools import ToolSpec, get_tool
from explorl.training.sft.data import tokenize_dataset
from explorl.training.sft.forward_pass import add_scores, tokens_that_fit
from explorl.training.sft.packed_rows import TokenRows
from explorl.training.sharding import autocast_dtype, has_sharded_weights, spread_devices

BATCH_METHODS = (
    "compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch", "_prepare_inputs",
    "get_train_dataloader",
)  # fmt: skip
"""Methods that receive TRL's batches; if a user overrides one, it gets TRL's batches."""


class NothingToLearn(ValueError):
    """Raised if truncation leaves no token to train on."""


class PackedSFTTrainer(SFTTrainer):
    """`trl.SFTTrainer`, faster.

    Args:
        packed: None packs rows if the packed pass is proven equal to the model's own, and warns if not. True makes that
            an error. False uses TRL's padded pass.
        tokens_per_pass: Most tokens per forward pass, at least the longest row. None is what memory allows, up to
            65,536. `per_device_train_batch_size` still bounds the rows.
        tool: The tool that completions call, such as "python": its outputs are not trained on.
    """

    data_collator: Any

    def __init__(
        self,
        *args: Any,
        packed: bool | None = None,
        tokens_per_pass: int | None = None,
        tool: ToolSpec | str | None = None,
        **kwargs: Any,
    ) -> None:
        if tokens_per_pass is not None and tokens_per_pass < 1:
            raise ValueError(
                f"tokens_per_pass is {tokens_per_pass}; use at least the length of the longest row, or None"
            )
        self._packed, self._tokens_per_pass = packed, tokens_per_pass
        self._tool = get_tool(tool) if isinstance(tool, str) else tool
        self._rows: TokenRows | None = None
        self._kind: passes.Kind = "padded"
        self._reset_sums()
        super().__init__(*args, **kwargs)
        self._has_scores = add_scores(causal(self.model))

    # ---------------------------------------------------------------- data

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        rows = None
        needs_trl = (
            packing
            or formatting_func is not None
            or args.assistant_only_loss
            or args.dataset_text_field in (getattr(dataset, "column_names", None) or ())
        )
        is_switched_off = self._packed is False and self._tool is None
        if not needs_trl and not is_switched_off and args.truncation_mode in ("keep_start", "keep_end"):
            rows = tokenize_dataset(
                dataset,
                processing_class,
                max_length=args.max_length,
                keep_start=args.truncation_mode == "keep_start",
                completion_only=self.completion_only_loss,
                tool=self._tool,
            )
        if rows is None and self._tool is not None:
            raise ValueError(
                f"tool={self._tool.name!r} needs rows with a prompt and a completion, text or messages; the "
                f"{dataset_name} dataset has other rows, or packing, formatting_func or assistant_only_loss is set: "
                "remove that, or the tool"
            )
        if rows is None:
            rows = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        elif args.shuffle_dataset:
            rows = rows.shuffle(seed=args.seed)
        if isinstance(rows, Dataset) and len(rows) == 0:
            raise NothingToLearn(
                f"no row of the {dataset_name} dataset has a token to train on within max_length={args.max_length} "
                "tokens, prompt included; raise max_length"
            )
        return rows

    def get_train_dataloader(self) -> Any:
        self._rows = self._packed_rows()
        if self._rows is None:
            return super().get_train_dataloader()
        collator, self.data_collator = self.data_collator, list
        try:
            return self._get_dataloader(
                dataset=range(len(self._rows)),
                description="Training",
                batch_size=self._train_batch_size,
                sampler_fn=lambda _: self._get_train_sampler(
                    self._remove_unused_columns(self.train_dataset, description="Training")
                ),
                is_training=True,
            )
        finally:
            self.data_collator = collator

    def _packed_rows(self) -> TokenRows | None:
        """Return the rows to pack, or None to use TRL's padded pass."""
        if self._packed is False:
            return None
        reason = self._reason_for_padding()
        if reason is None:
            rows = TokenRows.from_dataset(self.train_dataset)
            if not rows.lengths.all():
                raise ValueError(
                    f"row {int(rows.lengths.argmin())} of the training dataset has no tokens; leave it out"
                )
            longest, dtype = int(rows.lengths.max()), autocast_dtype(self.accelerator)
            self.model.train()  # dropout counts
            choice = passes.choose(self.model, longest, dtype=dtype)
            self._kind, reason = choice.kind, choice.why
            if choice.kind != "padded":
                checkpointing = self.args.gradient_checkpointing
                fitting = tokens_that_fit(self.model, self.args.device, dtype, choice.kind, checkpointing)
                self.tokens_per_pass = self._tokens_per_pass or max(fitting, longest)
                if self.tokens_per_pass < longest:
                    raise ValueError(
                        f"tokens_per_pass is {self.tokens_per_pass}, and the longest row has {longest} tokens; use "
                        f"{longest} or more, or a smaller max_length"
                    )
                return rows
        if self._packed:
            raise ValueError(f"packed=True does not work here ({reason}); use packed=None")
        if self.accelerator.is_main_process:
            warnings.warn(f"SFT uses TRL's padded pass, which is slower: {reason}", UserWarning, stacklevel=3)
        return None

    def _reason_for_padding(self) -> str | None:
        """Return the first option or property that needs TRL's padded pass, or None."""
        args = self.args
        plain = isinstance(self.train_dataset, Dataset) and self.train_dataset.format["type"] is None
        adapter = getattr(self.model, "active_peft_config", None)
        reasons = {
            "the dataset is a stream, or computes its rows on access": not plain,
            "packing or padding_free is set; remove them, rows are packed without padding anyway": (
                self.padding_free or args.packing
            ),
            "a custom data collator is set": type(self.data_collator) is not DataCollatorForLanguageModeling,
            "the rows have images": self._is_vision_dataset,
            "label_smoothing_factor is set": args.label_smoothing_factor > 0,
            "compute_loss_func is set": self.compute_loss_func is not None,
            **{f"{name} is overridden": self._is_overridden(name) for name in BATCH_METHODS},
            f"router_aux_loss_coef is {self.router_aux_loss_coef}": self.aux_loss_enabled,
            "torch_compile is set": args.torch_compile,
            "use_liger_kernel is set": args.use_liger_kernel,
            "neftune_noise_alpha is set, whose noise depends on a row's length": args.neftune_noise_alpha is not None,
            "weights are sharded": has_sharded_weights(self.model, self.accelerator),
            "DeepSpeed counts backward passes, and packed rows may need several": self.is_deepspeed_enabled,
            "parallelism_config is set": self.accelerator.parallelism_config is not None,
            "the model is on several devices": bool(spread_devices(self.model)),
            "dispatch_batches is set": args.accelerator_config.dispatch_batches is True,
            "the adapter adds virtual tokens": getattr(adapter, "is_prompt_learning", False),
            "the model's loss is a mean over each micro-batch": not self.model_accepts_loss_kwargs,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _is_overridden(self, name: str) -> bool:
        """Tell whether a subclass or an assignment replaced this method."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(PackedSFTTrainer, name)

    # ---------------------------------------------------------------- steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        if self._rows is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        chosen = list(islice(epoch_iterator, num_batches))
        if not chosen:
            return [], None
        rows, drawn = self._rows, np.concatenate(chosen)
        numbers = np.repeat(np.arange(len(chosen)), [len(batch) for batch in chosen])
        batches = [
            {
                "passes": [rows.packed(drawn[part], device, numbers[part]) for part in parts],
                **_token_counts(int(rows.lengths[drawn[np.concatenate(parts)]].sum())),
            }
            for parts in rows.batches(chosen, self.tokens_per_pass)
        ]
        scored = [int(rows.scored[list(batch)].sum()) for batch in chosen]
        self._sums.append(torch.zeros(2, len(chosen), dtype=torch.float64, device=device))
        self._scored += scored
        self._tokens += int(rows.lengths[drawn].sum())
        labelled = torch.tensor(sum(scored)).to(device, non_blocking=True)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            labelled = self.accelerator.gather(labelled).sum()
        return batches, labelled

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if "passes" not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for number, part in enumerate(inputs["passes"], 1):
            last = number == len(inputs["passes"])
            with nullcontext() if last else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if "rows" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        names = ("rows", "scored", "targets", "shift_labels", "batch_numbers")
        rows, scored, targets, labels, numbers = (inputs.pop(name) for name in names)
        head_inputs = (
            {"scored": scored, "targets": targets}
            if self._has_scores
            else {"shift_labels": labels, "fused_lm_head": True}
        )
        with packed_rows(model, rows, self._kind == "unrolled", None):
            outputs = model(**inputs, **head_inputs)
        losses = -outputs.log_probs
        if self.args.loss_type == "dft":
            losses = losses * outputs.log_probs.exp().detach()
        labelled = len(scored) if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(labelled).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        self._sum_statistics(outputs, scored, numbers)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 6 · tokens · parameters without embeddings."""
        if "passes" not in inputs:
            return super().floating_point_ops(inputs)
        return 6 * inputs["input_ids"].numel() * self._parameters

    @cached_property
    def _parameters(self) -> int:
        return int(causal(self.model).num_parameters(exclude_embeddings=True))

    # ---------------------------------------------------------------- logging

    def _reset_sums(self) -> None:
        self._sums: list[Tensor] = []
        """Sums of entropy and of correct tokens in each sampled micro-batch, one tensor for each optimizer step."""
        self._scored: list[int] = []
        """Number of tokens that each of these sums is over."""
        self._tokens = 0

    def _sum_statistics(self, outputs: Any, scored: Tensor, numbers: Tensor) -> None:
        """Sum entropy and accuracy on the device by sampled micro-batch, over which TRL takes its means."""
        if not self._sums:  # not in a training step
            return
        with torch.no_grad():
            values = torch.stack([outputs.entropy.flatten().double(), outputs.is_top1.flatten().double()])
            values = values if self._has_scores else values.index_select(1, scored)
            self._sums[-1].index_add_(1, numbers, values)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._sums:
            sums = torch.cat(self._sums, dim=1)
            counts = torch.tensor([self._scored, [self._tokens] * len(self._scored)], dtype=sums.dtype)
            totals = self.accelerator.reduce(torch.cat([sums, counts.to(sums.device)]), reduction="sum")
            *sums_by_batch, scored, tokens = totals.tolist()
            self._total_train_tokens += int(tokens[0])
            metrics = self._metrics["train"]
            for name, values in zip(("entropy", "mean_token_accuracy"), sums_by_batch, strict=True):
                metrics[name] += [value / max(count, 1) for value, count in zip(values, scored, strict=True)]
            metrics["num_tokens"] = [self._total_train_tokens]
            if "num_tokens" in self._metrics["eval"]:  # TRL set it before these tokens were counted
                self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
            self._reset_sums()
        super().log(logs, *args, **kwargs)


def _token_counts(tokens: int) -> dict[str, Tensor]:
    """Return tensors from which a Trainer counts tokens; they take no memory."""
    ones = torch.ones(1, 1, dtype=torch.long).expand(1, tokens)
    return {"input_ids": ones, "attention_mask": ones}
