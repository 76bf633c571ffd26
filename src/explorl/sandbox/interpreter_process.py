"""The connection to the process of one interpreter: its messages, its state and its deadline."""

from __future__ import annotations

import json
import marshal
import socket
import time
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

from explorl.sandbox.codec import LOAD_BYTES
from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.scratch import working_folder

if TYPE_CHECKING:
    from explorl.sandbox.interpreter import Interpreter

State = Literal["waiting", "starting", "idle", "busy", "ended"]
_MAX_MESSAGE = 1 << 26
"""Most bytes of a message; a longer length means that the data is not a message."""

_FORGOTTEN: list[ExitStack] = []


class InterpreterProcess:
    """A supervisor with its interpreter. Ends with `close`, with the fork server, or with this process."""

    def __init__(self) -> None:
        self.state: State = "waiting"
        self._owner: weakref.ref[Interpreter] | None = None
        self.deadline = float("inf")
        """The time of `time.monotonic` by which it must have answered."""
        self._stack = ExitStack()
        self._sockets: list[socket.socket] = []
        """The message socket and the control socket."""
        self._out, self._in = bytearray(), bytearray()

    @property
    def owner(self) -> Interpreter | None:
        """The interpreter whose calls it runs; None for a spare process."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, interpreter: Interpreter) -> None:
        self._owner = weakref.ref(interpreter)

    @property
    def is_abandoned(self) -> bool:
        """True if its interpreter has been garbage-collected."""
        return self._owner is not None and self._owner() is None

    def start(self, limits: dict[str, Any], layers: tuple[str, ...], seconds: float) -> None:
        """Start the process; raise OSError or `ForkServerDied` if that fails."""
        folder = None if "namespaces" in layers else self._stack.enter_context(working_folder())
        try:
            self._sockets = list(fork_server_client.start_interpreter())
        except ForkServerDied:
            self._sockets = list(fork_server_client.start_interpreter())  # in a new server
        self._sockets[0].setblocking(False)
        self.state, self.deadline = "starting", time.monotonic() + seconds
        request = {"limits": limits, "layers": layers, "folder": folder, "entry_point": None}
        self._send(marshal.dumps(request))

    def call(self, source: str, load: int, seconds: float) -> None:
        """Send a cell to run; ``load`` is the number of interpreters per processor."""
        self.state, self.deadline = "busy", time.monotonic() + seconds
        self._send(load.to_bytes(LOAD_BYTES, "big") + source.encode(errors="surrogatepass"))

    def mark_idle(self) -> None:
        """Store that it has answered and waits for the next call."""
        self.state, self.deadline = "idle", float("inf")

    def fileno(self) -> int:
        return self._sockets[0].fileno()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        try:
            while self._out:
                del self._out[: self._sockets[0].send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which reading will show
            self._out.clear()

    def receive(self) -> dict[str, Any] | None:
        """Return its next message, None if it is not complete yet; raise EOFError if the process has ended."""
        with suppress(BlockingIOError):
            try:
                while part := self._sockets[0].recv(1 << 16):
                    self._in += part
            except ConnectionError:
                part = b""
            if not part and not self._is_whole():
                raise EOFError
        if not self._is_whole():
            return None
        length = 8 + int.from_bytes(self._in[:8], "big")
        frame = bytes(self._in[8:length])
        del self._in[:length]
        message: dict[str, Any] = json.loads(frame)
        return message

    def close(self) -> None:
        """Kill the process and remove its working folder."""
        self._close_sockets()
        self._stack.close()

    def forget(self) -> None:
        """Leave the process and its folder to the parent, in a fork of this process."""
        self._close_sockets()
        _FORGOTTEN.append(self._stack)

    def _close_sockets(self) -> None:
        self.state, self.deadline = "ended", float("inf")
        for connection in self._sockets:
            connection.close()

    def _is_whole(self) -> bool:
        if len(self._in) < 8:
            return False
        length = int.from_bytes(self._in[:8], "big")
        if length > _MAX_MESSAGE:  # not a message but the fork server's last output
            raise EOFError
        return len(self._in) >= 8 + length

    def _send(self, body: bytes) -> None:
        self._out += len(body).to_bytes(8, "big") + body
        self.flush()
