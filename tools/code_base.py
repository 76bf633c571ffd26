"""Parse the library without importing it: imports between modules, classes, functions and their docstrings.

tests/test_architecture.py checks the rules, and tools/figures.py prints sizes.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "explorl"
TEXT_FILES = {".py", ".yaml", ".html", ".css", ".js"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One file. ``name`` leaves out the library's own name: "tasks.base", and "tasks" for that package's __init__."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@dataclass(frozen=True)
class Class:
    module: Module
    name: str
    node: ast.ClassDef

    @property
    def methods(self) -> int:
        return sum(isinstance(node, FUNCTIONS) for node in self.node.body)


@dataclass(frozen=True)
class Function:
    module: Module
    name: str
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def lines(self) -> int:
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def parameters(self) -> int:
        """Count the parameters, without self and cls."""
        arguments = self.node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return len(names) - (names[:1] in (["self"], ["cls"])) + bool(arguments.vararg) + bool(arguments.kwarg)

    @property
    def is_property(self) -> bool:
        """Tell whether callers read it as an attribute, so that a noun is the right docstring."""
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in self.node.decorator_list}
        return bool(decorators & {"property", "cached_property"})

    @cached_property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def first_word(self) -> str:
        """Return the docstring's first word, or "" where it starts with a formula or a number."""
        match = re.match(r"\W*([^\W\d_]+)", self.docstring)
        return match[1] if match else ""


class CodeBase:
    """All modules below one folder."""

    def __init__(self, folder: Path = LIBRARY) -> None:
        self.folder = folder

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Parse all modules."""
        collects = gc.isenabled()
        gc.disable()  # syntax trees are many small objects: the collector would take three times as long as the parser
        try:
            modules = [parse(path, self.folder) for path in sorted(self.folder.rglob("*.py"))]
        finally:
            if collects:
                gc.enable()
        return {module.name: module for module in modules}

    @cached_property
    def classes(self) -> list[Class]:
        """Return all classes, nested ones too."""
        return [Class(*definition) for definition in self._definitions() if isinstance(definition[2], ast.ClassDef)]

    @cached_property
    def functions(self) -> list[Function]:
        """Return all functions, methods and nested functions too."""
        return [Function(*definition) for definition in self._definitions() if isinstance(definition[2], FUNCTIONS)]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Map each module to those it imports, anywhere: at the top, inside functions, under ``if TYPE_CHECKING``."""
        return {name: set(self._imports_of(module)) - {name} for name, module in self.modules.items()}

    @cached_property
    def text_files(self) -> list[Path]:
        """Return the files that people write and read, data apart."""
        return sorted(path for path in self.folder.rglob("*") if path.suffix in TEXT_FILES)

    def package_of(self, path: Path) -> str:
        """Return the package directly below the library that a file lies in, or "" for a file at the library's root."""
        return path.relative_to(self.folder).parts[0] if path.parent != self.folder else ""

    def _definitions(self) -> Iterator[tuple[Module, str, ast.AST]]:
        for module in self.modules.values():
            yield from ((module, name, node) for name, node in _definitions_in(module.tree, ""))

    def _imports_of(self, module: Module) -> Iterator[str]:
        library = self.folder.name
        for node in ast.walk(module.tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    inside = [library, *module.path.relative_to(self.folder).parts[:-1]]
                    base = ".".join(inside[: len(inside) - node.level + 1] + ([base] if base else []))
                targets = [f"{base}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                targets = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            for target in targets:
                parts = str(target).split(".")
                # The version is a constant that the root defines before anything else: reading it imports nothing.
                if parts[0] == library and parts[1:] != ["__version__"]:
                    yield self._longest_module(parts[1:])

    def _longest_module(self, parts: list[str]) -> str:
        """Resolve "tasks.base.Task" to the module "tasks.base", and a name of the root to "__init__"."""
        lengths = range(len(parts), 0, -1)
        names = (".".join(parts[:length]) for length in lengths)
        return next((name for name in names if name in self.modules), "__init__")


def parse(path: Path, folder: Path) -> Module:
    """Parse one file of the library in ``folder``."""
    parts = path.relative_to(folder).with_suffix("").parts
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    text = path.read_text(encoding="utf-8")
    return Module(".".join(parts), path, text, ast.parse(text, str(path)))


def _definitions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield prefix + child.name, child
            yield from _definitions_in(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions_in(child, prefix)


def cycles(imports: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return each group of modules that import each other, directly or through others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(imports[module]):
            if target not in index:
                visit(target)
            if target in stack:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            start = stack.index(module)
            groups.append(tuple(sorted(stack[start:])))
            del stack[start:]

    for module in sorted(imports):
        if module not in index:
            visit(module)
    return sorted(group for group in groups if len(group) > 1)


def words(text: str) -> set[str]:
    """Return the words of a text in lower case, those inside snake_case and CamelCase identifiers too."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}
