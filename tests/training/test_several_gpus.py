"""Several GPUs that one process sees: the command says what to do, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from explorl.cli.app import main


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize(("visible", "first"), [(None, "0"), ("2,3", "2")])
def test_one_process_and_two_gpus(
    command: str,
    visible: str | None,
    first: str,
    small_policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    changes = [f"model.name={small_policy}", "sft.from_scratch=false", "sft.examples=4", "task.train_problems=32"]
    arguments = [command, "--preset", "tiny", "--run", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, *(part for change in changes for part in ("--set", change))])
    lines = capsys.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert len(lines) == 2, lines
    assert lines[0].startswith("explorl: 2 GPUs are visible, but a process trains on one")
    assert lines[0].endswith(f" CUDA_VISIBLE_DEVICES={first}")
    assert "--launch FILE with num_processes: 2" in lines[1]
    assert not (tmp_path / "run").exists()
