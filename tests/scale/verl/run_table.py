"""One step inside verl with each strategy of the registry, in one start of Ray: ``python run_table.py OUT``.

As `run_verl`, but the trainer becomes that of another strategy before every step: `ExplorlTrainer.__init__` and
`_setup` are gone through again, without verl's own, whose workers go on. Writes what was said against each strategy,
to OUT/said.json, and the metrics of its step to OUT/steps.json.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from run_verl import ENVIRONMENT, compose, main, prepare

OVERRIDES = """
+explorl.correct=acc +explorl.answers=pred +explorl.run=false +explorl.strategies=[] data.train_batch_size=2
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.actor.ppo_mini_batch_size=1
"""


@contextmanager
def without_verls_own(base: Any) -> Iterator[None]:
    """verl's trainer is there already."""

    def keeps_config(trainer: Any, config: Any) -> None:
        trainer.config = config

    own = base.__init__, base._setup
    base.__init__, base._setup = keeps_config, lambda trainer: None
    try:
        yield
    finally:
        base.__init__, base._setup = own


def with_strategy(config: Any, name: str) -> Any:
    from omegaconf import open_dict

    from explorl.integrations.verl.support import EXAMPLES

    changed = copy.deepcopy(config)
    with open_dict(changed):
        changed.trainer.v1.trainer_mode = "explorl"
        changed.explorl.strategies = [{name: EXAMPLES.get(name, {})}]
    return changed


def refusals(config: Any) -> dict[str, str]:
    """What the trainer says against each strategy when it is made; empty where nothing."""
    from explorl.integrations.verl import trainer as ours
    from explorl.strategies import REGISTRY

    reasons = {}
    with without_verls_own(ours.PPOTrainerSync):
        for name in REGISTRY:
            try:
                ours.ExplorlTrainer(with_strategy(config, name))
                reasons[name] = ""
            except ValueError as error:
                reasons[name] = str(error)
    return reasons


def become(trainer: Any, config: Any) -> None:
    """The trainer of this configuration, with the workers that there are and verl's own loss to begin with."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from explorl.integrations.verl import trainer as ours

    group = getattr(trainer, "_whole_group", trainer.actor_rollout_wg)
    trainer.actor_rollout_wg = group
    if isinstance(trainer.ref_policy_wg, ours._RowTemperature):
        trainer.ref_policy_wg = trainer.ref_policy_wg._group
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    group.set_loss_fn(partial(ppo_loss, config=actor))
    with without_verls_own(ours.PPOTrainerSync):
        trainer.__init__(config)
        trainer._setup()


def rotating_runner(names: list[str], out: Path) -> Any:
    """main_ppo's runner, with a trainer that has another strategy at each step."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
        def run(self, config: Any) -> None:
            from explorl.integrations.verl.trainer import ExplorlTrainer

            step, weights = ExplorlTrainer.step, {}

            def rotated(trainer: Any, metrics: Any, timing: Any) -> Any:
                name = names[trainer.global_steps - 1]
                become(trainer, with_strategy(config, name))
                output = step(trainer, metrics, timing)
                assert [strategy.name for strategy in trainer.strategies] == [name]
                weights[name] = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
                return output

            ExplorlTrainer.step = rotated
            super().run(config)
            (out / "steps.json").write_text(json.dumps(weights))

    return ray.remote(Runner)


if __name__ == "__main__":
    if os.environ.get("VERL_PLATFORM") != "cpu":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    out = Path(sys.argv[1]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    reasons = refusals(compose(prepare(out, 8) + OVERRIDES.split()))
    (out / "said.json").write_text(json.dumps(reasons))
    names = [name for name, text in reasons.items() if not text]
    steps = f"trainer.total_training_steps={len(names)}"
    main(out, [*OVERRIDES.split(), steps], prompts=2 * len(names), runner=partial(rotating_runner, names))
