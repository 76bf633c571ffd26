"""The plug-in that verl loads by the entry point ``verl.plugins``: a trainer, a policy loss, an estimator, agent loops.

verl reports a plug-in that could not be loaded only at debug level, and then knows none of these names. The check of
the configuration is therefore installed independently: if the rest cannot be loaded, a configuration that uses Explorl
ends with the reason, and others are not affected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from verl.utils import config as verl_config

from explorl.integrations.verl.check import check_config
from explorl.integrations.verl.settings import explorl_keys

logger = logging.getLogger(__name__)


def guard(config: Mapping[str, Any], failure: Exception | None = None) -> None:
    """Raise if a configuration uses Explorl and the plug-in could not be loaded or does not support it."""
    keys = explorl_keys(config)
    if keys and failure is not None:
        raise RuntimeError(
            f"{keys[0]} needs Explorl's plug-in for verl, which could not be loaded: {type(failure).__name__}: "
            f"{failure}; it supports verl 0.9"
        ) from failure
    check_config(config)


def install(failure: Exception | None) -> None:
    """Add our check of the configuration to verl's, which runs before Ray starts."""
    original = getattr(verl_config.validate_config, "__wrapped__", verl_config.validate_config)

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        guard(OmegaConf.to_container(config, resolve=True), failure)
        return original(config, *args, **kwargs)

    verl_config.validate_config = validate_config


def load() -> Exception | None:
    """Import and register all components; return the error if that fails."""
    try:
        from explorl.integrations.verl import agent_loop, policy_loss, trainer  # noqa: F401
    except Exception as error:
        logger.error("Explorl's plug-in for verl could not be loaded: %s: %s", type(error).__name__, error)
        return error
    return None


FAILURE = load()
install(FAILURE)
