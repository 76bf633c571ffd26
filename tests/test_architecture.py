"""Check which package imports which, that names are unique, and the language of the code.

tests/architecture_exceptions.py lists what breaks a rule today, with reasons. A test fails when there is a new offender
or when an entry is no longer needed. `python tests/test_architecture.py` prints the lists as they should be.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.code_base import FUNCTIONS, CodeBase, Module, cycles, words
from tools.figures import NO_VERBS

from tests import architecture_exceptions as exceptions

# Each package may import those above it.
PACKAGES = [
    *("core", "metrics", "stats", "sandbox", "tasks", "models", "modeling", "rollout", "strategies", "evaluation"),
    *("training", "analysis", "report", "study", "integrations", "cli"),
]
ROOT_FILES = {"__init__.py", "__main__.py", "py.typed"}
TRL_ADAPTER = {"trl_trainer", "trl_adapter"}  # the only module that uses private names of TRL's GRPO trainer
BANNED_WORDS = re.compile("nobody|somebody|anew|seat(s|ed)?|leash(es)?|nurse(s|ry|ries)?")
BANNED_PHRASE = re.compile(r"\bbut[\s#]+for\b", re.IGNORECASE)
MOST_WITHOUT_VERB = 0.02

Offender = tuple[str | int, ...]
CODE = CodeBase()


def home(path: Path) -> str:
    """Return the package of a file; for one at the library's root, the package that it is to be moved to."""
    return CODE.package_of(path) or exceptions.ROOT_MODULES.get((path.stem,), "")


def rank(module: Module) -> int:
    """Return the package's position in the table; the root may import everything, and nothing may import it."""
    package = home(module.path)
    return PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)


def forbidden_imports() -> set[Offender]:
    """Return each module with each package below its own that it imports."""
    modules = CODE.modules
    return {
        (name, home(modules[target].path) or target)
        for name, targets in CODE.imports.items()
        for target in targets
        if rank(modules[target]) > rank(modules[name])
    }


def duplicate_classes() -> set[Offender]:
    """Return the public classes that several modules define, with their number."""
    names = {(item.module.name, item.name) for item in CODE.classes}
    counts = Counter(name for _, name in names if not name.startswith("_") and "." not in name)
    return {(name, count) for name, count in counts.items() if count > 1}


def duplicate_stems() -> set[Offender]:
    """Return the names that several files have, with their number."""
    counts = Counter(module.stem for module in CODE.modules.values() if module.stem != "__init__")
    return {(stem, count) for stem, count in counts.items() if count > 1}


def root_modules() -> set[Offender]:
    """Return the modules and other files that do not belong at the library's root."""
    files = {path.name for path in CODE.folder.iterdir() if path.is_file()} - ROOT_FILES
    return {(name.removesuffix(".py"),) for name in files}


def private_names_of_trl() -> set[Offender]:
    """Return the private names of TRL's GRPO trainer, except those of transformers' Trainer, used in training."""
    sources = {}
    for file in ("trl/trainer/grpo_trainer.py", "transformers/trainer.py"):
        spec = importlib.util.find_spec(file.split("/")[0])
        assert spec is not None
        sources[file] = (Path(str(spec.origin)).parents[1] / file).read_text(encoding="utf-8")
    grpo, stock = (set(re.findall(r"(?:\bself\.|def )(_[a-z]\w*)", source)) for source in sources.values())
    return {
        (module.name, name)
        for module in CODE.modules.values()
        if home(module.path) == "training" and module.stem not in TRL_ADAPTER
        for name in attributes(module) & (grpo - stock)
    }


def attributes(module: Module) -> set[str]:
    """Return the names of the attributes that a module uses and the functions that it defines."""
    nodes = list(ast.walk(module.tree))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return used | {node.name for node in nodes if isinstance(node, FUNCTIONS)}


def banned_words() -> set[Offender]:
    """Return each package with each banned word in its code and text."""
    offenders: set[Offender] = set()
    for path in CODE.text_files:
        text = path.read_text(encoding="utf-8")
        package = home(path) or path.stem
        offenders |= {(package, word) for word in words(text) if BANNED_WORDS.fullmatch(word)}
        if BANNED_PHRASE.search(text):
            offenders.add((package, "but for"))
    return offenders


def docstrings_without_verb() -> set[Offender]:
    """Return the packages in which too many docstrings of functions start with "What", "Whether", …"""
    documented: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for function in CODE.functions:
        package = home(function.module.path) or function.module.name
        documented[package] += bool(function.docstring)
        bad[package] += function.first_word in NO_VERBS
    return {(package,) for package in documented if bad[package] > MOST_WITHOUT_VERB * documented[package]}


# The name of each list in architecture_exceptions.py, and the function that returns what should be on it.
CHECKS: dict[str, Callable[[], Iterable[Offender]]] = {
    "ROOT_MODULES": root_modules,
    "FORBIDDEN_IMPORTS": forbidden_imports,
    "CYCLES": lambda: cycles(CODE.imports),
    "DUPLICATE_CLASSES": duplicate_classes,
    "DUPLICATE_STEMS": duplicate_stems,
    "PRIVATE_NAMES_OF_TRL": private_names_of_trl,
    "BANNED_WORDS": banned_words,
    "DOCSTRINGS_WITHOUT_VERB": docstrings_without_verb,
}


def lines(offenders: Iterable[Offender], reasons: Mapping[Offender, str]) -> str:
    """Format entries to be pasted, with their reasons, also where a module has moved or a number has changed."""
    moved = {bare(offender): reason for offender, reason in reasons.items()}
    text = ""
    for offender in sorted(offenders, key=str):
        key = ", ".join(map(json.dumps, offender)) + ("," if len(offender) == 1 else "")
        text += f"    ({key}): {json.dumps(moved.get(bare(offender), 'REASON'))},\n"
    return text


def bare(offender: Offender) -> Offender:
    """Return the offender with modules as file names without their packages, and without numbers."""
    return tuple(part.rpartition(".")[2] for part in offender if isinstance(part, str))


def test_every_kind_of_import_counts(tmp_path: Path) -> None:
    files = {
        "__init__.py": "__version__ = '1'",
        "core/__init__.py": "",
        "core/top.py": "from explorl import __version__, core\nfrom explorl.core import relative",
        "core/relative.py": "from . import lazy\nfrom ..tasks.base import Task",
        "core/lazy.py": "def f():\n    import explorl.tasks.base\n    from explorl.core.top import name",
        "core/typed.py": "if TYPE_CHECKING:\n    from explorl.tasks import base, Task",
        "core/dynamic.py": "importlib.import_module('explorl.tasks.base')\nimport explorl",
        "tasks/__init__.py": "",
        "tasks/base.py": "import explorlib, numpy.core",
    }
    for name, text in files.items():
        path = tmp_path / "explorl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    imports = CodeBase(tmp_path / "explorl").imports
    assert imports == {
        "__init__": set(),
        "core": set(),
        "core.top": {"core", "core.relative"},
        "core.relative": {"core.lazy", "tasks.base"},
        "core.lazy": {"core.top", "tasks.base"},
        "core.typed": {"tasks", "tasks.base"},
        "core.dynamic": {"__init__", "tasks.base"},
        "tasks": set(),
        "tasks.base": set(),
    }
    assert cycles(imports) == [("core.lazy", "core.relative", "core.top")]


def test_packages_are_in_the_table() -> None:
    packages = {CODE.package_of(module.path) for module in CODE.modules.values()} - {""}
    assert packages <= set(PACKAGES), f"src/explorl: {sorted(packages - set(PACKAGES))} not in PACKAGES of {__file__}"


@pytest.mark.parametrize("name", CHECKS)
def test_offenders_are_those_on_the_list(name: str) -> None:
    allowed: Mapping[Offender, str] = getattr(exceptions, name)
    offenders = set(CHECKS[name]())
    message = ""
    if new := offenders - allowed.keys():
        message += f"Fix these, or add them to {name} in {exceptions.__file__}:\n{lines(new, allowed)}"
    if stale := allowed.keys() - offenders:
        message += f"No longer needed; remove from {name} in {exceptions.__file__}:\n{lines(stale, allowed)}"
    if message:
        pytest.fail(message, pytrace=False)


if __name__ == "__main__":
    for name, check in CHECKS.items():
        print(f"{name}: Exceptions = {{\n{lines(check(), getattr(exceptions, name))}}}\n")
