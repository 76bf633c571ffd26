"""Print the size and the shape of the library, so that everyone sees where the next cut is.

python tools/figures.py
python tools/figures.py --package rollout --docstrings
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.code_base import ROOT, Class, CodeBase, Function, Module

# A docstring that starts with one of these says what is the case instead of what its function does.
NO_VERBS = {"What", "Whether", "That", "How", "Where", "Of"}

# Imperative verbs that may start a docstring. Add one that is missing; leave out those that are nouns more often.
VERBS = set((ROOT / "tools" / "verbs.txt").read_text(encoding="utf-8").split())


def starts_with_verb(function: Function) -> bool:
    """Tell whether the docstring starts with an imperative verb. "Share of …" and "Count of …" start with nouns."""
    first, second = [*re.findall(r"[^\s.,:;()]+", function.docstring), "", ""][:2]
    return first.lower() in VERBS and first[0].isupper() and second != "of"


def table(rows: Sequence[Sequence[object]]) -> str:
    """Align the columns: the first to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def package_row(name: str, modules: Sequence[Module], functions: Iterable[Function]) -> list[object]:
    """Return a package's row: files, lines, functions, and how their docstrings start."""
    functions = list(functions)
    documented = [function for function in functions if function.docstring]
    # A property is read as an attribute, so a noun is its right docstring.
    to_start_with_verb = [function for function in documented if not function.is_property]
    return [
        name,
        len(modules),
        sum(module.lines for module in modules),
        len(functions),
        len(documented),
        share(sum(map(starts_with_verb, to_start_with_verb)), len(to_start_with_verb)),
        share(sum(function.first_word in NO_VERBS for function in documented), len(documented)),
    ]


def place_of(item: Class | Function) -> str:
    """Return the item's file and line, as editors open them."""
    return f"{item.module.path.relative_to(ROOT)}:{item.node.lineno}"


def print_top(title: str, counted: Iterable[tuple[int, str, str]], rows: int) -> None:
    """Print the entries with the largest counts."""
    largest = sorted(counted, key=lambda entry: (-entry[0], entry[1:]))[:rows]
    print(f"\n{title}")
    for count, name, where in largest:
        print(f"{count:6}  {name}  {where}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", help="only this package, such as rollout")
    parser.add_argument("--docstrings", action="store_true", help="list each docstring that does not start with a verb")
    parser.add_argument("--top", type=int, default=10, help="length of the lists (10)")
    options = parser.parse_args()

    gc.disable()  # nothing is freed before the end, and looking through all the syntax trees takes seconds
    code = CodeBase()
    packages: dict[str, list[Module]] = {}
    for module in code.modules.values():
        packages.setdefault(code.package_of(module.path) or "(root)", []).append(module)
    if options.package and options.package not in packages:
        parser.error(f"there is no package {options.package!r}; choose from {', '.join(sorted(packages))}")
    if options.package:
        packages = {options.package: packages[options.package]}

    modules = [module for members in packages.values() for module in members]
    names = {module.name for module in modules}
    functions = [function for function in code.functions if function.module.name in names]
    classes = [item for item in code.classes if item.module.name in names]

    rows: list[list[object]] = [
        ["package", "files", "lines", "functions", "docstrings", "verb first", "what, whether …"]
    ]
    for name, members in sorted(packages.items()):
        inside = {module.name for module in members}
        rows.append(package_row(name, members, (f for f in functions if f.module.name in inside)))
    rows.append(package_row("all", modules, functions))
    print(table(rows))

    top = options.top
    print_top("Longest modules", ((m.lines, str(m.path.relative_to(ROOT)), "") for m in modules), top)
    print_top("Longest functions", ((f.lines, f.name, place_of(f)) for f in functions), top)
    print_top("Most parameters", ((f.parameters, f.name, place_of(f)) for f in functions), top)
    print_top("Most methods", ((c.methods, c.name, place_of(c)) for c in classes), top)

    if options.docstrings:
        print("\nDocstrings that do not start with a verb")
        for function in functions:
            if function.docstring and not function.is_property and not starts_with_verb(function):
                print(f"{place_of(function)}: {function.name}: {function.docstring.splitlines()[0]}")


if __name__ == "__main__":
    main()
