"""A table of results that prints itself and writes JSON, CSV, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from explorl.core.documents import parse_json
from explorl.core.store import write_text
from explorl.core.text import clean
from explorl.stats.interval import Interval

if TYPE_CHECKING:
    import rich.console
    import rich.table

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\r\n]")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")

Cell = str | int | float | bool | Interval | None

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "\n": " ", "−": "$-$",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. Cells are texts, numbers, `Interval`s or None (not measured).

    ``number`` is the format of floats and intervals in the readable outputs: ".3f" by default, ".1%" for percent and
    "+.1p" for a difference of shares in percentage points, without a unit. A mapping gives one format per column, and
    ``row_numbers`` one per row, for columns without a format. JSON and CSV keep full precision and shares.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    number: str | Mapping[str, str] = ".3f"
    row_numbers: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(map(clean, self.columns)))
        object.__setattr__(self, "title", clean(self.title))
        object.__setattr__(self, "rows", tuple(tuple(_normalized(cell) for cell in row) for row in self.rows))
        duplicates = {name for name in self.columns if self.columns.count(name) > 1}
        if duplicates:
            raise ValueError(f"column names must differ, got {sorted(duplicates)[0]!r} more than once")
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {index} has {len(row)} cells for {len(self.columns)} columns")
        if self.row_numbers is not None and len(self.row_numbers) != len(self.rows):
            raise ValueError(
                f"row_numbers has {len(self.row_numbers)} formats for {len(self.rows)} rows; give one per row"
            )

    def print(self, console: rich.console.Console | None = None) -> None:
        """Print to the terminal, or to this console."""
        from rich.console import Console

        (console or Console()).print(self)

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> Iterator[rich.table.Table]:
        for number, columns in enumerate(self._blocks(options.max_width)):
            yield self._block(columns, self.title if number == 0 else "", options.max_width)

    def _block(self, columns: Sequence[int], title: str, width: int) -> rich.table.Table:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(title) if title else None)
        wraps = self._width([self._widths[index] for index in columns]) > width
        for index in columns:
            name, least = self.columns[index], self._least_widths[index]
            header = "\n".join(textwrap.wrap(name, least, break_long_words=False)) if wraps else name
            table.add_column(Text(header), justify="right" if self._is_numeric(index) else "left", overflow="fold")
        for row in self.texts():
            table.add_row(*(Text(row[index]) for index in columns))  # Text, so that brackets in a cell are not markup
        return table

    def _blocks(self, width: int) -> list[list[int]]:
        """Return the columns in blocks that fit the width, each with the name columns first; one block if all fit."""
        indices = list(range(len(self.columns)))
        if self._width(self._least_widths) <= width:
            return [indices]
        names = next((index for index in indices if self._is_numeric(index)), 0) or 1
        if self._width(self._least_widths[:names]) > 0.6 * width:
            names = 1
        blocks = [indices[:names]]
        for index in indices[names:]:
            widths = [self._least_widths[other] for other in (*blocks[-1], index)]
            if len(blocks[-1]) > names and self._width(widths) > width:
                blocks.append(indices[:names])
            blocks[-1].append(index)
        return blocks

    @staticmethod
    def _width(widths: Sequence[int]) -> int:
        """Return the width of a table with columns of these widths, including lines and margins."""
        return sum(widths) + 3 * len(widths) + 1

    @cached_property
    def _least_widths(self) -> list[int]:
        """Width that each column needs for its cells on one line and its title wrapped."""
        from rich.cells import cell_len

        columns = zip(*[self.columns, *self.texts()], strict=True)
        return [
            max(cell_len(part) for part in (*head.split(), *(line for cell in cells for line in cell.split("\n")), ""))
            for head, *cells in columns
        ]

    @cached_property
    def _widths(self) -> list[int]:
        """Width that each column needs with its title on one line."""
        from rich.cells import cell_len

        return [max(cell_len(name), least) for name, least in zip(self.columns, self._least_widths, strict=True)]

    def to_json(self) -> str:
        """Return JSON of the form ``{"title", "columns", "rows": [{column: value}]}``.

        An interval becomes ``{"mean", "low", "high", "confidence"}``; NaN and inf become null, because JSON lacks them.
        """
        rows = [dict(zip(self.columns, map(_jsonable, row), strict=True)) for row in self.rows]
        data = {"title": self.title, "columns": self.columns, "rows": rows}
        return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, number: str | Mapping[str, str] = ".3f") -> Table:
        """Read a table that `to_json` wrote."""
        data = parse_json(text, "the table")
        columns = data["columns"]
        rows = [
            [Interval(**cell) if isinstance(cell, dict) else cell for cell in (row[name] for name in columns)]
            for row in data["rows"]
        ]
        return cls(columns, rows, data["title"], number)

    def to_csv(self) -> str:
        """Return CSV (RFC 4180) with a header; a column with intervals adds ``name low`` and ``name high``.

        Text that a spreadsheet would run as a formula gets a leading apostrophe.
        """
        wide = [any(isinstance(row[index], Interval) for row in self.rows) for index in range(len(self.columns))]
        header: list[str] = []
        for name, is_wide in zip(self.columns, wide, strict=True):
            header += [name, f"{name} low", f"{name} high"] if is_wide else [name]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(map(_without_formula, header))
        for row in self.rows:
            line: list[Any] = []
            for cell, is_wide in zip(row, wide, strict=True):
                if isinstance(cell, Interval):
                    line += [cell.mean, cell.low, cell.high]
                else:
                    line += [_without_formula(cell), None, None] if is_wide else [_without_formula(cell)]
            writer.writerow(line)
        return out.getvalue()

    def to_latex(self) -> str:
        """Return a ``tabular`` with booktabs rules (``\\usepackage{booktabs}``); all text is escaped."""
        layout = "".join("r" if self._is_numeric(index) else "l" for index in range(len(self.columns)))
        lines = [f"% {' '.join(self.title.split())}"] if self.title else []
        lines += [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", _latex_row(self.columns), r"\midrule"]
        lines += [_latex_row(row) for row in self.texts()]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])

    def to_markdown(self) -> str:
        """Return a pipe table with numbers right-aligned."""
        rules = ["---:" if self._is_numeric(index) else "---" for index in range(len(self.columns))]
        rows = [
            [escape_markdown(text) if isinstance(cell, str) else text for cell, text in zip(row, texts, strict=True)]
            for row, texts in zip([self.columns, *self.rows], [self.columns, *self.texts()], strict=True)
        ]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, f"| {' | '.join(rules)} |")
        return "\n".join([*lines, ""])

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write ``.json``, ``.csv``, ``.tex`` or ``.md``, atomically; the suffix chooses the format."""
        path = Path(path)
        writers = {".json": self.to_json, ".csv": self.to_csv, ".tex": self.to_latex, ".md": self.to_markdown}
        if path.suffix not in writers:
            raise ValueError(f"cannot write a table to {path.name!r}; use a name that ends in .json, .csv, .tex or .md")
        write_text(path, writers[path.suffix]())
        return path

    def texts(self) -> list[list[str]]:
        """Return the cells as formatted text."""
        specs = self.row_numbers or [None] * len(self.rows)
        return [
            [_format(cell, self._number(name, spec)) for name, cell in zip(self.columns, row, strict=True)]
            for row, spec in zip(self.rows, specs, strict=True)
        ]

    def _number(self, column: str, row: str | None) -> str:
        if isinstance(self.number, str):
            return row or self.number
        return self.number.get(column) or row or ".3f"

    def _is_numeric(self, index: int) -> bool:
        return any(isinstance(row[index], int | float | Interval) for row in self.rows) and not any(
            isinstance(row[index], str) for row in self.rows
        )


def _format(cell: Cell, spec: str) -> str:
    if not isinstance(cell, float | Interval):
        return "–" if cell is None else str(cell)
    if spec.endswith("p"):
        spec = f"{spec[:-1]}f"
        cell = cell * 100 if isinstance(cell, float) else cell.times(100)
    return _NUMBER.sub(_sign, format(cell, spec))


def _sign(number: re.Match[str]) -> str:
    """Return a number with a minus sign instead of a hyphen, and no sign before a zero."""
    text = number[0]
    return text.replace("-", "−") if re.search("[1-9]", text) else text.lstrip("+-")


def _normalized(cell: Any) -> Cell:
    """Return a cell with NumPy and torch scalars as Python numbers, and text cleaned for files and terminals."""
    cell = cell.item() if hasattr(cell, "item") else cell
    if not isinstance(cell, Cell):
        raise ValueError(f"a cell must be text, a number, an Interval or None; got {cell!r}")
    return clean(cell) if isinstance(cell, str) else cell


def _jsonable(cell: Cell) -> Any:
    if isinstance(cell, Interval):
        return {name: _jsonable(getattr(cell, name)) for name in ("mean", "low", "high", "confidence")}
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _latex_row(cells: Sequence[str]) -> str:
    row = " & ".join("".join(_LATEX.get(letter, letter) for letter in cell) for cell in cells) + r" \\"
    return (
        f"{{}}{row}" if row.startswith(("[", "*")) else row
    )  # otherwise LaTeX reads it as an argument of the rule or \\\\ before it


def _without_formula(cell: Cell) -> Cell:
    """Return a cell that no spreadsheet reads as a formula; a number written as text stays the same."""
    if isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell.removesuffix("%")):
        return f"'{cell}"
    return cell


def escape_markdown(text: str) -> str:
    """Escape text, such as an arm's name, so that Markdown shows it without links, emphasis, code or tags."""
    text = "".join(f"\\{letter}" if letter in "\\|`*_<[]{~$&" else letter for letter in text)
    return " ".join(text.replace("://", ":\\//").replace("www.", "www\\.").split())
