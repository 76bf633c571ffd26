"""The body of `explorl rft`: rejection-sampling fine-tuning in a run's folder, started or resumed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from explorl.core.config import Config, ConfigError, rft_config
from explorl.core.store import RunStore, resume_command
from explorl.core.terminal import literal, print_change


def rft_command(config: Config, store: RunStore, *, console: Console, alone: bool) -> Path | None:
    """Runs what is left of the run; the folder of its policy, or None where it was finished, which is said."""
    from explorl.training.rft.loop import run_rft, where

    config = rft_config(config)
    _check_longer(config, store)
    if (store.folder / "model").is_dir() and where(config, store) is None:
        console.print(literal(f"{store.folder} is finished; its policy is {store.folder / 'model'}"), soft_wrap=True)
        more = f"rft.iterations={2 * config.rft.iterations}"
        console.print(literal(f"go on with it: {resume_command(store.folder)} --set {more}"), soft_wrap=True)
        return None
    try:
        model = run_rft(config, store, console=console, alone=alone)
    except KeyboardInterrupt as interrupt:
        at = where(config, store)
        if not store.config_path.exists() or at is None:
            raise
        raise type(interrupt)(f"go on (iteration {at[0]}, {at[1]}) with: {resume_command(store.folder)}") from interrupt
    finally:
        store.unlock()
    print_change(store.metrics(), console)
    return model


def _check_longer(config: Config, store: RunStore) -> None:
    if not store.config_path.exists() or not store.has_steps:
        return
    held = store.config().get("rft", {}).get("iterations", 0)
    if config.rft.iterations < held:
        raise ConfigError(
            f"rft.iterations is {config.rft.iterations} in --set and {held} in {store.config_path}; use {held} or more"
        )
