"""The wheel, installed where nothing else of the repository is, and used from an empty folder."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "explorl"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]

pytest.importorskip("hatchling", reason="builds the wheel; pip install '.[test]'")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel; its dependencies are those of the running interpreter."""

    wheel: Path
    site: Path
    empty: Path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command in the empty folder, by the wheel alone: what lies in `site` is found first."""
        path = f"{self.site / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.empty,
            env={**os.environ, "PYTHONPATH": str(self.site), "PATH": path, "PYTHONIOENCODING": "utf-8", **environment},
            capture_output=True, text=True, encoding="utf-8",
        )  # fmt: skip

    def printed(self, *command: str, **environment: str) -> str:
        done = self.run(*command, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "src" / "explorl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore", "hatch_build.py"):
        shutil.copy(REPOSITORY / name, source)
    alone = {**os.environ, "PIP_NO_INDEX": "1"}
    target = ["--no-compile", "--target", str(folder / "site"), "--find-links", str(folder)]
    for command in (
        ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)],
        ["install", "--quiet", "--no-deps", *target, "explorl"],
    ):
        done = subprocess.run([*PIP, *command], env=alone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    (folder / "empty").mkdir()
    [wheel] = folder.glob("explorl-*.whl")
    return Installed(wheel, folder / "site", folder / "empty")


def test_every_file_of_the_package_is_in_the_wheel(installed: Installed) -> None:
    files = {path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*") if path.is_file()}
    files = {path for path in files if "__pycache__" not in path.parts}
    assert {path.suffix for path in files} >= {".yaml", ".jsonl", ".html", ".css", ".js", ".json", ".safetensors"}
    packed = {Path(name) for name in zipfile.ZipFile(installed.wheel).namelist()}
    assert files - packed == set(), "missing in the wheel"
    assert {path for path in packed - files if path.parts[0] == "explorl"} == set(), "not of the package"


def test_the_page_on_pypi_has_no_relative_link(installed: Installed) -> None:
    archive = zipfile.ZipFile(installed.wheel)
    [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert page.startswith("# Explorl\n")
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", page) == []


def test_what_is_imported_is_the_wheel(installed: Installed) -> None:
    code = (
        "import explorl, importlib.metadata as m; "
        "print(explorl.__file__); print(explorl.__version__); print(m.version('explorl'))"
    )
    file, *versions = installed.printed(sys.executable, "-c", code).split("\n")
    assert Path(file).is_relative_to(installed.site)
    assert versions[0] == versions[1] == installed.wheel.name.split("-")[1]
    assert installed.printed("explorl", "--version") == f"{versions[0]}\n"
    assert installed.printed(sys.executable, "-m", "explorl", "--help").startswith("Usage: explorl ")


def test_what_the_readme_lists_is_there(installed: Installed) -> None:
    """In one process, since torch takes seconds to import."""
    code = """
import sys
from explorl.cli.app import main
for command in ("study deng --profile tiny --plan", "strategies", "config show --preset tiny", "models list"):
    try:
        main(command.split())
    except SystemExit as end:
        print("end", end.code)
"""
    planned, strategies, config, models, rest = installed.printed(sys.executable, "-c", code).split("end 0\n")
    assert "14 arms × 3 seeds, 45 steps each, in runs/deng-tiny" in planned
    assert "ppl_shaping" in strategies
    assert "name: tiny" in config
    assert str(installed.site / "explorl" / "models") in models
    assert rest == ""
    assert not list(installed.empty.iterdir()), "nothing is written"


def test_an_unknown_study_is_told_its_names(installed: Installed) -> None:
    done = installed.run("explorl", "study", "dengg", "--profile", "tiny")
    assert done.returncode == 2
    assert "deng, effects, egsw, frontier, mecklenburg" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_is_offered(installed: Installed) -> None:
    script = installed.printed("bash", "-c", "explorl --show-completion; true")
    assert "complete -o default -F _explorl_completion explorl" in script
    request = {"_EXPLORL_COMPLETE": "complete_bash", "COMP_WORDS": "explorl\nstudy\neg", "COMP_CWORD": "2"}
    assert installed.printed("explorl", **request).split() == ["egsw"]
