"""The trainer inside verl, end to end on a CPU: its runner, Ray, TransferQueue, agent loops, rewards and FSDP2 workers,
with a real model that is really sampled and really updated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.protocol")
pytestmark = pytest.mark.scale

import torch  # noqa: E402

from explorl.core.store import RunStore  # noqa: E402
from explorl.integrations.verl import support  # noqa: E402

HERE = Path(__file__).parent
STEPS, PROMPTS, ANSWERS = 2, 4, 4


def strategies(out: Path) -> list[Any]:
    """One or more for every hook that verl has a place for."""
    return [
        {"element_wise_temperature": {"solve_rates": str(out / "rates.json"), "easy": 0.8, "hard": 1.2}},
        {"bottom_p": {"p": 0.9, "frequency": 0.5}},
        {"overlong_penalty": {"cache": 8}},
        "ppl_shaping",
        "entropy_advantage",
        "mask_truncated",
        {"egsw": {"alpha": 0.3}},
        {"kl_cov": {"fraction": 0.05}},
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verl")
    rates = {problem: float(index % 2) for index, problem in enumerate(prompts())}
    (out / "rates.json").write_text(json.dumps(rates))
    listed = strategies(out)
    (out / "strategies.json").write_text(json.dumps(listed))
    overrides = [
        f"trainer.total_training_steps={STEPS}",
        f"+explorl.strategies={hydra(listed)}",
        "+explorl.correct=acc",
    ]
    completed = call("run_verl.py", str(out), *overrides)
    assert completed.returncode == 0, completed.stdout[-6000:] + completed.stderr[-6000:]
    return out


def prompts() -> list[str]:
    from explorl.tasks import get_task

    task = get_task("countdown-mini")
    return [str(task.prompt(problem)) for problem in task.problems("train", limit=64)]


def hydra(value: Any) -> str:
    """A list as hydra's command line has it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(hydra, value)) + "]" if isinstance(value, list) else str(value)


def call(script: str, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))}
    return subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, timeout=800
    )


def seen(run: Path, step: int) -> dict[str, Any]:
    return torch.load(run / f"seen-{step}.pt", weights_only=False)


def test_every_step_is_sampled_shaped_and_learnt(run: Path) -> None:
    lines = RunStore.open(run / "checkpoints" / "explorl").metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["grad_norm"] > 0
        assert line["strategy/egsw/weight_tokens"] > 0
        assert line["strategy/ppl_shaping/advantage_tokens"] > 0
        assert line["strategy/kl_cov/tokens"] >= 1
        assert line["strategy/overlong_penalty/reward_rows"] > 0
        assert line["strategy/mask_truncated/masked_tokens"] > 0
        assert line["strategy/bottom_p/frequency"] == 0.5
    moved = json.loads((run / "moved.json").read_text())
    assert len(moved) == STEPS + 1
    assert moved[0] == 0
    assert all(change > 0 for change in moved[1:])


def test_rows_stand_by_prompt(run: Path) -> None:
    for step in range(1, STEPS + 1):
        batch = seen(run, step)["batch"]
        assert batch["group"].tolist() == [row // ANSWERS for row in range(PROMPTS * ANSWERS)]
        assert batch["step"] == step - 1
        for group in range(PROMPTS):
            assert len(set(batch["prompts"][group * ANSWERS : (group + 1) * ANSWERS])) == 1


def test_each_request_has_its_rows_parameters(run: Path) -> None:
    rates = json.loads((run / "rates.json").read_text())
    requests = json.loads((run / "requests.json").read_text())
    assert len(requests) == STEPS * PROMPTS * ANSWERS
    assert all(request["extra_args"]["explorl_bottom_p"] == 0.9 for request in requests)
    assert all(request["extra_args"]["explorl_bottom_p_frequency"] == 0.5 for request in requests)
    batches = [seen(run, step)["batch"] for step in range(1, STEPS + 1)]
    wanted = [1.2 - 0.4 * rates[prompt] for batch in batches for prompt in batch["prompts"]]
    assert Counter(round(value, 4) for value in wanted) == Counter(round(sent["temperature"], 4) for sent in requests)
    assert len(set(wanted)) == 2
    temperatures = torch.cat([batch["temperature"] for batch in batches])
    torch.testing.assert_close(temperatures, torch.tensor(wanted))


def test_the_passes_are_at_each_rows_temperature_and_the_entropy_at_1(run: Path) -> None:
    """The first batch again, by the model's own forward."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    record = seen(run, 1)
    batch, columns = record["batch"], record["columns"]
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for row in (0, ANSWERS, 2 * ANSWERS + 1):
        length = int(columns["lengths"][row])
        answer = columns["responses"][row, :length]
        prompt = torch.tensor(tokenizer(batch["prompts"][row])["input_ids"])
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, answer]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        cool = (logits / batch["temperature"][row]).log_softmax(-1)
        logps = cool.gather(1, answer.unsqueeze(1)).squeeze(1)
        plain = logits.log_softmax(-1)
        entropy = -(plain.exp() * plain).sum(-1)
        torch.testing.assert_close(batch["old_logps"][row, :length], logps, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(batch["entropy"][row, :length], entropy, atol=2e-4, rtol=1e-3)


def test_advantages_are_those_of_exploration_trainer(run: Path) -> None:
    completed = call("same_batch.py", str(run), path=str(Path(sys.prefix) / "trl"))
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]
    line = next(line for line in completed.stdout.splitlines() if line.startswith("DIFFERENCES "))
    steps = json.loads(line.removeprefix("DIFFERENCES "))
    assert len(steps) == STEPS
    for differences in steps:
        assert {"base", "advantages", "loss_mask", "weights", "kept/7/chosen"} <= set(differences)
        assert all(value <= 1e-6 for value in differences.values()), differences


def test_explorl_report_reads_the_run(run: Path) -> None:
    from explorl.report.run_page import write_run_report

    page = write_run_report([run / "checkpoints" / "explorl"], run / "page.html")
    assert "entropy" in Path(page).read_text(encoding="utf-8")


def test_the_table_calls_what_ran_here_running(run: Path) -> None:
    rows = {row.strategy: row for row in support()}
    ran = {next(iter(spec)) if isinstance(spec, dict) else spec for spec in strategies(run)}
    assert len(ran) >= 5
    assert all(rows[name].runs for name in ran)
