"""The lens on two processes that hold very different parts of a batch: it logs what one process would log.

Run as a module, it is one of the two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from explorl.training.grpo.inspection_schedule import Lens
from explorl.training.grpo.observers import statistics
from explorl.training.grpo.trainer import ExplorationTrainer
from tests.training import test_two_processes as two
from tests.training.test_two_processes import policy  # noqa: F401 (a fixture)

NAMES = ("engine/plain", "engine/company", "given/plain", "windows/company")
CLOSE = ("lens/update_size", "lens/probability_change")
"""Of the main process's own answers, which are others than those of a process alone."""


def logged(folder: Path, name: str, *, processes: int) -> list[dict[str, float]]:
    """What is logged under lens/ at each step."""
    watched: Any = partial(ExplorationTrainer, observers=statistics(), lens=Lens(every=1, rate=0.5))
    vars(two)["ExplorationTrainer"] = watched
    try:
        outcome, _ = two.train(folder, two.CASES[name], processes=processes)
    finally:
        vars(two)["ExplorationTrainer"] = ExplorationTrainer
    return [{key: value for key, value in line.items() if key.startswith("lens/")} for line in outcome.logs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_processes_log_what_one_logs(policy: Path, tmp_path: Path) -> None:  # noqa: F811
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __name__]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    command = [*launch, str(policy), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[:6000]
    for name in NAMES:
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text())[name] for rank in (0, 1))
        alone = logged(policy, name, processes=1)
        assert not any(second)
        lines = [line for line in first if line]
        assert len(lines) == len(two.SCENES)
        for line, expected in zip(lines, [line for line in alone if line], strict=True):
            assert {"lens/update_size_p90", "lens/probability_change_mean_abs"} <= line.keys() & expected.keys()
            if name == "windows/company":  # which rows an update sees is chance, and so are the weights after it
                continue
            # Without the engine the entropy is known of the answers that are looked at closely alone.
            apart = (*CLOSE, "lens/entropy", "lens/fastest") if name == "given/plain" else CLOSE
            compared, others = (
                {key: value for key, value in record.items() if not key.startswith(apart)}
                for record in (line, expected)
            )
            assert compared == pytest.approx(others, rel=1e-3, abs=1e-4), name
            assert len(compared) > 3


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    policy_folder, out = map(Path, sys.argv[1:])
    results = {name: logged(policy_folder, name, processes=2) for name in NAMES}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
