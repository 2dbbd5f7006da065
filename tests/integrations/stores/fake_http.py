"""A scripted HTTP server on a loopback port."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import BinaryIO

from tests.integrations.stores.loopback import LoopbackServer, Said


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    """Make a complete response; `Content_Length="7"` makes a header that lies."""
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    return f"HTTP/1.1 {status}\r\n".encode() + head(**fields) + body


def head(**fields: str) -> bytes:
    return "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in fields.items()).encode() + b"\r\n"


class FakeHTTP(LoopbackServer):
    """Stores objects by PUT and returns them by GET, unless `tell` returns another response.

    Attributes:
        tell: returns the response to a method and a path, at once or in parts; None for the honest response. Tests may
            change it.
        objects: the stored objects, by path.
        requests: method and path of each request.
    """

    def __init__(self, tell: Callable[[str, str], Said | None] = lambda method, path: None) -> None:
        self.tell = tell
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/kv"

    def serve(self, connection: socket.socket, stream: BinaryIO) -> None:
        """Respond to requests. A response in parts ends the connection."""
        while line := stream.readline():
            method, path, _ = line.decode().split(" ")
            lines = iter(lambda: stream.readline().strip(), b"")
            fields = {name.lower(): text for name, text in (each.decode().split(": ", 1) for each in lines)}
            body = stream.read(int(fields.get("content-length", 0)))
            self.requests.append((method, path))
            said = self.tell(method, path)
            if said is None:
                said = self.honest(method, path, body)
            self.say(connection, said)
            if not isinstance(said, bytes):
                break

    def honest(self, method: str, path: str, body: bytes) -> bytes:
        """Return the response of an honest server to a request."""
        if method == "PUT":
            self.objects[path] = body
            return answer("201 Created")
        if path not in self.objects:
            return answer("404 Not Found", b"" if method == "HEAD" else b"no such object")
        data = self.objects[path]
        return answer(Content_Length=str(len(data))) if method == "HEAD" else answer(body=data)
