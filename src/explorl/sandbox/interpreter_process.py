"""One process of an interpreter, as `interpreter` sees it: what it was sent, what it has said, and when it is late."""

from __future__ import annotations

import json
import marshal
import socket
import time
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal

from explorl.sandbox.codec import CROWD
from explorl.sandbox.fork_client import ForkServerDied, fork_server_client
from explorl.sandbox.scratch import working_folder

if TYPE_CHECKING:
    from explorl.sandbox.interpreter import Interpreter

State = Literal["waiting", "starting", "idle", "busy", "ended"]
_LONGEST = 1 << 26
"""Bytes of a message; one that claims to be longer is none."""

_FORGOTTEN: list[ExitStack] = []


class Process:
    """A keeper with its notebook. Ends with `close`, with the nursery, or with this process, however that ends."""

    def __init__(self) -> None:
        self.state: State = "waiting"
        self._owner: weakref.ref[Interpreter] | None = None
        self.deadline = float("inf")
        """When it must have answered, of `time.monotonic`."""
        self._stack = ExitStack()
        self._sockets: list[socket.socket] = []
        """To talk with it, and its leash."""
        self._out, self._in = bytearray(), bytearray()

    @property
    def owner(self) -> Interpreter | None:
        """Whose calls it runs; None for a spare one."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, interpreter: Interpreter) -> None:
        self._owner = weakref.ref(interpreter)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody can use it any more."""
        return self._owner is not None and self._owner() is None

    def start(self, limits: dict[str, Any], layers: tuple[str, ...], seconds: float) -> None:
        """Have it begin; OSError or `ForkServerDied` where that cannot be."""
        folder = None if "namespaces" in layers else self._stack.enter_context(working_folder())
        try:
            self._sockets = list(fork_server_client.start_interpreter())
        except ForkServerDied:
            self._sockets = list(
                fork_server_client.start_interpreter()
            )  # the nursery was killed since: now there is a new one
        self._sockets[0].setblocking(False)
        self.state, self.deadline = "starting", time.monotonic() + seconds
        request = {"limits": limits, "layers": layers, "folder": folder, "entry_point": None}
        self._send(marshal.dumps(request))

    def call(self, source: str, crowd: int, seconds: float) -> None:
        """Send it a cell to run; ``crowd``: how many interpreters share a processor."""
        self.state, self.deadline = "busy", time.monotonic() + seconds
        self._send(crowd.to_bytes(CROWD, "big") + source.encode(errors="surrogatepass"))

    def rest(self) -> None:
        """It has answered."""
        self.state, self.deadline = "idle", float("inf")

    def fileno(self) -> int:
        return self._sockets[0].fileno()

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._out)

    def flush(self) -> None:
        """Send as much as it takes now."""
        try:
            while self._out:
                del self._out[: self._sockets[0].send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, as reading will tell
            self._out.clear()

    def receive(self) -> dict[str, Any] | None:
        """Its next message, None if that is not all there; EOFError when it is gone."""
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
        """Kill it, and remove what it has left."""
        self._leave()
        self._stack.close()

    def forget(self) -> None:
        """In a fork of this process: leave it to the parent, and its folder too."""
        self._leave()
        _FORGOTTEN.append(self._stack)

    def _leave(self) -> None:
        self.state, self.deadline = "ended", float("inf")
        for one in self._sockets:
            one.close()

    def _is_whole(self) -> bool:
        if len(self._in) < 8:
            return False
        length = int.from_bytes(self._in[:8], "big")
        if length > _LONGEST:  # not a message, but the nursery's last words
            raise EOFError
        return len(self._in) >= 8 + length

    def _send(self, body: bytes) -> None:
        self._out += len(body).to_bytes(8, "big") + body
        self.flush()
