"""scripts/passk_change.py: a study's figure in a file that any reader of SVG can show."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from explorl.core.store import write_json
from tests.report.studies import ARMS, make_results

ROOT = Path(__file__).parents[2]
NAME = "{http://www.w3.org/2000/svg}text"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("passk_change", ROOT / "scripts" / "passk_change.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(script: ModuleType, folder: Path, means: dict[str, list[float]]) -> ElementTree.Element:
    """The figure of arms with these changes in pass@k."""
    results = make_results()
    for arm in results["arms"]:
        values = means[arm["name"]]
        arm["gain"] = {"k": [1, 8], "mean": values, "low": values, "high": values, "band": "95 %"}
    write_json(folder / "results.json", results)
    script.main([str(folder), str(folder / "change.svg")])
    return ElementTree.parse(folder / "change.svg").getroot()


def test_the_figure_stands_alone(script: ModuleType, tmp_path: Path) -> None:
    figure = drawn(script, tmp_path, dict(zip(ARMS, ([0.1, -0.05], [0.08, 0.0], [0.07, 0.02]), strict=True)))
    text = (tmp_path / "change.svg").read_text(encoding="utf-8")
    assert "var(" not in text
    assert "currentColor" not in text
    names = [node.text for node in figure.iter(NAME)]
    assert set(ARMS) < set(names)
    assert "change in pass@k (points)" in names
    assert "plain GRPO +10.0 points at k = 1 and −5.0 points at k = 8" in figure.attrib["aria-label"]


def test_names_of_lines_that_end_together_do_not_lie_on_each_other(script: ModuleType, tmp_path: Path) -> None:
    figure = drawn(script, tmp_path, dict(zip(ARMS, ([0.1, 0.0], [0.08, 0.0], [0.07, 0.001]), strict=True)))
    texts = [node for node in figure.iter(NAME) if node.text in ARMS]
    heights = sorted(float(node.attrib["y"]) for node in texts)
    assert len(heights) == 3
    assert all(below - above > 8 for above, below in pairwise(heights))


def test_the_readme_states_the_arms_and_numbers_of_its_figure() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    figure = ElementTree.parse(ROOT / "docs" / "images" / "passk-change.svg").getroot()
    label = figure.attrib["aria-label"].partition(": ")[2]
    arms = re.findall(r"(?:^|; )(.+?) (\S+) points at k = 1 and (\S+) points at k = 8", label)
    assert [name for name, *_ in arms] == ["plain GRPO", "risk-sensitive GRPO", "MaxRL"]
    for text in (readme, (ROOT / "docs" / "index.md").read_text(encoding="utf-8")):
        (alt,) = re.findall(r"Change in pass@k by training.*? with ([^\"\]]+)", text)
        assert re.split(", | and ", alt) == [name for name, *_ in arms]
    sentence = "At k = 8 the change is {} points with plain GRPO, {} with risk-sensitive GRPO and {} with MaxRL."
    assert sentence.format(*(gain for _, _, gain in arms)) in " ".join(readme.split())
    assert re.findall(r"\b[A-Z]+_[A-Z_]+\b", re.sub(r"`[^`]*`|```.*?```", "", readme, flags=re.DOTALL)) == []


def test_a_study_without_a_start_is_refused(script: ModuleType, tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", {**make_results(), "arms": []})
    with pytest.raises(ValueError, match="no evaluation from before its training"):
        script.main([str(tmp_path), str(tmp_path / "change.svg")])
