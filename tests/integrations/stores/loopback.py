"""A server on a loopback port whose every connection has a thread: the part that all scripted servers share."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

Said = bytes | Iterable[bytes]


class LoopbackServer:
    """Listens from its creation to `close`; what it says to a connection is up to `serve`.

    Attributes:
        port: on 127.0.0.1.
        sent: bytes that could be sent.
        connections: how many were opened.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self, connection: socket.socket, stream: BinaryIO) -> None:
        """Answer what arrives in `stream` until it ends; a connection that breaks is over."""
        raise NotImplementedError

    def say(self, connection: socket.socket, said: Said) -> None:
        """Send bytes at once, or parts of them one after the other, and count them.

        Raises:
            OSError: the other side has gone, or this server was closed.
        """
        for part in (said,) if isinstance(said, bytes) else said:
            if self._over:
                raise ConnectionAbortedError("the server was closed")
            connection.sendall(part)
            self.sent += len(part)

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
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            self.serve(connection, stream)
        self._open.discard(connection)
