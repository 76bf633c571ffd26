"""The connection to the process of one interpreter: its messages, its state and its deadline."""

from __future__ import annotations

import marshal
import math
import socket
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.frames import Channel
from explorl.sandbox.process_group import AnsweringProcess
from explorl.sandbox.scratch import working_folder

if TYPE_CHECKING:
    from explorl.sandbox.interpreter import Interpreter

_MAX_MESSAGE = 1 << 26
"""Most bytes of a message; a longer length means that the data is not a message."""

_FORGOTTEN: list[ExitStack] = []


class InterpreterProcess(AnsweringProcess):
    """A supervisor with its interpreter. Ends with `close`, with the fork server, or with this process."""

    def __init__(self) -> None:
        self._owner: weakref.ref[Interpreter] | None = None
        self._folder = ExitStack()
        self._sockets: tuple[socket.socket, ...] = ()
        """The message socket and the control socket."""

    @property
    def owner(self) -> Interpreter | None:
        """The interpreter whose calls it runs; None for a spare process."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, interpreter: Interpreter) -> None:
        self._owner = weakref.ref(interpreter)

    def is_late(self) -> bool:
        """Return True if it should have answered, or if its interpreter has been garbage-collected."""
        return super().is_late() or (self._owner is not None and self._owner() is None)

    def start(self, limits: dict[str, Any], layers: tuple[str, ...], seconds: float) -> None:
        """Start the process; raise OSError or `ForkServerDied` if that fails."""
        folder = None if "namespaces" in layers else self._folder.enter_context(working_folder())
        try:
            self._sockets = fork_server_client.start_interpreter()
        except ForkServerDied:
            self._sockets = fork_server_client.start_interpreter()  # in a new server
        descriptor = self._sockets[0].fileno()
        self.channel = Channel(descriptor, descriptor, _MAX_MESSAGE)
        self.mark_started(seconds)
        self.channel.send(marshal.dumps({"limits": limits, "layers": layers, "folder": folder, "entry_point": None}))

    def close(self) -> None:
        """Kill the process and remove its working folder."""
        self._close_sockets()
        self._folder.close()

    def forget(self) -> None:
        """Leave the process and its folder to the parent, in a fork of this process."""
        self._close_sockets()
        _FORGOTTEN.append(self._folder)

    def _close_sockets(self) -> None:
        self.state, self.deadline = "ended", math.inf
        for connection in self._sockets:
            connection.close()
