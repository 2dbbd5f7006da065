"""vLLM's OpenAI server in a process of its own: started, asked, measured and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cuvee.codec.errors import CuveeError

__all__ = ["Server"]

_START_SECONDS = 300.0
_STOP_SECONDS = 90.0
_ANSWER_SECONDS = 300.0
_DYING_SECONDS = 5.0
_LOG_LINES = 15


class Server:
    """A server on a free port of this machine. Leaving the context stops it as an operator would.

    Args:
        log: where its output goes.
        model: folder of the checkpoint, which is also the name that clients ask for.
        arguments: more of the command line.

    Raises:
        CuveeError: it does not come up. The message ends with its last lines.
    """

    def __init__(self, log: Path, model: Path, arguments: Sequence[str]) -> None:
        self.model = str(model)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._log = log
        sources = str(Path(sys.modules["cuvee"].__path__[0]).parent)
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH")))),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # On a CPU vLLM gives an engine with a connector other cores than one without. All variants have the same.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        }
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--host", "127.0.0.1",
            "--port", self.url.rpartition(":")[2], "--enforce-eager", "--shutdown-timeout", "60", *arguments,
        ]  # fmt: skip
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables, start_new_session=True
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            time.sleep(0.2)
        self._kill()
        raise self._failure("did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        deadline = time.monotonic() + _STOP_SECONDS  # its engine may still be closing the store
        while time.monotonic() < deadline and self._session_lives():
            time.sleep(0.1)
        self._kill()

    def check(self) -> None:
        """Raise CuveeError if it has died."""
        if self._process.poll() is not None:
            raise self._failure(f"died with status {self._process.returncode}")

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The greedy answer to a prompt.

        Raises:
            CuveeError: there is none.
        """
        fields = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        try:
            return str(json.loads(self._ask(request))["choices"][0]["text"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise CuveeError(f"the server's answer is none: {error}") from error

    def counters(self) -> dict[str, float]:
        """The metrics of the server, each summed over its labels.

        Raises:
            CuveeError: it does not answer.
        """
        lines = self._ask(f"{self.url}/metrics").decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _ask(self, request: str | urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                return bytes(answer.read())
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to end
                self._process.wait(_DYING_SECONDS)
            self.check()
            raise CuveeError(f"the server did not answer: {error}") from error

    def _failure(self, what: str) -> CuveeError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return CuveeError("\n".join([f"the server {what}; {self._log} ends with", *lines]))

    def _session_lives(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
