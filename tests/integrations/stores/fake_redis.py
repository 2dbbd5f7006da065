"""A Redis server that says what a test wants it to say, on a loopback port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# What a server replies that holds nothing, and to a put.
ACCOUNTS = b"*4\r\n:0\r\n:1000\r\n:1\r\n:1\r\n"
HONEST: dict[str, bytes] = {
    "EXEC": b"*2\r\n+OK\r\n" + ACCOUNTS,
    "EVAL": ACCOUNTS,
    "GET": b"$-1\r\n",
    "GETRANGE": b"$0\r\n\r\n",
    "STRLEN": b":0\r\n",
    "EXISTS": b":0\r\n",
    "UNLINK": b":0\r\n",
    "SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
}

Reply = bytes | Iterable[bytes] | Callable[[list[bytes]], bytes | Iterable[bytes]]


def bulk(text: bytes) -> bytes:
    """A string as RESP has it."""
    return b"$%d\r\n%s\r\n" % (len(text), text)


class FakeRedis:
    """Answers each command by its name: what `replies` holds, else as an honest, empty server does.

    Attributes:
        port: on 127.0.0.1.
        replies: by the name of the command; bytes, parts of them that are sent one after the other, or a function of
            the command that returns one of those. Tests may change it.
        commands: what came, without the greetings of connections.
        sent: bytes that could be sent.
        connections: how many were opened.
    """

    def __init__(self, **replies: Reply) -> None:
        self.replies = replies
        self.commands: list[list[bytes]] = []
        self.sent = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        """For `open_store` and redis-py."""
        return f"redis://127.0.0.1:{self.port}/0"

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
                self.connections += 1
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        queued = False
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                command = []
                for _ in range(int(line[1:])):
                    command.append(stream.read(int(stream.readline()[1:])))
                    stream.read(2)
                name = command[0].decode().upper()
                if name != "CLIENT":
                    self.commands.append(command)
                reply: Any = HONEST.get(name, b"+OK\r\n")
                if queued and name != "EXEC":
                    reply = b"+QUEUED\r\n"
                else:
                    queued = name == "MULTI"
                    reply = self.replies.get(name, reply)
                reply = reply(command) if callable(reply) else reply
                for part in (reply,) if isinstance(reply, bytes) else reply:
                    if self._over:
                        return
                    connection.sendall(part)
                    self.sent += len(part)
        self._open.discard(connection)


@contextmanager
def fake_redis(**replies: Reply) -> Iterator[FakeRedis]:
    """A `FakeRedis` that is closed afterwards."""
    server = FakeRedis(**replies)
    try:
        yield server
    finally:
        server.close()
