"""The base of the scripted servers: a server on a loopback port with one thread per connection."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import BinaryIO

Said = bytes | Iterable[bytes]

# A server takes its port seconds after it was found. Until then nobody else may: these are below the ports that Linux
# gives to connections, each worker of pytest-xdist has its own, and none is found twice.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
_PORTS = itertools.cycle(random.sample(range(10_000 + 2_000 * _WORKER, 12_000 + 2_000 * _WORKER), 2_000))


def free_port() -> int:
    """Find a port that is free, along with the one 10000 above it, which some servers use as well."""
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", port))
            above.bind(("127.0.0.1", port + 10_000))
            return port


class LoopbackServer:
    """Listens from its creation until `close`. Subclasses respond in `serve`.

    Attributes:
        port: the port on 127.0.0.1.
        sent: how many bytes were sent.
    """

    def __init__(self) -> None:
        self.sent = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._over = False
        threading.Thread(target=self._listen, daemon=True).start()

    def serve(self, connection: socket.socket, stream: BinaryIO) -> None:
        """Respond to the data in `stream` until it ends."""
        raise NotImplementedError

    def say(self, connection: socket.socket, said: Said) -> None:
        """Send bytes at once, or several parts one after the other, and count them.

        Raises:
            OSError: the client has disconnected, or this server was closed.
        """
        for part in (said,) if isinstance(said, bytes) else said:
            if self._over:
                raise ConnectionAbortedError("the server was closed")
            connection.sendall(part)
            self.sent += len(part)

    def close(self) -> None:
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
                threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection, connection.makefile("rb") as stream:
            self.serve(connection, stream)
        self._open.discard(connection)
