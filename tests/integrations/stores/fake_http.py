"""An HTTP server that says what a test wants it to say, on a loopback port."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Answer = bytes | Iterable[bytes]


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    """An answer, whole; `Content_Length="7"` is a header that lies."""
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    return f"HTTP/1.1 {status}\r\n".encode() + head(**fields) + body


def head(**fields: str) -> bytes:
    """Header fields and the blank line."""
    return "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in fields.items()).encode() + b"\r\n"


class FakeHTTP:
    """Keeps what is PUT and gives it to GET, honestly, unless `say` answers.

    Attributes:
        port: on 127.0.0.1.
        say: of a method and a path: what is sent, in parts or at once; None to be honest. Tests may change it.
        objects: what is kept, by path.
        requests: method and path of each request.
        sent: bytes that could be sent.
    """

    def __init__(self, say: Callable[[str, str], Answer | None] = lambda method, path: None) -> None:
        self.say = say
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        """For `ObjectStore`."""
        return f"http://127.0.0.1:{self.port}/kv"

    def close(self) -> None:
        """Listen no more, and close all connections."""
        self._over = True
        for sock in (self._listener, *tuple(self._open)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                method, path, _ = line.decode().split(" ")
                lines = iter(lambda: stream.readline().strip(), b"")
                fields = {name.lower(): text for name, text in (each.decode().split(": ", 1) for each in lines)}
                body = stream.read(int(fields.get("content-length", 0)))
                self.requests.append((method, path))
                said = self.say(method, path)
                if said is None:
                    said = self._honest(method, path, body, fields.get("range", ""))
                for part in (said,) if isinstance(said, bytes) else said:
                    if self._over:
                        return
                    connection.sendall(part)
                    self.sent += len(part)
                if not isinstance(said, bytes):
                    break
        self._open.discard(connection)

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
