"""The column vllm of docs/support.md, row by row, against the real trainer with a real vLLM."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from datasets import Dataset
from tools.docs.support_matrix import REFUSALS
from trl.generation import vllm_generation

from explorl import ExplorationTrainer
from explorl.strategies import Strategy
from tests.scale.strategies import beside, one_of_each, unlike
from tests.scale.vllm.test_training import PROMPTS, config, reward

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("ignore::UserWarning")]

WORDS = {
    "its completions cannot branch": "lets completions branch",
    "it does not record the probabilities of other tokens": "needs the probabilities of other tokens",
    "the interpreter needs Explorl's engine": "interpreter",
}


def against(strategy: Strategy, folder: Path, out: Path) -> str:
    """What the trainer says against a strategy; empty where it has made a step."""
    changes = {"max_steps": 1, "beta": 0.01, "vllm_importance_sampling_correction": not strategy.needs_sampling_logps}
    args = config(out, vllm_mode="colocate", **changes)
    data = Dataset.from_dict({"prompt": PROMPTS * 2})
    try:
        trainer = ExplorationTrainer(str(folder), reward, args, data, correct="reward", **beside(strategy))
    except ValueError as error:
        return str(error)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 1, strategy.name
    assert math.isfinite(losses[0]), strategy.name
    return ""


def test_the_column_vllm(llm: Any, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One vLLM for all of them: TRL makes one for each trainer, and hands it the trainer's weights."""
    monkeypatch.setattr(vllm_generation, "LLM", lambda **_: llm)
    strategies = one_of_each(PROMPTS)
    expected = {strategy.name: REFUSALS["vllm"](strategy) for strategy in strategies}
    done = {strategy.name: against(strategy, policy_folder, tmp_path) for strategy in strategies}
    assert not unlike(expected, done, WORDS)
    assert any(done.values())
