"""What PyPI shows of the README: every link and image works there, or is not there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TARGETS = re.compile(r"""\]\(([^)\s]+)\)|\b(?:src|srcset|href)="([^"]+)\"""")
CODE_BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
CODE = re.compile(r"(?s:^```.*?^```$)|^    .*$|`[^`\n]+`", re.MULTILINE)


def targets(text: str) -> list[str]:
    """Where links and images lead."""
    return [first or second for first, second in TARGETS.findall(CODE.sub("", text))]


@pytest.fixture(scope="module")
def hook() -> Any:
    pytest.importorskip("hatchling", reason="builds the wheel; pip install '.[test]'")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_to_files() -> None:
    relative = [target for target in targets(README) if not target.startswith(("https://", "#"))]
    assert len(relative) > 20
    assert [target for target in relative if not (ROOT / target.split("#")[0]).is_file()] == []


def test_with_a_repository_all_is_absolute(hook: Any) -> None:
    page = hook.for_pypi(README, "https://example.org/explorl")
    assert len(targets(page)) == len(targets(README))
    assert [target for target in targets(page) if not target.startswith(("https://", "#"))] == []
    assert "https://example.org/explorl/raw/HEAD/docs/images/" in page
    assert "](https://example.org/explorl/blob/HEAD/docs/trl.md)" in page
    urls = hook.project_urls("https://example.org/explorl")
    assert urls["Repository"] == "https://example.org/explorl"
    assert {"Documentation", "Changelog", "Issues"} <= urls.keys()


def test_without_one_no_link_leads_nowhere(hook: Any) -> None:
    page = hook.for_pypi(README, "")
    assert [target for target in targets(page) if not target.startswith(("https://", "#"))] == []
    assert "<picture>" not in page
    assert "<img" not in page
    assert "docs/trl.md lists every option" in page, "the text of a link stays"
    assert hook.project_urls("") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [a](docs/a.md#b), [c](https://c.org) and [d](#d)", "see a, [c](https://c.org) and [d](#d)"),
        ('<img width="5" src="docs/a.svg" alt="a">\nnext', "next"),
        ("[`code`](docs/a.md) ![alt text](docs/a.svg)end", "`code` end"),
        ('<picture>\n  <source srcset="docs/d.png">\n  <img src="docs/l.png">\n</picture>\nnext', "next"),
    ],
)
def test_what_is_left_out(text: str, expected: str, hook: Any) -> None:
    assert hook.for_pypi(text, "") == expected


def test_the_readme_says_how_to_install_before_anything_else_is_run() -> None:
    first, second = CODE_BLOCK.findall(README)[:2]
    assert "pip install ." in first
    assert "pip install explorl" in first
    assert "make quickstart" in second


def test_the_drop_in_script_names_a_strategy_that_was_measured_to_act() -> None:
    (line,) = re.findall(r"^    strategies=\[(.*)\],(.*)$", README, re.MULTILINE)
    assert line[0].startswith("xs.RiskSensitive(")
    assert "xs.MaxRL()" in line[1]
