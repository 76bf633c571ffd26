"""The message of an error that a user can resolve."""

from __future__ import annotations

import pickle

import pytest

from explorl.cli.failures import explain
from explorl.core.documents import DocumentError
from explorl.core.errors import ConfigError, ExplorlError
from explorl.core.plugins import PluginError
from explorl.core.store import StoreError
from explorl.evaluation.llm_judge import JudgeError
from explorl.models import ModelError
from explorl.sandbox.programs import SandboxError


def test_a_message_is_made_of_its_parts() -> None:
    error = ConfigError("no tool is named", key="--tool-calls", value=2, hint="add --tools python")
    assert str(error) == "--tool-calls is 2: no tool is named; add --tools python"
    assert str(ConfigError(key="engine", value="vlm", hint="use 'vllm'")) == "engine is 'vlm'; use 'vllm'"
    assert str(ConfigError("it is empty")) == "it is empty"
    assert str(ConfigError("it is empty", hint="fill it")) == "it is empty; fill it"


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ConfigError, ValueError), (DocumentError, ValueError), (PluginError, ValueError), (StoreError, Exception),
        (ModelError, Exception), (JudgeError, Exception), (SandboxError, RuntimeError),
    ],
)  # fmt: skip
def test_commands_explain_it_and_its_parts_survive_another_process(kind: type[ExplorlError], base: type) -> None:
    error = pickle.loads(pickle.dumps(kind(key="a.b", value=3, hint="use 4")))
    assert isinstance(error, base)
    assert (error.key, error.value, error.hint) == ("a.b", 3, "use 4")
    assert explain(error) == "a.b is 3; use 4"


def test_other_errors_are_bugs() -> None:
    assert explain(RuntimeError("x")) is None
