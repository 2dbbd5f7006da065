"""Real Redis servers for tests, started from `redis-server` on free ports, each in its own folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.stores.loopback import free_port
from tests.waiting import PATIENCE, wait_until


def require_redis() -> str:
    """Return the path of `redis-server`.

    Without it, or without redis-py, the test is skipped; it fails if the environment variable CUVEE_REQUIRE_REDIS is 1.
    """
    path = shutil.which("redis-server")
    if path is not None and find_spec("redis") is not None:
        return path
    missing = "redis-server" if path is None else "redis-py"
    if os.environ.get("CUVEE_REQUIRE_REDIS") == "1":
        pytest.fail(f"CUVEE_REQUIRE_REDIS=1, but {missing} is not installed")
    pytest.skip(f"needs {missing}")


class RedisServer:
    """One `redis-server` on a TCP port and a unix socket. Its data survives `kill` and `restart` only if it was saved.

    Attributes:
        port: TCP port on 127.0.0.1.
        socket: path of the unix socket.
        folder: its working directory.
    """

    def __init__(self, folder: Path, *arguments: str, password: str = "", cluster: bool = False) -> None:
        self.folder = folder
        self.password = password
        self.socket = str(folder / "redis.sock")
        self.port = 0
        self._cluster = cluster
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{f':{self.password}@' if self.password else ''}{self.socket}"

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.url, socket_timeout=PATIENCE, protocol=2)

    def start(self) -> None:
        """Start the server, and wait for its first PONG."""
        path = require_redis()
        fresh = self.port == 0
        for _ in range(10):
            if fresh:
                self.port = free_port()
            command = [path, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket]
            command += ["--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no"]
            command += ["--requirepass", self.password] if self.password else []
            command += ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"] if self._cluster else []
            with (self.folder / "redis.log").open("ab") as log:
                self._process = subprocess.Popen([*command, *self._arguments], stdout=log, stderr=log)
            wait_until(lambda: self._has_ended() or self._answers(), "PONG")
            if not self._has_ended():
                return  # otherwise its port was taken
        pytest.fail(f"redis-server does not start:\n{(self.folder / 'redis.log').read_text()[-2000:]}")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def pause(self) -> None:
        """Make the server hang: connections stay open without replies."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill the server if it runs, and start it on the same port."""
        self.kill()
        self.start()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _answers(self) -> bool:
        import redis

        client = self.client()
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
        finally:
            client.close()


@contextmanager
def redis_server(*arguments: str, password: str = "", cluster: bool = False) -> Iterator[RedisServer]:
    """Yield a running server with the given arguments of `redis-server`; kill and remove it afterwards."""
    require_redis()
    # Not pytest's tmp_path, because the path of a unix socket is limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), *arguments, password=password, cluster=cluster)
        try:
            server.start()
            yield server
        finally:
            server.resume()
            server.kill()


@contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Yield a cluster of primaries without replicas, which share the 16384 slots evenly."""
    with ExitStack() as stack:
        servers = [stack.enter_context(redis_server(cluster=True)) for _ in range(nodes)]
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr
        clients = [stack.enter_context(server.client()) for server in servers]
        agreed = lambda: all(b"cluster_state:ok" in _info(client) for client in clients)  # noqa: E731
        wait_until(agreed, "a cluster")
        yield servers


def _info(client: Any) -> bytes:
    info = client.execute_command("CLUSTER", "INFO")  # which some releases of redis-py parse
    return b"cluster_state:" + info["cluster_state"].encode() if isinstance(info, dict) else bytes(info)
