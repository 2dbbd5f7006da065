"""The stores that are measured: a Redis server, and an HTTP object store, each on a loopback port of its own."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from cuvee.codec.errors import CuveeError

__all__ = ["STORES", "ObjectServer", "RedisServer", "StoreServer", "missing"]

_START_SECONDS = 20.0
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class StoreServer(Protocol):
    """A server of a store.

    Attributes:
        port: on 127.0.0.1.
    """

    port: int

    def __enter__(self) -> Self:
        """Start."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        ...

    def url(self, port: int) -> str:
        """Return the store's URL for cuvee, behind a proxy on this port."""
        ...

    def entries(self) -> int:
        """Return the number of entries."""
        ...


def missing(store: str) -> str | None:
    """Return what this machine lacks to run one of `STORES`; None if it lacks nothing."""
    if store == "redis" and shutil.which("redis-server") is None:
        return "redis-server, of the package of that name"
    package, extra = {"redis": ("redis", "redis"), "http": ("aiohttp", "objects")}[store]
    return None if find_spec(package) is not None else f"{package}: pip install cuvee[{extra}]"


class RedisServer:
    """A `redis-server` that keeps nothing on disk.

    Args:
        folder: for its log.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "redis.log"
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self._stop()
                raise CuveeError(f"redis-server did not start:\n{self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def url(self, port: int) -> str:
        """See `StoreServer.url`: answers may be slow."""
        return f"redis://127.0.0.1:{port}/0?timeout=60"

    def entries(self) -> int:
        """See `StoreServer.entries`: without a budget, the server has no other keys."""
        import redis

        with redis.Redis(port=self.port) as client:
            return int(client.dbsize())

    def _answers(self) -> bool:
        """Return whether this server answers, and not another one that has taken the port meanwhile."""
        import redis

        with redis.Redis(port=self.port) as client:
            try:
                return self._process is not None and client.info("server")["process_id"] == self._process.pid
            except redis.ConnectionError:
                return False

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class ObjectServer:
    """Objects in memory, by path: PUT, GET with ranges, and HEAD, over HTTP/1.1."""

    def __init__(self, folder: Path) -> None:
        self._objects: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._objects))
        self._server.daemon_threads = True
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, port: int) -> str:
        """See `StoreServer.url`."""
        return f"fsspec+http://127.0.0.1:{port}/kv"

    def entries(self) -> int:
        """See `StoreServer.entries`."""
        return len(self._objects)


STORES: dict[str, type[RedisServer | ObjectServer]] = {"redis": RedisServer, "http": ObjectServer}


def _handler(objects: dict[str, bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_PUT(self) -> None:
            objects[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._say(201)

        def do_GET(self) -> None:
            data = objects.get(self.path)
            if data is None:
                self._say(404)
                return
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            if wanted is None:
                self._say(200, data)
            elif int(wanted[1]) >= len(data):
                self._say(416)
            else:
                first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
                self._say(206, data[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(data)}")

        def do_HEAD(self) -> None:
            data = objects.get(self.path)
            self._say(404 if data is None else 200, b"" if data is None else data)

        def log_message(self, format: str, *args: object) -> None:  # each request would be a line
            pass

        def _say(self, status: int, body: bytes = b"", **fields: str) -> None:
            self.send_response(status)
            for name, value in {**fields, "Content_Length": str(len(body))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
