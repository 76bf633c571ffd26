"""`--launch FILE`: a command of several processes, as accelerate's configuration file says.

It does what ``accelerate launch --config_file FILE -m explorl …`` does, and tells of a failure once. accelerate itself
starts a single process on CPUs unless it has MPI; here, as many as the file says.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from explorl.core import processes
from explorl.core.config import ConfigError, read_yaml
from explorl.core.plugins import child_environment

_SIGNS = ("distributed_type", "num_processes", "compute_environment")
"""Keys of which accelerate's files have one at least."""


class WorkerFailed(Exception):
    """One of the processes has failed; the text is what it said, and ``code`` its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def check_file(path: Path) -> dict[str, Any]:
    """What accelerate's file says; `ConfigError` where it is none, or names a single process."""
    if processes.count() > 1:
        raise ConfigError(f"--launch is given to one of {processes.count()} processes already; leave it out")
    if not path.is_file():
        raise ConfigError(f"--launch names {path}, which is no file; docs/scale.md has files to start from")
    try:
        said = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(said, dict) or not any(key in said for key in _SIGNS):
        raise ConfigError(
            f"{path} is no configuration of accelerate: it has none of {', '.join(_SIGNS)}; write one with "
            "`accelerate config`, or start from those in docs/scale.md"
        )
    number = said.get("num_processes")
    if not isinstance(number, int) or isinstance(number, bool) or number < 2:
        raise ConfigError(
            f"num_processes is {number!r} in {path}; use the number of GPUs of all machines, such as 8, or leave out "
            "--launch to train with one process"
        )
    return said


def launch(path: Path, module: str, arguments: Sequence[str]) -> None:
    """Runs a module with these arguments in the processes that the file describes, and waits for them.

    Raises `WorkerFailed` with what the first of them to fail has said.
    """
    said = check_file(path)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # On CPUs by torchrun, which accelerate has for GPUs.
    cpus = bool(said.get("use_cpu")) and said.get("distributed_type") not in ("DEEPSPEED", "FSDP")
    how = ["--multi_gpu"] if cpus else []
    if not said.get("main_process_port") and int(said.get("num_machines") or 1) < 2:
        how += ["--main_process_port", "0"]  # any that is free
    given = launch_command_parser().parse_args(["--config_file", str(path), *how, "--module", module, *arguments])
    told = {
        **child_environment(),
        processes.LAUNCH_FILE: str(path),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if cpus:
        told["ACCELERATE_USE_CPU"] = "true"
    with TemporaryDirectory() as folder:
        word = Path(folder) / "last-word"
        told[processes.INTERRUPTION_FILE] = str(word)
        try:
            with _environment(told), _silent():
                launch_command(given)
        except ChildFailedError as error:
            raise _first_of(error.failures) from None
        except SignalException as signalled:  # all processes have ended
            text = word.read_text(encoding="utf-8") if word.exists() else ""
            raise WorkerFailed(text, 128 + int(signalled.sigval)) from None
        except SystemExit as error:
            if error.code:
                raise WorkerFailed("", int(error.code) if isinstance(error.code, int) else 1) from None


def _first_of(failures: Mapping[int, Any]) -> WorkerFailed:
    """What the process that failed first has said."""

    def when(rank: int) -> float:
        message = failures[rank].error_file_data.get("message")
        exact = message.get("extraInfo", {}).get("exact") if isinstance(message, dict) else None
        return float(failures[rank].timestamp + 1 if exact is None else exact)  # those that left no word come behind

    rank = min(failures, key=when)
    failure = failures[rank]
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        text, code = str(message["message"]), int(message["extraInfo"].get("code", 1))
        return WorkerFailed(text if rank == 0 else f"process {rank}: {text}", code)
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
        hint = "; it may have run out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return WorkerFailed(f"process {rank} {how}{hint}", 1)
    return WorkerFailed(f"process {rank} ended with exit code {failure.exitcode}", failure.exitcode)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def _silent() -> Iterator[None]:
    """The launcher's own reports of a failure say nothing that the process has not said."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def command_line(*parts: Any) -> list[str]:
    """Arguments in the order given: a pair is an option with its value, left out where that is None."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, tuple):
            found += [part[0], str(part[1])] if part[1] is not None else []
        else:
            found.append(str(part))
    return found


def python_command(path: Path, module: str) -> list[str]:
    """A command that does what `launch` does, from a process of its own."""
    return [sys.executable, "-m", "explorl.core.launch", str(path), module]


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m explorl.core.launch FILE MODULE ARGUMENTS...``"""
    path, module, *arguments = sys.argv[1:] if argv is None else argv
    try:
        launch(Path(path), module, arguments)
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
