"""Run a command in several processes, as accelerate's configuration file describes (`--launch FILE`).

This does what ``accelerate launch --config_file FILE -m explorl …`` does, but reports a failure once. On CPUs without
MPI, accelerate starts a single process; this starts as many as the file sets.
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

_ACCELERATE_KEYS = ("distributed_type", "num_processes", "compute_environment")
"""Keys of which every accelerate file has at least one."""


class WorkerFailed(Exception):
    """A process has failed; the text is its error message, and ``code`` its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def check_file(path: Path) -> dict[str, Any]:
    """Return the content of an accelerate file; raise ConfigError if it is invalid or sets a single process."""
    if processes.count() > 1:
        raise ConfigError(
            f"--launch was given to one of {processes.count()} processes that train together; leave it out"
        )
    if not path.is_file():
        raise ConfigError(f"--launch names {path}, which is no file; docs/scale.md has examples")
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict) or not any(key in values for key in _ACCELERATE_KEYS):
        raise ConfigError(
            f"{path} is no configuration of accelerate: it has none of {', '.join(_ACCELERATE_KEYS)}; write one with "
            "`accelerate config`, or adapt an example of docs/scale.md"
        )
    number = values.get("num_processes")
    if not isinstance(number, int) or isinstance(number, bool) or number < 2:
        raise ConfigError(
            f"num_processes is {number!r} in {path}; use the number of GPUs of all machines, such as 8, or leave out "
            "--launch to train with one process"
        )
    return values


def launch(path: Path, module: str, arguments: Sequence[str]) -> None:
    """Run a module with these arguments in the processes that the file describes, and wait for them.

    Raise `WorkerFailed` with the message of the first process that fails.
    """
    values = check_file(path)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # accelerate uses torchrun only with --multi_gpu
    cpus = bool(values.get("use_cpu")) and values.get("distributed_type") not in ("DEEPSPEED", "FSDP")
    options = ["--multi_gpu"] if cpus else []
    if not values.get("main_process_port") and int(values.get("num_machines") or 1) < 2:
        options += ["--main_process_port", "0"]  # any free port
    parsed = launch_command_parser().parse_args(["--config_file", str(path), *options, "--module", module, *arguments])
    environment = {
        **child_environment(),
        processes.LAUNCH_FILE: str(path),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if cpus:
        environment["ACCELERATE_USE_CPU"] = "true"
    with TemporaryDirectory() as folder:
        interruption = Path(folder) / "last-word"
        environment[processes.INTERRUPTION_FILE] = str(interruption)
        try:
            with _environment(environment), _silenced_logs():
                launch_command(parsed)
        except ChildFailedError as error:
            raise _first_failure(error.failures) from None
        except SignalException as signalled:  # all processes have ended
            text = interruption.read_text(encoding="utf-8") if interruption.exists() else ""
            raise WorkerFailed(text, 128 + int(signalled.sigval)) from None
        except SystemExit as error:
            if error.code:
                raise WorkerFailed("", int(error.code) if isinstance(error.code, int) else 1) from None


def _first_failure(failures: Mapping[int, Any]) -> WorkerFailed:
    """Return the error of the process that failed first."""

    def failed_at(rank: int) -> float:
        message = failures[rank].error_file_data.get("message")
        exact = message.get("extraInfo", {}).get("exact") if isinstance(message, dict) else None
        return float(failures[rank].timestamp + 1 if exact is None else exact)  # those without a message come last

    rank = min(failures, key=failed_at)
    failure = failures[rank]
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        text, code = str(message["message"]), int(message["extraInfo"].get("code", 1))
        return WorkerFailed(text if rank == 0 else f"process {rank}: {text}", code)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = "; it may have run out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return WorkerFailed(f"process {rank} was ended by {name}{hint}", 1)
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
def _silenced_logs() -> Iterator[None]:
    """Suppress logs: the launcher's own reports of a failure repeat the process's message."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def command_line(*parts: Any) -> list[str]:
    """Return arguments as text; a pair is an option with its value, left out if the value is None."""
    arguments: list[str] = []
    for part in parts:
        if isinstance(part, tuple):
            arguments += [part[0], str(part[1])] if part[1] is not None else []
        else:
            arguments.append(str(part))
    return arguments


def python_command(path: Path, module: str) -> list[str]:
    """Return a command that does what `launch` does in a new process."""
    return [sys.executable, "-m", "explorl.core.launch", str(path), module]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m explorl.core.launch FILE MODULE ARGUMENTS...``."""
    path, module, *arguments = sys.argv[1:] if argv is None else argv
    try:
        launch(Path(path), module, arguments)
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
