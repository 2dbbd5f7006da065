"""An HTTP object store on a loopback port of its own."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

__all__ = ["ObjectServer"]

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class ObjectServer:
    """Objects in memory, by path: PUT, GET with ranges, and HEAD, over HTTP/1.1.

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self) -> None:
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
        """Return the store's URL for cuvee, behind a proxy on this port."""
        return f"http://127.0.0.1:{port}/kv"

    def entries(self) -> int:
        """Return the number of entries."""
        return len(self._objects)


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
