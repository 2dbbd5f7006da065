"""An HTTP server that says what a test wants it to say, on a loopback port."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from tests.integrations.stores.loopback import LoopbackServer, Said


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    """An answer, whole; `Content_Length="7"` is a header that lies."""
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    return f"HTTP/1.1 {status}\r\n".encode() + head(**fields) + body


def head(**fields: str) -> bytes:
    """Header fields and the blank line."""
    return "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in fields.items()).encode() + b"\r\n"


class FakeHTTP(LoopbackServer):
    """Keeps what is PUT and gives it to GET, honestly, unless `tell` answers.

    Attributes:
        tell: of a method and a path: what is sent, in parts or at once; None to be honest. Tests may change it.
        objects: what is kept, by path.
        requests: method and path of each request.
    """

    def __init__(self, tell: Callable[[str, str], Said | None] = lambda method, path: None) -> None:
        self.tell = tell
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        super().__init__()

    @property
    def url(self) -> str:
        """For `ObjectStore`."""
        return f"http://127.0.0.1:{self.port}/kv"

    def serve(self, connection: socket.socket, stream: BinaryIO) -> None:
        """Until an answer came in parts, after which the connection ends."""
        while line := stream.readline():
            method, path, _ = line.decode().split(" ")
            lines = iter(lambda: stream.readline().strip(), b"")
            fields = {name.lower(): text for name, text in (each.decode().split(": ", 1) for each in lines)}
            body = stream.read(int(fields.get("content-length", 0)))
            self.requests.append((method, path))
            said = self.tell(method, path)
            if said is None:
                said = self._honest(method, path, body, fields.get("range", ""))
            self.say(connection, said)
            if not isinstance(said, bytes):
                break

    def _honest(self, method: str, path: str, body: bytes, wanted: str) -> bytes:
        if method == "PUT":
            self.objects[path] = body
            return answer("201 Created")
        if path not in self.objects:
            return answer("404 Not Found", b"" if method == "HEAD" else b"no such object")
        data = self.objects[path]
        if method == "HEAD":
            return answer(Content_Length=str(len(data)))
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if part is None:
            return answer(body=data)
        if int(part[1]) >= len(data):
            return answer("416 Range Not Satisfiable")
        return answer("206 Partial Content", data[int(part[1]) : int(part[2]) + 1])


@contextmanager
def fake_http() -> Iterator[FakeHTTP]:
    """A `FakeHTTP` that is closed afterwards."""
    server = FakeHTTP()
    try:
        yield server
    finally:
        server.close()
