"""The base class of errors that a user can cause and resolve."""

from __future__ import annotations


class ExplorlError(Exception):
    """An error that a user can resolve: commands print its message without a traceback.

    The message is given whole, or made of its parts: ``key`` is ``value``: ``problem``; ``hint``. So an error names
    what is wrong, where it is, and a good value.
    """

    def __init__(self, problem: str = "", *, key: str = "", value: object = None, hint: str = "") -> None:
        self.problem, self.key, self.value, self.hint = problem, key, value, hint
        super().__init__(self.render())

    def render(self) -> str:
        """Return the message."""
        subject = f"{self.key} is {self.value!r}" if self.key else ""
        text = ": ".join(filter(None, (subject, self.problem)))
        return "; ".join(filter(None, (text, self.hint)))


class ConfigError(ExplorlError, ValueError):
    """A configuration that cannot be used; the message names the key, the value, the place and a good value."""
