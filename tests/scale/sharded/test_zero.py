"""ZeRO and FSDP2 on two processes over gloo: the same tokens, losses and weights as DDP's, strategies included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale.sharded.training import CASES, Outcome

pytestmark = pytest.mark.scale
pytest.importorskip("deepspeed")

RUNS = {
    "ddp": ["shaped", "reset", "kept"],
    "zero1": ["shaped"],
    "zero2": ["shaped", "reset", "kept", "resumed", "checkpointed", "half"],
    "zero3": ["shaped", "reset", "kept", "resumed", "checkpointed", "generate", "apart", "half"],
    "fsdp2": ["shaped"],
}
"""What is trained, in one start of two processes for each backend. From the second case on, ZeRO-3 takes the model
apart when it is loaded."""

Outcomes = dict[tuple[str, str], list[Outcome]]


@pytest.fixture(scope="module")
def outcomes(small_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By backend and case, of both processes."""
    folder = tmp_path_factory.mktemp("outcomes")
    outcomes_by_case: Outcomes = {}
    for backend, names in RUNS.items():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*launch, "-m", "tests.scale.sharded.training", str(small_policy), str(folder), backend, *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[3]
        ended = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=500
        )
        for name in names:
            paths = [folder / f"{backend}-{name}-{rank}.json" for rank in (0, 1)]
            assert all(path.exists() for path in paths), f"{backend}, {name}:\n{ended.stderr[-6000:]}"
            outcomes_by_case[backend, name] = [Outcome(**json.loads(path.read_text())) for path in paths]
    return outcomes_by_case


@pytest.mark.parametrize(
    ("backend", "name"),
    [("zero1", "shaped"), ("fsdp2", "shaped"), *((f"zero{n}", name) for n in (2, 3) for name in RUNS["ddp"])],
)
def test_as_ddp(outcomes: Outcomes, backend: str, name: str) -> None:
    for actual, expected in zip(outcomes[backend, name], outcomes["ddp", name], strict=True):
        assert actual.sampled_by_engine
        assert expected.sampled_by_engine
        assert actual.completions == expected.completions
        assert len(actual.losses) == CASES[name].config["max_steps"]
        assert actual.losses == pytest.approx(expected.losses, abs=1e-5)
        assert actual.entropies == pytest.approx(expected.entropies, abs=1e-5)
        assert actual.weights == pytest.approx(expected.weights, rel=1e-4, abs=1e-4)
        assert actual.reference == pytest.approx(expected.reference, rel=1e-4, abs=1e-4)


def test_the_cases_learn(outcomes: Outcomes) -> None:
    """Else all of it would be equal for nothing: losses, and weights of cases that begin alike."""
    shaped, reset = outcomes["ddp", "shaped"][0], outcomes["ddp", "reset"][0]
    assert min(map(abs, shaped.losses[1:])) > 1e-4
    assert max(abs(a - b) for a, b in zip(shaped.weights, reset.weights, strict=True)) > 1e-2
    assert reset.reference != pytest.approx(reset.weights, abs=1e-4)  # it moved at step 4, and the policy once more


def test_zero2_has_the_packed_pass_and_sharded_weights_have_not(outcomes: Outcomes) -> None:
    assert outcomes["zero2", "shaped"][0].packed
    assert not outcomes["zero3", "shaped"][0].packed
    assert not outcomes["fsdp2", "shaped"][0].packed


@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_resumed(outcomes: Outcomes, backend: str) -> None:
    """From a checkpoint in the middle, with a reference that has moved: as if it had not stopped."""
    for actual, expected in zip(outcomes[backend, "resumed"], outcomes[backend, "kept"], strict=True):
        assert actual.completions == expected.completions[2:]
        assert actual.losses == pytest.approx(expected.losses, abs=1e-5)
        assert actual.weights == pytest.approx(expected.weights, rel=1e-4, abs=1e-4)
        assert actual.reference == pytest.approx(expected.reference, rel=1e-4, abs=1e-4)


def test_with_gradient_checkpointing(outcomes: Outcomes) -> None:
    for actual, expected in zip(outcomes["zero3", "checkpointed"], outcomes["zero2", "checkpointed"], strict=True):
        assert actual.completions == expected.completions
        assert actual.losses == pytest.approx(expected.losses, abs=1e-5)


def test_the_engine_sees_the_weights(outcomes: Outcomes) -> None:
    """What it records is what the model's own pass gives, in every batch; also of bfloat16 weights that DeepSpeed fills
    from float32 ones of its own."""
    for (backend, name), both in outcomes.items():
        for result in both:
            assert len(result.drift) == (len(result.completions) if result.sampled_by_engine else 0), (backend, name)
            assert max(result.drift, default=0.0) < (0.1 if name == "half" else 1e-4), (backend, name, result.drift)
    assert max(outcomes["zero2", "half"][0].drift) > 1e-3  # it is in half precision


def test_weights_that_are_not_gathered(outcomes: Outcomes) -> None:
    """`model.generate` samples where the user wants it so, and it is said where that follows from another wish."""
    apart, generated = outcomes["zero3", "apart"][0], outcomes["zero3", "generate"][0]
    assert not apart.sampled_by_engine
    assert not generated.sampled_by_engine
    assert any("ds3_gather_for_generation is False" in text for text in apart.said)
    assert not any("slower than Explorl's engine" in text for text in generated.said)
    assert apart.losses == pytest.approx(generated.losses, abs=1e-5)
