"""Temperatures of each row in the padded pass of the reference, which has no entropy to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from explorl.training.grpo.trainer import ExplorationTrainer

STRATEGIES = [{"element_wise_temperature": {"source": "running"}}]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rows_with_temperatures_and_a_reference(make_trainer: Callable[..., Any]) -> None:
    """As ZeRO-3 and FSDP2 train, where nothing is packed; the KL term is that of the packed pass."""
    logged = []
    for packed in (True, False):
        trainer = make_trainer(ExplorationTrainer, options={"strategies": STRATEGIES, "packed": packed}, beta=0.05)
        trainer.train()
        logged.append([entry["kl"] for entry in trainer.state.log_history if "kl" in entry])
    np.testing.assert_allclose(logged[1], logged[0], atol=1e-4)
