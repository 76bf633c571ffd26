"""The command as people meet it: help at 80 columns, usage errors in three lines, completion in the shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

import explorl
from explorl.cli.app import app, main

from .hostile import NAMES, raw

SOURCE = str(Path(explorl.__file__).parents[1])


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from commands(subcommand, (*path, name))


EVERY = dict(commands(get_command(app)))


def printed(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def real(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m explorl` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "explorl", *arguments],
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


# ---------------------------------------------------------------------------- help
def test_the_commands_are_all_looked_at() -> None:
    assert {("study",), ("eval",), ("models", "fetch"), ("config", "show"), ()} <= EVERY.keys()


@pytest.mark.parametrize("path", EVERY, ids=lambda path: " ".join(path) or "explorl")
def test_help_fits_into_80_columns(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = printed(*path, "--help", capsys=capsys)
    assert code == 0
    assert not [line for line in out.splitlines() if len(line) > 80]
    assert not re.search("[─│╭┃]", out), "boxes leave no room for the texts"
    command, words = EVERY[path], set(out.split())
    texts = [command.help, *(entry.help for entry in command.params)]
    texts += [entry.help.split("\n")[0] for entry in getattr(command, "commands", {}).values()]
    assert all(texts), "everything has a help text"
    broken = {word for text in texts for word in text.split()} - words
    assert not broken, "whole words and no text cut short"


@pytest.mark.parametrize("path", EVERY, ids=lambda path: " ".join(path) or "explorl")
def test_help_says_per_where_it_means_per(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = printed(*path, "--help", capsys=capsys)
    counted = r"(?i)\b(one|steps|completions|responses|samples|runs|folder)\s+an?\s+(arm|problem|GPU|core|seed|task)\b"
    assert not re.search(counted, out)


def test_strategies_fit_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from explorl.strategies import describe

    monkeypatch.setattr("explorl.cli.output.console", Console(width=80))
    code, out, _ = printed("strategies", capsys=capsys)
    lines, words = out.splitlines(), set(out.split())
    unwrapped = " ".join(out.split())
    assert code == 0
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
    for entry in describe():
        assert entry["name"] in lines
        assert {*entry["effect"].split(), *entry["paper"].split()} <= words
        for parameter in entry["hyperparameters"]:
            if parameter["required"]:
                assert f"{parameter['name']} (required)" in unwrapped
            elif not isinstance(parameter["default"], list | tuple | dict):
                assert f"{parameter['name']}={parameter['default']}" in out
    assert "at=[output, step], shared=per_leaf" in unwrapped
    assert "share={from: 0.25, to: 1.0, steps: 100}, calls=" in unwrapped


# ---------------------------------------------------------------------------- usage errors
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nonsense",), ("--nonsense", "see explorl --help")),
        (("trian",), ("'trian'", "'train'", "see explorl --help")),
        (("train", "--presett", "tiny"), ("--presett", "--preset", "see explorl train --help")),
        (("train", "--config"), ("--config", "argument")),
        (("train", "surplus"), ("surplus", "see explorl train --help")),
        (("eval", "--model", "tiny"), ("missing option '--task'", "see explorl eval --help")),
        (("compare",), ("missing argument 'FOLDER'", "see explorl compare --help")),
        (("quickstart", "--steps", "many"), ("many", "--steps", "int")),
        (("quickstart", "--steps", "0"), ("0", "--steps", "1")),
        (("eval", "--model", "tiny", "--task", "t", "--temperature", "hot"), ("hot", "--temperature", "valid")),
        (("models", "ftech"), ("'ftech'", "'fetch'", "see explorl models --help")),
    ],
)
def test_usage_errors_take_three_lines(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = printed(*arguments, capsys=capsys)
    assert code == 2
    assert not out
    assert 1 <= len(err.splitlines()) <= 3, err
    assert err.startswith("explorl: ")
    assert not re.search("[─│╭┃]|Traceback", err)
    for word in words:
        assert word in err


def test_the_real_command_makes_the_same_errors() -> None:
    done = real("quickstart", "--steps", "0", COLUMNS="40")
    assert (done.returncode, done.stdout) == (2, "")
    error, help_ = done.stderr.splitlines()
    assert error.startswith("explorl: invalid value ")
    assert re.search(r"\b0\b.*--steps|--steps.*\b0\b", error), "the value is named"
    assert help_ == "see explorl quickstart --help"


@pytest.mark.parametrize("text", [name for name in NAMES if raw(name)])
def test_usage_errors_show_any_text_and_obey_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["x" + text], ["train", f"--{text}"], ["train", "x" + text], ["quickstart", "--steps", text]):
        code, out, err = printed(*arguments, capsys=capsys)
        assert code == 2
        assert not raw(out + err)
        assert len(err.splitlines()) <= 3


@pytest.mark.parametrize("path", [(), ("models",), ("config",)])
def test_without_arguments_there_is_help(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = printed(*path, capsys=capsys)
    output = out + err
    assert output.startswith(f"Usage: {' '.join(('explorl', *path))} ")
    assert all(name in output for name in EVERY[path].commands)


# ---------------------------------------------------------------------------- version, module, completion
def test_the_version_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", explorl.__version__)
    assert printed("--version", capsys=capsys)[:2] == (0, f"{explorl.__version__}\n")
    assert real("--version").stdout == f"{explorl.__version__}\n"


COMPLETIONS: list[tuple[tuple[str, ...], set[str]]] = [
    (("explorl", "st"), {"study", "strategies"}),
    (("explorl", "study", "d"), {"deng"}),
    (("explorl", "study", "deng", "--profile", ""), {"tiny", "gpu"}),
    (("explorl", "study", "--profile", ""), set()),
    (("explorl", "study", "./nowhere.yaml", "--profile", ""), set()),
    (("explorl", "train", "--preset", ""), {"tiny", "tiny-rft", "tiny-tools", "mecklenburg", "deng-table3"}),
    (("explorl", "quickstart", "--st"), {"--steps"}),
]


def test_the_shell_completes_without_torch() -> None:
    """Each of them in a process of many, none of which may take the seconds that torch takes."""
    code = f"""
import os, sys
from explorl.cli.app import main
for words, _ in {COMPLETIONS!r}:
    os.environ |= {{"_EXPLORL_COMPLETE": "complete_bash", "COMP_WORDS": "\\n".join(words)}}
    os.environ["COMP_CWORD"] = str(len(words) - 1)
    try:
        main()
    except SystemExit as end:
        print("end", end.code)
print({{"torch", "transformers", "trl", "pyarrow", "matplotlib"}} & {{*sys.modules}})
"""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    *offers, loaded = done.stdout.split("end 0\n")
    assert [set(offer.split()) for offer in offers] == [offered for _, offered in COMPLETIONS], done.stderr
    assert loaded == "set()\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_installs_itself_into_bash(tmp_path: Path) -> None:
    command = tmp_path / "explorl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m explorl "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": SOURCE,
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    script = (
        "explorl --install-completion; source ~/.bashrc\n"
        "COMP_WORDS=(explorl qual); COMP_CWORD=1; _explorl_completion explorl; echo offered ${COMPREPLY[*]}\n"
        "explorl --show-completion\n"
        "true\n"  # else bash is gone when its last command asks which shell there is
    )
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert "bash completion installed" in done.stdout, done.stderr
    assert "offered quality" in done.stdout
    assert "complete -o default -F _explorl_completion explorl" in done.stdout
