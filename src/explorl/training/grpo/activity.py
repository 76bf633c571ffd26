"""Warnings about what had no effect in a run: rewards that never differed, strategies that changed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from explorl.strategies import EntropyBranching, ReferenceReset, Strategy
from explorl.strategies._lib.validate import name_of
from explorl.strategies.base import overrides
from explorl.training.grpo.dynamic import varies

CLEAR = 20
"""Number of generation batches without reward differences after which to warn during the run."""
CHANGES = ("reward_rows", "advantage_tokens", "masked_tokens", "weight_tokens")
"""Metrics that count what a strategy has changed."""
UNMEASURED = ("arguments", "order", "sampling", "clip", "after_step")
"""Hooks whose effect is not counted: a strategy with one of them counts as active."""


class Activity(TrainerCallback):
    """Counts what changes during training, and warns once, with the reason, about what never had an effect."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._reset()

    def _reset(self) -> None:
        self.batches, self._has_rows = 0, False
        self._scored = self._varied = False
        self._acted: set[str] = set()
        self._penalties: dict[str, Tensor] = {}
        self._places = self._branches = 0.0

    def batch(self, rewards: Tensor) -> None:
        """Count a generation batch, with the total rewards of all processes."""
        self.batches += 1
        self._scored = self._scored or not bool(rewards.isnan().all())
        self._varied = self._varied or bool(varies(rewards.unsqueeze(1), self.trainer.num_generations).any())
        if self.batches == CLEAR and not self._varied:
            self.trainer.warn_once(self._about_rewards())

    def shaped(self, metrics: Mapping[str, float]) -> None:
        """Count what the strategies have changed in a generation batch."""
        names = map(name_of, self.trainer.strategies)
        self._acted |= {name for name in names if any(metrics.get(f"strategy/{name}/{change}") for change in CHANGES)}

    def penalty(self, strategy: Strategy, term: Tensor, mask: Tensor) -> None:
        """Count a strategy's term of the loss; without waiting for the device."""
        name, acts = name_of(strategy), ((term.detach() != 0) & (mask > 0)).any()
        self._penalties[name] = self._penalties[name] | acts if name in self._penalties else acts

    def branching(self, numbers: Mapping[str, float]) -> None:
        """Count the positions at which branching was decided, and the branches."""
        self._places += numbers["branching/places"]
        self._branches += numbers["branching/branches"]

    # ---------------------------------------------------------------- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._reset()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_rows = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._has_rows and state.global_step < state.max_steps:
            raise ValueError(
                "train_dataset is too small for a generation batch, so nothing was trained; give it "
                f"{args.generation_batch_size // args.num_generations} prompts or more"
            )
        acted = {name for name, acts in self._penalties.items() if bool(acts)} | self._acted
        acted = set().union(*gather_object([acted]))
        if not self.batches:  # a batch of an earlier training was in use
            return
        if not self._varied:
            if self.batches < CLEAR:
                self.trainer.warn_once(self._about_rewards())
            return
        for strategy in self.trainer.strategies:
            if not self._has_acted(strategy, acted):
                self.trainer.warn_once(f"{name_of(strategy)} {self._why_idle(strategy)}")

    # ---------------------------------------------------------------- warnings

    def _has_acted(self, strategy: Strategy, acted: set[str]) -> bool:
        if isinstance(strategy, ReferenceReset):
            return bool(strategy.memory.get("resets"))
        if isinstance(strategy, EntropyBranching):
            return self._branches > 0
        return name_of(strategy) in acted or any(overrides(strategy, hook) for hook in UNMEASURED)

    def _about_rewards(self) -> str:
        if not self._scored:
            return (
                f"no completion was scored in {self._counted}: every reward function returned None or NaN, so nothing "
                "was learned; check the reward functions"
            )
        return (
            f"all completions of a prompt got equal rewards in {self._counted}: without a difference within a group "
            "there is no advantage to learn from; check the reward function, use prompts that the policy sometimes "
            "solves, or raise num_generations or the temperature"
        )

    def _why_idle(self, strategy: Strategy) -> str:
        if isinstance(strategy, EntropyBranching):
            markers = ", ".join(strategy.at)
            if self._places:
                return (
                    f"never branched in {self._counted}: it decided against branching at each of "
                    f"{self._places:,.0f} positions; raise base or weight"
                )
            return (
                f"found no position to branch in {self._counted}: no completion had one of its markers ({markers}) "
                "early enough; set at to what completions contain, such as newline"
            )
        if isinstance(strategy, ReferenceReset):
            return f"changed nothing in {self._counted}: no reset was due; lower every or on_stall"
        return f"changed nothing in {self._counted}: it left every reward, advantage, weight and mask as it was"

    @property
    def _counted(self) -> str:
        return f"{self.batches:,} generation batch{'es' * (self.batches != 1)}"
