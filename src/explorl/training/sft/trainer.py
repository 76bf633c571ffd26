"""TRL's `SFTTrainer` without padding: packed rows, the unrolled pass where the model has one, no wait for the GPU.

What is overridden of TRL and transformers, and why:

    _prepare_dataset       tokenises a thousand rows at a time
    get_train_dataloader   gives the numbers of rows, in TRL's order
    get_batch_samples      packs them: micro-batches of equal tokens, in passes of at most `tokens_per_pass`
    training_step          goes forward and backward, pass by pass
    compute_loss           the mean over all learnt tokens of the optimizer step, as TRL has it
    log                    entropy and accuracy, which are added up on the device until then

Where the packed pass is not proven to give what the model gives, or an option needs padded rows, all of them are TRL's.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from explorl.modeling import passes
from explorl.modeling.packed import causal, packed_rows
from explorl.rollout.tools import ToolSpec, get_tool
from explorl.training.sft.data import tokenised
from explorl.training.sft.forward_pass import add_scores, tokens_that_fit
from explorl.training.sft.packed_rows import TokenRows
from explorl.training.sharding import has_sharded_weights, spread_devices

SEEING_BATCHES = (
    "compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch", "_prepare_inputs",
    "get_train_dataloader",
)  # fmt: skip
"""Methods that see TRL's batches: one of the user's own reads what is documented of them."""


class NothingToLearn(ValueError):
    """Rows that are all cut off before their completions begin."""


class PackedSFTTrainer(SFTTrainer):
    """`trl.SFTTrainer`, faster.

    Args:
        packed: None packs rows where that is proven to give what the model gives, and warns where it is not. True
            makes that an error. False is TRL's own padded pass.
        tokens_per_pass: No more tokens go through the model at a time, if no single row has more. None is what memory
            allows, up to 65,536. `per_device_train_batch_size` bounds the rows as ever.
        tool: A tool that completions were written with, such as "python": what it says in them is not learnt.
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
            raise ValueError(f"tokens_per_pass is {tokens_per_pass}; use at least the longest row's tokens, or None")
        self._packed, self._tokens_per_pass = packed, tokens_per_pass
        self._tool = get_tool(tool) if isinstance(tool, str) else tool
        self._rows: TokenRows | None = None
        self._kind: passes.Kind = "padded"
        self._parameters: int | None = None
        self._forget()
        super().__init__(*args, **kwargs)
        self._has_scores = add_scores(causal(self.model))

    # ---------------------------------------------------------------- data

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        rows = None
        special = packing or formatting_func is not None or args.assistant_only_loss
        special = special or (self._packed is False and self._tool is None)
        special = special or args.truncation_mode not in ("keep_start", "keep_end")  # which TRL refuses
        if not special and args.dataset_text_field not in (getattr(dataset, "column_names", None) or ()):
            rows = tokenised(
                dataset,
                processing_class,
                max_length=args.max_length,
                keep_start=args.truncation_mode == "keep_start",
                completion_only=self.completion_only_loss,
                tool=self._tool,
            )
        if rows is None and self._tool is not None:
            raise ValueError(
                f"tool is {self._tool.name!r}, whose outputs can be left out where rows are a prompt and a completion, "
                f"text or messages; the {dataset_name} dataset has other rows, or packing, a formatting function or "
                "assistant_only_loss is set: leave that out, or the tool"
            )
        if rows is None:
            rows = super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        elif args.shuffle_dataset:
            rows = rows.shuffle(seed=args.seed)
        if isinstance(rows, Dataset) and len(rows) == 0:
            raise NothingToLearn(
                f"no row of the {dataset_name} dataset has anything to learn within max_length={args.max_length} "
                "tokens, prompt included; raise max_length"
            )
        return rows

    def get_train_dataloader(self) -> Any:
        self._rows = self._packed_rows()
        if self._rows is None:
            return super().get_train_dataloader()
        own, self.data_collator = self.data_collator, list
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
            self.data_collator = own

    def _packed_rows(self) -> TokenRows | None:
        """The rows to pack; None where TRL's padded pass is to be used."""
        if self._packed is False:
            return None
        why = self._needs_padding()
        if why is None:
            rows = TokenRows.of(self.train_dataset)
            if not rows.lengths.all():
                raise ValueError(
                    f"row {int(rows.lengths.argmin())} of the training dataset has no tokens; leave it out"
                )
            longest = int(rows.lengths.max())
            self.model.train()  # dropout counts
            choice = passes.choose(self.model, longest, dtype=self._compute_dtype)
            if choice.kind != "padded":
                self._kind = choice.kind
                self._set_tokens_per_pass(longest)
                return rows
            why = choice.why
        if self._packed:
            raise ValueError(f"packed=True does not work here ({why}); use packed=None")
        if self.accelerator.is_main_process:
            warnings.warn(f"SFT runs TRL's padded pass, which is slower: {why}", UserWarning, stacklevel=3)
        return None

    def _needs_padding(self) -> str | None:
        """The option that TRL's own pass is needed for."""
        args = self.args
        plain = isinstance(self.train_dataset, Dataset) and self.train_dataset.format["type"] is None
        adapter = getattr(self.model, "active_peft_config", None)
        reasons = {
            "the dataset is a stream, or computes its rows when asked for them": not plain,
            "packing or padding_free is set; leave them out, rows are packed without padding anyway": (
                self.padding_free or args.packing
            ),
            "it has a data collator of its own": type(self.data_collator) is not DataCollatorForLanguageModeling,
            "the rows have images": self._is_vision_dataset,
            "label_smoothing_factor is set": args.label_smoothing_factor > 0,
            "compute_loss_func is set": self.compute_loss_func is not None,
            **{f"{name} is overridden": self._is_overridden(name) for name in SEEING_BATCHES},
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
        """Whether a subclass, or whoever put it in place, has a method of its own."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(PackedSFTTrainer, name)

    def _set_tokens_per_pass(self, longest: int) -> None:
        if self._tokens_per_pass is None:
            checkpointing = self.args.gradient_checkpointing
            found = tokens_that_fit(self.model, self.args.device, self._compute_dtype, self._kind, checkpointing)
            self.tokens_per_pass = max(found, longest)
        elif self._tokens_per_pass < longest:
            raise ValueError(
                f"tokens_per_pass is {self._tokens_per_pass}, and the longest row has {longest} tokens; use {longest} "
                "or more, or a smaller max_length"
            )
        else:
            self.tokens_per_pass = self._tokens_per_pass

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """What autocast makes of float32; None without it."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return kinds.get(self.accelerator.mixed_precision) if self.accelerator.native_amp else None

    # ---------------------------------------------------------------- steps

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        if self._rows is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        chosen = list(islice(epoch_iterator, num_batches))
        if not chosen:
            return [], None
        rows = self._rows
        drawn: dict[int, list[int]] = {}  # the micro-batches that TRL would have put each row into
        for number, some in enumerate(chosen):
            for row in some:
                drawn.setdefault(row, []).append(number)
        batches = [
            {
                "passes": [rows.packed(some, device, [drawn[row].pop() for row in some.tolist()]) for some in batch],
                **_sizes(sum(int(rows.lengths[s].sum()) for s in batch)),
            }
            for batch in rows.batches(chosen, self.tokens_per_pass)
        ]
        scored = [int(rows.scored[list(some)].sum()) for some in chosen]
        self._expect(scored, sum(int(rows.lengths[list(some)].sum()) for some in chosen), device)
        learnt = torch.tensor(sum(scored)).to(device, non_blocking=True)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            learnt = self.accelerator.gather(learnt).sum()
        return batches, learnt

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if "passes" not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        losses = []
        for number, some in enumerate(inputs["passes"], 1):
            last = number == len(inputs["passes"])
            with nullcontext() if last else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, some, num_items_in_batch))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if "rows" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        names = ("rows", "scored", "targets", "shift_labels", "drawn")
        rows, scored, targets, following, drawn = (inputs.pop(name) for name in names)
        asked = (
            {"scored": scored, "targets": targets}
            if self._has_scores
            else {"shift_labels": following, "fused_lm_head": True}
        )
        with packed_rows(model, rows, self._kind == "unrolled", None):
            outputs = model(**inputs, **asked)
        losses = -outputs.log_probs
        if self.args.loss_type == "dft":
            losses = losses * outputs.log_probs.exp().detach()
        learnt = len(scored) if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / torch.as_tensor(learnt).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        self._remember(outputs, scored, drawn)
        return (loss, outputs) if return_outputs else loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """6 · tokens · parameters but embeddings, which are counted once."""
        if "passes" not in inputs:
            return super().floating_point_ops(inputs)
        if self._parameters is None:
            self._parameters = causal(self.model).num_parameters(exclude_embeddings=True)
        return 6 * inputs["input_ids"].numel() * self._parameters

    # ---------------------------------------------------------------- what is logged

    def _forget(self) -> None:
        self._sums: list[Tensor] = []
        self._scored: list[int] = []
        self._tokens = 0

    def _expect(self, scored: list[int], tokens: int, device: torch.device) -> None:
        """Makes room for the sums over each micro-batch of an optimizer step, whose counts the host knows."""
        self._sums.append(torch.zeros(2, len(scored), dtype=torch.float64, device=device))
        self._scored += scored
        self._tokens += tokens

    def _remember(self, outputs: Any, scored: Tensor, drawn: Tensor) -> None:
        """Adds up what is logged, on the device, by the micro-batches that rows were drawn in: TRL's means are over
        those."""
        if not self._sums:  # no step of a training
            return
        with torch.no_grad():
            values = torch.stack([outputs.entropy.flatten().double(), outputs.is_top1.flatten().double()])
            values = values if self._has_scores else values.index_select(1, scored)
            self._sums[-1].index_add_(1, drawn, values)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._sums:
            sums = torch.cat(self._sums, dim=1)
            counts = torch.tensor([self._scored], dtype=sums.dtype, device=sums.device)
            tokens = torch.full_like(counts, self._tokens)
            together = self.accelerator.reduce(torch.cat([sums, counts, tokens]), reduction="sum")
            entropy, correct, scored, seen = together.tolist()
            self._total_train_tokens += int(seen[0])
            learnt = self._metrics["train"]
            learnt["entropy"] += [one / max(count, 1) for one, count in zip(entropy, scored, strict=True)]
            learnt["mean_token_accuracy"] += [one / max(count, 1) for one, count in zip(correct, scored, strict=True)]
            learnt["num_tokens"] = [self._total_train_tokens]
            if "num_tokens" in self._metrics["eval"]:  # which was asked for before they were counted
                self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
            self._forget()
        super().log(logs, *args, **kwargs)


def _sizes(tokens: int) -> dict[str, Tensor]:
    """What a Trainer counts tokens by; takes no memory."""
    ones = torch.ones(1, 1, dtype=torch.long).expand(1, tokens)
    return {"input_ids": ones, "attention_mask": ones}
