"""A stranger's path: an empty folder, a file of word problems, and the commands of the tour, through to a page."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split("## Your own problems\n")[1].split("\n## ")[0]
EQUAL_REWARDS = (
    r"warning: all completions of a prompt got equal rewards in \d generation batch(es)?: without a difference within "
    "a group there is no advantage to learn from; check the reward function, use prompts that the policy sometimes "
    "solves, or raise num_generations or the temperature\n"
)
"""The warning at the end of a training in which the embedded policy solved no word problem; the page mentions it."""
SMALL = "prompts_per_step: 4, generations: 4, micro_batch: 16"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


def reduced(text: str, *changes: tuple[str, str]) -> str:
    """What the page prints, with fewer of everything."""
    for printed, used in changes:
        assert text.count(printed) == 1, printed
        text = text.replace(printed, used)
    return text


def word_problems(first: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Rows like the first one."""
    rng, rows = random.Random(0), {first["prompt"]: first["answer"]}
    while len(rows) < count:
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        who, thing = rng.choice(["Ada", "Ben", "Cleo", "Dan"]), rng.choice(["pens", "eggs", "coins", "books", "hats"])
        rows[f"{who} has {a} {thing} and gets {b} more. How many {thing} has {who} now?"] = a + b
    return [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the section says to save; `explorl` is a script that lies elsewhere, as an installed one does."""
    folder = tmp_path / "empty"
    folder.mkdir()
    rows = word_problems(json.loads(blocks("json")[0]), 200)
    config, study = blocks("yaml")
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    small = f"rollout: {{max_tokens: 24}}\ntraining: {{steps: 2, {SMALL}}}\nevaluation: {{problems: 8, samples: 2}}"
    (folder / "words.yaml").write_text(reduced(config, ("training: {steps: 30}", small)), encoding="utf-8")
    base = f"  preset: tiny\n  rollout: {{max_tokens: 24}}\n  training: {{{SMALL}}}\n"
    changes = [
        ("  preset: tiny\n", base),
        ("seeds: 3", "seeds: 1"),
        ("every: 20, problems: 20", "every: 2, problems: 8"),
    ]
    (folder / "words-study.yaml").write_text(reduced(study, *changes, ("steps: 40", "steps: 2")), encoding="utf-8")
    (tmp_path / "explorl").write_text("from explorl.cli.app import main\n\nmain()\n", encoding="utf-8")
    return folder


def run(folder: Path, command: str) -> str:
    """A command of the page, typed in the folder."""
    for printed, used in (("training.steps=40", "training.steps=3"), ("--samples 8", "--samples 4 --max-tokens 24")):
        command = command.replace(printed, used)
    words = shlex.split(command)
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(folder.parent / words[0]), *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    warning = EQUAL_REWARDS if words[1] == "train" else ""
    assert re.fullmatch(f"({warning})?", done.stderr), f"{command} complains: {done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_commands_from_a_file_to_a_page(folder: Path) -> None:
    commands = re.findall(r"^ {4}(explorl .*)$", SECTION, re.MULTILINE)
    assert [command.split()[1] for command in commands] == [
        "config", "train", "report", "quality", "train", "train", "eval", "compare", "study", "report",
    ]  # fmt: skip
    show, train, report, quality, longer, other, evaluate, compare, study, again = commands
    assert "path: words.jsonl" in run(folder, show)
    output = run(folder, train)
    change = r"[\d.]+% before training, [\d.]+% after"
    assert re.search(rf"held out: pass@1 {change}; pass@2 {change}", output)
    assert f"next: {report}\n" in output, "it says what the page says comes next"
    assert "report: runs/words/report.html" in run(folder, report)
    page = (folder / "runs" / "words" / "report.html").read_text(encoding="utf-8")
    assert "words: training took pass@1 from" in page
    assert re.search(r"│ +2 │ +16 │", run(folder, quality))
    assert "GRPO: step 3 of 3" in run(folder, longer)
    run(folder, other)
    output = run(folder, evaluate)
    assert f"next: {compare}\n" in output
    compared = run(folder, compare)
    assert all(f"{pair} │" in compared for pair in ("plain − start", "passk − start", "passk − plain"))
    assert (folder / "runs" / "comparison" / "report.html").is_file()
    output = run(folder, study)
    assert "2 arms × 1 seed, 2 steps each" in output
    assert "pass@k is not shown to differ from GRPO in pass@1, nor in pass@8; with one seed" in output.replace(
        "\n", " "
    )
    logs = [path.read_text(encoding="utf-8") for path in (folder / "runs" / "words-arms").rglob("log.txt")]
    assert [log for log in logs if not re.fullmatch(f"({EQUAL_REWARDS})?", log)] == []
    assert "report: runs/words-arms/report.html" in run(folder, again)
    page = (folder / "runs" / "words-arms" / "report.html").read_text(encoding="utf-8")
    for section in ("summary", "over-training", "pass-at-k", "rollouts"):
        assert f'<section id="{section}"' in page
    summary = page.split('<section id="summary"')[1].split("</section>")[0]
    assert [name in summary for name in ("GRPO", "pass@k", "before training", "pass@8")] == [True] * 4
    rollouts = json.loads(
        re.findall(r'<script type="application/json" id="rollout-data">(.*?)</script>', page, re.S)[0]
    )
    assert "How many" in json.dumps(rollouts)
