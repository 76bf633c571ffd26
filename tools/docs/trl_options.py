"""Generate docs/trl.md, which lists how each option of TRL is treated.

python -m tools.docs.trl_options > docs/trl.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from explorl.training.grpo import options

PAGE = """# TRL's options

`ExplorationTrainer` is `trl.GRPOTrainer` with strategies. This page lists how each of TRL's options and arguments is
treated. `python -m tools.docs.trl_options` generates it from `explorl/training/grpo/options.py`, and a test compares
that file with TRL's own fields (TRL 1.16) to detect options added by a new release. An unknown argument is an error.

## Precision

TRL's default, float32 weights with bfloat16 autocast, is the best supported: weights and optimizer state stay in
float32, the engine samples from a bfloat16 copy of the weights that is refreshed before each generation, and the
training pass runs under autocast. (On a processor without bfloat16 arithmetic the engine samples in float32, which is
faster there.) `fp16=True` works in the same way, with accelerate's gradient scaler. Gradient checkpointing, which TRL
enables by default, recomputes each layer of the packed pass in the backward pass. As in TRL, weights that you load in
bfloat16 are trained in bfloat16; small updates are lost to rounding, so at a learning rate of 5e-6 most weights never
change.

## Pass@k and a report

Two callbacks provide the evaluation and recording of `explorl train` to any TRL script, with `GRPOTrainer`,
`SFTTrainer` or our trainer. `PassAtK` scores held-out rows before training, at regular intervals and at the end, with
the script's own reward function. `RunRecorder` stores logs, samples and scores in a run's folder. The scores are also
sent to every tracker of `report_to`, as `eval/pass@8` with `eval/pass@8_low` and `eval/pass@8_high`, the ends of the
interval.

```python
from explorl import PassAtK, RunRecorder

rows = dataset.train_test_split(test_size=100, seed=0)
held_out = PassAtK(rows["test"], reward, every=50, samples=8)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows["train"], callbacks=[held_out])
RunRecorder("runs/mine").watch(trainer)
trainer.train()
print(held_out.history[trainer.state.global_step].pass_at(8))
```

`explorl report runs/mine` creates the page. An answer counts as correct if the reward is 1 or more; `correct=0.5` sets
another threshold. The page of an `ExplorationTrainer` also shows the entropy of each token.

## Rejected

No option of TRL is rejected by itself. The following combinations are rejected at construction, with an alternative:

{refused}

## Falls back to TRL

These options are honoured, but while they are set TRL's own code replaces a part of ours:

{aside}

In addition, with a warning that names the layer: a model whose results the engine cannot reproduce is sampled by
`model.generate`, and one whose results the packed pass cannot reproduce is trained with TRL's padded pass
([models.md](models.md)). The engine ends a completion at the end of the model's context (`max_position_embeddings`) and
logs this, while `generate` would continue; prompts that fill the context are left to `generate`. Vision-language models
are sampled and trained by TRL's own code. Micro-batches contain about the same number of tokens each, and never more
rows than `per_device_train_batch_size`. They are TRL's own if the loss depends on the content of a micro-batch
(`loss_type="bnpo"`, an entropy bonus, `top_entropy_quantile`, the router's loss, or a subclass that overrides
`compute_loss`, `_compute_loss`, `_prepare_inputs` or `_get_per_token_logps_and_entropies`), and if optimizer steps do
not end with a generation batch.

## Irrelevant

{irrelevant}

## Arguments of the trainer

{arguments}

Additional arguments: `strategies`, `correct`, `answers`, `engine`, `engine_options`, `packed`, `interpreter`,
`on_rollouts`, `token_records`, `observers`, `lens`, `dynamic_sampling`, `skip_solved`; see
`help(ExplorationTrainer)`. [dynamic-sampling.md](dynamic-sampling.md) describes the last two. `interpreter="python"`
lets completions execute fenced blocks of Python in a sandbox while they are sampled, without a chat template for tools:
TRL's mask is 0 on the output of a block, reward functions receive the text with every output blanked (a program can
print an answer), and `tools/call_frequency`, `tools/callers`, `tools/failure_frequency` and `tools/refused` are logged.
An observer is any object with `see(step: StepView)` that returns numbers by name; its results for a generation batch
are logged under `lens/` after the last update on that batch. `explorl train` uses `observers=statistics()` from
`explorl.training.grpo.observers`; `lens=Lens(rate=0.05)` from `explorl.training.grpo.inspection_schedule` sets how many
completions are inspected in detail, by two passes without gradient. Without observers nothing is inspected.

## Honoured

All others:

{honoured}
"""


def page() -> str:
    """Return the page docs/trl.md."""

    def rows(table: Mapping[str, str], code: bool = True) -> str:
        return "\n".join(f"- {f'`{name}`' if code else name}: {text}" for name, text in table.items())

    return PAGE.format(
        refused=rows(options.REFUSED, code=False),
        aside=rows(options.STEPS_ASIDE),
        irrelevant=rows(options.IRRELEVANT),
        arguments=rows(options.ARGUMENTS),
        honoured=textwrap.fill(
            ", ".join(f"`{name}`" for name in sorted(options.HONOURED)), 120, break_on_hyphens=False
        ),
    )


if __name__ == "__main__":
    print(page(), end="")
