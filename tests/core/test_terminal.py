"""What commands print to the terminal besides their results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from explorl.core.terminal import plain_warnings


def issuer(module: str) -> Callable[..., None]:
    """Return a function of a module that issues a warning, two calls deep and with stack levels as given."""
    namespace: dict[str, Any] = {"__name__": module}
    code = "import warnings\ndef issue(text, level=1):\n    warnings.warn(text, UserWarning, stacklevel=level)\n"
    exec(compile(code, f"/packages/{module.replace('.', '/')}.py", "exec"), namespace)
    issue: Callable[..., None] = namespace["issue"]
    return issue


@pytest.mark.parametrize("level", [1, 2, 3, 50])
def test_own_warnings_are_one_plain_line(capsys: pytest.CaptureFixture[str], level: int) -> None:
    with plain_warnings():
        issuer("explorl.training.somewhere")("all rewards are equal:\n  check the \x1b[31mreward", level)
    captured = capsys.readouterr()
    assert captured.err == "warning: all rewards are equal: check the ␛[31mreward\n"
    assert captured.out == ""


@pytest.mark.parametrize("module", ["transformers.trainer", "my_rewards", "explorl_plugin.rewards", "__main__"])
def test_warnings_of_others_are_left_to_python(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder, module: str
) -> None:
    with plain_warnings():
        issuer(module)("old option")
    (warning,) = recwarn
    assert (str(warning.message), warning.category, warning.lineno) == ("old option", UserWarning, 3)
    assert capsys.readouterr().err == ""


def test_ignored_warnings_stay_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), plain_warnings():
        warnings.simplefilter("ignore")
        issuer("explorl.training.somewhere")("anything")
    assert capsys.readouterr().err == ""


def test_restores_the_display_of_warnings() -> None:
    before = warnings.showwarning
    with pytest.raises(KeyError), plain_warnings():
        raise KeyError
    assert warnings.showwarning is before
