"""The process of an interpreter: runs cells in one namespace and outputs what a notebook would show.

That is what a cell prints, the value of its last expression, and the traceback of an error, which contains only the
lines of cells and no paths of the machine. Imported in the sandbox, so it imports little.
"""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import sys
import traceback

from explorl.sandbox.frames import receive, write_all
from explorl.sandbox.supervised import CALLS, LAST, MEMORY_EXIT, REPLIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

OUTPUT = LAST
"""The descriptor that cells write to, also through descriptors 1 and 2 unless a cell closes them."""
TOKEN = 16
"""Length of the random bytes at the start of a call and its reply; no process knows them before the call."""
SUCCEEDED, RAISED = b"+", b"-"
"""The last byte of a reply: the cell has finished or raised."""


def serve(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover
    """Run cells for the supervisor until it closes the pipe."""
    vars(builtins).update(exit=_exit, quit=_exit)  # which otherwise need the module site
    sys.stdout = sys.stderr = None  # those of the fork server are closed
    number = 0
    try:
        while True:
            call = receive(CALLS)
            number += 1
            _restore_output()
            good = run_cell(call[TOKEN:].decode(errors="surrogatepass"), f"<cell {number}>", namespace)
            _flush()
            os.write(REPLIES, call[:TOKEN] + (SUCCEEDED if good else RAISED))
    except MemoryError:
        os._exit(MEMORY_EXIT)
    except BaseException:  # the supervisor has ended, or a cell has closed the pipe or left a signal handler
        os._exit(1)


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> bool:
    """Run a cell and write its output to `OUTPUT`; return True if it did not raise."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # the line ends that Python knows
    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in source.split("\n")], name)
    try:
        for code in compile_cell(source, name):
            exec(code, namespace)
    except BaseException as error:
        _flush()
        _write(format_error(error))
        return False
    return True


def compile_cell(source: str, name: str) -> list[CodeType]:
    """Return the code of a cell's statements and, separately, of a last expression whose value is shown.

    As in a notebook, a semicolon after the expression hides its value.
    """
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or _ends_with_semicolon(source, last):
        return [compile(tree, name, "exec", dont_inherit=True)]
    statements = ast.Module(tree.body[:-1], tree.type_ignores)
    flags = _future_flags(statements)
    return [
        compile(statements, name, "exec", dont_inherit=True),
        compile(ast.Interactive([last]), name, "single", flags, dont_inherit=True),
    ]


def _ends_with_semicolon(source: str, last: ast.Expr) -> bool:
    lines = source.encode(errors="surrogatepass").split(b"\n")
    assert last.end_lineno is not None
    rest = lines[last.end_lineno - 1][last.end_col_offset :]
    return rest.lstrip(b" \t\f").startswith(b";")


def _future_flags(module: ast.Module) -> int:
    """Return the compiler flags of a cell's ``from __future__ import``, for its last expression."""
    import __future__

    names = [
        alias.name
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    return sum({getattr(__future__, name).compiler_flag for name in names if name in __future__.all_feature_names})


def format_error(error: BaseException) -> str:
    """Return the traceback with the frames of cells alone and without paths of this machine."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _keep_cell_frames(summary)
        return "".join(summary.format()).replace(os.path.dirname(os.__file__), "<python>")
    except BaseException:  # any access to a class of the cell can raise
        return f"{type.__dict__['__name__'].__get__(type(error))}: <error that cannot be shown>\n"


def _keep_cell_frames(summary: traceback.TracebackException) -> None:
    """Remove all frames except those of cells, also from causes, contexts and grouped exceptions."""
    waiting: list[traceback.TracebackException | None] = [summary]
    visited: set[int] = set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in visited:
            continue
        visited.add(id(error))
        error.stack[:] = [frame for frame in error.stack if frame.filename.startswith("<cell ")]
        waiting += [error.__cause__, error.__context__, *(getattr(error, "exceptions", None) or ())]


def _exit(code: object = None) -> None:
    raise SystemExit(code)


def _restore_output() -> None:  # pragma: no cover
    """Open standard output and error again if the last cell closed them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(OUTPUT, number)
        stream = getattr(sys, name, None)
        try:
            is_closed = stream is None or stream.closed
        except BaseException:
            is_closed = False  # a stream of the cell's own
        if is_closed:
            binary = open(number, "wb", closefd=False)  # noqa: SIM115  # open as long as the process
            setattr(sys, name, io.TextIOWrapper(binary, "utf-8", "backslashreplace", line_buffering=True))


def _flush() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except BaseException:
            continue


def _write(text: str) -> None:
    write_all(OUTPUT, text.encode(errors="backslashreplace"))
