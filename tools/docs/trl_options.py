"""Generate docs/trl.md, which lists how each option of TRL is treated.

python -m tools.docs.trl_options > docs/trl.md
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from explorl.training.grpo import options

PAGE = """# TRL's options

`ExplorationTrainer` is `trl.GRPOTrainer` with strategies. This page says what becomes of each of TRL's options and
arguments; `python -m tools.docs.trl_options` writes it from `explorl/training/grpo/options.py`, and a test compares
that file with TRL's own fields (TRL 1.16), so an option that a new release adds is noticed. An unknown argument is an
error.

## Precision

TRL's default, float32 weights with bfloat16 autocast, is the first-class path: optimizer state and weights stay
float32, the engine samples from a bfloat16 copy of the weights that is refreshed before each generation, and the
training pass runs under autocast. (On a processor without bfloat16 arithmetic the engine samples in float32, which is
faster there.) `fp16=True` works likewise, with accelerate's gradient scaler. Gradient checkpointing, which TRL
switches on by default, computes each layer of the packed pass again in the backward pass. Weights that you load in
bfloat16 are trained in bfloat16, as in TRL; small steps are lost in their rounding, so at a learning rate of 5e-6
most weights never move.

## Pass@k and a page

Two callbacks give any script of TRL's, with `GRPOTrainer`, `SFTTrainer` or ours, what `explorl train` has: `PassAtK`
scores held-out rows before training, every so many steps and at the end, by the script's own reward function, and
`RunRecorder` keeps what is logged, sampled and scored in a run's folder. The scores also go to every tracker of
`report_to`, as `eval/pass@8` with `eval/pass@8_low` and `eval/pass@8_high`, the ends of the interval.

```python
from explorl import PassAtK, RunRecorder

rows = dataset.train_test_split(test_size=100, seed=0)
held_out = PassAtK(rows["test"], reward, every=50, samples=8)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows["train"], callbacks=[held_out])
RunRecorder("runs/mine").watch(trainer)
trainer.train()
print(held_out.history[trainer.state.global_step].pass_at(8))
```

`explorl report runs/mine` makes the page. An answer counts as correct where the reward is 1 or more; `correct=0.5` sets
another bound. The entropy of each token is on the page of an `ExplorationTrainer`, which records it.

## Refused

No option of TRL's is refused by itself. Refused at construction, with what to use instead:

{refused}

## Something steps aside

These are honoured, and while they are set something of ours makes way for TRL's own code:

{aside}

Further, and with a warning that names the layer: a model that the engine would not compute as it computes itself is
sampled by `model.generate`, and one that the packed pass would not compute so is trained with TRL's padded pass
([models.md](models.md)). The engine ends an answer where the model's context ends (`max_position_embeddings`), and logs
it, where `generate` would go on beyond; prompts that fill the context are left to `generate`. Vision-language models
are sampled and trained by TRL's own code. Micro-batches hold about equally many tokens, and never more rows than
`per_device_train_batch_size`; where the loss looks at what is in a micro-batch (`loss_type="bnpo"`, an entropy bonus,
`top_entropy_quantile`, the router's loss, or a subclass with a `compute_loss`, `_compute_loss`, `_prepare_inputs` or
`_get_per_token_logps_and_entropies` of its own) and where optimizer steps do not end with a generation batch, they are
TRL's own.

## Irrelevant

{irrelevant}

## Arguments of the trainer

{arguments}

Ours beside them: `strategies`, `correct`, `answers`, `engine`, `engine_options`, `packed`, `interpreter`,
`on_rollouts`, `token_records`, `observers`, `lens`, `dynamic_sampling`, `skip_solved`; see
`help(ExplorationTrainer)`. [dynamic-sampling.md](dynamic-sampling.md) has the last two. `interpreter="python"` lets
answers run fenced blocks of Python in a sandbox while they are written, without a chat template for tools: TRL's mask
has 0 on what a block showed, reward functions get the text with every output left blank (a program can print an
answer), and `tools/call_frequency`, `tools/callers`, `tools/failure_frequency` and `tools/refused` are logged. An
observer is any object with `see(step: StepView)` that returns numbers by name; what it says of a generation batch,
once the last update on it is done, is logged under `lens/`. What `explorl train` logs is `observers=statistics()`
from `explorl.training.grpo.observers`; `lens=Lens(rate=0.05)` from `explorl.training.grpo.inspection_schedule` says how
many answers are looked at closely, by two passes without gradient. Without observers nothing is looked at.

## Honoured

All others:

{honoured}
"""


def page() -> str:
    """Return the page docs/trl.md."""

    def rows(table: Mapping[str, str], code: bool = True) -> str:
        return "\n".join(f"- {f'`{name}`' if code else name}: {what}" for name, what in table.items())

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
