"""Looking up plug-ins: names, entry points, import paths, the working folder, and what to write for an unknown word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial, wraps
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import explorl
from explorl.core import plugins
from explorl.core.plugins import (
    PluginError,
    PluginKind,
    child_environment,
    is_marked,
    is_path,
    mark,
    nearest,
    suggest,
    unknown,
)


def refusal(value: Any) -> str | None:
    return None if isinstance(value, type) and issubclass(value, dict) else f"is {value!r}; name a dict"


KIND: PluginKind[type] = PluginKind("shelf", {"plain": dict}, "my_pkg.shelves:Wide", refusal, "explorl.shelves")

MODULE = """
class Wide(dict):
    class Inner(dict):
        pass

wide = Wide()
number = 3
def __getattr__(name):
    raise {}[name] if name == "failing" else AttributeError
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module, a package and a folder without __init__.py."""
    for name in ("shelf_module.py", "shelf_package/__init__.py", "shelf_package/deep.py", "shelf_space/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("shelf_")]:
        del sys.modules[name]


def test_a_name_is_looked_up_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    points = [EntryPoint("plain", "shelf_module:Wide", KIND.group), EntryPoint("wide", "shelf_module:Wide", KIND.group)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == KIND.group else [])
    assert (KIND.find("plain").value, KIND.find("plain").origin) == (dict, "registry")
    assert (KIND.find("wide").value.__name__, KIND.find("wide").origin) == ("Wide", "entry point")
    assert KIND.find("shelf_module:Wide").origin == "path"
    assert KIND.find("shelf_package.deep:Wide.Inner").value.__name__ == "Inner"
    assert PluginKind("shelf", {}, "a:B", refusal).points() == {}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shelf_module:wide", "shelf 'shelf_module:wide' is {}; name a dict"),
        ("shelf_module:number", "is 3; name a dict"),
        ("shelf_module:number.real", "has no 'number.real' to use; it has Wide"),
        ("shelf_module:wide.keys", "has no 'wide.keys' to use; it has Wide"),
        ("shelf_module:Wide.Outer", "has no 'Wide.Outer' to use"),
        ("shelf_module:failing", "shelf_module failed: KeyError: 'failing' (shelf_module.py, line"),
        ("shelf_package.none:Wide", "there is no module 'shelf_package.none'"),
        ("plian", "unknown shelf 'plian'; did you mean 'plain'? (name your own like my_pkg.shelves:Wide)"),
        ("collections:OrderedDict", "collections is part of Python's library"),
        ("shelf_package.__main__:Wide", "is a program"),
        (7, "the name of a shelf is 7; give text, like my_pkg.shelves:Wide"),
    ],
)
def test_what_is_no_plugin_is_refused(name: Any, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(PluginError) as error:
        KIND.find(name)
    assert words in str(error.value)


@pytest.mark.parametrize("path", ["a:B", "a.b.c:D.e", "_a1:_B", "ä:Ö"])
def test_import_paths(path: str) -> None:
    assert is_path(path)


@pytest.mark.parametrize("path", ["", "a", "a.b", ":", "a:", ":B", "a:B:C", "a b:C", "a:B()", "a..b:C", "a.py:B"])
def test_no_import_paths(path: str) -> None:
    assert not is_path(path)


def test_marks() -> None:
    def plain() -> None: ...

    marked = mark(lambda: None, "shelf")
    assert is_marked(marked, "shelf")
    assert is_marked(wraps(marked)(lambda: None), "shelf")
    assert not any(is_marked(value, "shelf") for value in (plain, partial(marked), mark(lambda: None, "other"), type))


def test_what_to_write_for_an_unknown_word() -> None:
    assert nearest("GRPOO", ["grpo", "RFT"]) == "grpo"
    assert nearest("grpo", ["GRPO", "RFT"]) == "GRPO"
    assert nearest(1e9, ["GRPO", 3]) is None
    assert suggest("stps", ["steps", "seeds"]) == "did you mean 'steps'?"
    assert suggest("xyzzy", {"b", "a"}) == "known: a, b"
    assert suggest("xyzzy", []) == "known: none"
    assert str(unknown("shelf", "plian", ["plain"])) == "unknown shelf 'plian'; did you mean 'plain'?"


# --- the working folder -----------------------------------------------------------------------------------------------


def test_without_a_command_python_alone_finds_modules(folder: Path) -> None:
    with pytest.raises(PluginError, match="there is no module 'shelf_module'"):
        KIND.find("shelf_module:Wide")


@pytest.mark.parametrize("module", ["shelf_module", "shelf_package", "shelf_package.deep", "shelf_space.part"])
def test_a_named_module_is_found_and_announced_once(module: str, folder: Path) -> None:
    messages: list[str] = []
    before = [*sys.path]
    with plugins.working_folder(messages.append):
        assert sys.path == before  # nothing has been named
        with plugins.working_folder(lambda _: None):
            with pytest.raises(PluginError, match="no module 'shelf_gone'"):
                KIND.find("shelf_gone:Wide")
            assert sys.path == before
        for _ in range(2):
            KIND.find(f"{module}:Wide")
        assert sys.path == [*before, str(folder)]
    assert sys.path == before
    assert messages == [f"importing {module} from the working folder {folder}, as shelf '{module}:Wide' says"]


def test_what_python_finds_in_the_working_folder_is_announced_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    messages: list[str] = []
    with plugins.working_folder(messages.append):
        KIND.find("shelf_module:Wide")
    assert len(messages) == 1


def test_a_module_from_elsewhere_is_not_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    messages: list[str] = []
    with plugins.working_folder(messages.append):
        KIND.find("shelf_package.deep:Wide")
    assert not messages


@pytest.mark.parametrize(("flags", "importable"), [([], True), (["-P"], False)])
def test_processes_that_a_command_starts_look_where_it_looks(flags: list[str], importable: bool, folder: Path) -> None:
    """With ``python -m``, which would put the working folder first."""
    (folder / "yaml.py").write_text("raise SystemError('the working folder')")
    code = "from explorl.core.plugins import child_environment; print(*child_environment().items())"
    source = {**os.environ, "PYTHONPATH": str(Path(explorl.__file__).parents[1])}
    printed = subprocess.run(
        [sys.executable, *flags, "-c", code], env=source, capture_output=True, text=True, check=True
    )
    expected = {"PYTHONSAFEPATH": "1", plugins.SEARCHES: "1" if importable else "0"}
    assert printed.stdout.split("\n")[0] == " ".join(map(str, expected.items()))
    show = [sys.executable, "-m", "explorl", "config", "show", "--set", "task.name=shelf_module:Wide"]
    completed = subprocess.run(show, env={**source, **expected}, capture_output=True, text=True, check=False)
    assert "SystemError" not in completed.stderr
    assert ("is not a task" in completed.stderr) == importable
    assert ("there is no module 'shelf_module'" in completed.stderr) != importable


def test_a_childs_environment_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.SEARCHES, "0")
    assert child_environment()[plugins.SEARCHES] == "0"
