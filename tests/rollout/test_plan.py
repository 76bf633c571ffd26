"""What the plan says that a call takes, against what it took: tallied on the CPU, and as measured on an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from explorl.rollout import Engine, SamplingParams, memory_plan
from explorl.rollout.memory.cache import LayerShape
from explorl.rollout.memory_plan import MemoryNeeds, allowed_memory, free_memory, make_plan, work_bytes, workspace_bytes

from .models import prompts

MIB = 1 << 20
CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def held(engine: Engine, *args: Any) -> int:
    """Most bytes of tensors that a call held at a time, beside the model."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.generate(*args)
    assert profiler.profiler is not None
    found = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@pytest.mark.parametrize(("rows", "tokens", "lengths"), [(64, 8, (30, 9)), (8, 12, (5, 17, 1, 9))])
def test_a_call_takes_what_was_planned(
    llama: Any, rows: int, tokens: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "SPANS", ())
    engine = Engine(llama)
    engine.check(60)
    ids = prompts(lengths)
    took = held(engine, ids, rows // len(ids), SamplingParams(max_tokens=tokens, stop_token_ids=(), seed=0))
    assert engine.plan is not None
    assert 0.6 * engine.plan.bytes < took <= engine.plan.bytes


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("requests", "tokens", "measured"), [(512, 256, 3808), (512, 1024, 12679), (64, 1024, 1701)], ids=str
)
def test_peaks_measured_on_an_h200(requests: int, tokens: int, measured: int) -> None:
    """SmolLM2-135M's shape in bfloat16, 16 samples of each prompt of 64 tokens; MiB beside the model."""
    layers = [LayerShape(3, 64, 64, torch.bfloat16, CUDA)] * 30
    made = make_plan(
        layers,
        MemoryNeeds(requests, requests // 16, prompt_tokens=64, tokens=tokens),
        vocab=49152,
        logit_bytes=2,
        prefill_bytes=2 * (8 * 576 + 3 * 1536),
        batch_size=None,
        budget=60_000 * MIB,
        device=CUDA,
        kernels=True,
    )
    assert made.slots == requests
    assert made.bytes / MIB == pytest.approx(measured, rel=0.05)


def test_work_is_the_largest_of_what_comes_and_goes() -> None:
    how = {"state": 1000, "logits": 10, "activations": 3, "copied": 50}
    assert work_bytes(100, 8, **how) == 1000 + 100 * 13
    assert work_bytes(2, 800, **how) == 1000 + 800 * 3
    assert work_bytes(2, 8, **how) == 1000 + 50


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("setting", "each"),
    [
        ("", 32 * MIB),
        (":4096:8", 32 * MIB),
        (":16:8", 128 << 10),
        (":4096:2:16:8", 8 * MIB + (128 << 10)),
        (":8", 32 * MIB),
    ],
)
def test_workspaces(setting: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert workspace_bytes(CUDA) == memory_plan.STREAMS * each
    assert workspace_bytes(torch.device("cpu")) == 0


# ---------------------------------------------------------------- limits of containers


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_a_container_limits_memory(tmp_path: Path) -> None:
    """By its own group and by those around it; what is kept of files is free."""
    groups, own = tmp_path / "groups", tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert allowed_memory(groups, own) is None
    group(groups, {"cgroup.procs": ""})
    group(groups / "a", {"memory.max": 1000, "memory.current": 300, "memory.stat": "anon 250\ninactive_file 40"})
    group(groups / "a" / "b", {"memory.max": "max", "memory.current": 200})
    assert allowed_memory(groups, own) == 740
    group(groups / "a" / "b", {"memory.max": 250})
    assert allowed_memory(groups, own) == 50
    group(groups / "a" / "b", {"memory.max": 100})
    assert allowed_memory(groups, own) == 0


def test_a_container_of_the_first_version(tmp_path: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    own.write_text("12:cpu,cpuacct:/x\n9:memory:/docker/1\n1:name=systemd:/y\n")
    files = {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 500, "memory.stat": "total_inactive_file 60"}
    group(groups / "memory" / "docker" / "1", files)
    assert allowed_memory(groups, own) == 460


def test_where_nothing_is_said_there_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert allowed_memory(tmp_path, tmp_path / "missing") is None
    (tmp_path / "odd").write_text("nothing\n\n")
    assert allowed_memory(tmp_path, tmp_path / "odd") is None
    free = free_memory(torch.device("cpu"))
    monkeypatch.setattr("explorl.rollout.memory_plan.allowed_memory", lambda: free // 4)
    assert free_memory(torch.device("cpu")) == free // 4
