"""Test the command line as a whole: usage, errors, help, size, and startup."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.package.cli.running import RUN, Files, fails, misused, run

import cuvee
from cuvee.cli import app


def test_wrong_usage_is_exit_code_two(files: Files) -> None:
    out = files.folder / "o"
    encode = ("encode", files.cache, out)
    for args in (
        ("nonsense",),
        ("encode", files.cache),
        encode,
        (*encode, "--profile", files.profile, "--config", files.folder),
        (*encode, "--profile", files.profile, "--bits", "2", "--kl", "0.1"),
        (*encode, "--profile", files.profile, "--chunk-tokens", "0"),
        ("decode", files.cache, out),
        ("inspect",),
    ):
        misused(*args)
    assert not out.exists()


def test_debug_shows_the_traceback(files: Files) -> None:
    done = RUN.invoke(app, ["--debug", "inspect", str(files.cache)])
    assert isinstance(done.exception, cuvee.FormatError)
    assert isinstance(RUN.invoke(app, ["inspect", str(files.cache), "--debug"]).exception, cuvee.FormatError)
    fails("inspect", files.cache, match="not a cuvee blob")  # … and only with --debug


def commands(command: Any, name: str = "") -> Iterator[str]:
    """Yield every command without subcommands, such as "encode" and "profile learn"."""
    if not hasattr(command, "commands"):
        yield name.strip()
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


COMMANDS = sorted(set(commands(typer.main.get_command(app))) - {"eval"})  # lm-eval prints its help


def test_the_command_line_stays_small() -> None:
    def parameters(command: Any) -> int:
        below = getattr(command, "commands", {}).values()
        return sum(map(parameters, below)) if below else len(command.params)

    for group in ("", "model", "profile", "store"):
        assert "Commands" in run(*group.split(), "--help").stdout
    assert len(COMMANDS) + 1 <= 18 and parameters(typer.main.get_command(app)) <= 95


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = run(*command.split(), "--help").stdout
    assert "Usage: " in shown and f"Example: cuvee {command}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_is_right(command: str) -> None:
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    examples = re.findall(f"Example: cuvee {command}\\b *(.*)", found.help)
    assert examples
    for example in examples:
        found.make_context(command, shlex.split(example))


def test_as_a_process(files: Files) -> None:
    def cli(*args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cuvee", *map(str, args)], capture_output=True, text=True, check=False
        )

    done = cli("--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("cuvee")
    done = cli("inspect", files.cache)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("error: ")
    assert cli("encode").returncode == 2


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, cuvee.cli; print(sorted({'torch', 'numpy', 'numba', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
