"""The documents say what the code does: the strategies' pages are generated, and the tutorial's code runs."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tools.docs import strategy_pages

import explorl.strategies as xs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "strategies.md"
TUTORIAL = ROOT / "docs" / "tutorial-strategy.md"


BEGIN, END = "<!-- measured effects: begin -->", "<!-- measured effects: end -->"


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# --- docs/strategies.md -------------------------------------------------------------------------------------------


def test_the_page_is_what_the_docstrings_say() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == strategy_pages.render(written), "run python -m tools.docs.strategy_pages"


def test_the_readme_lists_every_strategy() -> None:
    page = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert strategy_pages.readme(page) == page, "run python -m tools.docs.strategy_pages"
    for name, strategy in xs.REGISTRY.items():
        assert f"| `{name}` |" in page
        assert strategy.paper.split(",")[0] in page
        (source,) = re.findall(rf"^\| `{name}` \|.* \| (.+) \|$", page, re.MULTILINE)
        assert all(re.search(r"\b\d{4}\b", part) for part in source.split(";")), f"{name}: {source!r}"
    with pytest.raises(ValueError, match="no table that begins with"):
        strategy_pages.readme("# A page\n")


@pytest.mark.parametrize("name", xs.REGISTRY)
def test_every_strategy_has_a_whole_section(name: str) -> None:
    section = strategy_pages.render().split(f"\n## {name}\n")[1].split("\n## ")[0]
    for part in ("Idea", "What to expect", "When not to use it", "Source", "Deviations and errata"):
        text = section.split(f"**{part}.** ")[1].split("\n\n")[0]
        assert len(text) > 4, part
        assert text[0] == text[0].upper(), part
    assert "```text\n" in section
    assert "; hooks: `" in section
    entry = next(entry for entry in xs.describe() if entry["name"] == name)
    for word in re.findall(r"\w+", entry["docs"].partition("\n\n")[2]):
        assert word.lower() in section.lower()
    for parameter in entry["hyperparameters"]:
        row = next(line for line in section.splitlines() if line.startswith(f"| `{parameter['name']}` |"))
        assert ("required" if parameter["required"] else repr(parameter["default"])) in row


def test_comments_beside_fields_are_the_notes() -> None:
    assert "| `k` | `int \\| Schedule` | required | at most half of the generations of a prompt is a good rule |" in (
        strategy_pages.render()
    )
    assert (
        "| `direction` | `1 \\| -1` | `1` | −1 favours high perplexity, the paper's weaker variant |"
        in strategy_pages.render()
    )


def test_the_examples_of_the_page_build_the_same_strategies() -> None:
    composed, scheduled = blocks(PAGE, "yaml")
    names, schedule = blocks(PAGE, "python")
    scope: dict[str, object] = {}
    exec(names, scope)
    assert xs.build_all(yaml.safe_load(composed)["strategies"]) == scope["strategies"]
    assert xs.build_all(yaml.safe_load(scheduled)) == [eval(schedule, scope)]


def test_the_page_opens_with_advice_that_was_measured() -> None:
    """Each interval in it stands in a page of results, and what it advises keeps pass@k."""
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE)[0] == "Which strategy should I use?"
    advice = strategy_pages.by_hand(page, strategy_pages.ADVICE)
    results = "\n".join(path.read_text(encoding="utf-8") for path in (PAGE.parent / "results").glob("*.md"))
    intervals = re.findall(r"\[[+−][\d.]+, [+−][\d.]+\]", advice)
    assert len(intervals) >= 6
    assert [interval for interval in intervals if interval not in results] == []
    assert "`risk_sensitive`" in advice.split("\n\n")[0]


def test_measured_effects_are_kept() -> None:
    page = strategy_pages.render().replace(
        strategy_pages.NOT_YET, "| strategy | entropy |\n| --- | --- |\n| egsw | 1.5 ± 0.1 |"
    )
    assert "egsw | 1.5 ± 0.1" in strategy_pages.render(page)
    assert strategy_pages.render(page) == page
    assert strategy_pages.render(strategy_pages.render()) == strategy_pages.render()


@pytest.mark.parametrize(
    "page",
    [BEGIN + "numbers", "numbers" + END, END + BEGIN, 2 * (BEGIN + "numbers" + END)],
    ids=["no end", "no begin", "reversed", "twice"],
)
def test_broken_marks_never_lose_numbers(page: str) -> None:
    with pytest.raises(ValueError, match="must be between"):
        strategy_pages.render(page)


def test_the_command_writes_and_checks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    strategy_pages.write(page)
    assert page.read_text(encoding="utf-8") == strategy_pages.render()
    strategy_pages.write(page, check=True)
    page.write_text(strategy_pages.render().replace("0.28", "0.29"), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"strategy_pages --path {page}")):
        strategy_pages.write(page, check=True)
    command = [sys.executable, "-m", "tools.docs.strategy_pages", "--path", str(page), "--check"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{page} is out of date")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


# --- docs/tutorial-strategy.md ------------------------------------------------------------------------------------


@pytest.fixture
def my_pkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tutorial's package, saved as the tutorial says."""
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "concise.py").write_text(blocks(TUTORIAL, "python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("my_pkg", "my_pkg.concise"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return package


def test_the_tutorial_is_short() -> None:
    assert len(blocks(TUTORIAL, "python")[0].splitlines()) < 40


def test_the_tutorials_case_by_hand(my_pkg: Path) -> None:
    exec(blocks(TUTORIAL, "python")[1], {})


def test_the_tutorials_config_loads_by_import_path(my_pkg: Path) -> None:
    from explorl.core.config import Config

    (text,) = blocks(TUTORIAL, "yaml")
    settings = Config(**yaml.safe_load(text))
    concise, other = xs.build_all(settings.strategies)
    assert type(concise).__module__ == "my_pkg.concise"
    assert concise.alpha == xs.Schedule(0.0, 0.2, start=100, steps=200)
    assert other == xs.MaskTruncated()
    with pytest.raises(ValueError, match=r"concise: alpha is 0\.7"):
        Config(strategies=[{"my_pkg.concise:Concise": {"alpha": 0.7}}])
    points = tomllib.loads(blocks(TUTORIAL, "toml")[0])["project"]["entry-points"]["explorl.strategies"]
    assert xs.find(points["concise"]) is type(concise)


@pytest.mark.filterwarnings("error:.* does nothing")
@pytest.mark.parametrize("loaded", ["as an object", "by import path"])
def test_the_tutorials_strategy_trains(my_pkg: Path, small_policy: Path, tmp_path: Path, loaded: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig

    from explorl.models import load_policy

    policy = load_policy(str(small_policy), device="cpu")
    scope = {
        "model": policy.model,
        "tokenizer": policy.tokenizer,
        "reward": lambda completions, **columns: [sum(map(str.isdigit, text)) / 10 for text in completions],
        "dataset": Dataset.from_dict({"prompt": [f"{a} {a + 1}=" for a in range(8)]}),
        "args": GRPOConfig(
            str(tmp_path / "run"),
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=10,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            seed=1,
        ),
    }
    code = blocks(TUTORIAL, "python")[2]
    if loaded == "by import path":
        assert "Concise(alpha=0.2)" in code
        code = code.replace("Concise(alpha=0.2)", '{"my_pkg.concise:Concise": {"alpha": 0.2}}')
    exec(code, scope)
    logs = [entry for entry in scope["trainer"].state.log_history if "loss" in entry]  # type: ignore[attr-defined]
    assert [entry["step"] for entry in logs] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in logs)
    assert all(0 < entry["strategy/concise/length"] <= 10 for entry in logs)
    assert max(entry["strategy/concise/advantage_change"] for entry in logs) > 0
