"""What verl loads through the entry point ``verl.plugins``: a trainer, a policy loss, an estimator, agent loops.

verl says at its debug level alone that a plug-in could not be loaded, and then knows none of these names. So the check
of the configuration comes first and stands by itself: where the rest cannot be loaded, a configuration that names
explorl ends with the reason, and every other one is left alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from verl.utils import config as verl_config

from explorl.integrations.verl.check import checked
from explorl.integrations.verl.settings import names_explorl

logger = logging.getLogger(__name__)


def guard(config: Mapping[str, Any], failure: Exception | None = None) -> None:
    """Raises where a configuration names explorl and cannot have it."""
    named = names_explorl(config)
    if named and failure is not None:
        raise RuntimeError(
            f"{named[0]} needs Explorl's plug-in for verl, which could not be loaded: {type(failure).__name__}: "
            f"{failure}; it is made for verl 0.9"
        ) from failure
    checked(config)


def install(failure: Exception | None) -> None:
    """Lets verl's own check of a configuration, which comes before Ray, end with ours."""
    original = getattr(verl_config.validate_config, "__wrapped__", verl_config.validate_config)

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        guard(OmegaConf.to_container(config, resolve=True), failure)
        return original(config, *args, **kwargs)

    verl_config.validate_config = validate_config


def load() -> Exception | None:
    """Registers everything; the reason where that fails."""
    try:
        from explorl.integrations.verl import agent_loop, policy_loss, trainer  # noqa: F401
    except Exception as error:
        logger.error("Explorl's plug-in for verl could not be loaded: %s: %s", type(error).__name__, error)
        return error
    return None


FAILURE = load()
install(FAILURE)
