"""A process that has imported vLLM and done nothing else, from which scripts are forked: importing takes seven seconds.

    run_forked(command, folder, environment, log, timeout) -> exit status
    this file, run as a script: that process; it ends when the one that started it does

A forked script begins as if started by `python SCRIPT`: with its own session, environment, output and arguments. What
it shares with others is the seed of string hashes, and addresses. A test that one process finds what another left
must give one of them a process that was not forked, or it could not tell a key that depends on either.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What an engine imports when it starts, and what its models are.
LATER = ("vllm.v1.worker.cpu_worker", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.llama")
_IMPORT_SECONDS = 400.0
_END_SECONDS = 30.0


class ForkingError(AssertionError):
    """The process that forks has ended, or does not answer; the message ends with its output."""


class Forker:
    """The process that forks, seen from the one that wants scripts run. It ends when its standard input does.

    Args:
        environment: of the process. Scripts are given their own, but what is read when vLLM is imported is read here.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            bufsize=0,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Let the process end."""
        atexit.unregister(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def run(self, order: Mapping[str, Any], timeout: float) -> int | str:
        """Fork a process, and wait for it: its exit status as of `subprocess`, or that it took too long.

        Args:
            order: `command`, `folder`, `environment` and `log`, see `_become`.
            timeout: seconds for the script.

        Raises:
            ForkingError: there is no process to fork from, for example because vLLM cannot be imported.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it said before it ended is read below
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        child = self._read(_IMPORT_SECONDS)
        if child is None:
            self._process.kill()
            raise ForkingError(self._said("did not fork"))
        try:
            status = self._read(timeout)
        finally:
            # Whatever the script has started is of its session.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        if status is None:
            if self._read(_END_SECONDS) is None:  # what comes later would be taken for another script's
                self._process.kill()
            return f"not done after {timeout:g} s"
        return status

    def _read(self, timeout: float) -> int | None:
        """Read one number; None if none comes in time."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], timeout)[0]:
            return None
        line = pipe.readline()
        if not line:
            self._process.wait(_END_SECONDS)
            raise ForkingError(self._said("has ended"))
        return int(line)

    def _said(self, problem: str) -> str:
        self._log.seek(0)
        return f"the process that imports vLLM {problem}\n{self._log.read().decode(errors='replace')[-8000:]}"


_running: list[Forker] = []  # at most one


def run_forked(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path, timeout: float
) -> int | str:
    """Run a script in a process that has imported vLLM: its exit status, or that it took too long.

    Args:
        command: the script's path, and its arguments.
        folder: working directory.
        environment: all of it. The first call's is that in which vLLM is imported.
        log: file for its output.
        timeout: seconds.

    Raises:
        ForkingError: vLLM could not be imported.
    """
    if _running and not _running[0].lives:
        _running.pop().close()
    if not _running:
        _running.append(Forker(environment))
    order = {"command": list(command), "folder": str(folder), "environment": dict(environment), "log": str(log)}
    return _running[0].run(order, timeout)


# What runs in the process that forks --------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Fork for each order that is read: returns the order in the forked process, None where there are no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM may print
    from tests.integrations.vllm.engines import import_vllm

    import_vllm()
    for name in LATER:
        importlib.import_module(name)
    with os.fdopen(os.dup(0), "rb", buffering=0) as orders:
        while line := orders.readline():
            if (child := os.fork()) == 0:
                os.close(answers)
                order: dict[str, Any] = json.loads(line)
                return order
            os.write(answers, b"%d\n" % child)
            _, status = os.waitpid(child, 0)
            os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    return None


def _become(order: Mapping[str, Any]) -> None:
    """Do what `python SCRIPT ARGUMENTS` does, in an environment, a folder and a session of its own."""
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    script = order["command"][0]
    sys.argv = list(order["command"])
    sys.path[:0] = [str(Path(script).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    # Outside of all functions, so that a script's end is that of the interpreter: it calls what is to be called then.
    if (_order := _serve()) is not None:
        _become(_order)
