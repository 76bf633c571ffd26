"""The inside of an interpreter: runs one cell after the other in one namespace, and shows what a notebook shows.

Output is what is printed, the value of a last expression, and the traceback of an error, through the user's own lines
only and without the machine's paths. Imported in the sandbox, so it imports little.
"""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import os
import sys
import traceback

from explorl.sandbox.child import CALLS, MEMORY_EXIT, REPLIES, receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

OUTPUT = 7
"""Where cells write to, as descriptors 1 and 2 do until somebody closes them."""
TOKEN = 16
"""Bytes that begin a call, and its reply; nobody knows them before the call."""
GOOD, BAD = b"+", b"-"
"""The rest of a reply: the cell has ended, or has raised."""


def serve(request: dict[str, Any], namespace: dict[str, Any]) -> None:  # pragma: no cover (another process)
    """Run cells for the keeper until it hangs up."""
    vars(builtins).update(exit=_exit, quit=_exit)  # which are there without site, too
    sys.stdout = sys.stderr = None  # not those of the nursery
    number = 0
    try:
        while True:
            call = receive(CALLS)
            number += 1
            _mend()
            good = run_cell(call[TOKEN:].decode(errors="surrogatepass"), f"<cell {number}>", namespace)
            _flush()
            os.write(REPLIES, call[:TOKEN] + (GOOD if good else BAD))
    except MemoryError:
        os._exit(MEMORY_EXIT)
    except BaseException:  # the keeper is gone; or a cell has closed what leads to it, or has left a signal's handler
        os._exit(1)


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> bool:
    """Run a cell and write what it shows to `OUTPUT`; whether it ended without an error."""
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Python reads it; it knows no other line ends
    linecache.cache[name] = (len(source), None, [f"{line}\n" for line in source.split("\n")], name)
    try:
        for code in compiled(source, name):
            exec(code, namespace)
    except BaseException as error:
        _flush()
        _write(shown(error))
        return False
    return True


def compiled(source: str, name: str) -> list[CodeType]:
    """A cell's code: its statements, and apart from them a last expression that is to be shown.

    As in a notebook, a semicolon behind the expression says that it is not.
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
    """What a cell's ``from __future__ import`` says also of its last expression."""
    import __future__

    names = [
        alias.name
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    return sum({getattr(__future__, name).compiler_flag for name in names if name in __future__.all_feature_names})


def shown(error: BaseException) -> str:
    """The traceback as the user's code sees it: frames of cells alone, no path of this machine."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _keep_cells(summary)
        return "".join(summary.format()).replace(os.path.dirname(os.__file__), "<python>")
    except BaseException:  # a class of the user's can raise whatever is done with it
        return f"{type.__dict__['__name__'].__get__(type(error))}: <error that cannot be shown>\n"


def _keep_cells(summary: traceback.TracebackException) -> None:
    """Leave out all frames but those of cells; also in the errors that this one followed on, or is a group of."""
    waiting: list[traceback.TracebackException | None] = [summary]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [frame for frame in one.stack if frame.filename.startswith("<cell ")]
        waiting += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def _exit(code: object = None) -> None:
    raise SystemExit(code)


def _mend() -> None:  # pragma: no cover (another process)
    """Give the cell its standard output back, if the last one closed it."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(OUTPUT, number)
        stream = getattr(sys, name, None)
        try:
            is_closed = stream is None or stream.closed
        except BaseException:
            is_closed = False  # not a stream of ours
        if is_closed:
            binary = open(number, "wb", closefd=False)  # noqa: SIM115  # as long as the process
            setattr(sys, name, io.TextIOWrapper(binary, "utf-8", "backslashreplace", line_buffering=True))


def _flush() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except BaseException:
            continue


def _write(text: str) -> None:
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(OUTPUT, left) :]
